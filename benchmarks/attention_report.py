"""Output of benchmarks/attention.py: table, ratios, resources of kernels, plot."""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from attention_peers import PASSES

OURS, FA2, CUDNN = "distca", "FA2 (ATen)", "cuDNN (torch)"
KERNELS = "6distca9attention4sm90"  # mangled namespace of distca's kernels
SHARD_BASE = 8192  # tokens of the dense case that shards are compared with


@dataclass(frozen=True)
class Timing:
    """The time of one implementation's pass on one case."""

    case: str
    kind: str
    key: tuple
    implementation: str
    pass_name: str
    milliseconds: float  # median
    tflops: float
    share_of_matmul: float


@dataclass(frozen=True)
class Ratio:
    case: str
    pass_name: str
    against: str
    value: float
    wanted: float | None  # minimum


def table(timings: list[Timing]) -> str:
    """Format TFLOP/s and the share of the matmul rate: a line per case and implementation."""
    width = max((len(timing.case) for timing in timings), default=4)
    head = f"{'case':{width}}  {'implementation':14}" + "".join(f"  {p:>16}" for p in PASSES)
    lines = [head, "-" * len(head)]
    by_row: dict[tuple[str, str], dict[str, Timing]] = {}
    for timing in timings:
        by_row.setdefault((timing.case, timing.implementation), {})[timing.pass_name] = timing
    for (case, implementation), passes in by_row.items():
        cells = [cell(passes.get(name)) for name in PASSES]
        lines.append(f"{case:{width}}  {implementation:14}" + "".join(f"  {c:>16}" for c in cells))
    return "\n".join(lines)


def cell(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return f"{timing.tflops:.0f} ({timing.share_of_matmul:4.0%})"


def left_out_table(left_out: dict[str, list[str]]) -> str:
    """Format a line per reason, with the name of its first case and the number of others."""
    lines = []
    for reason, cases in left_out.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        lines.append(f"{reason} [{cases[0]}{more}]" if cases else reason)
    return "\n".join(lines) or "nothing"


class Rates:
    """TFLOP/s by (case key, implementation, pass)."""

    def __init__(self, timings: list[Timing]) -> None:
        self._timings = {(t.key, t.implementation, t.pass_name): t for t in timings}

    def ratio(self, one: tuple, other: tuple, against: str, wanted: float | None) -> Ratio | None:
        """Return the ratio of two (key, implementation, pass), or None unless both were timed."""
        a, b = self._timings.get(one), self._timings.get(other)
        if a is None or b is None:
            return None
        return Ratio(a.case, a.pass_name, against, a.tflops / b.tflops, wanted)


def ratios(timings: list[Timing]) -> list[Ratio]:
    """Return the ratios of our rates to those of another library, and of shards to our dense rate.

    Our deterministic pass is compared with the other library's backward pass.
    """
    rates, all_ratios = Rates(timings), []
    for key in dict.fromkeys(timing.key for timing in timings):
        for name in PASSES:
            ours, kind, head_dim = (key, OURS, name), key[0], key[1]
            if kind == "shards":
                other = (("dense", head_dim, SHARD_BASE), OURS, name)
                against = f"our dense {SHARD_BASE // 1024}k"
            else:
                against = CUDNN if kind == "dense" else FA2
                other = (key, against, "forward" if name == "forward" else "backward")
            all_ratios.append(rates.ratio(ours, other, against, wanted_ratio(key, name)))
    return [ratio for ratio in all_ratios if ratio is not None]


def wanted_ratio(key: tuple, pass_name: str) -> float | None:
    """Return the target: the best library's rate on whole documents, and ours on short shards."""
    match key:
        case ("dense", "128", length) if length >= 8192:
            by_pass = (1.0, 1.0, 0.9)
        case ("dense", "64", length) if length >= 8192:
            by_pass = (1.05, 1.05, None)
        case ("shards", "128", 128, 8192, _):
            by_pass = (0.9, 0.85, 0.8)
        case ("documents", "128", _, 32768):
            by_pass = (1.8, 1.6, None)
        case _:
            by_pass = (None, None, None)
    return dict(zip(PASSES, by_pass, strict=True))[pass_name]


def ratio_table(ratios: list[Ratio]) -> str:
    """Format a line per case. The target follows a ratio, and "!" marks a ratio below it."""
    width = max((len(ratio.case) for ratio in ratios), default=4)
    by_case: dict[str, dict[str, Ratio]] = {}
    for ratio in ratios:
        by_case.setdefault(ratio.case, {})[ratio.pass_name] = ratio
    lines = [f"{'case':{width}}" + "".join(f"  {name:>15}" for name in PASSES)]
    for case, passes in by_case.items():
        cells = [ratio_cell(passes.get(name)) for name in PASSES]
        against = next(iter(passes.values())).against
        lines.append(f"{case:{width}}" + "".join(f"  {c:>15}" for c in cells) + f"  x {against}")
    return "\n".join(lines)


def ratio_cell(ratio: Ratio | None) -> str:
    if ratio is None or ratio.wanted is None:
        return "-" if ratio is None else f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.wanted:.2f}){' ' if ratio.value >= ratio.wanted else '!'}"


@dataclass(frozen=True)
class Kernel:
    """Resources of a kernel in the library's machine code, without dynamic shared memory."""

    name: str
    registers: int  # per thread, at launch
    stack_bytes: int  # spills lie here
    local_bytes: int
    static_shared_bytes: int


def find_cuobjdump() -> str | None:
    """Look for cuobjdump on the path, in the CUDA toolkit and in the triton package."""
    from torch.utils.cpp_extension import CUDA_HOME  # logs a warning where there is no GPU

    folders = [os.environ.get("PATH", ""), str(Path(CUDA_HOME or "") / "bin")]
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or []) if triton else []:
        folders.append(str(Path(folder) / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def read_kernels(library: Path) -> list[Kernel]:
    """Return the resources of the library's own attention kernels.

    Raises FileNotFoundError without cuobjdump, and subprocess.CalledProcessError if it fails.
    """
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump is not on the path; it comes with the CUDA toolkit")
    command = [tool, "-res-usage", str(library)]
    return parse_kernels(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parse_kernels(text: str) -> list[Kernel]:
    functions = re.findall(r"Function ([^\s:]+):\s*\n\s*(REG:[^\n]*)", text)
    kernels = []
    for mangled, line in functions:
        if KERNELS not in mangled:
            continue
        usage = {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", line)}
        figures = (usage.get(field, 0) for field in ("REG", "STACK", "LOCAL", "SHARED"))
        kernels.append(Kernel(demangled(mangled), *figures))
    return kernels


def demangled(name: str) -> str:
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None:
        return name
    text = subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()
    text = text.replace("distca::attention::sm90::", "").replace("(anonymous namespace)::", "")
    return text.split("(")[0].removeprefix("void ")


def kernel_table(library: Path) -> tuple[str, list[Kernel]]:
    try:
        kernels = read_kernels(library)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}", []
    if not kernels:
        return f"{library.name} holds no Hopper attention kernels", []
    lines = [f"{'registers':>9} {'stack B':>8} {'local B':>8} {'static shared B':>15}  kernel"]
    for k in kernels:
        lines.append(
            f"{k.registers:9} {k.stack_bytes:8} {k.local_bytes:8} {k.static_shared_bytes:15}  "
            f"{k.name}"
        )
    spilling = [k.name for k in kernels if k.stack_bytes or k.local_bytes]
    lines.append("spills or stack in: " + ", ".join(spilling) if spilling else "no spills")
    return "\n".join(lines), kernels


def save(folder: Path, record: dict, timings: list[Timing]) -> None:
    """Write attention.json and attention.csv, and attention.png if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(timing) for timing in timings]
    record = record | {"timings": rows}
    (folder / "attention.json").write_text(json.dumps(record, indent=2) + "\n")
    fields = ("case", "kind", "implementation", "pass_name")
    fields += ("milliseconds", "tflops", "share_of_matmul")
    with (folder / "attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("attention.png is left out: matplotlib is not installed")
    elif timings:
        plot(folder / "attention.png", timings, record["device"])


def plot(path: Path, timings: list[Timing], device: str) -> None:
    """Draw a panel per pass, with the cases from left to right and a line per implementation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(timing.case for timing in timings))
    kind_of = {timing.case: timing.kind for timing in timings}
    kinds = [
        [idx for idx, case in enumerate(cases) if kind_of[case] == kind]
        for kind in dict.fromkeys(kind_of.values())
    ]
    size = (max(6.0, 2 + 0.28 * len(cases)), 11)
    figure, panels = pyplot.subplots(len(PASSES), 1, sharex=True, figsize=size)
    implementations = list(dict.fromkeys(timing.implementation for timing in timings))
    for panel, pass_name in zip(panels, PASSES, strict=True):
        for idx, implementation in enumerate(implementations):
            rate = {
                timing.case: timing.tflops
                for timing in timings
                if (timing.implementation, timing.pass_name) == (implementation, pass_name)
            }
            width = 2.5 if implementation == OURS else 1.0
            for positions in kinds:
                heights = [rate.get(cases[position], float("nan")) for position in positions]
                label = implementation if positions is kinds[0] else None
                panel.plot(positions, heights, "o-", color=f"C{idx}", lw=width, ms=4, label=label)
        panel.set_ylabel(f"{pass_name}, TFLOP/s")
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", color="0.9")
    panels[0].legend(ncols=3, fontsize="small")
    panels[0].set_title(f"Causal core attention, bfloat16, {device}")
    panels[-1].set_xticks(range(len(cases)), cases, rotation=90, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
