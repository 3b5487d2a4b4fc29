"""Who does what when, as a trace that chrome://tracing reads, and as pictures."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from distca.simulate.layers import (
    ATTENTION,
    EXCHANGE,
    KINDS,
    LINEAR,
    PARAMETERS,
    TENSOR_PARALLEL,
    WAITING,
)
from distca.simulate.machine import FORWARD
from distca.simulate.pipeline import IDLE, Schedule
from distca.simulate.results import Result
from distca.simulate.scenario import Scenario
from distca.watching.report import new_figure
from distca.watching.trace import event, name_event

# Inside a layer's forward pass, schematically; backward mirrors it.
ORDER = (LINEAR, TENSOR_PARALLEL, EXCHANGE, ATTENTION, WAITING, PARAMETERS)
STREAMS = {"compute": 0, "communication": 1, "waiting": 2}
STREAM_OF_KIND = (0, 0, 1, 1, 1, 2)
COLORS = ("#2a7f8e", "#e1a32f", "#c44e52", "#8c6bb1", "#7a7a7a", "#e9e9e9")  # by kind
BASELINE_COLOR, OURS_COLOR = "#b7b7b7", "#2a7f8e"
SHORTEST = 1e-9  # seconds; what is left over by rounding is not drawn
MAX_EVENTS = 50_000  # of a trace; beyond, layers are drawn as one


def segments(
    schedule: Schedule, scenario: Scenario, rank: int, layers: int
) -> Iterator[tuple[int, float, float, str]]:
    """(kind, start, seconds, what) of planner rank `rank` (stage * groups + group) in order of
    time; every operation is drawn as `layers` equal layers."""
    stage, group = divmod(rank, scenario.groups)
    spans = []
    for each in (each for each in schedule.operations if each.stage == stage):  # in order
        is_forward = each.pass_idx == FORWARD
        work = "serving only" if each.micro_batch == IDLE else f"{each.micro_batch}"
        what = f"{'forward' if is_forward else 'backward'} {work}"
        kinds = list(ORDER if is_forward else reversed(ORDER)) * layers
        spans.append((float(each.start[group]), kinds, each.seconds[:, group] / layers, what))
    closing = schedule.closing[:, group]
    end = schedule.seconds - float(closing.sum())
    spans.append((end, [PARAMETERS, LINEAR], closing, "end of step"))
    for start, kinds, by_kind, what in spans:  # one kind after another
        for kind in kinds:
            seconds = float(by_kind[kind])
            if seconds > SHORTEST:
                yield kind, start, seconds, what
            start += seconds


def some_ranks(scenario: Scenario, count: int) -> list[int]:
    """At most `count` planner ranks, evenly over stages and groups."""
    total = scenario.pp * scenario.groups
    count = min(count, total)
    return [total * i // count for i in range(count)]


def chrome_trace(schedule: Schedule, scenario: Scenario, num_ranks: int) -> dict:
    """Complete events (ts and dur in us) of `num_ranks` planner ranks: pid is the first GPU of a
    rank's tensor parallel group, tid its stream."""
    ranks = some_ranks(scenario, num_ranks)
    num_operations = len(schedule.operations) // scenario.pp
    by_layer = num_operations * len(ranks) * len(KINDS) * scenario.stage_layers <= MAX_EVENTS
    layers = scenario.stage_layers if by_layer else 1
    events = []
    for rank in ranks:
        pid = rank * scenario.tp
        events.append(name_event("process_name", pid, 0, f"rank {pid}"))
        events += [name_event("thread_name", pid, tid, name) for name, tid in STREAMS.items()]
        for kind, start, seconds, what in segments(schedule, scenario, rank, layers):
            name, tid = f"{KINDS[kind]}, {what}", STREAM_OF_KIND[kind]
            events.append(event(name, pid, tid, 1e6 * start, 1e6 * seconds, cat=KINDS[kind]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw_timeline(path: Path, results: list[Result], num_ranks: int) -> None:
    """A panel for each system: one line a rank, the shown step on one scale of time."""
    ranks = some_ranks(results[0].scenario, num_ranks)
    figure = new_figure(13, len(results) * (0.9 + 0.11 * len(ranks)) + 1)
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, result in zip(panels, results, strict=True):
        schedule, scenario = result.outcome.schedule, result.scenario
        for row, rank in enumerate(ranks):
            bars: dict[int, list[tuple[float, float]]] = {}
            for kind, start, seconds, _ in segments(schedule, scenario, rank, layers=1):
                bars.setdefault(kind, []).append((1e3 * start, 1e3 * seconds))
            for kind, of_kind in bars.items():
                panel.broken_barh(of_kind, (row - 0.42, 0.84), color=COLORS[kind])
        panel.axvline(1e3 * schedule.seconds, color="black", linewidth=1)
        panel.set_title(f"{result.system.label}: {1e3 * schedule.seconds:.0f} ms", loc="left")
        panel.invert_yaxis()
        shown = range(0, len(ranks), max(1, len(ranks) // 8))
        panel.set_yticks(shown, [str(ranks[row] * scenario.tp) for row in shown])
        panel.set_ylabel("rank")
    panels[-1].set_xlabel("ms since the step began; passes of a micro-batch, by kind")
    handles = [panels[0].barh(0, 0, color=color) for color in COLORS]
    names = [name.replace("_", " ") for name in KINDS]
    figure.legend(handles, names, loc="outside upper center", ncols=len(KINDS))
    figure.savefig(path, dpi=110)


def draw_balance(path: Path, results: list[Result]) -> None:
    """Step times, compute of every rank in the shown step, memory."""
    figure = new_figure(15, 5.5)
    steps, ranks, memory = figure.subplots(1, 3)
    names = [result.system.label for result in results]
    colors = [BASELINE_COLOR if r.system.is_baseline else OURS_COLOR for r in results]
    place = np.arange(len(results))
    steps.barh(place, [1e3 * result.mean for result in results], color=colors)
    steps.plot([1e3 * result.slowest_decile for result in results], place, "k|", markersize=14)
    steps.set_yticks(place, names)
    steps.invert_yaxis()
    steps.set_title("step, ms: mean, and | the slowest tenth")
    for result in results:
        busy = result.outcome.schedule.busy(result.scenario)[[LINEAR, ATTENTION]].sum(axis=0)
        style = "--" if result.system.is_baseline else "-"
        share = np.arange(busy.size) / max(1, busy.size - 1)
        ranks.plot(share, 1e3 * np.sort(busy)[::-1], style, label=result.system.label)
    ranks.set_ylim(bottom=0)
    ranks.set_title("compute of every rank, slowest first, ms")
    ranks.set_xlabel("share of ranks")
    ranks.legend(fontsize=8)
    memory.barh(place, [result.memory_max / 1e9 for result in results], color=colors)
    means = [result.means["memory_mean_bytes"] / 1e9 for result in results]
    memory.plot(means, place, "k|", markersize=14)
    memory.axvline(results[0].scenario.machine.memory_gb, color="#c44e52")
    memory.set_yticks(place, [""] * len(results))
    memory.invert_yaxis()
    memory.set_title("memory, GB: fullest rank, | mean; red: a GPU's")
    figure.savefig(path, dpi=110)
