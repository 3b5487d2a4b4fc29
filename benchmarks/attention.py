"""Compare distca's attention kernels with other libraries: check results, then time every case.

    python benchmarks/attention.py --lengths lengths.json --out runs/attention
    python benchmarks/attention.py --head-dims 192,192:128,256 --shard-rows 128 --shard-keys 8192

All cases are causal, in bfloat16, with N(0, 1) inputs that do not fit in L2. d128, d192 and d256
have 32 query and 8 key heads, d64 has 32 and 32, and d192:128, whose v is narrower, 16 and 16.

  dense       equal documents, 32k tokens in total
  shards      tasks of R query rows over documents of K tokens, computed for another rank. "every"
              has all shards of the documents, "half" every second one, and "last" the last shard of
              each document, so that no two tasks share keys, as in other libraries' figures for
              "R rows x K keys". The planner joins neighbouring shards, so training has "half" but
              never "every". Other libraries get a copy of the keys for each task.
  documents   lengths drawn from each file of --lengths

The script calls distca's operators on one rank, without a process group. Before it times a case, it
compares out, dq, dk and dv of some documents with float32 matrix products. The run ends if an error
exceeds twice the error of bfloat16 matrix products plus rounding.

TFLOP/s follow the usual count: 2 * head_dim for each of the two matrix products forward and of the
five backward, times heads * (query, key) pairs, with half the diagonal. Times are medians over
rounds; each library runs once per round. "deterministic" is the backward pass in deterministic
mode. torch does not fill new memory there, because no kernel needs it.

At the power limit, the power that a kernel draws sets the clock of those after it. Each timed call
therefore follows untimed calls of the same library, which together take at least 10 ms.
"""

import argparse
import gc
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from attention_cases import (
    HEADS,
    SHARINGS,
    Case,
    Shards,
    dense_case,
    documents_case,
    shards_case,
)
from attention_check import Checker, relative_difference
from attention_peers import (
    DEFAULT_PEERS,
    PASSES,
    PEERS,
    Inputs,
    Runner,
    Unavailable,
    distca_runner,
    first_line,
    importable_peers,
)
from attention_report import Timing, kernel_table, left_out_table, ratio_table, ratios, save, table

from distca._library import LIBRARY
from distca.options import make_writable

KINDS = ("dense", "shards", "documents")
DENSE_LENGTHS = (2048, 8192, 32768, 65536)
SHARD_ROWS = (64, 128, 256, 512, 2048)
SHARD_KEYS = (8192, 65536)
QUICK_REPEATS = 5
LEAD_MS = 10.0
MATMUL_SIZE = 8192
# Relative; correct libraries differ by about 0.005.
MAX_PEER_DIFFERENCE = 0.03


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def listed(kind: type, allowed: tuple = ()) -> Callable[[str], list]:
        def parse(text: str) -> list:
            values = [kind(part) for part in text.split(",")]
            if allowed and not set(values) <= set(allowed):
                raise argparse.ArgumentTypeError(f"{text!r}; expected some of {allowed}")
            return values

        return parse

    parser.add_argument(
        "--cases", type=listed(str, KINDS), default=list(KINDS), help="ratios of shards need dense"
    )
    parser.add_argument("--head-dims", type=listed(str, tuple(HEADS)), default=["64", "128"])
    parser.add_argument("--shard-rows", type=listed(int), default=list(SHARD_ROWS))
    parser.add_argument("--shard-keys", type=listed(int), default=list(SHARD_KEYS))
    parser.add_argument("--lengths", type=Path, action="append", default=[], help="JSON list")
    parser.add_argument("--tokens", type=listed(int), default=[32768, 131072], help="of documents")
    parser.add_argument("--repeats", type=int, default=20, help="rounds per case")
    parser.add_argument("--quick", action="store_true", help="few rounds and short cases")
    parser.add_argument(
        "--peers",
        type=listed(str, tuple(PEERS)),
        default=DEFAULT_PEERS,
        help=f"of {','.join(PEERS)}",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for attention.csv, .json and .png")
    args = parser.parse_args()
    if min(args.repeats, *args.tokens, *args.shard_rows, *args.shard_keys) < 1:
        parser.error("--repeats, --tokens, --shard-rows and --shard-keys must be positive")
    if max(args.shard_rows) > min(args.shard_keys):
        parser.error("--shard-rows must not exceed --shard-keys")
    try:
        make_writable("--out", args.out, "attention.csv", "attention.json", "attention.png")
    except ValueError as error:
        parser.error(str(error))
    if args.quick:
        args.repeats, args.tokens = min(args.repeats, QUICK_REPEATS), args.tokens[:1]
        args.shard_rows, args.shard_keys = [128], args.shard_keys[:1]
    return args


def cases_of(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    for heads in (HEADS[head_dim] for head_dim in args.head_dims):
        if "dense" in args.cases:
            for length in DENSE_LENGTHS[:2] if args.quick else DENSE_LENGTHS:
                yield dense_case(heads, length, device)
        if "shards" in args.cases:
            for keys, sharing, rows in itertools.product(
                args.shard_keys, SHARINGS, args.shard_rows
            ):
                yield shards_case(heads, Shards(rows, keys, sharing), device)
        if "documents" in args.cases:
            for path, tokens in itertools.product(args.lengths, args.tokens):
                yield documents_case(heads, path, tokens, args.seed, device)


def milliseconds(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the device times of each call, in rounds, so that all calls share heat.

    Each round has another order. A timed call follows untimed ones that take LEAD_MS together.
    """

    def timed(call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        return begin, end

    num_leads = {}
    for name, call in calls.items():
        call()
        begin, end = timed(call)
        end.synchronize()
        num_leads[name] = math.ceil(LEAD_MS / begin.elapsed_time(end))
    events = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(repeats):
        for name, call in order.sample(list(calls.items()), len(calls)):
            for _ in range(num_leads[name]):
                call()
            events[name].append(timed(call))
    torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()
    }


def matmul_tflops(device: torch.device, repeats: int) -> list[float]:
    """Return the rates of the square bfloat16 product that kernels are compared with."""
    a, b = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    times = milliseconds({"matmul": lambda: a @ b}, repeats)["matmul"]
    return [2 * MATMUL_SIZE**3 / (1e9 * ms) for ms in times]


def check_ours(case: Case, inputs: Inputs, runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
    """End the run unless distca's results are right. Return its out and dq."""
    q, k, v, _ = inputs
    checker = Checker(case, inputs)
    share = case.layout, case.rows, case.heads.softmax_scale, case.task_list
    out, lse = torch.ops.distca.attend(q, k, v, *share)
    errors = [f"forward: {line}" for line in checker.errors(out=out) + checker.lse_errors(lse)]
    for pass_name in PASSES[1:]:
        dq, dk, dv = runner.calls[pass_name]()
        errors += [f"{pass_name}: {line}" for line in checker.errors(dq=dq, dk=dk, dv=dv)]
    if errors:
        sys.exit(f"{case.name}: distca's results are wrong\n  " + "\n  ".join(errors))
    return out, dq


def usable(
    runner: Runner, ours: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Runner, dict[str, str]]:
    """Return the runner with the passes that agree with our out and dq, and errors by pass."""
    calls, reasons = {}, {}
    for pass_name, call in runner.calls.items():
        try:
            result = call()
            tensor = result if pass_name == "forward" else result[0]
            difference = relative_difference(
                runner.rows_of(tensor), ours[0 if pass_name == "forward" else 1]
            )
            if not difference <= MAX_PEER_DIFFERENCE:
                raise ValueError(f"its result differs from ours by {difference:.1%}")
            calls[pass_name] = call
        except Exception as error:  # another library may raise anything
            reasons[pass_name] = first_line(error)
    return Runner(runner.name, calls, runner.rows_of), reasons


@dataclass
class Benchmark:
    args: argparse.Namespace
    device: torch.device
    makers: dict[str, Callable]
    left_out: dict[str, list[str]]  # cases by library and reason; empty for the whole run
    medians: list[tuple[Case, str, str, float]] = field(default_factory=list)  # ms

    def runners(self, case: Case, inputs: Inputs) -> list[Runner]:
        """Return the checked runners: ours, then every other library that can run the case."""
        ours = distca_runner(case, inputs)
        results = check_ours(case, inputs, ours)
        runners = [ours]
        for name, make in self.makers.items():
            try:
                runner, reasons = usable(make(case, inputs), results)
            except Unavailable as reason:
                self.leave_out(case, f"{name}: {reason}")
                continue
            except Exception as error:  # another library may raise anything
                self.leave_out(case, f"{name}: {first_line(error)}")
                continue
            for pass_name, reason in reasons.items():
                self.leave_out(case, f"{name}, {pass_name}: {reason}")
            runners.append(runner)
        return runners

    def leave_out(self, case: Case, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(case.name)

    def run(self, case: Case) -> None:
        start = time.perf_counter()
        runners = self.runners(case, case.inputs(self.args.seed, torch.bfloat16))
        shown = [self.time_pass(case, pass_name, runners) for pass_name in PASSES]
        seconds = time.perf_counter() - start
        print(f"{case.name}: right; TFLOP/s {', '.join(shown)} [{seconds:.1f} s]", flush=True)

    def time_pass(self, case: Case, pass_name: str, runners: list[Runner]) -> str:
        """Time one pass of all runners, and return the TFLOP/s of ours and of the fastest other."""
        calls = {r.name: r.calls[pass_name] for r in runners if pass_name in r.calls}
        rates = {}
        for name, times in milliseconds(calls, self.args.repeats).items():
            ms = statistics.median(times)
            self.medians.append((case, name, pass_name, ms))
            rates[name] = tflops(case, pass_name, ms)
        shown = f"{pass_name} {rates.pop(runners[0].name):.0f}"
        if rates:
            fastest = max(rates, key=rates.get)
            shown += f" ({fastest} {rates[fastest]:.0f})"
        return shown

    def timings(self, matmul: float) -> list[Timing]:
        timings = []
        for case, name, pass_name, ms in self.medians:
            rate = tflops(case, pass_name, ms)
            timings.append(
                Timing(case.name, case.kind, case.key, name, pass_name, ms, rate, rate / matmul)
            )
        return timings


def tflops(case: Case, pass_name: str, ms: float) -> float:
    return (case.forward_flops if pass_name == "forward" else case.backward_flops) / (1e9 * ms)


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        sys.exit("attention.py times kernels on a CUDA device, and torch sees none")
    # In deterministic mode torch would fill every new tensor with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda", torch.cuda.current_device())
    benchmark = Benchmark(args, device, *importable_peers(args.peers))
    if "documents" in args.cases and not args.lengths:
        benchmark.left_out["documents: pass --lengths"] = []
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    print(f"{torch.cuda.get_device_name(device)}, {versions}, {args.repeats} rounds", flush=True)
    matmul_rates = matmul_tflops(device, args.repeats)
    for case in cases_of(args, device):
        benchmark.run(case)
        gc.collect()  # frees the graphs of other libraries
        torch.cuda.empty_cache()
    matmul_rates += matmul_tflops(device, args.repeats)
    matmul = statistics.median(matmul_rates)
    timings = benchmark.timings(matmul)
    all_ratios, (kernels_text, kernels) = ratios(timings), kernel_table(LIBRARY)
    print("\nLeft out\n" + left_out_table(benchmark.left_out))
    print("\nKernels\n" + kernels_text)
    print(f"\nTFLOP/s (share of the {matmul:.0f} of a {MATMUL_SIZE}^3 matrix product)")
    print(table(timings))
    print("\nRatios of TFLOP/s (target; ! if below)\n" + ratio_table(all_ratios))
    if args.out is not None:
        record = {
            "device": torch.cuda.get_device_name(device),
            "versions": versions,
            "repeats": args.repeats,
            "seed": args.seed,
            "matmul_tflops": matmul,
            "left_out": benchmark.left_out,
            "kernels": [asdict(kernel) for kernel in kernels],
            "ratios": [asdict(ratio) for ratio in all_ratios],
        }
        save(args.out, record, timings)


if __name__ == "__main__":
    main()
