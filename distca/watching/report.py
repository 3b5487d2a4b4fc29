"""What planning did to the balance: a summary of numbers, a table and a picture.

`seconds_before` and `seconds_after` are [steps][ranks]: predicted attention seconds of one layer,
as in PlanReport. matplotlib is imported only when something is drawn.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from distca.watching.figures import STEPS_FILE, max_over_mean
from distca.watching.trace import chrome_trace, read_spans

StepsOfRanks = Sequence[Sequence[float]]

BEFORE_COLOR, AFTER_COLOR, IDEAL_COLOR, WAITING_COLOR = "#c44e52", "#2a7f8e", "#555555", "#e3e3e3"
MAX_RANKS_IN_LEGEND = 16
MAX_BARS = 4000  # of a run's picture; more take matplotlib minutes
SUMMARY_FILE, PICTURE_FILE, TRACE_FILE = "summary.json", "balance.png", "trace.json"


def summary(
    seconds_before: StepsOfRanks,
    seconds_after: StepsOfRanks,
    *,
    bytes_per_step: Sequence[int],
    plan_ms: Sequence[float],
    tokens_per_second: float,
    max_loss_difference: float | None = None,
) -> dict[str, float | int | None]:
    """Imbalances (max/mean of ranks) and bytes_per_step are means over steps, plan_ms a median.

    Bytes count all ranks and layers, forward and backward.
    """
    _check(seconds_before, seconds_after)
    before = [max_over_mean(step) for step in seconds_before]
    after = [max_over_mean(step) for step in seconds_after]
    return {
        "max_loss_difference": max_loss_difference,
        "imbalance_before": statistics.fmean(before),
        "imbalance_after": statistics.fmean(after),
        "imbalance_after_max": max(after),
        "tokens_per_second": tokens_per_second,
        "bytes_per_step": statistics.fmean(bytes_per_step),
        "plan_ms": statistics.median(plan_ms),
        "ranks": len(seconds_before[0]),
        "steps": len(seconds_before),
    }


def write_summary(path: str | Path, values: dict) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def draw_balance(
    path: str | Path, seconds_before: StepsOfRanks, seconds_after: StepsOfRanks
) -> None:
    """Above: each step's attention time stacked by rank, before and after. Below: max/mean."""
    _check(seconds_before, seconds_after)
    figure_type, color_maps = _matplotlib()
    num_ranks = len(seconds_before[0])
    palette = color_maps["viridis"]
    colors = [palette(0.1 + 0.8 * rank / max(1, num_ranks - 1)) for rank in range(num_ranks)]
    figure = figure_type(figsize=(13, 8), layout="constrained")
    figure.suptitle(
        f"Core attention of {len(seconds_before)} steps on {num_ranks} ranks", fontsize=18
    )
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    before = figure.add_subplot(grid[0, 0])
    after = figure.add_subplot(grid[0, 1], sharey=before)
    _draw_stack(before, seconds_before, colors, "before planning")
    _draw_stack(after, seconds_after, colors, "after planning")
    before.set_ylabel("predicted attention time of one layer,\nsum over ranks (ms)", fontsize=12)
    handles, labels = after.get_legend_handles_labels()
    if num_ranks > MAX_RANKS_IN_LEGEND:
        handles, labels = [handles[i] for i in (0, -2, -1)], [labels[i] for i in (0, -2, -1)]
    after.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=11
    )
    _draw_ratios(figure.add_subplot(grid[1, :]), seconds_before, seconds_after)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


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


def run_summary(steps: Sequence[dict]) -> dict[str, float | int | list]:
    """Means over steps, of plan_ms the median. attention_ms, exposed_ms: measured, by rank, means
    of the steps that were timed, [] where none was."""
    timed = [step for step in steps if step["attention_ms"]]
    before, after = ([step[f"imbalance_{when}"] for step in steps] for when in ("before", "after"))
    slowest = [sum(max(step[f"seconds_{when}"]) for step in steps) for when in ("before", "after")]
    return {
        "steps": len(steps),
        "ranks": len(steps[0]["seconds_before"]),
        "imbalance_before": statistics.fmean(before),
        "imbalance_before_max": max(before),
        "imbalance_after": statistics.fmean(after),
        "imbalance_after_max": max(after),
        "predicted_speedup": slowest[0] / slowest[1] if slowest[1] > 0 else 1.0,
        "moved_mb": statistics.fmean(step["moved_mb"] for step in steps),
        "plan_ms": statistics.median(step["plan_ms"] for step in steps),
        "waited_ms": statistics.fmean(step["waited_ms"] for step in steps),
        **{
            name: [
                statistics.fmean(rank) for rank in zip(*(each[name] for each in timed), strict=True)
            ]
            for name in ("attention_ms", "exposed_ms")
        },
    }


def table(values: dict) -> str:
    """A run's summary as lines of text."""
    rows = [
        ("steps", f"{values['steps']} on {values['ranks']} ranks"),
        *(
            (f"imbalance {when}", f"{values[f'imbalance_{when}']:.3f} (worst {worst:.3f})")
            for when, worst in (
                ("before", values["imbalance_before_max"]),
                ("after", values["imbalance_after_max"]),
            )
        ),
        ("attention, predicted", f"{values['predicted_speedup']:.2f} times faster"),
        ("moved", f"{values['moved_mb']:.1f} MB a layer, forward and backward, by all ranks"),
        (
            "plan",
            f"{values['plan_ms']:.1f} ms, training waited {values['waited_ms']:.1f} ms for it",
        ),
    ]
    for name, what in (("attention, measured", "attention_ms"), ("of that exposed", "exposed_ms")):
        if measured := values[what]:
            rows.append((name, f"{min(measured):.1f} to {max(measured):.1f} ms a step, by rank"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def draw_run(folder: str | Path) -> str:
    """Writes a run's summary.json, balance.png and trace.json (of the step timed last) into its
    folder; returns the table, and says so where matplotlib is missing. Raises ValueError where
    the folder has no records."""
    folder = Path(folder)
    steps = read_steps(folder)
    values = run_summary(steps)
    write_summary(folder / SUMMARY_FILE, values)
    written = [SUMMARY_FILE, *_write_trace(folder, steps)]
    stride = -(-len(steps) * values["ranks"] // MAX_BARS)
    shown = steps[:: max(1, stride)]
    text = table(values)
    try:
        draw_balance(
            folder / PICTURE_FILE,
            *([step[f"seconds_{when}"] for step in shown] for when in ("before", "after")),
        )
    except ImportError as error:
        return f"{text}\n{error}"
    written.append(PICTURE_FILE)
    return f"{text}\nwrote {', '.join(written)} to {folder}"


def _write_trace(folder: Path, steps: Sequence[dict]) -> list[str]:
    """Names of the files written: none where no step was timed, or its record is missing."""
    saved = read_spans(folder)
    record = next((each for each in steps if saved and each["step"] == saved[0]["step"]), None)
    if record is None or not any(each["spans"] for each in saved):
        return []
    (folder / TRACE_FILE).write_text(json.dumps(chrome_trace(record, saved)))
    return [TRACE_FILE]


def _check(seconds_before: StepsOfRanks, seconds_after: StepsOfRanks) -> None:
    if not seconds_before or len(seconds_before) != len(seconds_after):
        raise ValueError(
            f"seconds_before has {len(seconds_before)} steps and seconds_after "
            f"{len(seconds_after)}; expected the same number, at least one"
        )
    counts = {len(step) for step in (*seconds_before, *seconds_after)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"steps have {sorted(counts)} ranks; expected one number of ranks, at least one"
        )


def _matplotlib():
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing the balance needs matplotlib; install it: pip install matplotlib"
        ) from error
    return Figure, colormaps


def _draw_stack(axes, seconds: StepsOfRanks, colors: list, name: str) -> None:
    """On top of the ranks' own time, the time they wait for the slowest."""
    steps = range(1, len(seconds) + 1)
    waiting = [len(step) * max(step) - sum(step) for step in seconds]
    layers = [[step[rank] for step in seconds] for rank in range(len(colors))] + [waiting]
    labels = [f"rank {rank}" for rank in range(len(colors))] + ["waiting for\nthe slowest rank"]
    bottom = [0.0] * len(seconds)
    for layer, color, label in zip(layers, [*colors, WAITING_COLOR], labels, strict=True):
        heights = [value * 1e3 for value in layer]
        axes.bar(steps, heights, width=0.92, bottom=bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    total = sum(map(sum, seconds)) + sum(waiting)
    share = sum(waiting) / total if total > 0 else 0.0
    axes.set_title(f"{name}: {share:.1%} of the time waiting", fontsize=14)
    _tidy(axes, len(seconds))


def _draw_ratios(axes, seconds_before: StepsOfRanks, seconds_after: StepsOfRanks) -> None:
    steps = range(1, len(seconds_before) + 1)
    for seconds, color, name in (
        (seconds_before, BEFORE_COLOR, "before"),
        (seconds_after, AFTER_COLOR, "after"),
    ):
        ratios = [max_over_mean(step) for step in seconds]
        label = f"{name}: mean {statistics.fmean(ratios):.3f}"
        axes.plot(steps, ratios, color=color, marker="o", markersize=4, linewidth=2, label=label)
    axes.axhline(1.0, color=IDEAL_COLOR, linestyle="--", linewidth=1, label="perfect balance")
    axes.set_title("slowest rank relative to the mean of all ranks", fontsize=14)
    axes.set_ylabel("max / mean attention time", fontsize=12)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=11)
    _tidy(axes, len(seconds_before))


def _tidy(axes, num_steps: int) -> None:
    axes.set_xlabel("step", fontsize=12)
    axes.set_xlim(0.4, num_steps + 0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
