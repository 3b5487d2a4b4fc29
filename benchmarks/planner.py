"""Compare the planner with lower bounds and two baseline planners, in time and quality.

    python benchmarks/planner.py --lengths lengths.json --out runs/planner
    python benchmarks/planner.py --lengths lengths.json --ranks 512 --tokens 65536 --json 512.json

The script needs no GPU and no process group. It calls torch.ops.distca.plan and .layout in this
process, for causal attention of 32 query and 8 key heads of 128 in bfloat16 on a CUDA device. Each
seed draws documents from a list and packs them to equal tokens per rank, as training_step.py does.
Figures are medians over seeds. Without --ranks and --tokens, the script measures all combinations.

plan_ms is the time of a plan and of the layout of the rank that sends most, on one thread, after a
warm-up call. It is the median of several calls if they are short. For the baseline planners it is
the time of their Python code.

  greedy         the most loaded rank gives to the least loaded until all are balanced, regardless
                 of bytes
  longest first  assigns whole documents, longest first, to the rank with least work, regardless of
                 their home

--cluster also plans for unequal servers or links: mixed (every other server has half the speed),
dedicated (every eighth rank computes for all) and nodes (of eight ranks, with 50 GB/s per rank
between nodes). For these, the plan's makespan over servers and links is compared with the lower
bound of planner_optimum.py.

The script counts a plan's tasks again from their rows, in numpy. They must cover every query once,
and seconds and bytes of every rank must be those that the planner reports.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from planner_optimum import CLUSTERS, PASSES, optimum
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
)
from planner_report import ALIKE, OURS, Figures, Result, save, save_json, table
from torch import Tensor

import distca
from distca.options import make_writable
from distca.planning.cluster import Cluster, cluster_of
from distca.planning.cost import AttentionShape
from distca.planning.packs import read_lengths
from distca.planning.plan import CAUSAL
from distca.planning.solver import balance, tasks_of
from distca.watching.figures import max_over_mean

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = (65536, 131072)
MAX_RANKS = 65536
MAX_TOKENS = 2**31 - 1
NUM_REPEATS = 5
SHORT_SECONDS = 0.1  # a longer call is not repeated
# The order of sums differs from the planner's.
MAX_DIFFERENCE = 1e-9


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--cluster", choices=CLUSTERS, nargs="+", default=[ALIKE])
    parser.add_argument("--seeds", type=counted(10000), default=10, help="number of seeds, from 0")
    parser.add_argument("--tolerance", type=float, default=distca.Options.tolerance)
    parser.add_argument("--json", type=Path, help="file for the medians of a single case")
    parser.add_argument("--out", type=Path, help="folder for planner.csv and .png")
    args = parser.parse_args(argv)
    args.cases = list(itertools.product(args.lengths, args.tokens, args.ranks, args.cluster))
    if args.json is not None and len(args.cases) != 1:
        parser.error(
            f"--json describes one case, and these are {len(args.cases)}; pass one --lengths, "
            "--ranks, --tokens and --cluster, or save them with --out"
        )
    try:
        args.lists = {path: read_lengths(path) for path in args.lengths}
    except ValueError as error:
        parser.error(f"--lengths {error}")
    try:
        args.options = distca.Options(tolerance=args.tolerance)
    except ValueError as error:
        parser.error(f"--{error}")
    try:  # before minutes of planning
        make_writable("--json", args.json)
        make_writable("--out", args.out, "planner.csv", "planner.png")
    except ValueError as error:
        parser.error(str(error))
    return args


def timed(call: Callable[[], object]) -> tuple[object, float]:
    """Return (result, milliseconds) of one call, or the median of several if they are short."""
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

    def figures_by_planner(self, pack: Pack, cluster_name: str) -> dict[str, Figures]:
        link = cluster_of(self.options, pack.num_ranks, "cuda").link_bytes_per_second
        cluster = CLUSTERS[cluster_name](pack.num_ranks, link)
        home = loads_of(pack, pack.home_tasks(), self.prices)
        case = Case(pack, home, cluster, optimum(pack, home.seconds, cluster, self.prices))
        by_planner = {OURS: self.ours(case)}
        if cluster_name != ALIKE:
            return by_planner
        for name, planner in BASELINES.items():
            tasks, ms = timed(lambda plan=planner: plan(pack, self.prices, self.options.tolerance))
            check_cover(pack, tasks)
            figures = self.figures(case, loads_of(pack, tasks, self.prices), ms, None)
            by_planner[name] = replace(figures, **self.over_bounds(case, tasks))
        return by_planner

    def ours(self, case: "Case") -> Figures:
        pieces, pack = case.pack.pieces(), case.pack
        (encoded, reported), plan_ms = timed(lambda: self.plan(pieces, case.cluster))
        tasks = tasks_of(encoded)[:, :4].numpy()
        check_cover(pack, tasks)
        loads = loads_of(pack, tasks, self.prices, case.ranks_per_node)
        check_report(reported, case.home, loads, case.speeds)
        busiest = int(loads.bytes_out.argmax())
        _, layout_ms = timed(lambda: torch.ops.distca.layout(pieces, encoded, busiest, 0, "cuda"))
        figures = self.figures(case, loads, plan_ms + layout_ms, layout_ms)
        if case.is_alike:
            figures = replace(figures, **self.over_bounds(case, tasks))
        return figures

    def plan(self, pieces: Tensor, cluster: Cluster) -> tuple[Tensor, Tensor]:
        cost, tolerance = self.prices.cost, self.options.tolerance
        return balance(pieces, CAUSAL, cost, self.shape, cluster, tolerance)

    def figures(
        self, case: "Case", loads: Loads, plan_ms: float, layout_ms: float | None
    ) -> Figures:
        fair = loads.seconds.sum() / case.speeds.sum()
        return Figures(
            plan_ms,
            layout_ms,
            max_over_mean(case.home.seconds.tolist()),
            float(case.slowest(loads) / fair),
            None,
            None,
            None,
            None,
            case.makespan(loads) / case.optimum,
        )

    def over_bounds(self, case: "Case", tasks: np.ndarray) -> dict[str, float]:
        """Return the figures that compare bytes with bounds, for equal servers and links."""
        home, loads = case.home, loads_of(case.pack, tasks, self.prices)
        bounds = Bounds.of(home.seconds, self.prices)
        slowest = float(loads.seconds.max())
        sender, receiver = int(loads.bytes_out.argmax()), int(loads.bytes_in.argmax())
        num_bytes = int(loads.bytes_out.sum())
        least = least_bytes_within(slowest, home.seconds, self.prices)
        return {
            "bytes_over_bound": over(num_bytes, bounds.total),
            "bytes_over_least": over(num_bytes, least),
            "egress_over_bound": over(int(loads.bytes_out[sender]), float(bounds.egress[sender])),
            "ingress_over_bound": over(
                int(loads.bytes_in[receiver]), float(bounds.ingress[receiver])
            ),
        }


@dataclass(frozen=True)
class Case:
    """A pack on a cluster."""

    pack: Pack
    home: Loads
    cluster: Cluster
    optimum: float  # seconds

    @property
    def speeds(self) -> np.ndarray:
        """Return the servers' speeds [num_ranks]."""
        speeds = self.cluster.speeds
        return np.ones(self.pack.num_ranks) if speeds is None else np.array(speeds)

    @property
    def ranks_per_node(self) -> int:
        return self.cluster.ranks_per_node or self.cluster.num_ranks

    @property
    def is_alike(self) -> bool:
        return self.cluster.speeds is None and self.cluster.ranks_per_node is None

    def slowest(self, loads: Loads) -> float:
        """Return the compute seconds of the slowest server. Servers of speed 0 have no work."""
        assert not loads.seconds[self.speeds == 0].any()
        return float((loads.seconds / np.where(self.speeds > 0, self.speeds, 1)).max())

    def makespan(self, loads: Loads) -> float:
        """Return the seconds of a layer. In each pass, a rank computes visiting tasks, and home
        tasks beside its transfers."""
        _, inside, between, *_ = self.cluster.links().tolist()
        most_between = np.maximum(loads.node_bytes_out, loads.node_bytes_in)
        inside_out, inside_in = (
            loads.bytes_out - loads.node_bytes_out,
            loads.bytes_in - loads.node_bytes_in,
        )
        transfers = np.maximum(most_between / between, np.maximum(inside_out, inside_in) / inside)
        speeds = np.where(self.speeds > 0, self.speeds, 1)
        visiting = loads.seconds_visiting / speeds
        home = loads.seconds / speeds - visiting
        return sum(
            float((seconds * visiting + np.maximum(seconds * home, num_bytes * transfers)).max())
            for seconds, num_bytes in PASSES
        )


def over(num_bytes: int, bound: float) -> float:
    """Return the ratio to the bound, which is 1 if both are 0."""
    if bound > 0:
        return num_bytes / bound
    return 1.0 if num_bytes == 0 else float("inf")


def check_report(reported: Tensor, home: Loads, counted: Loads, speeds: np.ndarray) -> None:
    """Raise RuntimeError unless the planner's loads equal those counted from its tasks."""
    speeds = np.where(speeds > 0, speeds, 1)
    columns = {
        "seconds_home": home.seconds / speeds,
        "seconds": counted.seconds / speeds,
        "bytes_out": counted.bytes_out,
        "bytes_in": counted.bytes_in,
        "node_bytes_out": counted.node_bytes_out,
        "node_bytes_in": counted.node_bytes_in,
    }
    reported_columns = reported.numpy().T[[*range(len(columns)), 7]]  # the others are memory
    columns["seconds_visiting"] = counted.seconds_visiting / speeds
    for (name, expected), column in zip(columns.items(), reported_columns, strict=True):
        wrong = ~np.isclose(column, expected, rtol=MAX_DIFFERENCE, atol=0)
        if wrong.any():
            rank = int(wrong.argmax())
            raise RuntimeError(
                f"{name} of rank {rank}: the planner reports {column[rank]}, its tasks sum to "
                f"{expected[rank]}"
            )


def medians(figures: list[Figures]) -> Figures:
    columns = zip(*(astuple(each) for each in figures), strict=True)
    return Figures(*(None if None in column else statistics.median(column) for column in columns))


def run_case(
    benchmark: Benchmark, lengths: list[int], case: tuple[int, int, str], seeds: int
) -> dict[str, Figures]:
    """Return the medians over seeds of each planner. Print a dot for every seed."""
    tokens, ranks, cluster = case
    by_seed = []
    for seed in range(seeds):
        pack = draw_pack(lengths, ranks, tokens, seed)
        by_seed.append(benchmark.figures_by_planner(pack, cluster))
        print(".", end="", flush=True)
    return {name: medians([figures[name] for figures in by_seed]) for name in by_seed[0]}


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    benchmark = Benchmark(args.options)
    benchmark.figures_by_planner(draw_pack([1000, 3000], 4, 4096, 0), ALIKE)  # warm-up
    results = []
    for idx, (path, *case) in enumerate(args.cases):
        tokens, ranks, cluster = case
        progress = f"[{idx + 1}/{len(args.cases)}] {path.stem}, {tokens} tokens, {ranks} ranks "
        progress += f"{cluster} "
        print(progress, end="", flush=True)
        start = time.perf_counter()
        by_planner = run_case(benchmark, args.lists[path], case, args.seeds)
        print(f" {by_planner[OURS].plan_ms:.1f} ms a plan [{time.perf_counter() - start:.1f} s]")
        results += [
            Result(path.stem, ranks, tokens, cluster, name, args.seeds, args.tolerance, figures)
            for name, figures in by_planner.items()
        ]
    print(f"\nMedians over {args.seeds} seeds, tolerance {args.tolerance}; ! above the target")
    print(table(results))
    if args.json is not None:
        save_json(args.json, results)
    if args.out is not None:
        save(args.out, results)


if __name__ == "__main__":
    main()
