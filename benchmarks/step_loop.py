"""Train and time the steps of a variant, for the benchmarks that train."""

import argparse
import functools
import gc
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_time import Span, gathered, profiled, step_profile, timed
from step_model import attention_shape, build_model
from step_report import Run
from step_variants import Planner, Share, Variant
from torch import Tensor
from workloads import Rows, Workload, make_rows

import distca
from distca.ranks.session import Session


def join(device_type: str) -> torch.device:
    """Open the process group and return this rank's device."""
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def leave() -> None:
    """Close the process group.

    A thread of gloo releases tensors after the call that used them has returned. If Python ends
    before that, the process aborts. So a barrier gives the thread time.
    """
    distca.close()
    dist.barrier()
    dist.destroy_process_group()


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of open_session that add_model_arguments does not add."""
    parser.add_argument(
        "--peer-memory-gb", type=float, default=10.0, help="distca's option of this name"
    )
    parser.add_argument("--ranks-per-node", type=int, help="distca's option of this name")


def add_step_arguments(parser: argparse.ArgumentParser, skip: int | dict[str, int]) -> None:
    """Add --turns, --steps and --skip. `skip` is the default, or one for each mode, which callers
    set."""
    parser.add_argument(
        "--turns", type=int, default=1, help="runs of each variant, in turns with the others"
    )
    parser.add_argument("--steps", type=int, default=20, help="how many, including those of --skip")
    parser.add_argument(
        "--skip",
        type=int,
        default=skip if isinstance(skip, int) else None,
        help=f"first steps to leave out (default: {skip})",
    )


def check_step_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with an error unless --turns, --steps and --skip fit together."""
    if args.turns < 1:
        parser.error(f"--turns is {args.turns}; needs at least 1")
    if not 0 <= args.skip < args.steps:
        parser.error(f"--skip is {args.skip}; needs 0 to {args.steps - 1}, less than --steps")


def open_session(
    args: argparse.Namespace,
    transport: str,
    group: dist.ProcessGroup | None = None,
    servers: tuple[int, ...] = (),
) -> Session:
    options = distca.Options(
        transport=transport,
        peer_memory_gb=args.peer_memory_gb,
        keep_inputs_gb=args.keep_inputs_gb,
        ranks_per_node=args.ranks_per_node,
    )
    return distca.init(group, options, servers=servers)


def peer_memory_gib(session: Session, device: torch.device) -> float:
    """Return the peer memory of each rank of an open session, in GiB."""
    if device.type == "cpu" or not session.group_name:
        return 0.0
    return torch.ops.distca.peer_memory_bytes(session.group_name) / 2**30


class Trainer:
    """Trains a variant's model from the initial weights."""

    def __init__(
        self,
        args: argparse.Namespace,
        variant: Variant,
        planner: Planner | None,
        device: torch.device,
        trainers: dist.ProcessGroup | None,
    ) -> None:
        self.model = build_model(args, device, variant.core_attention, variant.ping_pong, trainers)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.learning_rate, fused=device.type == "cuda"
        )
        self.planner = planner
        self.plans: list[distca.PlanReport] = []

    def step(self, rows: Rows, share: Share) -> Tensor:
        """Train one step. Return this rank's part of the loss times the number of ranks."""
        documents = share.documents
        if self.planner is not None:
            documents, plan = self.planner.latest
        logits = self.model(rows.tokens, rows.position_ids, documents)
        loss_sum = F.cross_entropy(logits.float(), rows.labels, reduction="sum")
        loss = loss_sum * rows.loss_scale
        if self.planner is not None:  # while the device still has work
            self.planner.plan_next()
            self.plans.append(plan.report())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def run_steps(
    args: argparse.Namespace,
    workload: Workload,
    device: torch.device,
    variant: Variant,
    num_profiled: int,
    group: dist.ProcessGroup | None = None,
    trainers: dist.ProcessGroup | None = None,
) -> tuple[Run, list[list[Span]]]:
    """Run all steps from the initial weights, and profile the last ones again.

    `group` is for the variant's own attention. `trainers` are the ranks that call this (None: all).
    A variant with a transport needs an open session. Return the run, and the spans of the last step
    by rank.
    """
    cuda, num_steps = device.type == "cuda", len(workload.packs)
    again = range(max(0, num_steps - num_profiled), num_steps)
    steps, planner = [*range(num_steps), *again], None
    if variant.transport is not None:
        planner = Planner(variant, workload, steps, attention_shape(args, device), device)
    trainer, run, spans = Trainer(args, variant, planner, device, trainers), Run(), []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    allocations = [num_allocations(device)]
    for index, step in enumerate(steps):
        share = variant.share(workload, step, group, device)
        rows = make_rows(workload, step, args.vocab, args.seed, device).chosen(share.rows)
        train_step = functools.partial(trainer.step, rows, share)
        if index >= num_steps:
            spans = profiled(train_step, device, trainers)
            run.profiles.append(step_profile(spans))
            continue
        ms, loss_sum = timed(train_step, device, trainers)
        run.step_ms.append(ms)
        run.losses.append(loss_sum / workload.num_ranks)
        allocations.append(num_allocations(device))
    run.most_tokens = max(
        len(workload.rows_of(step, rank))
        for step in range(num_steps)
        for rank in range(workload.num_ranks)
    )
    run.plans = trainer.plans[:num_steps]
    if cuda:
        run.peak_gib = max(gathered(torch.cuda.max_memory_allocated() / 2**30, device, trainers))
        run.reserved_gib = max(gathered(torch.cuda.max_memory_reserved() / 2**30, device, trainers))
        for before, after in itertools.pairwise(allocations):
            run.allocations.append(int(max(gathered(after - before, device, trainers))))
    return run, spans


def num_allocations(device: torch.device) -> int:
    """Return how many blocks of memory PyTorch's allocator got from the device until now."""
    if device.type == "cpu":
        return 0
    return torch.cuda.memory_stats(device)["num_device_alloc"]


def free_memory(device: torch.device) -> None:
    gc.collect()  # the model's cycles hold its memory and the process group
    if device.type == "cuda":
        torch.cuda.empty_cache()
