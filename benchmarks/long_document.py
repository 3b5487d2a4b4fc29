"""Time attention of documents that cross ranks, in TFLOP/s per GPU.

    torchrun --nproc-per-node 4 benchmarks/long_document.py --document 524288 --out runs/long

The script runs one layer, forward and backward, on one document over all ranks (--document) or on a
long document among those of a list (--mixed, --lengths). "peer" and "process_group" are distca with
equal runs of tokens. "context" is context parallelism with distca's kernels (context_parallel.py).
"torch cudnn" and "torch flash" are torch's context_parallel over these backends of SDPA, for one
document on CUDA. "alone" is distca's kernel without communication: each rank has a document of its
own with one rank's share of the (query, key) pairs.

Times are medians over rounds on the slowest rank, from a barrier to the end on the device. They
include communication. One more round is profiled (device_time.py) to break down the device time of
each rank. FLOPs are 4 x heads x head_dim for each visible pair, and 2.5 times as many backward.
"difference" is the largest relative difference of out, dq, dk and dv from the first way.
"""

import argparse
import contextlib
import csv
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from attention_peers import Unavailable
from device_time import FIGURES, gathered, profiled, step_profile, synchronise
from long_document_ways import Way, alone_way, variant_way
from step_model import add_attention_arguments, attention_shape, check_device, dtype_of
from step_report import max_or_nan
from torch import Tensor
from torch_context_parallel import BACKENDS, torch_way
from training_step import free_memory, join, leave
from workloads import Workload, add_arguments, make_workload

from distca.options import make_writable
from distca.watching.figures import BACKWARD_OVER_FORWARD

ALONE = "alone"
FILES = ("long_document.csv", "long_document_ranks.csv")
WAYS = (ALONE, "peer", "process_group", "context", *BACKENDS)


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    add_attention_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3, help="after one warm-up round")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--out", type=Path, help="folder for long_document.csv")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    if world_size == 0:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    try:
        workload = make_workload(args, world_size, num_steps=1)
        check_device(args)
        make_writable("--out", args.out, *FILES)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not workload.crosses_ranks:
        parser.error("these documents are whole on their ranks; pass --document or --mixed")
    return args, workload


@dataclass(frozen=True)
class Result:
    way: str
    forward_ms: float
    backward_ms: float
    forward_tflops: float  # per GPU
    backward_tflops: float
    difference: float | None = None  # None for the first way and for "alone"


@dataclass(frozen=True)
class Measured:
    forward_ms: float
    backward_ms: float
    tensors: list[Tensor]  # out, dq, dk and dv of this rank's rows
    profiles: dict[str, dict[str, list[float]]]  # device_time.step_profile by pass


class Inputs:
    """q, k, v, grad_out [tokens, heads, head_dim] of a pack from N(0, 1), equal on all ranks."""

    def __init__(self, args: argparse.Namespace, num_tokens: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(args.seed)
        self.tensors = [
            torch.randn(
                (num_tokens, heads, args.head_dim),
                generator=generator,
                device=device,
                dtype=dtype_of(device),
            )
            for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)
        ]

    def of(self, way: Way) -> tuple[Tensor, ...]:
        """Return this rank's rows in the shape that the way expects."""
        return tuple(way.shaped(tensor[way.rows]) for tensor in self.tensors)


def measure(way: Way, inputs: Inputs, num_rounds: int, device: torch.device) -> Measured:
    q, k, v, grad_out = inputs.of(way)
    leaves, times = [x.requires_grad_() for x in (q, k, v)], []
    for _ in range(1 + num_rounds):
        forward_ms, out = timed(lambda: way.attend(*leaves), device)
        backward_ms, grads = timed(
            lambda out=out: torch.autograd.grad(out, leaves, grad_out), device
        )
        times.append((forward_ms, backward_ms))
    medians = [statistics.median(each) for each in zip(*times[1:], strict=True)]
    forward_ms, backward_ms = (max(gathered(ms, device)) for ms in medians)
    outs = []
    spans = {
        "forward": profiled(lambda: outs.append(way.attend(*leaves)), device),
        "backward": profiled(lambda: torch.autograd.grad(outs[0], leaves, grad_out), device),
    }
    return Measured(
        forward_ms,
        backward_ms,
        [way.rows_of(x.detach()) for x in (out, *grads)],
        {name: step_profile(each) for name, each in spans.items()},
    )


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, object]:
    synchronise(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start), result


def own_run(result: Tensor, way: Way, workload: Workload) -> Tensor:
    """Redistribute the rows that each rank holds in this way to equal runs, in order."""
    whole = result.new_zeros(workload.num_tokens, *result.shape[1:])
    whole.index_copy_(0, way.rows, result)
    dist.all_reduce(whole)
    first = workload.tokens * dist.get_rank()
    return whole[first : first + workload.tokens].clone()


def relative_difference(one: list[Tensor], other: list[Tensor], device: torch.device) -> float:
    """Return the largest difference of all tensors and ranks, or NaN if any is NaN."""
    differences = [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(one, other, strict=True)
    ]
    ranks = gathered(max_or_nan(differences), device)
    return max_or_nan(ranks)


def num_pairs(lengths: list[int]) -> int:
    return sum(length * (length + 1) // 2 for length in lengths)


class Benchmark:
    def __init__(self, args: argparse.Namespace, workload: Workload, device: torch.device) -> None:
        self.args, self.workload, self.device = args, workload, device
        self.inputs = Inputs(args, workload.num_tokens, device)
        self.pairs = num_pairs(workload.lengths(0)) / dist.get_world_size()  # a rank's share
        self.num_alone = max(1, round(math.sqrt(2 * self.pairs)))
        self.results: list[Result] = []
        self.profiles: dict[str, dict[str, dict[str, list[float]]]] = {}  # by way and pass
        self.left_out: dict[str, str] = {}
        self._reference: list[Tensor] | None = None

    def way(self, name: str) -> contextlib.AbstractContextManager[Way]:
        args, device = self.args, self.device
        if name == ALONE:
            return alone_way(self.num_alone, device)
        if name in BACKENDS:
            heads = args.heads, args.kv_heads
            return torch_way(name, self.workload, heads, args.head_dim, device)
        if name == "peer" and device.type != "cuda":
            raise Unavailable("peer memory needs CUDA")
        shape = attention_shape(args, device)
        return variant_way(name, self.workload, shape, args.keep_inputs_gb, device)

    def run(self, name: str) -> None:
        try:
            with self.way(name) as way:
                measured = measure(way, self.inputs, self.args.rounds, self.device)
                runs = None
                if name != ALONE:
                    runs = [own_run(tensor, way, self.workload) for tensor in measured.tensors]
        except Unavailable as reason:
            self.left_out[name] = str(reason)
            return
        pairs = num_pairs([self.num_alone]) if name == ALONE else self.pairs
        flops = 4 * self.args.heads * self.args.head_dim * pairs
        self.profiles[name] = measured.profiles
        self.results.append(
            Result(
                name,
                measured.forward_ms,
                measured.backward_ms,
                flops / measured.forward_ms / 1e9,
                BACKWARD_OVER_FORWARD * flops / measured.backward_ms / 1e9,
                self._difference(runs),
            )
        )

    def _difference(self, runs: list[Tensor] | None) -> float | None:
        if runs is None:
            return None
        if self._reference is None:
            self._reference = runs
            return None
        return relative_difference(runs, self._reference, self.device)


def run(args: argparse.Namespace, workload: Workload, device: torch.device) -> Benchmark:
    benchmark = Benchmark(args, workload, device)
    for name in args.ways:
        benchmark.run(name)
        free_memory(device)
    return benchmark


def show(benchmark: Benchmark) -> None:
    lengths = benchmark.workload.lengths(0)
    print(
        f"{len(lengths)} document(s), at most {max(lengths):,} tokens long, on "
        f"{dist.get_world_size()} ranks; alone: {benchmark.num_alone:,} tokens"
    )
    print(f"{'':14} {'forward':>34} {'backward':>34} {'difference':>11}")
    heading = f"{'ms':>12} {'TFLOP/s':>10} {'of alone':>10}"
    print(f"{'':14} {heading} {heading}")
    alone = next((each for each in benchmark.results if each.way == ALONE), None)
    for each in benchmark.results:
        line = f"{each.way:14}"
        for name in ("forward", "backward"):
            tflops = getattr(each, f"{name}_tflops")
            line += f" {getattr(each, f'{name}_ms'):12.3f} {tflops:10.4g}"
            share = "" if alone is None else f"{tflops / getattr(alone, f'{name}_tflops'):.3f}"
            line += f" {share:>10}"
        print(line + ("" if each.difference is None else f" {each.difference:11.1e}"))
    for way, figure, by_rank in rank_figures(benchmark):
        print(f"{way:14} {figure:24}" + "".join(f"{ms:12.3f}" for ms in by_rank))
    for name, reason in benchmark.left_out.items():
        print(f"{name} is left out: {reason}")


def rank_figures(benchmark: Benchmark) -> Iterator[tuple[str, str, list[float]]]:
    """Yield (way, figure, milliseconds by rank)."""
    for way, passes in benchmark.profiles.items():
        for name, profile in passes.items():
            for figure in FIGURES:
                yield way, f"{name} {figure}", profile[figure]


def save(folder: Path, benchmark: Benchmark) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ways, ranks = (folder / name for name in FILES)
    with ways.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[field.name for field in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(each) for each in benchmark.results)
    with ranks.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["way", "figure", *range(dist.get_world_size())])
        writer.writerows([way, name, *each] for way, name, each in rank_figures(benchmark))


def main() -> None:
    args, workload = arguments()
    device = join(args.device)
    benchmark = run(args, workload, device)
    if dist.get_rank() == 0:
        show(benchmark)
        if args.out is not None:
            save(args.out, benchmark)
    leave()


if __name__ == "__main__":
    main()
