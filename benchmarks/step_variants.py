"""Ways to compute core attention in a training step, and the rows that a rank holds in each."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from context_parallel import HeadTail, context_attention
from step_model import CoreAttention, WholeDocuments, torch_attention
from torch import Tensor
from workloads import Workload

import distca


@dataclass(frozen=True)
class Share:
    """A rank's part of a step."""

    rows: Tensor  # int64: indices among the step's rows, in the rank's order
    documents: object  # argument of the variant's attention


@dataclass(frozen=True)
class Variant:
    core_attention: CoreAttention
    share: Callable[[Workload, int, dist.ProcessGroup, torch.device], Share]
    transport: str | None = None
    """distca's transport, or None if the variant needs no plan."""
    ping_pong: bool = False
    takes_crossing: bool = False
    """Whether documents may cross ranks."""
    by_default: bool = True
    is_sorted: bool = False
    """Whether the loader sorts documents (workloads.sorted_workload)."""


def own_rows(workload: Workload, step: int, device: torch.device) -> Tensor:
    rows = workload.rows_of(step, dist.get_rank())
    return torch.arange(rows.start, rows.stop, device=device)


def flash_share(
    workload: Workload, step: int, group: dist.ProcessGroup, device: torch.device
) -> Share:
    lengths = workload.packs[step][dist.get_rank()]
    return Share(own_rows(workload, step, device), WholeDocuments.of(lengths, device))


def own_share(
    workload: Workload, step: int, group: dist.ProcessGroup, device: torch.device
) -> Share:
    rank, packs = dist.get_rank(), workload.packs[step]
    if workload.crosses_ranks:
        documents = distca.Documents.sharded(packs[0], rank, workload.num_ranks)
    else:
        documents = distca.Documents([0, *itertools.accumulate(packs[rank])])
    return Share(own_rows(workload, step, device), documents)


def halves_share(
    workload: Workload, step: int, group: dist.ProcessGroup, device: torch.device
) -> Share:
    """Return two runs of a pack whose documents cross ranks, as ping-pong needs them."""
    if not workload.crosses_ranks:
        return own_share(workload, step, group, device)
    pack = torch.arange(workload.tokens * dist.get_world_size(group))
    batch = distca.shard_batch(pack, workload.packs[step][0], group=group, runs=2)
    return Share(batch.tokens.to(device), batch.documents)


def permuted_share(
    workload: Workload, step: int, group: dist.ProcessGroup, device: torch.device
) -> Share:
    """Return the next rank's documents in another order, so that only the order of sums differs."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % num_ranks
    lengths = workload.packs[step][other]
    ends = list(itertools.accumulate(lengths, initial=workload.rows_of(step, other).start))
    order = random.Random(step).sample(range(len(lengths)), len(lengths))
    rows = torch.cat([torch.arange(ends[idx], ends[idx + 1]) for idx in order])
    cu_seqlens = [0, *itertools.accumulate(lengths[idx] for idx in order)]
    return Share(rows.to(device), distca.Documents(cu_seqlens))


def context_share(
    workload: Workload, step: int, group: dist.ProcessGroup, device: torch.device
) -> Share:
    shards = HeadTail.of(workload.lengths(step), group, device)
    return Share(shards.rows, shards)


PERMUTED = "plain permuted"
PING_PONG = " pingpong"
SORTED = "sorted"
VARIANTS = {
    "flash": Variant(torch_attention, flash_share),
    "plain": Variant(distca.core_attention, own_share),
    PERMUTED: Variant(distca.core_attention, permuted_share, by_default=False),
    "context": Variant(context_attention, context_share, takes_crossing=True),
    **{
        f"{transport}{PING_PONG * in_halves}": Variant(
            distca.core_attention,
            halves_share if in_halves else own_share,
            transport,
            ping_pong=in_halves,
            takes_crossing=True,
            by_default=transport == "process_group" or (transport == "peer" and not in_halves),
        )
        for transport in ("process_group", "peer", "hybrid")
        for in_halves in (False, True)
    },
    SORTED: Variant(distca.core_attention, own_share, by_default=False, is_sorted=True),
    **{
        f"{SORTED} {name}": Variant(
            distca.core_attention, own_share, name, by_default=False, is_sorted=True
        )
        for name in ("process_group", "peer")
    },
}


def chosen_variants(
    names: list[str] | None, workload: Workload, device_type: str, by_nvlink: bool = True
) -> list[str]:
    """Return `names`, or the default variants that can run. Raises ValueError for names of variants
    that cannot run."""
    links = "" if by_nvlink else " over emulated links"
    fitting = [
        name
        for name, variant in VARIANTS.items()
        if (variant.takes_crossing or not workload.crosses_ranks)
        and (variant.transport != "peer" or (device_type == "cuda" and by_nvlink))
    ]
    if names is None:
        return [name for name in fitting if VARIANTS[name].by_default]
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"--variants has {name!r}; expected some of {', '.join(VARIANTS)}")
        if name not in fitting:
            raise ValueError(
                f"--variants has {name!r}; expected some of {', '.join(fitting)}, which run these "
                f"documents on {device_type}{links}"
            )
    return names


class Planner:
    """Plans each step in the background during the previous step."""

    latest: tuple[distca.Documents, distca.Plan]
    """The documents and the plan of the step that was planned last."""

    def __init__(
        self,
        variant: Variant,
        workload: Workload,
        steps: list[int],
        shape: distca.AttentionShape,
        device: torch.device,
    ) -> None:
        self._workload, self._steps, self._device = workload, iter(steps), device
        self._share, self._shape = variant.share, shape
        self.plan_next()

    def plan_next(self) -> None:
        """Start to plan the next step, if any is left."""
        step = next(self._steps, None)
        if step is not None:
            documents = self._share(self._workload, step, None, self._device).documents
            plan = distca.plan(documents, device=self._device, shape=self._shape, ahead=True)
            self.latest = documents, plan
