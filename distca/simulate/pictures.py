"""Pictures of simulated steps. The only file of this package that imports matplotlib."""

from pathlib import Path

import numpy as np

from distca.simulate.layers import ATTENTION, KINDS, LINEAR
from distca.simulate.results import Result
from distca.simulate.timeline import segments, some_ranks

COLORS = ("#2a7f8e", "#e1a32f", "#c44e52", "#8c6bb1", "#7a7a7a", "#e9e9e9")  # by kind
BASELINE_COLOR, OURS_COLOR = "#b7b7b7", "#2a7f8e"


def _figure(width: float, height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install it: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_timeline(path: Path, results: list[Result], num_ranks: int) -> None:
    """A panel for each system: one line a rank, the shown step on one scale of time."""
    ranks = some_ranks(results[0].scenario, num_ranks)
    figure = _figure(13, len(results) * (0.9 + 0.11 * len(ranks)) + 1)
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, result in zip(panels, results, strict=True):
        schedule, scenario = result.outcome.schedule, result.scenario
        for row, rank in enumerate(ranks):
            spans: dict[int, list[tuple[float, float]]] = {}
            for each in segments(schedule, scenario, rank, layers=1):
                spans.setdefault(each.kind, []).append((1e3 * each.start, 1e3 * each.seconds))
            for kind, bars in spans.items():
                panel.broken_barh(bars, (row - 0.42, 0.84), color=COLORS[kind])
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
    figure = _figure(15, 5.5)
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
    memory.plot([result.memory_mean / 1e9 for result in results], place, "k|", markersize=14)
    memory.axvline(results[0].scenario.machine.memory_bytes / 1e9, color="#c44e52")
    memory.set_yticks(place, [""] * len(results))
    memory.invert_yaxis()
    memory.set_title("memory, GB: fullest rank, | mean; red: a GPU's")
    figure.savefig(path, dpi=110)
