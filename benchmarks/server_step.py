"""Time training steps with an attention server, or beside other work on one rank's device.

    torchrun --nproc-per-node 2 benchmarks/server_step.py server --document 65536
    torchrun --nproc-per-node 2 benchmarks/server_step.py slow --document 131072 --hidden 2048 \\
        --ffn 7168 --layers 2 --vocab 1024 --steps 18

The model, the documents and the timing of a step are those of training_step.py. --document is the
number of tokens of all ranks that train.

In the mode "server", the last rank serves attention and runs no model (docs/servers.md). The others
train. In the variant "alone", they balance attention among themselves, and the last rank does
nothing. In "served", the last rank computes its part of their attention. The output shows how many
times faster "served" is, the memory of the trainer that uses most, and the memory of the server.

In the mode "slow", all ranks train, and another process computes on the device of the last rank
(other_work.py). It takes --part of the device's time. In the variant "even", the process rests. In
"slow", it works, and plans assume equally fast ranks. In "slow measured", it works, and plans use
the measured speeds of the ranks (distca/ranks/pace.py). The cost of the other work is the time by
which steps of "slow" exceed those of "even". The output shows the part of this cost that "slow
measured" saves.

The output also shows the largest part that plans could save. Other work slows down linear layers as
much as attention, but only attention can move to another rank. If the other work takes a part p of
one of n devices, and all ranks finish their steps together, plans save (n - 1) / (n - p) of the
cost: 0.63 with two ranks and p = 0.4. They save less if the slow rank's linear layers alone take
longer than such a step.

The other work begins after the group has opened and measured its links and its attention, so all
variants plan with similar figures. Ranks time attention in one call of four. Choose --skip so that
it covers the steps until speeds are known: about 10.

On the CPU, distca measures no speeds, so "slow measured" has the same plans as "slow". Each rank
then runs on one core, and the other work on the core of the last rank.

All variants of a mode train on the same documents and tokens, from the same initial weights. If
losses differ by more than 2e-5 in float32 (on the CPU), or by more than 1e-2 in bfloat16, the
program saves its figures and ends with an error.
"""

import argparse
import contextlib
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from device_time import Span, gathered
from other_work import LARGEST_PART, OtherWork, own_core
from step_loop import (
    add_session_arguments,
    add_step_arguments,
    check_step_arguments,
    free_memory,
    join,
    leave,
    open_session,
    peer_memory_gib,
    run_steps,
)
from step_model import add_model_arguments, check_device, dtype_of
from step_report import Run, disagreement, save, show, summarize
from step_variants import Variant, own_share
from workloads import Workload, add_arguments, make_workload

import distca
from distca.options import make_writable
from distca.ranks.pace import NUM_WORDS, UNKNOWN, Pace

ALONE, SERVED = "alone", "served"
EVEN, SLOW, MEASURED = "even", "slow", "slow measured"
VARIANTS = {"server": (ALONE, SERVED), "slow": (EVEN, SLOW, MEASURED)}
NUM_WARM_UP_STEPS = {"server": 3, "slow": 10}
NUM_PROFILED_STEPS = 1


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=VARIANTS)
    add_arguments(parser)
    add_model_arguments(parser)
    add_session_arguments(parser)
    add_step_arguments(parser, NUM_WARM_UP_STEPS)
    parser.add_argument(
        "--part",
        type=float,
        default=0.4,
        help="part of the last rank's device that other work takes (default: %(default)s)",
    )
    parser.add_argument("--transport", default="auto", help="distca's option of this name")
    parser.add_argument("--out", type=Path, help="JSON file; CSV and PNG files go beside it")
    args = parser.parse_args(argv)
    if args.skip is None:
        args.skip = NUM_WARM_UP_STEPS[args.mode]
    num_ranks = int(os.environ.get("WORLD_SIZE", 0))
    if num_ranks < 2:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 " + __file__)
    check_step_arguments(parser, args)
    if not 0 < args.part < LARGEST_PART:
        parser.error(
            f"--part is {args.part}; needs a number between 0 and {LARGEST_PART}, because two "
            "processes get half of a device each"
        )
    try:
        workload = make_workload(args, num_ranks - (args.mode == "server"), args.steps)
        check_device(args)
        make_writable("--out", args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, workload


@dataclass
class Result:
    """A run of one variant. On ranks that did not train, `run` has no steps."""

    run: Run
    timeline: list[list[Span]]  # of the last step, by rank
    figures: dict[str, float]


class Mode:
    """Runs the steps of each variant of a mode."""

    def __init__(self, args: argparse.Namespace, workload: Workload, device: torch.device) -> None:
        self.args, self.workload, self.device = args, workload, device
        self.last = dist.get_world_size() - 1
        self.is_last = dist.get_rank() == self.last

    def train(
        self, num_profiled: int, trainers: dist.ProcessGroup | None = None
    ) -> tuple[Run, list[list[Span]]]:
        """Run all steps in the open session. All ranks of `trainers` (default: all) call this."""
        variant = Variant(distca.core_attention, own_share, self.args.transport)
        run, timeline = run_steps(
            self.args, self.workload, self.device, variant, num_profiled, trainers=trainers
        )
        run.skip = self.args.skip
        return run, timeline


class ServerMode(Mode):
    """The last rank serves the others, or does nothing."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.trainers = dist.new_group(range(self.last))

    def run(self, name: str, num_profiled: int) -> Result:
        result, session = Result(Run(), [], {}), None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if name == SERVED:
            session = open_session(self.args, self.args.transport, servers=(self.last,))
        elif not self.is_last:
            session = open_session(self.args, self.args.transport, self.trainers)
        if not self.is_last:
            result.run, result.timeline = self.train(num_profiled, self.trainers)
            result.run.peer_memory_gib = peer_memory_gib(session, self.device)
            distca.close()
        elif session is not None:
            distca.serve()
        if name == SERVED:
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
            peaks = gathered(peak / 2**30, self.device)
            result.figures = {"server's peak, GiB": peaks[self.last]}
        return result


class UnknownPace(Pace):
    """The pace of a group that times nothing, so that plans assume equally fast ranks."""

    def words(self, group_name: str) -> list[int]:
        return [UNKNOWN] * NUM_WORDS


class SlowMode(Mode):
    """Other work takes a part of the last rank's device, or rests."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.other_work = OtherWork(self.device, self.args.part) if self.is_last else None

    def run(self, name: str, num_profiled: int) -> Result:
        session, part, is_busy = open_session(self.args, self.args.transport), 0.0, name != EVEN
        if name == SLOW:
            session.pace = UnknownPace(session.num_ranks)
        if is_busy and self.is_last:
            self.other_work.begin()
        run, timeline = self.train(num_profiled)
        if is_busy and self.is_last:
            part = self.other_work.end()
        run.peer_memory_gib = peer_memory_gib(session, self.device)
        distca.close()
        parts = gathered(part, self.device)
        return Result(run, timeline, {"other work, part of the device": parts[self.last]})

    def close(self) -> None:
        if self.other_work is not None:
            self.other_work.close()


def mean_ms(run: Run) -> float:
    return statistics.fmean(run.measured_ms())


def part_of_servers(plan: distca.PlanReport) -> float:
    """Return the part of all attention that servers compute."""
    speeds = plan.measured_speeds or [1.0] * len(plan.seconds_after)
    work = [seconds * speed for seconds, speed in zip(plan.seconds_after, speeds, strict=True)]
    return sum(work[rank] for rank in plan.servers) / sum(work)


def part_taken_back(even_ms: float, slow_ms: float, measured_ms: float) -> float:
    """Return the part of the other work's cost that plans with measured speeds save."""
    return (slow_ms - measured_ms) / (slow_ms - even_ms)


def largest_part_taken_back(attention: float, other_work: float, num_ranks: int) -> float:
    """Return the part of the cost that ideal plans save. Under these, all ranks finish their steps
    together, or the slow rank computes no attention at all. `attention` is the part of a step that
    is attention, and `other_work` is the part of one rank's device that other work takes."""
    even, slow = 1.0, 1 / (1 - other_work)
    ideal = max(num_ranks / (num_ranks - other_work), (1 - attention) * slow)
    return part_taken_back(even, slow, ideal)


def attention_of_step(run: Run) -> float:
    """Return the part of the profiled steps that ranks spend in attention on average."""
    profile = run.mean_profile()
    return statistics.fmean(profile["attention_ms"]) / max(profile["step_ms"])


def server_figures(runs: dict[str, Run]) -> dict[str, float]:
    plans = runs[SERVED].plans[runs[SERVED].skip :]
    return {
        f"{SERVED}: times faster than {ALONE}": mean_ms(runs[ALONE]) / mean_ms(runs[SERVED]),
        f"{SERVED}: part of attention on the server": statistics.fmean(map(part_of_servers, plans)),
    }


def slow_figures(runs: dict[str, Run], other_work: float, num_ranks: int) -> dict:
    """Return the figures of the mode "slow", where other work took `other_work` of a device."""
    even, slow, measured = (mean_ms(runs[name]) for name in VARIANTS["slow"])
    attention, plans = attention_of_step(runs[EVEN]), runs[MEASURED].plans
    with_speeds = [step for step, plan in enumerate(plans) if plan.measured_speeds]
    return {
        f"{SLOW}: cost of the other work, ms": slow - even,
        f"{MEASURED}: part of the cost taken back": part_taken_back(even, slow, measured),
        f"{MEASURED}: part that can be taken back": largest_part_taken_back(
            attention, other_work, num_ranks
        ),
        f"{EVEN}: attention, part of the profiled step": attention,
        f"{MEASURED}: speeds of the last plan": plans[-1].measured_speeds,
        f"{MEASURED}: lags of the last plan, ms": plans[-1].lags_ms,
        f"{MEASURED}: first step planned with speeds": with_speeds[0] if with_speeds else "none",
    }


def summary_of(args: argparse.Namespace, results: dict[str, Result], num_ranks: int) -> dict:
    """Summarize a result of each variant. Its run holds the means over the turns."""
    runs = {name: result.run for name, result in results.items()}
    of_results = {
        f"{name}: {key}": value
        for name, result in results.items()
        for key, value in result.figures.items()
    }
    summary = {"mode": args.mode, **summarize(runs, {}, num_ranks), **of_results}
    if args.mode == "server":
        return summary | server_figures(runs)
    other_work = results[MEASURED].figures["other work, part of the device"]
    return summary | slow_figures(runs, other_work, num_ranks)


def run_mode(
    args: argparse.Namespace, workload: Workload, device: torch.device
) -> dict[str, Result] | None:
    """Run all variants. On rank 0, return a result of each, with means over turns."""
    mode = (ServerMode if args.mode == "server" else SlowMode)(args, workload, device)
    results: dict[str, list[Result]] = {name: [] for name in VARIANTS[args.mode]}
    for num_profiled in [*[0] * (args.turns - 1), NUM_PROFILED_STEPS]:
        for name, each in results.items():
            each.append(mode.run(name, num_profiled))
            free_memory(device)
    if isinstance(mode, SlowMode):
        mode.close()
    if dist.get_rank() != 0:
        return None
    return {
        name: Result(
            Run.mean_of([result.run for result in each]), each[-1].timeline, each[-1].figures
        )
        for name, each in results.items()
    }


def main() -> None:
    args, workload = arguments()
    device, wrong = join(args.device), None
    is_pinned = args.mode == "slow" and args.device == "cpu"
    with own_core(dist.get_rank()) if is_pinned else contextlib.nullcontext():
        results = run_mode(args, workload, device)
    if results is not None:
        runs = {name: result.run for name, result in results.items()}
        summary = summary_of(args, results, dist.get_world_size())
        show(summary, runs)
        if args.out is not None:
            save(args.out, summary, runs, {}, {name: r.timeline for name, r in results.items()})
        wrong = disagreement(runs, dtype_of(device))
    leave()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
