"""Train a small Llama on packed documents with FSDP2 and attention balanced by distca.

    torchrun --nproc-per-node 4 examples/train.py --compare --steps 50 --out runs/train

The script runs on the CPU (gloo, float32) and on CUDA devices (NCCL, bfloat16). With --compare it
trains twice from one seed, first with torch's attention, and reports the largest loss difference.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig, WholeDocuments, torch_attention
from stdlib_corpus import VOCAB_SIZE, Corpus, Pack
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distca
from distca.options import make_writable
from distca.watching.report import draw_balance, new_figure

SIZES = {
    "cpu": {"tokens_per_rank": 4096, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2},
    "cuda": {"tokens_per_rank": 32768, "hidden": 2048, "layers": 4, "heads": 16, "kv_heads": 4},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ON_CPU = "ranks share the CPU, so balance saves no time; what counts here are equal losses"
ON_WHOLE_PACKS = "not comparable, without distca every rank computes the whole pack"
LARGEST_FLOAT32_DIFFERENCE = 1e-4  # of two losses that differ only in summation order


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true", help="train without distca as well")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens-per-rank", type=int, help="4096 on CPU, 32768 on CUDA")
    parser.add_argument("--layers", type=int, help="2 on CPU, 4 on CUDA")
    parser.add_argument("--hidden", type=int, help="64 on CPU, 2048 on CUDA")
    parser.add_argument("--heads", type=int, help="4 on CPU, 16 on CUDA")
    parser.add_argument("--kv-heads", type=int, help="2 on CPU, 4 on CUDA")
    parser.add_argument("--dtype", choices=DTYPES, help="float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for balance.png and summary.json")
    parser.add_argument(
        "--sharded", action="store_true", help="one global pack; documents may cross ranks"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile every block")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument(
        "--ping-pong", action="store_true", help="run every block on two halves of the tokens"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 examples/train.py ...")
    if args.out is not None:
        try:  # before it trains
            new_figure(1, 1)
            make_writable("--out", args.out, "summary.json", "balance.png")
        except (ImportError, ValueError) as error:
            parser.error(str(error))
    args.device_type = "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in SIZES[args.device_type].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.dtype = DTYPES[args.dtype or ("float32" if args.device_type == "cpu" else "bfloat16")]
    return args


@dataclass(frozen=True)
class Batch:
    """This rank's rows of a step."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    documents: distca.Documents | WholeDocuments
    loss_scale: float  # factor for this rank's sum of losses; the mean over ranks is the loss


def batches(args: argparse.Namespace, device: torch.device, with_distca: bool) -> Iterator[Batch]:
    """Yield this rank's batches. Each rank reads all packs to count the tokens of the loss."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_packs = 1 if args.sharded else world_size
    num_tokens = args.tokens_per_rank * world_size // num_packs
    corpus = Corpus(args.seed, context=num_tokens)
    while True:
        packs = [corpus.next_pack(num_tokens) for _ in range(num_packs)]
        pack, terms = packs[rank % num_packs], world_size
        if with_distca and args.sharded:
            yield sharded_batch(pack, 2 if args.ping_pong else 1, device)
            continue
        if with_distca:
            documents = distca.Documents([0, *itertools.accumulate(pack.lengths)])
        else:
            documents = WholeDocuments.of(pack.lengths, device)
            terms = num_packs  # 1 with --sharded, where every rank trains on the entire pack
        yield Batch(
            tokens=pack.tokens.long().to(device),
            labels=pack.labels().to(device),
            position_ids=documents.position_ids.to(device),
            documents=documents,
            loss_scale=terms / sum(each.num_predicted for each in packs),
        )


def sharded_batch(pack: Pack, runs: int, device: torch.device) -> Batch:
    """Return this rank's one or two runs of a pack that all ranks share."""
    run = distca.shard_batch(pack.tokens.long(), pack.lengths, runs=runs)
    return Batch(
        tokens=run.tokens.to(device),
        labels=run.labels.to(device),
        position_ids=run.position_ids.to(device),
        documents=run.documents,
        loss_scale=run.loss_scale,
    )


def planned(
    args: argparse.Namespace, unplanned: Iterator[Batch], device: torch.device
) -> Iterator[tuple[Batch, distca.Plan]]:
    """Yield batches and their plans. The next step is planned while the current one computes."""
    shape = distca.AttentionShape(
        args.heads, args.kv_heads, args.hidden // args.heads, args.dtype.itemsize
    )
    ready: list[tuple[Batch, distca.Plan]] = []
    for batch in unplanned:
        plan = distca.plan(batch.documents, device=device, shape=shape, ahead=True)
        ready.append((batch, plan))
        if len(ready) == 2:
            yield ready.pop(0)
    yield from ready


def build_model(args: argparse.Namespace, device: torch.device, with_distca: bool) -> Llama:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        ffn=args.hidden * 7 // 2,
        recompute=args.checkpoint,
    )
    with device:
        model = Llama(config, distca.core_attention if with_distca else torch_attention)
    precision = MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        if args.ping_pong and with_distca:
            block = distca.PingPong(block)  # the same module, of another class
        if args.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


@dataclass
class History:
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    plan_reports: list[distca.PlanReport] = field(default_factory=list)


def train(args: argparse.Namespace, device: torch.device, with_distca: bool) -> History:
    model = build_model(args, device, with_distca)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    steps = itertools.islice(batches(args, device, with_distca), args.steps)
    steps = planned(args, steps, device) if with_distca else ((batch, None) for batch in steps)
    history, progress = History(), Progress(args, "distca" if with_distca else "torch")
    for step, (batch, plan) in enumerate(steps):
        start = time.perf_counter()
        if plan is not None:
            plan.wait()  # compiled code cannot wait
        logits = model(batch.tokens, batch.position_ids, batch.documents)
        loss_sum = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
        loss = loss_sum * batch.loss_scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        history.losses.append(mean_loss.item())  # waits for the device
        history.step_seconds.append(time.perf_counter() - start)
        if plan is not None:
            history.plan_reports.append(plan.report())
        progress.show(step, history)
    progress.end()
    return history


class Progress:
    """Prints a line per step on rank 0. On a terminal, each line replaces the previous one."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.tokens_per_step = args.tokens_per_rank * dist.get_world_size()
        self.layers, self.num_steps, self.name = args.layers, args.steps, name
        self.shows = dist.get_rank() == 0
        self.in_place = sys.stdout.isatty()

    def show(self, step: int, history: History) -> None:
        if not self.shows:
            return
        line = (
            f"{self.name:6}  step {step + 1:3}/{self.num_steps}  loss {history.losses[-1]:.4f}  "
            f"{self.tokens_per_step / history.step_seconds[-1]:8,.0f} tokens/s"
        )
        if history.plan_reports:
            last = history.plan_reports[-1]
            line += (
                f"  imbalance {last.imbalance_before:.2f} -> {last.imbalance_after:.2f}"
                f"  {sum(last.bytes_out) * self.layers / 1e6:6.1f} MB moved"
                f"  plan {last.plan_ms:.1f} ms"
            )
        print(f"\r\x1b[K{line}" if self.in_place else line, end="" if self.in_place else "\n")
        sys.stdout.flush()

    def end(self) -> None:
        if self.shows and self.in_place:
            print()


def show_header(args: argparse.Namespace) -> None:
    packing = "one pack for all ranks" if args.sharded else "packed for each rank"
    print(
        f"{dist.get_world_size()} ranks on {args.device_type}, {args.steps} steps of "
        f"{args.tokens_per_rank:,} tokens a rank\n"
        f"model: Llama, {args.layers} layers, {args.heads} query and {args.kv_heads} key heads of "
        f"{args.hidden // args.heads}, {str(args.dtype).removeprefix('torch.')}\n"
        f"documents: sources of Python's standard library, {packing}"
    )


def tokens_per_second(args: argparse.Namespace, history: History) -> float:
    """Return the speed of all ranks in the median step."""
    tokens_per_step = args.tokens_per_rank * dist.get_world_size()
    return tokens_per_step / statistics.median(history.step_seconds)


def summarize(args: argparse.Namespace, history: History, reference: History | None) -> dict:
    difference = None
    if reference is not None:
        pairs = zip(history.losses, reference.losses, strict=True)
        difference = max(abs(a - b) for a, b in pairs)
    reports = history.plan_reports
    return {
        "max_loss_difference": difference,
        "imbalance_before": statistics.fmean(each.imbalance_before for each in reports),
        "imbalance_after": statistics.fmean(each.imbalance_after for each in reports),
        "imbalance_after_max": max(each.imbalance_after for each in reports),
        "tokens_per_second": tokens_per_second(args, history),
        "bytes_per_step": statistics.fmean(sum(each.bytes_out) * args.layers for each in reports),
        "plan_ms": statistics.median(each.plan_ms for each in reports),
        "ranks": dist.get_world_size(),
        "steps": len(reports),
    }


def finish(args: argparse.Namespace, history: History, reference: History | None) -> str | None:
    """Write the files and print the closing lines. Return an error message, or None."""
    summary = summarize(args, history, reference)
    print(
        f"imbalance {summary['imbalance_before']:.3f} -> {summary['imbalance_after']:.3f} "
        f"(predicted max/mean attention time of {summary['ranks']} ranks, mean of steps)"
    )
    if args.out is not None:
        (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        draw_balance(
            args.out / "balance.png",
            [each.seconds_before for each in history.plan_reports],
            [each.seconds_after for each in history.plan_reports],
        )
        print(f"wrote {args.out / 'balance.png'} and {args.out / 'summary.json'}")
    if reference is None:
        return None
    before, after = (tokens_per_second(args, each) for each in (reference, history))
    meaning = ON_CPU if args.device_type == "cpu" else f"{after / before:.2f} times as fast"
    meaning = ON_WHOLE_PACKS if args.sharded else meaning
    print(f"torch {before:,.0f} tokens/s, distca {after:,.0f} tokens/s: {meaning}")
    difference = summary["max_loss_difference"]
    print(f"largest loss difference {difference:.2e}")
    if args.dtype != torch.float32 or difference <= LARGEST_FLOAT32_DIFFERENCE:
        return None
    return f"expected a loss difference of at most {LARGEST_FLOAT32_DIFFERENCE:.0e} in float32"


def main() -> None:
    args = arguments()
    device = torch.device("cpu")
    if args.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank() == 0:
        show_header(args)
    reference = train(args, device, with_distca=False) if args.compare else None
    distca.init()
    history = train(args, device, with_distca=True)
    failure = finish(args, history, reference) if dist.get_rank() == 0 else None
    distca.close()
    gc.collect()  # FSDP's cycles would keep the group and gloo's threads alive until exit
    dist.destroy_process_group()
    sys.exit(failure)


if __name__ == "__main__":
    main()
