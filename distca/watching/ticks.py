"""Planned and measured ticks of a pipeline, as a picture and as a trace for chrome://tracing and
Perfetto. distca.integrations.pipelining says what a tick is."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distca.watching.figures import TICKS_FOLDER
from distca.watching.trace import event, name_event, save_times

# Rows of a rank in the trace. Planned attention begins where its tick was measured to begin.
ROWS = ("planned attention", "ticks", "measured attention")
FORWARD_COLOR, BACKWARD_COLOR, TICK_COLOR = "#2a7f8e", "#c44e52", "#e3e3e3"
MAX_LABELS = 1000  # of a picture; more are slow to draw, and cannot be read


@dataclass
class TickTimes:
    """A tick on one rank. Times are in nanoseconds since 1970."""

    name: str  # "tick 4: 0F3 1F2", the passes of all ranks
    own: str  # "1F2", the pass of this rank; "" if it only serves
    is_forward: bool
    planned_ms: float  # of attention on this rank, including that of other stages
    begin: int = 0
    end: int = 0
    attention: list[tuple[int, int]] = field(default_factory=list)  # begin and end of each call


def save_ticks(folder: str | Path, rank: int, step: int, ticks: Sequence[TickTimes]) -> None:
    """Save the ticks of a step on one rank, and replace those of an earlier step."""
    times = {"rank": rank, "step": step, "ticks": [asdict(each) for each in ticks]}
    save_times(Path(folder) / TICKS_FOLDER, times)


def trace_of_ticks(saved: Sequence[Mapping]) -> dict:
    """Return complete events (ts and dur in us) of the ticks that ranks saved."""
    origin, events = _origin(saved), []
    for each in saved:
        rank = each["rank"]
        events.append(name_event("process_name", rank, 0, f"rank {rank}"))
        events += [name_event("thread_name", rank, row, name) for row, name in enumerate(ROWS)]
        for tick in each["ticks"]:
            name, start = f"{tick['name']} ({tick['own'] or 'serves'})", tick["begin"] - origin
            events.append(event(name, rank, 0, start / 1e3, 1e3 * tick["planned_ms"]))
            spans = [(1, tick["begin"], tick["end"]), *((2, *call) for call in tick["attention"])]
            for row, begin, end in spans:
                events.append(event(name, rank, row, (begin - origin) / 1e3, (end - begin) / 1e3))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _origin(saved: Sequence[Mapping]) -> int:
    return min(tick["begin"] for each in saved for tick in each["ticks"])


def draw_ticks(figure, saved: Sequence[Mapping]):
    """Draw a row for each rank. The upper axes show planned attention, tick after tick. The lower
    axes show measured ticks and their attention. Return the figure."""
    planned, measured = figure.subplots(2, 1)
    figure.suptitle(f"Ticks of step {saved[0]['step'] + 1}: attention of all stages", fontsize=18)
    _draw_planned(planned, saved)
    _draw_measured(measured, saved)
    for axes, title in (
        (planned, "planned: a tick ends with its slowest rank"),
        (measured, "measured: attention (coloured) in ticks (grey)"),
    ):
        axes.set_title(title, fontsize=14)
        axes.set_xlabel("ms", fontsize=12)
        axes.set_yticks(range(len(saved)), [f"rank {each['rank']}" for each in saved])
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    for color, name in ((FORWARD_COLOR, "forward"), (BACKWARD_COLOR, "backward")):
        planned.plot([], [], color=color, linewidth=8, label=name)
    planned.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=11)
    return figure


def _color(tick: Mapping) -> str:
    return FORWARD_COLOR if tick["is_forward"] else BACKWARD_COLOR


def _draw_planned(axes, saved: Sequence[Mapping]) -> None:
    labelled, start = len(saved) * len(saved[0]["ticks"]) <= MAX_LABELS, 0.0
    for ticks in zip(*(each["ticks"] for each in saved), strict=True):
        for row, tick in enumerate(ticks):
            axes.barh(row, tick["planned_ms"], left=start, color=_color(tick), edgecolor="white")
            if labelled:
                axes.text(start, row, tick["own"], fontsize=8, va="center", color="white")
        start += max(tick["planned_ms"] for tick in ticks)


def _draw_measured(axes, saved: Sequence[Mapping]) -> None:
    origin = _origin(saved)
    labelled = len(saved) * len(saved[0]["ticks"]) <= MAX_LABELS
    for row, each in enumerate(saved):
        for tick in each["ticks"]:
            whole = [((tick["begin"] - origin) / 1e6, (tick["end"] - tick["begin"]) / 1e6)]
            parts = [
                ((begin - origin) / 1e6, (end - begin) / 1e6) for begin, end in tick["attention"]
            ]
            axes.broken_barh(whole, (row - 0.4, 0.8), color=TICK_COLOR, edgecolor="white")
            axes.broken_barh(parts, (row - 0.25, 0.5), color=_color(tick))
            if labelled:
                axes.text(whole[0][0], row - 0.3, tick["own"], fontsize=8, va="center")
