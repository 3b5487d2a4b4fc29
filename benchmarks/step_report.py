"""Output of benchmarks/training_step.py and server_step.py: table, CSV, JSON, timelines."""

import csv
import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from device_time import ATTENTION, COMMUNICATION, COMPUTE, KINDS, WAITING, Span, by_kind
from step_variants import VARIANTS

import distca

NUM_WARM_UP_STEPS = 3
BASELINES = ("flash", "plain", "context")
LOSS_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
COLORS = {COMPUTE: "#8c6bb1", ATTENTION: "#2a7f8e", COMMUNICATION: "#e1a32f", WAITING: "#c44e52"}


@dataclass
class Run:
    """The steps of one variant."""

    step_ms: list[float] = field(default_factory=list)  # including warm-up
    losses: list[float] = field(default_factory=list)
    plans: list[distca.PlanReport] = field(default_factory=list)
    profiles: list[dict[str, list[float]]] = field(default_factory=list)
    """device_time.step_profile of the repeated steps."""
    peak_gib: float = 0.0  # on the rank that needs most
    reserved_gib: float = 0.0  # by PyTorch's allocator at most, on the rank that needs most
    allocations: list[int] = field(default_factory=list)
    """Blocks that PyTorch's allocator got from the device in each step, on the rank with most."""
    most_tokens: int = 0  # of a rank in a step
    peer_memory_gib: float = 0.0  # per rank, in addition to peak_gib
    turns_ms: list[float] = field(default_factory=list)
    """Mean step time of each run, if the variant ran several times."""
    skip: int = NUM_WARM_UP_STEPS  # number of first steps that figures leave out

    @classmethod
    def mean_of(cls, runs: Sequence["Run"]) -> "Run":
        """Average step times and losses over runs of one variant. All other fields come from the
        last."""
        mean = statistics.fmean
        steps = [mean(ms) for ms in zip(*(run.step_ms for run in runs), strict=True)]
        losses = [mean(each) for each in zip(*(run.losses for run in runs), strict=True)]
        turns = [mean(run.measured_ms()) for run in runs]
        return replace(runs[-1], step_ms=steps, losses=losses, turns_ms=turns)

    def measured_ms(self) -> list[float]:
        return self.step_ms[self.skip :]

    def mean_profile(self) -> dict[str, list[float]]:
        """Average the profiles of the repeated steps, by rank."""
        if not self.profiles:
            return {}
        return {
            name: [
                statistics.fmean(ms) for ms in zip(*(p[name] for p in self.profiles), strict=True)
            ]
            for name in self.profiles[0]
        }


def excess(ranks: list[float]) -> float:
    return max(ranks) - statistics.fmean(ranks)


@dataclass(frozen=True)
class Limit:
    """Time of attention alone with one kernel, and the ideal step time that follows from it."""

    attention_ms: list[list[float]]  # [steps][ranks], including warm-up
    step_ms: list[float]  # of the variant without balancing, after warm-up

    def measured_attention_ms(self) -> list[list[float]]:
        return self.attention_ms[-len(self.step_ms) :]

    def balanced_ms(self) -> list[float]:
        ranks = self.measured_attention_ms()
        return [step - excess(each) for step, each in zip(self.step_ms, ranks, strict=True)]


def of_profiled_limit(run: Run, unbalanced: Run) -> dict[str, float]:
    """Compare with the ideal time of the profiled steps, from attention inside the step.

    Attention takes longer there than alone, because an idle device runs at a higher clock.
    """
    limit_ms = sum(max(p["step_ms"]) - excess(p["attention_ms"]) for p in unbalanced.profiles)
    step_ms = sum(max(profile["step_ms"]) for profile in run.profiles)
    return {"times the balanced limit, profiled steps": step_ms / limit_ms} if limit_ms else {}


def summarize(runs: dict[str, Run], limits: dict[str, Limit], num_ranks: int) -> dict:
    """Summarize all runs. Milliseconds are means over the steps after warm-up."""
    mean = statistics.fmean
    summary = {"ranks": num_ranks}
    for kernel, limit in limits.items():
        ranks = limit.measured_attention_ms()
        summary[f"{kernel}: balanced limit, ms"] = mean(limit.balanced_ms())
        summary[f"{kernel}: attention, mean rank, ms"] = mean(mean(each) for each in ranks)
        summary[f"{kernel}: attention, slowest rank, ms"] = mean(max(each) for each in ranks)
    baselines = [name for name in BASELINES if name in runs]
    for name, run in runs.items():
        step_ms = run.measured_ms()
        figures = {"step, ms": mean(step_ms), "median step, ms": statistics.median(step_ms)}
        for other in baselines:
            if other != name:
                times = mean(runs[other].measured_ms()) / mean(step_ms)
                figures[f"times faster than {other}"] = times
        is_balanced = name in VARIANTS and VARIANTS[name].transport is not None
        if "plain" in limits and (is_balanced or is_sorted(name) or name == "context"):
            figures["times the balanced limit"] = mean(step_ms) / mean(
                limits["plain"].balanced_ms()
            )
            if not is_sorted(name):  # its steps have other documents
                figures |= of_profiled_limit(run, runs["plain"])
                figures["times plain, median of steps"] = median_ratio(run, runs["plain"])
        figures |= of_plans(run) | of_profiles(run)
        if "plain" in runs and name != "plain" and not is_sorted(name):  # it is attention's
            exposed, plain = (each.mean_profile()["exposed_ms"] for each in (run, runs["plain"]))
            above = mean(exposed) - mean(plain)
            figures["exposed communication above plain's, mean rank, ms"] = above
        figures["most tokens of a rank"] = run.most_tokens
        figures["peak, GiB"] = run.peak_gib
        figures["peak reserved, GiB"] = run.reserved_gib
        figures["allocations on the device after warm-up"] = sum(run.allocations[run.skip :])
        if run.peer_memory_gib:
            figures["peer memory, GiB"] = run.peer_memory_gib
        if len(run.turns_ms) > 1:
            figures["spread of its runs"] = max(run.turns_ms) / min(run.turns_ms) - 1
        summary |= {f"{name}: {key}": value for key, value in figures.items()}
    for first, name in same_documents(runs):
        difference = largest_difference(runs[first], runs[name])
        summary[f"{name}: max loss difference"] = difference
    return summary


def is_sorted(name: str) -> bool:
    return name in VARIANTS and VARIANTS[name].is_sorted


def median_ratio(run: Run, other: Run) -> float:
    pairs = zip(run.measured_ms(), other.measured_ms(), strict=True)
    return statistics.median(one / two for one, two in pairs)


def of_plans(run: Run) -> dict[str, float]:
    plans, mean = run.plans[run.skip :], statistics.fmean
    if not plans:
        return {}
    links = {
        "links, GB/s as planned with": plans[-1].link_gb_per_s,
        "links between nodes, GB/s as planned with": plans[-1].node_link_gb_per_s,
    }
    return {
        "imbalance before": mean(plan.imbalance_before for plan in plans),
        "imbalance after": mean(plan.imbalance_after for plan in plans),
        "bytes of a layer": mean(sum(plan.bytes_out) for plan in plans),
        "plan, median ms": statistics.median(plan.plan_ms for plan in plans),
        "plan waited for, ms": mean(plan.waited_ms for plan in plans),
        **{name: speed for name, speed in links.items() if speed is not None},
    }


def of_profiles(run: Run) -> dict[str, float]:
    """Average the profiled steps, and add the share that the worst of them exposes."""
    steps = [of_profile(profile) for profile in run.profiles]
    share = "exposed communication, of the step"
    return {name: statistics.fmean(step[name] for step in steps) for name in steps[0]} | {
        f"{share}, worst": max(step[share] for step in steps)
    }


def of_profile(profile: dict[str, list[float]]) -> dict[str, float]:
    """Return the figures of the rank that exposes most, and of the rank that hides least."""
    columns = ("exposed_ms", "communication_ms", "step_ms")
    ranks = list(zip(*(profile[name] for name in columns), strict=True))
    return {
        "exposed communication, ms": max(exposed for exposed, *_ in ranks),
        "exposed communication, of the step": max(
            exposed / step if step else 0.0 for exposed, _, step in ranks
        ),
        "hidden communication": min(
            1 - exposed / all_of_it if all_of_it else 1.0 for exposed, all_of_it, _ in ranks
        ),
    }


def same_documents(runs: dict[str, Run]) -> list[tuple[str, str]]:
    """Pair variants with the first one that trains on the same documents in each step."""
    pairs = []
    for sorts in (False, True):
        names = [name for name in runs if is_sorted(name) == sorts]
        pairs += [(names[0], name) for name in names[1:]]
    return pairs


def largest_difference(one: Run, other: Run) -> float:
    """Return the largest difference of losses, or NaN if one of them is NaN."""
    return max_or_nan([abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)])


def max_or_nan(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def disagreement(runs: dict[str, Run], dtype: torch.dtype) -> str | None:
    """Return what is wrong with the losses, or None if all are finite and agree.

    Times of a run with wrong losses mean nothing: with NaN, a GPU needs less power and runs faster.
    """
    for name, run in runs.items():
        for step, loss in enumerate(run.losses):
            if not math.isfinite(loss):
                return f"step {step} has loss {loss} in {name!r}; expected a finite loss"
    tolerance = LOSS_TOLERANCE[dtype]
    for first, name in same_documents(runs):
        pairs = zip(runs[first].losses, runs[name].losses, strict=True)
        for step, (one, other) in enumerate(pairs):
            if abs(one - other) > tolerance:
                return (
                    f"step {step} has loss {one} in {first!r} and {other} in {name!r}; expected a "
                    f"difference of at most {tolerance:g}"
                )
    return None


def show(summary: dict, runs: dict[str, Run]) -> None:
    width = max(len(name) for name in runs)
    for name, run in runs.items():
        print(f"loss {name:{width}} " + " ".join(f"{loss:.4f}" for loss in run.losses))
    for name, run in runs.items():
        for key, by_rank in run.mean_profile().items():
            numbers = " ".join(f"{ms:9.1f}" for ms in by_rank)
            print(f"profiled {name:{width}} {key:16} {numbers}")
    for key, value in summary.items():
        text = f"{value:,.4g}" if isinstance(value, float) else str(value)
        if "loss" in key:
            text = f"{value:.2e}"
        elif isinstance(value, float) and abs(value) >= 1000:
            text = f"{value:,.0f}"
        print(f"{key:60} {text:>16}")


def save(
    path: Path,
    summary: dict,
    runs: dict[str, Run],
    limits: dict[str, Limit],
    timelines: dict[str, list[list[Span]]],
) -> None:
    """Write the JSON file, a CSV table, and a picture of each variant's last profiled step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    by_step = {name: asdict(run) for name, run in runs.items()}
    attention = {kernel: limit.attention_ms for kernel, limit in limits.items()}
    record = {"summary": summary, "variants": by_step, "attention_ms": attention}
    path.write_text(json.dumps(record, indent=2) + "\n")
    with path.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([("what", "figure", "value"), *table(summary, runs)])
    if importlib.util.find_spec("matplotlib") is None:
        print("timelines are left out: matplotlib is not installed")
        return
    for name, ranks in timelines.items():
        picture = f"{path.stem}.{name.replace(' ', '_')}.png"
        draw_timeline(path.with_name(picture), name, ranks)


def table(summary: dict, runs: dict[str, Run]) -> list[tuple[str, str, float | str]]:
    """Return rows (variant or "all", figure, value) of the summary and of the mean profiles."""
    rows = []
    for key, value in summary.items():
        what, _, figure = key.rpartition(": ")
        rows.append((what or "all", figure, value))
    for name, run in runs.items():
        for key, by_rank in run.mean_profile().items():
            rows += [(name, f"profiled {key}, rank {i}", ms) for i, ms in enumerate(by_rank)]
    return rows


def draw_timeline(path: Path, name: str, ranks: list[list[Span]]) -> None:
    """Draw a panel per rank with a line per kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 1.3 * len(ranks) + 1), layout="constrained")
    panels = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
    start = min((span.begin for spans in ranks for span in spans), default=0.0)
    for rank, (panel, spans) in enumerate(zip(panels, ranks, strict=True)):
        for row, (kind, intervals) in enumerate(by_kind(spans).items()):
            bars = [((begin - start) / 1e3, (end - begin) / 1e3) for begin, end in intervals]
            panel.broken_barh(bars, (row - 0.42, 0.84), color=COLORS[kind])
        panel.set_yticks(range(len(KINDS)), KINDS, fontsize=7)
        panel.set_ylim(len(KINDS) - 0.5, -0.5)
        panel.set_ylabel(f"rank {rank}")
    panels[0].set_title(f"{name}: one training step", loc="left")
    panels[-1].set_xlabel("ms since the first rank began")
    figure.savefig(path, dpi=110)
