"""Output of benchmarks/planner.py: table, CSV, JSON, plot."""

import csv
import importlib.util
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

OURS = "distca"
ALIKE = "alike"


@dataclass(frozen=True)
class Figures:
    """Figures of one planner on one pack, or medians over packs.

    Figures that compare bytes with bounds are None unless servers and links are equal.
    """

    plan_ms: float
    """Time of a plan and one rank's layout, or of a baseline planner in Python."""
    layout_ms: float | None
    """The layout's part of plan_ms."""
    home_max_over_mean: float
    """Seconds of the slowest rank over the mean without balancing."""
    max_over_mean: float
    """Seconds of the slowest rank over the mean under the plan."""
    bytes_over_bound: float | None
    """Bytes moved over the least bytes that bring every rank to the mean."""
    bytes_over_least: float | None
    """Bytes moved over the least bytes that make the slowest rank as fast as in this plan."""
    egress_over_bound: float | None
    """Bytes out of the rank that sends most over the least bytes for its surplus."""
    ingress_over_bound: float | None
    """Bytes into the rank that receives most over the least bytes for its deficit."""
    makespan_over_optimum: float
    """Makespan over servers and links, relative to the lower bound of planner_optimum.py."""


@dataclass(frozen=True)
class Result:
    lengths: str  # name of the list
    ranks: int
    tokens: int  # per rank
    cluster: str  # of planner_optimum.py
    planner: str
    seeds: int
    tolerance: float
    figures: Figures  # medians over seeds


HEADINGS = {
    "plan_ms": "plan ms",
    "layout_ms": "(layout)",
    "home_max_over_mean": "max/mean at home",
    "max_over_mean": "max/mean",
    "bytes_over_bound": "bytes/bound",
    "bytes_over_least": "bytes/least",
    "egress_over_bound": "out/bound",
    "ingress_over_bound": "in/bound",
    "makespan_over_optimum": "time/least",
}
WANTED = {  # largest values for distca
    "max_over_mean": 1.01,
    "bytes_over_bound": 1.15,
    "egress_over_bound": 1.5,
    "ingress_over_bound": 1.5,
}
PLOTTED = ("plan_ms", *WANTED, "bytes_over_least")
WANTED_OF_UNLIKE = {"makespan_over_optimum": 1.03}  # where servers or links differ
WANTED_PLAN_MS = {512: 5.0, 4096: 60.0}  # by ranks


def wanted(result: Result, name: str) -> float | None:
    """Return the largest value that a figure should have, or None."""
    if result.planner != OURS:
        return None
    if result.cluster != ALIKE:
        return WANTED_OF_UNLIKE.get(name)
    return WANTED_PLAN_MS.get(result.ranks) if name == "plan_ms" else WANTED.get(name)


def table(results: list[Result]) -> str:
    """Format a line per case and planner. "!" marks figures above their target."""
    width = max(len(result.lengths) for result in results)
    head = f"{'lengths':{width}} {'tokens':>7} {'ranks':>5}  {'cluster':9}  {'planner':13}"
    lines = [head + "".join(f"  {heading:>11}" for heading in HEADINGS.values())]
    lines.append("-" * len(lines[0]))
    for result in results:
        line = f"{result.lengths:{width}} {result.tokens:7} {result.ranks:5}  {result.cluster:9}"
        line += f"  {result.planner:13}"
        for name, heading in HEADINGS.items():
            line += f"  {cell(result, name):>{max(11, len(heading))}}"
        lines.append(line)
    return "\n".join(lines)


def cell(result: Result, name: str) -> str:
    value, most = getattr(result.figures, name), wanted(result, name)
    if value is None:
        return "- "
    digits = 2 if name.endswith("_ms") else 3
    return f"{value:.{digits}f}{'!' if most is not None and value > most else ' '}"


def finite(figures: Figures) -> dict[str, float | None]:
    """Return figures by name, with None for infinite ones: the bound is 0, yet bytes moved."""
    values = asdict(figures)
    return {name: v if v is not None and math.isfinite(v) else None for name, v in values.items()}


def save_json(path: Path, results: list[Result]) -> None:
    """Write one case: distca's figures by name, and the other planners' under "baselines"."""
    ours = next(result for result in results if result.planner == OURS)
    case = asdict(ours)
    del case["planner"], case["figures"]
    baselines = {each.planner: finite(each.figures) for each in results if each is not ours}
    record = case | finite(ours.figures) | {"baselines": baselines}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def save(folder: Path, results: list[Result]) -> None:
    """Write planner.csv, and planner.png if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Result) if field.name != "figures"]
    with (folder / "planner.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*names, *HEADINGS], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(asdict(result) | finite(result.figures) for result in results)
    if importlib.util.find_spec("matplotlib") is None:
        print("planner.png is left out: matplotlib is not installed")
    else:
        plot(folder / "planner.png", results)


def plot(path: Path, results: list[Result]) -> None:
    """Plot each figure over the number of ranks, for equal servers and links.

    Each list and number of tokens has a colour. Panels of ratios to a bound end above distca, and
    "longest first" is mostly beyond them.
    """
    import matplotlib

    results = [result for result in results if result.cluster == ALIKE]
    if not results:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, sharex=True, figsize=(15, 8))
    for panel, name in zip(panels.flat, PLOTTED, strict=True):
        ours = draw_lines(panel, results, name)
        offset = 1 if name == "max_over_mean" else 0
        panel.set_title(HEADINGS[name] + (" - 1" if offset else ""))
        panel.set_xscale("log", base=2)
        if name == "plan_ms" or offset:
            panel.set_yscale("log")
        elif ours:
            panel.set_ylim(min(1.0, *ours), max(1.6, 1.2 * max(ours)))
        if name in WANTED:
            panel.axhline(WANTED[name] - offset, color="0.5", lw=0.8)
        panel.grid(color="0.9", which="both")
    for panel in panels[-1]:
        panel.set_xlabel("ranks")
    handles, labels = panels.flat[0].get_legend_handles_labels()
    num_planners = len({result.planner for result in results})
    num_columns = len(labels) // num_planners
    figure.legend(handles, labels, loc="lower center", ncols=num_columns, fontsize="small")
    figure.tight_layout(rect=(0, 0.04 + 0.02 * num_planners, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_lines(panel, results: list[Result], name: str) -> list[float]:
    """Draw a line per case and planner, distca's thick. Return distca's finite figures."""
    offset = 1 if name == "max_over_mean" else 0
    cases = list(dict.fromkeys((result.lengths, result.tokens) for result in results))
    styles = dict(zip(dict.fromkeys(r.planner for r in results), ("-", "--", ":"), strict=True))
    for case_idx, case in enumerate(cases):
        for planner, style in styles.items():
            line = [r for r in results if (r.lengths, r.tokens, r.planner) == (*case, planner)]
            panel.plot(
                [result.ranks for result in line],
                [getattr(result.figures, name) - offset for result in line],
                style,
                color=f"C{case_idx}",
                marker="o",
                ms=3,
                lw=2.0 if planner == OURS else 1.0,
                label=f"{case[0]}, {case[1]} tokens, {planner}",
            )
    ours = [getattr(r.figures, name) for r in results if r.planner == OURS]
    return [value for value in ours if math.isfinite(value)]
