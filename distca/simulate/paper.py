"""Speed-ups at 64 to 512 GPUs beside those published for core attention disaggregation."""

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from distca.simulate.machine import Machine
from distca.simulate.model import PRESETS
from distca.simulate.packing import draw
from distca.simulate.results import Result, run, steps_of
from distca.simulate.scenario import Scenario

RANKS = (64, 128, 256, 512)
CONTEXTS = (131072, 262144, 524288)
TP = 8  # a node
TOKENS = {"8B": 131072, "34B": 65536}  # of a group: what fits in memory without recomputation
PUBLISHED = (
    "Published (512 H200 at most, 8 a node, 50 GB/s a GPU between nodes, against the best DP x CP "
    "of\nvariable-length packing with per-document context parallelism): 1.07-1.20x on pretraining "
    "lengths,\n1.05-1.12x on ProLong, up to 1.35x."
)
BASELINES = ("fixed", "variable", "all-gather", "ring")
OURS = ("distca", "distca-ping-pong", "ticks", "ticks-ping-pong")


@dataclass(frozen=True)
class Row:
    model: str
    ranks: int
    context: int
    tokens: int  # of a group
    step_ms: dict[str, float]  # by system, mean
    slowest_decile_ms: dict[str, float]
    memory_gb: dict[str, float]  # of the fullest rank
    cp: dict[str, int]
    fits: dict[str, bool]

    def gain(self, system: str, baseline: str) -> float:
        """Of a system over a baseline, or over the best of those that fit in memory."""
        names = BASELINES if baseline == "best" else (baseline,)
        fitting = [name for name in names if self.fits[name]] or list(names)
        return min(self.step_ms[name] for name in fitting) / self.step_ms[system]

    @property
    def ours(self) -> str:
        """The fastest of distca's among those that fit in memory."""
        names = [name for name in OURS if name in self.step_ms]
        return min(names, key=lambda name: (not self.fits[name], self.step_ms[name]))


def scenarios(machine: Machine, pp: int) -> list[Scenario]:
    """Those whose packs fit on the groups of a stage. With pipelines groups hold half as many
    tokens, since same-phase ticks keep nearly twice as many micro-batches."""
    found = []
    for model, ranks, context in itertools.product(TOKENS, RANKS, CONTEXTS):
        tokens = TOKENS[model] if pp == 1 else TOKENS[model] // 2
        if ranks // (TP * pp) % (context // tokens) == 0:
            made = Scenario(
                model=PRESETS[model],
                machine=machine,
                ranks=ranks,
                tp=TP,
                pp=pp,
                tokens=tokens,
                context=context,
                micro_batches=1 if pp == 1 else 2 * pp,
                sharding="fsdp" if pp == 1 else "zero1",
            )
            found.append(made)
    return found


def sweep(lengths: list[int], chosen: list[Scenario], num_steps: int, seed: int) -> list[Row]:
    rows = []
    for scenario in chosen:
        steps = steps_of(scenario, list(draw(lengths, scenario, num_steps, seed)))
        rows.append(_row(scenario, run(scenario, steps, [*BASELINES, *OURS])))
    return rows


def _row(scenario: Scenario, results: list[Result]) -> Row:
    by_name = {result.system.name: result for result in results}
    return Row(
        scenario.model.name,
        scenario.ranks,
        scenario.context,
        scenario.tokens,
        {name: 1e3 * result.mean for name, result in by_name.items()},
        {name: 1e3 * result.slowest_decile for name, result in by_name.items()},
        {name: result.memory_max / 1e9 for name, result in by_name.items()},
        {name: result.cp for name, result in by_name.items()},
        {name: result.fits for name, result in by_name.items()},
    )


def table(rows: list[Row]) -> str:
    head = f"{'model':<6}{'GPUs':>5}{'context':>9}{'step ms':>9}  {'speed-up of':<12}over"
    head += "".join(f"{name:>13}" for name in (*BASELINES, "best"))
    head += f"{'in turn/best':>14}"
    lines = [head]
    for row in rows:
        line = f"{row.model:<6}{row.ranks:>5}{row.context:>9}{row.step_ms[row.ours]:>9.0f}"
        line += f"  {row.ours:<16}"
        for name in BASELINES:
            note = f" cp{row.cp[name]}{'' if row.fits[name] else '!'}"
            line += f"{_marked(row.gain(row.ours, name)) + note:>13}"
        line += f"{_marked(row.gain(row.ours, 'best')):>13}"
        lines.append(line + f"{_marked(row.gain('distca', 'best')):>14}")
    lines += [
        "! = does not fit in memory; * = distca does not pay; in turn: without ping-pong or ticks",
        PUBLISHED,
    ]
    return "\n".join(lines)


def _marked(gain: float) -> str:
    return f"{gain:.2f}x{'*' if gain < 1 else ''}"


def save_json(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
