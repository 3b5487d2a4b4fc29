"""The planner on its own: time and quality against lower bounds and two plain planners.

    python benchmarks/planner.py --lengths lengths.json --out runs/planner
    python benchmarks/planner.py --lengths lengths.json --ranks 512 --tokens 65536 --json 512.json

No GPU and no process group: torch.ops.distca.plan and .layout are called in this process, for
causal attention of 32 query and 8 key heads of 128 in bfloat16 on a CUDA device. A seed draws
documents from a list and packs them to equal tokens a rank, as training_step.py does. Figures are
medians over seeds; without --ranks and --tokens all combinations of both are measured.

plan_ms is one plan and the layout of the rank that sends most, on one thread, after a warm-up call;
of calls that are short, the median of several. The plain planners' is the time of their Python.

  greedy         the most loaded rank gives to the least loaded until all are balanced, whatever
                 that moves
  longest first  whole documents, longest first, to the rank with least work, wherever they lie

A plan's tasks are counted anew here, in numpy, from their rows: they have to cover every query
once, and seconds and bytes of every rank have to be those that the planner reports.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import numpy as np
import torch
from planner_reference import (
    BASELINES,
    Bounds,
    Loads,
    Pack,
    Prices,
    check_cover,
    draw_pack,
    least_bytes_within,
    loads_of,
    read_lengths,
)
from planner_report import OURS, Figures, Result, save, save_json, table
from torch import Tensor

import distca
from distca.cost import AttentionShape, link_bytes_per_second
from distca.planning import CAUSAL, max_over_mean

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = (65536, 131072)
MAX_RANKS = 65536
MAX_TOKENS = 2**31 - 1
PLAN_HEADER_WORDS = 5  # of an encoded plan; its tasks follow
NUM_REPEATS = 5
SHORT_SECONDS = 0.1  # a call that takes longer is made once
# Sums in another order than the planner's.
MAX_DIFFERENCE = 1e-9


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def counted(most: int) -> Callable[[str], int]:
        def parse(text: str) -> int:
            if not text.isdecimal() or not 1 <= int(text) <= most:
                raise argparse.ArgumentTypeError(f"{text!r}; expected an integer from 1 to {most}")
            return int(text)

        return parse

    parser.add_argument(
        "--lengths", type=Path, action="append", required=True, help="JSON list; may be repeated"
    )
    parser.add_argument("--ranks", type=counted(MAX_RANKS), nargs="+", default=RANKS)
    parser.add_argument(
        "--tokens", type=counted(MAX_TOKENS), nargs="+", default=TOKENS, help="per rank"
    )
    parser.add_argument("--seeds", type=counted(10000), default=10, help="0 to this, exclusive")
    parser.add_argument("--tolerance", type=float, default=distca.Options.tolerance)
    parser.add_argument("--json", type=Path, help="file for the medians of one case")
    parser.add_argument("--out", type=Path, help="folder for planner.csv and .png")
    args = parser.parse_args(given)
    args.cases = list(itertools.product(args.lengths, args.tokens, args.ranks))
    if args.json is not None and len(args.cases) != 1:
        parser.error(
            f"--json describes one case, and these are {len(args.cases)}; give one --lengths, one "
            "--ranks and one --tokens, or save them with --out"
        )
    try:
        args.lists = {path: read_lengths(path) for path in args.lengths}
    except ValueError as error:
        parser.error(f"--lengths {error}")
    try:
        args.options = distca.Options(tolerance=args.tolerance)
    except ValueError as error:
        parser.error(f"--{error}")
    return args


def timed(call: Callable[[], object]) -> tuple[object, float]:
    """(result, milliseconds): one call, or the median of several short ones."""
    times: list[float] = []
    while len(times) < NUM_REPEATS and (not times or times[0] < SHORT_SECONDS):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return result, 1e3 * statistics.median(times)


class Benchmark:
    def __init__(self, options: distca.Options) -> None:
        self.options = options
        self.shape = AttentionShape()
        self.prices = Prices.of(options, self.shape)

    def figures_by_planner(self, pack: Pack) -> dict[str, Figures]:
        home = loads_of(pack, pack.home_tasks(), self.prices)
        found = {OURS: self.ours(pack, home)}
        for name, planner in BASELINES.items():
            tasks, ms = timed(lambda plan=planner: plan(pack, self.prices, self.options.tolerance))
            check_cover(pack, tasks)
            found[name] = self.figures(home, loads_of(pack, tasks, self.prices), ms, None)
        return found

    def ours(self, pack: Pack, home: Loads) -> Figures:
        pieces = pack.pieces()
        (encoded, reported), plan_ms = timed(lambda: self.plan(pieces, pack.num_ranks))
        tasks = encoded[PLAN_HEADER_WORDS:].reshape(-1, 4).numpy()
        check_cover(pack, tasks)
        loads = loads_of(pack, tasks, self.prices)
        check_report(reported, home, loads)
        busiest = int(loads.bytes_out.argmax())
        _, layout_ms = timed(lambda: torch.ops.distca.layout(pieces, encoded, busiest, 0, "cuda"))
        return self.figures(home, loads, plan_ms + layout_ms, layout_ms)

    def plan(self, pieces: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
        return torch.ops.distca.plan(
            pieces,
            num_ranks,
            *CAUSAL,
            self.prices.cost,
            self.shape.row_bytes(),
            link_bytes_per_second(self.options, "cuda"),
            self.options.tolerance,
        )

    def figures(
        self, home: Loads, loads: Loads, plan_ms: float, layout_ms: float | None
    ) -> Figures:
        bounds = Bounds.of(home.seconds, self.prices)
        slowest = float(loads.seconds.max())
        sender, receiver = int(loads.bytes_out.argmax()), int(loads.bytes_in.argmax())
        num_bytes = int(loads.bytes_out.sum())
        return Figures(
            plan_ms,
            layout_ms,
            max_over_mean(home.seconds.tolist()),
            max_over_mean(loads.seconds.tolist()),
            over(num_bytes, bounds.total),
            over(num_bytes, least_bytes_within(slowest, home.seconds, self.prices)),
            over(int(loads.bytes_out[sender]), float(bounds.egress[sender])),
            over(int(loads.bytes_in[receiver]), float(bounds.ingress[receiver])),
        )


def over(num_bytes: int, bound: float) -> float:
    """1 if nothing has to move and nothing does."""
    if bound > 0:
        return num_bytes / bound
    return 1.0 if num_bytes == 0 else float("inf")


def check_report(reported: Tensor, home: Loads, counted: Loads) -> None:
    """Raises RuntimeError unless the planner's loads are those counted from its tasks."""
    columns = {
        "seconds_home": home.seconds,
        "seconds": counted.seconds,
        "bytes_out": counted.bytes_out,
        "bytes_in": counted.bytes_in,
    }
    for (name, expected), column in zip(columns.items(), reported.numpy().T, strict=True):
        wrong = ~np.isclose(column, expected, rtol=MAX_DIFFERENCE, atol=0)
        if wrong.any():
            rank = int(wrong.argmax())
            raise RuntimeError(
                f"{name} of rank {rank}: the planner reports {column[rank]}, its tasks make "
                f"{expected[rank]}"
            )


def medians(figures: list[Figures]) -> Figures:
    columns = zip(*(astuple(each) for each in figures), strict=True)
    return Figures(*(None if None in column else statistics.median(column) for column in columns))


def run_case(
    benchmark: Benchmark, lengths: list[int], ranks: int, tokens: int, seeds: int
) -> dict[str, Figures]:
    """Medians over seeds by planner; a dot on the screen for every seed."""
    by_seed = []
    for seed in range(seeds):
        by_seed.append(benchmark.figures_by_planner(draw_pack(lengths, ranks, tokens, seed)))
        print(".", end="", flush=True)
    return {name: medians([figures[name] for figures in by_seed]) for name in by_seed[0]}


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    torch.set_num_threads(1)
    benchmark = Benchmark(args.options)
    benchmark.figures_by_planner(draw_pack([1000, 3000], 4, 4096, 0))  # warm-up
    results = []
    for idx, (path, tokens, ranks) in enumerate(args.cases):
        progress = f"[{idx + 1}/{len(args.cases)}] {path.stem}, {tokens} tokens, {ranks} ranks "
        print(progress, end="", flush=True)
        start = time.perf_counter()
        found = run_case(benchmark, args.lists[path], ranks, tokens, args.seeds)
        print(f" {found[OURS].plan_ms:.1f} ms a plan [{time.perf_counter() - start:.1f} s]")
        results += [
            Result(path.stem, ranks, tokens, name, args.seeds, args.tolerance, figures)
            for name, figures in found.items()
        ]
    print(f"\nMedians over {args.seeds} seeds, tolerance {args.tolerance}; ! above what is wanted")
    print(table(results))
    if args.json is not None:
        save_json(args.json, results)
    if args.out is not None:
        save(args.out, results)


if __name__ == "__main__":
    main()
