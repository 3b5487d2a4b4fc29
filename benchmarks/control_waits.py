"""Measures how long the training thread waits for the control plane: for plans and agreements.

    torchrun --nproc-per-node 4 benchmarks/control_waits.py

A step has a few layers of attention, forward and backward. They run under one plan, under two plans
whose windows alternate between layers, or under the plans of four micro-batches. Planning is one
step ahead. The table shows the median time of a step in the profiler's ranges "distca wait for
plan" and "distca agreement", on the slowest rank.
"""

import argparse
import os
import statistics

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import distca

CAUSAL, SLIDING = (-1, 0), (128, 0)
CASES = {  # windows by layer, micro-batches
    "one plan": ([CAUSAL], 1),
    "two windows": ([CAUSAL, SLIDING], 1),
    "4 micro-batches": ([CAUSAL], 4),
}
RANGES = ("distca wait for plan", "distca agreement")
STEP = "benchmark step"
NUM_WARM_UP = 3  # steps

MicroBatch = tuple[distca.Documents, torch.Tensor]


def micro_batch(num_tokens: int) -> MicroBatch:
    """Return a document for rank 0, or several for any other rank, and rows of q, k and v."""
    lengths = [num_tokens] if dist.get_rank() == 0 else [num_tokens // 8] * 8
    documents = distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return documents, torch.randn(documents.num_tokens, 4, 32, requires_grad=True)


def waits_of(profiled: profile) -> list[list[float]]:
    """Return the time that each step spends in each of RANGES, in milliseconds."""
    events = profiled.events()
    waits = []
    for step in (each.time_range for each in events if each.name == STEP):
        times = dict.fromkeys(RANGES, 0.0)
        for each in events:
            if each.name in times and step.start <= each.time_range.start < step.end:
                times[each.name] += each.cpu_time_total / 1e3
        waits.append(list(times.values()))
    return waits


def measure(windows: list[tuple[int, int]], num_batches: int, args: argparse.Namespace) -> list:
    """Return the median waits of a step on this rank, in milliseconds."""

    def planned() -> list[MicroBatch]:
        batches = [micro_batch(args.tokens) for _ in range(num_batches)]
        for documents, _ in batches:
            for window in windows:
                distca.plan(documents, window_size=window, ahead=True)
        return batches

    coming = planned()

    def step() -> None:
        nonlocal coming
        batches, coming = coming, planned()
        for documents, x in batches:
            out = x
            for layer in range(args.layers):
                window = windows[layer % len(windows)]
                out = distca.core_attention(out, x, x, documents, window_size=window)
            out.sum().backward()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            dist.barrier()  # ranks begin a step together, as after an optimizer step
            with record_function(STEP):
                step()

    run(NUM_WARM_UP)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(args.steps)
    waits = waits_of(profiled)
    return [statistics.median(each) for each in zip(*waits, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="of a rank and micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    dist.init_process_group("gloo")
    distca.init()
    if dist.get_rank() == 0:
        print(f"{'ms a step':>18}" + "".join(f"{name:>24}" for name in RANGES))
    for name, (windows, num_batches) in CASES.items():
        waits = torch.tensor(measure(windows, num_batches, args))
        dist.all_reduce(waits, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name:>18}" + "".join(f"{wait:24.2f}" for wait in waits.tolist()), flush=True)
    distca.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
