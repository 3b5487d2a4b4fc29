"""Step time of Llama-wide blocks under FSDP2: ATen's varlen flash attention against distca.

    torchrun --nproc-per-node 4 benchmarks/training_step.py --lengths lengths.json --out step.json

Both variants see the same documents, tokens and initial weights. A step is forward, backward and
optimizer, timed on the host from a barrier to a barrier with the device synchronised, so it lasts
as long as the slowest rank needs.

The balanced limit is what perfect balance for free would give: the plain step less the time by
which the slowest rank's attention exceeds the mean. Attention alone (forward and backward of each
rank's own documents, one layer) is timed by itself for it, and multiplied by the layers.

What distca's step takes beyond the limit is split into the imbalance that the plan leaves
(predicted share of the measured attention) and the rest: communication that is not hidden, task
lists that run slower than whole documents, launches. On CUDA a profiled extra step of each variant
adds, per rank, the time in which only communication kernels run ("only_nccl_ms") and in which
none runs ("idle_ms"). In the plain step both hold the waiting for the slowest rank.
"""

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_time import gathered, profiled, synchronise
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distca

# The model is the example's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from llama import Llama, LlamaConfig, WholeDocuments, torch_attention  # noqa: E402

Packs = list[list[list[int]]]  # document lengths [steps][ranks][documents]
NUM_WARM_UP_STEPS = 3
IGNORE_INDEX = -100  # cross_entropy's default


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=Path, required=True, help="JSON list of document lengths")
    parser.add_argument("--tokens", type=int, default=65536, help="per rank")
    parser.add_argument("--steps", type=int, default=20, help=f"{NUM_WARM_UP_STEPS} are warm-up")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--noise", action="store_true", help="run the plain variant twice")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    if args.steps <= NUM_WARM_UP_STEPS:
        parser.error(f"--steps is {args.steps}; needs more than {NUM_WARM_UP_STEPS} warm-up steps")
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return args


def pack(args: argparse.Namespace, world_size: int) -> Packs:
    """Documents in shuffled order, cut into equal packs; the rest of one starts the next pack."""
    lengths = [length for length in json.loads(args.lengths.read_text()) if length > 0]
    random.Random(args.seed).shuffle(lengths)
    stream, rest = itertools.cycle(lengths), 0

    def next_pack() -> list[int]:
        nonlocal rest
        documents, room = [], args.tokens
        while room > 0:
            length = rest or next(stream)
            documents.append(min(length, room))
            rest = length - documents[-1]
            room -= documents[-1]
        return documents

    return [[next_pack() for _ in range(world_size)] for _ in range(args.steps)]


@dataclass(frozen=True)
class Input:
    """A step of this rank."""

    tokens: Tensor
    labels: Tensor
    documents: WholeDocuments
    loss_scale: float  # times the sum over this rank's rows: averaged over ranks it is the loss


def make_input(args: argparse.Namespace, packs: Packs, step: int, device: torch.device) -> Input:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    documents = WholeDocuments.of(packs[step][rank], device)
    generator = torch.Generator(device).manual_seed(
        (args.seed * args.steps + step) * world_size + rank
    )
    tokens = torch.randint(args.vocab, (args.tokens,), generator=generator, device=device)
    labels = tokens.roll(-1)
    labels[documents.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    num_documents = sum(len(each) for each in packs[step])
    return Input(tokens, labels, documents, world_size / (args.tokens * world_size - num_documents))


def build_model(args: argparse.Namespace, device: torch.device, core_attention) -> Llama:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        ffn=args.ffn,
        recompute=args.checkpoint,
    )
    with device:
        model = Llama(config, core_attention)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


@dataclass
class Variant:
    step_ms: list[float] = field(default_factory=list)  # warm-up included
    losses: list[float] = field(default_factory=list)
    plans: list[distca.PlanReport] = field(default_factory=list)
    profile: dict[str, list[float]] = field(default_factory=dict)  # ms by rank
    peak_gib: float = 0.0  # of the rank that needs most

    def measured_ms(self) -> list[float]:
        return self.step_ms[NUM_WARM_UP_STEPS:]


class Planner:
    """Documents and plan of the next step, made in the background during the current one."""

    def __init__(self, packs: Packs, steps: list[int], device: torch.device) -> None:
        self._packs, self._steps, self._device = packs, iter(steps), device
        self._next = None
        self.advance()

    def advance(self) -> tuple[distca.Documents, distca.Plan]:
        """Returns the step that was planned last and starts on the one after it."""
        current, step = self._next, next(self._steps, None)
        if step is not None:
            lengths = self._packs[step][dist.get_rank()]
            documents = distca.Documents([0, *itertools.accumulate(lengths)])
            self._next = documents, distca.plan(documents, device=self._device, ahead=True)
        return current


def run_variant(
    args: argparse.Namespace, packs: Packs, device: torch.device, with_distca: bool
) -> Variant:
    """All steps from the initial weights; on CUDA the last step's documents once more, profiled."""
    cuda = device.type == "cuda"
    model = build_model(args, device, distca.core_attention if with_distca else torch_attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    steps = [*range(args.steps), *([args.steps - 1] if cuda else [])]
    planner = Planner(packs, steps, device) if with_distca else None
    variant = Variant()
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def train_step(given: Input) -> Tensor:
        documents = given.documents
        if planner is not None:
            documents, plan = planner.advance()
            variant.plans.append(plan.report())
        logits = model(given.tokens, given.documents.position_ids, documents)
        loss_sum = F.cross_entropy(logits.float(), given.labels, reduction="sum")
        loss = loss_sum * given.loss_scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for index, step in enumerate(steps):
        given = make_input(args, packs, step, device)
        if index == args.steps:
            variant.profile = profiled(lambda given=given: train_step(given))
            break
        synchronise(device)
        start = time.perf_counter()
        loss = train_step(given)
        synchronise(device)
        variant.step_ms.append(1e3 * (time.perf_counter() - start))
        dist.all_reduce(loss)
        variant.losses.append(loss.item() / dist.get_world_size())
    variant.plans = variant.plans[: args.steps]
    if cuda:
        variant.peak_gib = max(gathered(torch.cuda.max_memory_allocated() / 2**30, device))
    return variant


def attention_alone(
    args: argparse.Namespace, packs: Packs, device: torch.device
) -> list[list[float]]:
    """Measured ms [steps][ranks] of core attention on each rank's own documents, all layers."""
    shapes = [(args.tokens, heads, args.head_dim) for heads in (args.heads, *[args.kv_heads] * 2)]
    q, k, v = (
        torch.randn(shape, device=device, dtype=args.dtype, requires_grad=True) for shape in shapes
    )
    grad_out = torch.randn_like(q)
    rows = []
    for step in range(args.steps):
        documents = WholeDocuments.of(packs[step][dist.get_rank()], device)
        ms = 0.0
        for _ in range(2 if step == 0 else 1):  # the first call also loads kernels
            synchronise(device)
            start = time.perf_counter()
            torch.autograd.grad(torch_attention(q, k, v, documents), (q, k, v), grad_out)
            if device.type == "cuda":
                torch.cuda.synchronize()
            ms = 1e3 * (time.perf_counter() - start)
        rows.append([each * args.layers for each in gathered(ms, device)])
    return rows


def excess(ranks: list[float]) -> float:
    return max(ranks) - statistics.fmean(ranks)


def summarize(
    args: argparse.Namespace, plain: Variant, balanced: Variant, attention_ms: list[list[float]]
) -> dict:
    """Milliseconds are means over the steps after warm-up unless the name says otherwise."""
    attention_ms, plans = attention_ms[NUM_WARM_UP_STEPS:], balanced.plans[NUM_WARM_UP_STEPS:]
    limit_ms = [
        step - excess(ranks) for step, ranks in zip(plain.measured_ms(), attention_ms, strict=True)
    ]
    # The plan's leftover, as a share of the mean, times the measured mean.
    left_ms = [
        (plan.imbalance_after - 1) * statistics.fmean(ranks)
        for plan, ranks in zip(plans, attention_ms, strict=True)
    ]
    mean = statistics.fmean
    plain_ms, balanced_ms = mean(plain.measured_ms()), mean(balanced.measured_ms())
    return {
        "ranks": dist.get_world_size(),
        "steps": len(plans),
        "plain_ms": plain_ms,
        "plain_median_ms": statistics.median(plain.measured_ms()),
        "distca_ms": balanced_ms,
        "distca_median_ms": statistics.median(balanced.measured_ms()),
        "balanced_limit_ms": mean(limit_ms),
        "speed_up": plain_ms / balanced_ms,
        "speed_up_limit": plain_ms / mean(limit_ms),
        "attention_mean_rank_ms": mean(mean(ranks) for ranks in attention_ms),
        "attention_slowest_rank_ms": mean(max(ranks) for ranks in attention_ms),
        "over_limit_ms": balanced_ms - mean(limit_ms),
        "over_limit_imbalance_ms": mean(left_ms),
        "over_limit_rest_ms": balanced_ms - mean(limit_ms) - mean(left_ms),
        "imbalance_before": mean(plan.imbalance_before for plan in plans),
        "imbalance_after": mean(plan.imbalance_after for plan in plans),
        "bytes_per_step": mean(sum(plan.bytes_out) * args.layers for plan in plans),
        "bytes_out_max_rank": mean(max(plan.bytes_out) * args.layers for plan in plans),
        "plan_ms_median": statistics.median(plan.plan_ms for plan in plans),
        "plan_waited_ms": mean(plan.waited_ms for plan in plans),
        "max_loss_difference": largest_difference(plain, balanced),
        "plain_peak_gib": plain.peak_gib,
        "distca_peak_gib": balanced.peak_gib,
    }


def largest_difference(one: Variant, other: Variant) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def show(summary: dict, variants: dict[str, Variant]) -> None:
    for name, variant in variants.items():
        losses = " ".join(f"{loss:.4f}" for loss in variant.losses)
        print(f"loss {name:12} {losses}")
    for name, variant in variants.items():
        for key, by_rank in variant.profile.items():
            print(f"profiled {name:12} {key:13} " + " ".join(f"{ms:9.1f}" for ms in by_rank))
    for key, value in summary.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        if key == "max_loss_difference" or key == "loss_noise":
            text = f"{value:.2e}"
        elif isinstance(value, float) and abs(value) >= 1000:
            text = f"{value:,.0f}"
        print(f"{key:28} {text:>16}")


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    packs = pack(args, dist.get_world_size())
    variants = {}
    for name in ("plain", "distca", *(["plain again"] if args.noise else [])):
        variants[name] = run_variant(args, packs, device, with_distca=name == "distca")
        gc.collect()  # the model's cycles hold its memory and the process group
        if args.device == "cuda":
            torch.cuda.empty_cache()
    attention_ms = attention_alone(args, packs, device)
    summary = summarize(args, variants["plain"], variants["distca"], attention_ms)
    if args.noise:
        summary["loss_noise"] = largest_difference(variants["plain"], variants["plain again"])
    if dist.get_rank() == 0:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            by_step = {name: asdict(variant) for name, variant in variants.items()}
            record = {"summary": summary, "variants": by_step, "attention_ms": attention_ms}
            args.out.write_text(json.dumps(record, indent=2) + "\n")
        show(summary, variants)
    distca.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
