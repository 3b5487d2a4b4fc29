"""Draws what each rank does at what time."""

from collections.abc import Iterator
from pathlib import Path

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
from distca.simulate.pipeline import Schedule
from distca.simulate.results import Result
from distca.simulate.scenario import Scenario
from distca.watching.report import new_figure

# Inside a forward pass, schematically; backward mirrors it.
ORDER = (LINEAR, TENSOR_PARALLEL, EXCHANGE, ATTENTION, WAITING, PARAMETERS)
COLORS = ("#2a7f8e", "#e1a32f", "#c44e52", "#8c6bb1", "#7a7a7a", "#e9e9e9")  # by kind
SHORTEST = 1e-9  # seconds; what is left over by rounding is not drawn
MAX_RANKS = 16


def segments(
    schedule: Schedule, scenario: Scenario, rank: int
) -> Iterator[tuple[int, float, float]]:
    """Yield (kind, start, seconds) of planner rank `rank` (stage * groups + group), in order of
    time."""
    stage, group = divmod(rank, scenario.groups)
    spans = []
    for each in (each for each in schedule.operations if each.stage == stage):  # in order
        kinds = ORDER if each.pass_idx == FORWARD else ORDER[::-1]
        spans.append((float(each.start[group]), kinds, each.seconds[:, group]))
    closing = schedule.closing[:, group]
    spans.append((schedule.seconds - float(closing.sum()), (PARAMETERS, LINEAR), closing))
    for start, kinds, by_kind in spans:  # one kind after another
        for kind in kinds:
            seconds = float(by_kind[kind])
            if seconds > SHORTEST:
                yield kind, start, seconds
            start += seconds


def draw_timeline(path: Path, results: list[Result]) -> None:
    """Draw a panel for each system, with a line for each rank. All panels show the first step on
    one scale of time."""
    scenario = results[0].scenario
    total = scenario.pp * scenario.groups
    count = min(MAX_RANKS, total)
    ranks = [total * i // count for i in range(count)]  # evenly over stages and groups
    figure = new_figure(13, len(results) * (0.9 + 0.11 * len(ranks)) + 1)
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    drawn: set[int] = set()
    for panel, result in zip(panels, results, strict=True):
        schedule = result.outcome.schedule
        for row, rank in enumerate(ranks):
            bars: dict[int, list[tuple[float, float]]] = {}
            for kind, start, seconds in segments(schedule, scenario, rank):
                bars.setdefault(kind, []).append((1e3 * start, 1e3 * seconds))
            drawn |= bars.keys()
            for kind, of_kind in bars.items():
                panel.broken_barh(of_kind, (row - 0.42, 0.84), color=COLORS[kind])
        panel.axvline(1e3 * schedule.seconds, color="black", linewidth=1)
        panel.set_title(f"{result.system.label}: {1e3 * schedule.seconds:.0f} ms", loc="left")
        panel.invert_yaxis()
        shown = range(0, len(ranks), max(1, len(ranks) // 8))
        panel.set_yticks(shown, [str(ranks[row] * scenario.tp) for row in shown])
        panel.set_ylabel("rank")
    panels[-1].set_xlabel("ms since the step began; passes of a micro-batch, by kind")
    shown = {
        KINDS[kind].replace("_", " "): panels[0].barh(0, 0, color=COLORS[kind])
        for kind in sorted(drawn)
    }
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=len(shown))
    figure.savefig(path, dpi=110)
