"""Step time of Llama-wide blocks under FSDP2, by how core attention is computed.

    torchrun --nproc-per-node 4 benchmarks/training_step.py --lengths lengths.json --out step.json

Variants: "flash" is PyTorch's varlen flash attention and "plain" distca's kernels, each rank its
own documents; "process_group" and "peer" are distca, balanced, by those transports. All see the
same documents, tokens and initial weights. A step is forward, backward and optimizer, timed on the
host from a barrier to a barrier with the device synchronised, so it lasts as long as the slowest
rank needs.

The balanced limit is what perfect balance for free would give: the step without balance less the
time by which the slowest rank's attention exceeds the mean. Attention alone (forward and backward
of each rank's own documents, one layer) is timed by itself for it, and multiplied by the layers.
Limits of different steps are compared with the steps of the same documents.

On CUDA a profiled extra step of each variant adds, per rank, the time in which only communication
kernels run ("only_nccl_ms") and in which none runs ("idle_ms"). Without balance both hold the
waiting for the slowest rank.
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

VARIANTS = ("flash", "plain", "process_group", "peer")
KERNELS = {"flash": torch_attention, "plain": distca.core_attention}  # each rank its own documents
AGAIN = " again"  # a variant run twice
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
    parser.add_argument(
        "--variants", nargs="+", default=[*VARIANTS], metavar="NAME", help=" ".join(VARIANTS)
    )
    parser.add_argument("--noise", action="store_true", help="run the first variant twice")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    if args.steps <= NUM_WARM_UP_STEPS:
        parser.error(f"--steps is {args.steps}; needs more than {NUM_WARM_UP_STEPS} warm-up steps")
    for name in args.variants:
        if name not in VARIANTS:
            parser.error(f"--variants has {name!r}; expected some of {' '.join(VARIANTS)}")
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
            documents = own_documents(self._packs, step)
            self._next = documents, distca.plan(documents, device=self._device, ahead=True)
        return current


def own_documents(packs: Packs, step: int) -> distca.Documents:
    return distca.Documents([0, *itertools.accumulate(packs[step][dist.get_rank()])])


def run_variant(args: argparse.Namespace, packs: Packs, device: torch.device, name: str) -> Variant:
    """All steps from the initial weights; on CUDA the last step's documents once more, profiled."""
    cuda = device.type == "cuda"
    kernel = torch_attention if name == "flash" else distca.core_attention
    model = build_model(args, device, kernel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    steps = [*range(args.steps), *([args.steps - 1] if cuda else [])]
    planner = None
    if name not in KERNELS:
        distca.init(options=distca.Options(transport=name))
        planner = Planner(packs, steps, device)
    variant = Variant()
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def train_step(given: Input, step: int) -> Tensor:
        documents = given.documents if name == "flash" else own_documents(packs, step)
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
            variant.profile = profiled(lambda given=given, step=step: train_step(given, step))
            break
        synchronise(device)
        start = time.perf_counter()
        loss = train_step(given, step)
        synchronise(device)
        variant.step_ms.append(1e3 * (time.perf_counter() - start))
        dist.all_reduce(loss)
        variant.losses.append(loss.item() / dist.get_world_size())
    variant.plans = variant.plans[: args.steps]
    if cuda:
        variant.peak_gib = max(gathered(torch.cuda.max_memory_allocated() / 2**30, device))
    distca.close()
    return variant


def attention_alone(
    args: argparse.Namespace, packs: Packs, device: torch.device, kernel: str
) -> list[list[float]]:
    """Measured ms [steps][ranks] of core attention on each rank's own documents, all layers."""
    shapes = [(args.tokens, heads, args.head_dim) for heads in (args.heads, *[args.kv_heads] * 2)]
    q, k, v = (
        torch.randn(shape, device=device, dtype=args.dtype, requires_grad=True) for shape in shapes
    )
    grad_out = torch.randn_like(q)
    rows = []
    for step in range(args.steps):
        documents = own_documents(packs, step)
        if kernel == "flash":
            documents = WholeDocuments.of(packs[step][dist.get_rank()], device)
        ms = 0.0
        for _ in range(2):  # the first call also loads kernels and makes the layout
            synchronise(device)
            start = time.perf_counter()
            torch.autograd.grad(KERNELS[kernel](q, k, v, documents), (q, k, v), grad_out)
            if device.type == "cuda":
                torch.cuda.synchronize()
            ms = 1e3 * (time.perf_counter() - start)
        rows.append([each * args.layers for each in gathered(ms, device)])
    return rows


def excess(ranks: list[float]) -> float:
    return max(ranks) - statistics.fmean(ranks)


@dataclass(frozen=True)
class Limit:
    """Attention alone by one kernel, and what a step would take if it were balanced for free."""

    attention_ms: list[list[float]]  # [steps][ranks], warm-up included
    step_ms: list[float]  # of the variant without balance, warm-up left out

    def balanced_ms(self) -> list[float]:
        ranks = self.attention_ms[NUM_WARM_UP_STEPS:]
        return [step - excess(each) for step, each in zip(self.step_ms, ranks, strict=True)]


def summarize(variants: dict[str, Variant], limits: dict[str, Limit]) -> dict:
    """Milliseconds are means over the steps after warm-up unless the name says otherwise."""
    mean = statistics.fmean
    summary = {"ranks": dist.get_world_size()}
    for kernel, limit in limits.items():
        ranks = limit.attention_ms[NUM_WARM_UP_STEPS:]
        summary[f"{kernel}: balanced limit, ms"] = mean(limit.balanced_ms())
        summary[f"{kernel}: attention, mean rank, ms"] = mean(mean(each) for each in ranks)
        summary[f"{kernel}: attention, slowest rank, ms"] = mean(max(each) for each in ranks)
    for name, variant in variants.items():
        step_ms = variant.measured_ms()
        summary[f"{name}: step, ms"] = mean(step_ms)
        summary[f"{name}: median step, ms"] = statistics.median(step_ms)
        for kernel, limit in limits.items():
            if kernel != name:
                summary[f"{name}: times faster than {kernel}"] = mean(limit.step_ms) / mean(step_ms)
        if name not in KERNELS and "plain" in limits:
            over = mean(step_ms) / mean(limits["plain"].balanced_ms())
            summary[f"{name}: times the balanced limit"] = over
        summary |= {f"{name}: {key}": value for key, value in of_plans(variant).items()}
        summary[f"{name}: peak, GiB"] = variant.peak_gib
    first = next(iter(variants.values()))
    for name, variant in variants.items():
        if variant is not first:
            summary[f"{name}: max loss difference"] = largest_difference(first, variant)
    return summary


def of_plans(variant: Variant) -> dict[str, float]:
    plans, mean = variant.plans[NUM_WARM_UP_STEPS:], statistics.fmean
    if not plans:
        return {}
    return {
        "imbalance before": mean(plan.imbalance_before for plan in plans),
        "imbalance after": mean(plan.imbalance_after for plan in plans),
        "bytes of a layer": mean(sum(plan.bytes_out) for plan in plans),
        "plan, median ms": statistics.median(plan.plan_ms for plan in plans),
        "plan waited for, ms": mean(plan.waited_ms for plan in plans),
    }


def largest_difference(one: Variant, other: Variant) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def show(summary: dict, variants: dict[str, Variant]) -> None:
    for name, variant in variants.items():
        losses = " ".join(f"{loss:.4f}" for loss in variant.losses)
        print(f"loss {name:14} {losses}")
    for name, variant in variants.items():
        for key, by_rank in variant.profile.items():
            print(f"profiled {name:14} {key:13} " + " ".join(f"{ms:9.1f}" for ms in by_rank))
    for key, value in summary.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        if "loss" in key:
            text = f"{value:.2e}"
        elif isinstance(value, float) and abs(value) >= 1000:
            text = f"{value:,.0f}"
        print(f"{key:44} {text:>16}")


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
    again = [args.variants[0] + AGAIN] if args.noise else []
    for name in (*args.variants, *again):
        variants[name] = run_variant(args, packs, device, name.removesuffix(AGAIN))
        gc.collect()  # the model's cycles hold its memory and the process group
        if args.device == "cuda":
            torch.cuda.empty_cache()
    limits = {
        kernel: Limit(attention_alone(args, packs, device, kernel), variants[kernel].measured_ms())
        for kernel in KERNELS
        if kernel in variants
    }
    summary = summarize(variants, limits)
    if dist.get_rank() == 0:
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            by_step = {name: asdict(variant) for name, variant in variants.items()}
            attention = {kernel: limit.attention_ms for kernel, limit in limits.items()}
            record = {"summary": summary, "variants": by_step, "attention_ms": attention}
            args.out.write_text(json.dumps(record, indent=2) + "\n")
        show(summary, variants)
    distca.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
