"""What planning did to the balance of a run: a summary, a table, a picture and a trace.

`seconds_before` and `seconds_after` are [steps][ranks]: predicted attention seconds of one layer,
as in PlanReport. matplotlib is imported only when something is drawn.
"""

import json
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from distca.watching.figures import (
    LINKS,
    MEASURED,
    SPANS_FOLDER,
    STEPS_FILE,
    TICKS_FOLDER,
    ExposedShare,
    max_over_mean,
    without,
)
from distca.watching.ticks import draw_ticks, trace_of_ticks
from distca.watching.trace import chrome_trace, read_times

StepsOfRanks = Sequence[Sequence[float]]

BEFORE_COLOR, AFTER_COLOR, IDEAL_COLOR, WAITING_COLOR = "#c44e52", "#2a7f8e", "#555555", "#e3e3e3"
LEGEND = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 11}
MAX_RANKS_IN_LEGEND = 16
MAX_BARS = 4000  # of a run's picture; more take matplotlib minutes
SUMMARY_FILE, PICTURE_FILE, TRACE_FILE = "summary.json", "balance.png", "trace.json"
TICKS_PICTURE_FILE, TICKS_TRACE_FILE = "ticks.png", "ticks.json"


def read_steps(folder: str | Path) -> list[dict]:
    """The records of a run: PlanReport.record() of each step, and "step". A last line that is not
    whole, because the run goes on, is left out. Raises ValueError where there are none."""
    path = Path(folder) / STEPS_FILE
    lines = path.read_text().splitlines() if path.is_file() else []
    if lines and not lines[-1].endswith("}"):
        lines.pop()
    if not lines:
        raise ValueError(
            f"{path} has no records; expected the folder that a run was given as run_dir "
            "(distca.run --run-dir)"
        )
    return [json.loads(line) for line in lines]


def run_summary(steps: Sequence[dict]) -> dict:
    """Return the means of a run's steps, except for the median of plan_ms and the latest `keeping`
    and figures of links. attention_ms and exposed_ms are measured: means by rank over the timed
    steps, or [] without any."""
    timed = [step for step in steps if step["attention_ms"]]
    exposed = ExposedShare()
    for step in steps:
        exposed.add(step)
    before, after = ([step[f"imbalance_{when}"] for step in steps] for when in ("before", "after"))
    slowest = [sum(max(step[f"seconds_{when}"]) for step in steps) for when in ("before", "after")]
    return {
        "steps": len(steps),
        "ranks": len(steps[0]["seconds_before"]),
        "servers": len(steps[0].get("servers", ())),
        "imbalance_before": statistics.fmean(before),
        "imbalance_before_max": max(before),
        "imbalance_after": statistics.fmean(after),
        "imbalance_after_max": max(after),
        "predicted_speedup": slowest[0] / slowest[1] if slowest[1] > 0 else 1.0,
        "moved_mb": statistics.fmean(step["moved_mb"] for step in steps),
        "kept_mb": statistics.fmean(step.get("kept_mb", 0.0) for step in steps),
        "keeping": steps[-1].get("keeping", ""),
        "plan_ms": statistics.median(step["plan_ms"] for step in steps),
        "waited_ms": statistics.fmean(step["waited_ms"] for step in steps),
        **{name: steps[-1][name] for name in LINKS if name in steps[-1]},
        "exposed_share": exposed.value,
        "advice": exposed.advice,
        **{
            name: list(map(statistics.fmean, zip(*(each[name] for each in timed), strict=True)))
            for name in MEASURED
        },
    }


def table(values: dict) -> str:
    """A run's summary as lines of text."""
    servers = f", {values['servers']} of them servers" if values["servers"] else ""
    rows = {"steps": f"{values['steps']} on {values['ranks']} ranks{servers}"}
    for name in ("imbalance_before", "imbalance_after"):
        rows[name.replace("_", " ")] = f"{values[name]:.3f} (worst {values[name + '_max']:.3f})"
    rows["attention, predicted"] = f"{values['predicted_speedup']:.2f} times faster"
    rows["moved"] = f"{values['moved_mb']:.1f} MB a layer, forward and backward, by all ranks"
    if values["keeping"]:
        rows["kept inputs"] = f"{values['kept_mb']:.1f} MB a layer ({values['keeping']})"
    rows["plan"] = (
        f"{values['plan_ms']:.1f} ms, training waited {values['waited_ms']:.1f} ms for it"
    )
    for name, measured in zip(("attention, measured", "of that exposed"), MEASURED, strict=True):
        if by_rank := values[measured]:
            rows[name] = f"{min(by_rank):.1f} to {max(by_rank):.1f} ms a step, by rank"
    if values["exposed_share"] is not None:
        rows["exposed communication"] = f"{values['exposed_share']:.1%} of a step, mean of ranks"
    for name, where in zip(LINKS, ("links in a node", "links between nodes"), strict=True):
        if name in values:
            rows[where] = f"{values[name]:.3g} GB/s from each rank, as plans expect"
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {value}" for name, value in rows.items()]
    return "\n".join(lines + [values["advice"]] * (values["advice"] is not None))


def draw_run(folder: str | Path) -> str:
    """Write a run's summary.json, balance.png and trace.json (of the step timed last) into its
    folder, and ticks.png and ticks.json for a pipeline that shares attention. Return the table, and
    say so if matplotlib is missing. Raise ValueError if the folder has no records."""
    folder = Path(folder)
    steps = read_steps(folder)
    values = run_summary(steps)
    (folder / SUMMARY_FILE).write_text(json.dumps(values, indent=2) + "\n")
    ticks = read_times(folder / TICKS_FOLDER)
    written = [SUMMARY_FILE, *_write_trace(folder, steps)]
    if ticks:
        (folder / TICKS_TRACE_FILE).write_text(json.dumps(trace_of_ticks(ticks)))
        written.append(TICKS_TRACE_FILE)
    stride = -(-len(steps) * values["ranks"] // MAX_BARS)
    shown = steps[:: max(1, stride)]
    text = table(values)
    try:
        draw_balance(
            folder / PICTURE_FILE,
            *([step[f"seconds_{when}"] for step in shown] for when in ("before", "after")),
            **{name: shown[0][name] for name in ("servers", "idle") if shown[0].get(name)},
        )
        if ticks:
            draw_ticks(new_figure(16, 8), ticks).savefig(folder / TICKS_PICTURE_FILE, dpi=150)
    except ImportError as error:
        return f"{text}\n{error}"
    written += [PICTURE_FILE, *[TICKS_PICTURE_FILE] * bool(ticks)]
    return f"{text}\nwrote {', '.join(written)} to {folder}"


def _write_trace(folder: Path, steps: Sequence[dict]) -> list[str]:
    """Names of the files written: none where no step was timed, or its record is missing."""
    saved = read_times(folder / SPANS_FOLDER)
    record = next((each for each in steps if saved and each["step"] == saved[0]["step"]), None)
    if record is None or not any(each["spans"] for each in saved):
        return []
    (folder / TRACE_FILE).write_text(json.dumps(chrome_trace(record, saved)))
    return [TRACE_FILE]


def new_figure(width: float, height: float):
    """A matplotlib figure; raises ImportError with the remedy where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install it: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_balance(
    path: str | Path,
    seconds_before: StepsOfRanks,
    seconds_after: StepsOfRanks,
    servers: Collection[int] = (),
    idle: Collection[int] = (),
) -> None:
    """Above: each step's attention time stacked by rank, before and after. Below: max/mean, of
    ranks that are not `servers` before, and not `idle` after."""
    num_steps, num_ranks = len(seconds_before), len(seconds_before[0])
    figure = new_figure(13, 8)
    figure.suptitle(f"Core attention of {num_steps} steps on {num_ranks} ranks", fontsize=18)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    before = figure.add_subplot(grid[0, 0])
    after = figure.add_subplot(grid[0, 1], sharey=before)
    ratios = figure.add_subplot(grid[1, :])
    counted_before, counted_after = (
        [without(ranks, step) for step in seconds]
        for ranks, seconds in ((servers, seconds_before), (idle, seconds_after))
    )
    _draw_stack(before, seconds_before, counted_before, "before planning")
    _draw_stack(after, seconds_after, counted_after, "after planning")
    before.set_ylabel("predicted attention time of one layer,\nsum over ranks (ms)", fontsize=12)
    handles, labels = after.get_legend_handles_labels()
    shown = [-1, -2, 0] if num_ranks > MAX_RANKS_IN_LEGEND else range(num_ranks, -1, -1)
    after.legend(*([entries[i] for i in shown] for entries in (handles, labels)), **LEGEND)
    _draw_ratios(ratios, counted_before, counted_after)
    for axes in (before, after, ratios):
        axes.set_xlabel("step", fontsize=12)
        axes.set_xlim(0.4, num_steps + 0.6)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _draw_stack(axes, seconds: StepsOfRanks, counted: StepsOfRanks, name: str) -> None:
    """On top of the ranks' own time, the time that the `counted` ones wait for the slowest."""
    from matplotlib import colormaps

    steps, num_ranks = range(1, len(seconds) + 1), len(seconds[0])
    waiting = [len(step) * max(step) - sum(step) for step in counted]
    bottom = [0.0] * len(seconds)
    for rank, layer in enumerate([*zip(*seconds, strict=True), waiting]):
        color = colormaps["viridis"](0.1 + 0.8 * rank / max(1, num_ranks - 1))
        label = f"rank {rank}"
        if rank == num_ranks:
            color, label = WAITING_COLOR, "waiting for\nthe slowest rank"
        heights = [value * 1e3 for value in layer]
        axes.bar(steps, heights, width=0.92, bottom=bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    total = sum(map(sum, seconds)) + sum(waiting)
    share = sum(waiting) / total if total > 0 else 0.0
    axes.set_title(f"{name}: {share:.1%} of the time waiting", fontsize=14)


def _draw_ratios(axes, seconds_before: StepsOfRanks, seconds_after: StepsOfRanks) -> None:
    for seconds, color, name in (
        (seconds_before, BEFORE_COLOR, "before"),
        (seconds_after, AFTER_COLOR, "after"),
    ):
        ratios = [max_over_mean(step) for step in seconds]
        steps, label = range(1, len(ratios) + 1), f"{name}: mean {statistics.fmean(ratios):.3f}"
        axes.plot(steps, ratios, color=color, marker="o", markersize=4, linewidth=2, label=label)
    axes.axhline(1.0, color=IDEAL_COLOR, linestyle="--", linewidth=1, label="perfect balance")
    axes.set_title("slowest rank relative to the mean of all ranks", fontsize=14)
    axes.set_ylabel("max / mean attention time", fontsize=12)
    axes.legend(**LEGEND)
