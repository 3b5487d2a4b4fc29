"""Predicted steps beside those that benchmarks/training_step.py measured."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.simulate.layers import NUM_PASSES, plain_attention
from distca.simulate.packing import Documents
from distca.simulate.results import Result, slowest_tenth
from distca.simulate.scenario import Scenario

# Systems here, and what the benchmark calls them; the first that it ran.
VARIANTS = {"fixed": ("plain",), "distca": ("peer", "process_group")}


@dataclass(frozen=True)
class Measured:
    step_ms: dict[str, list[float]]  # by system: fixed, and distca where it was run
    attention_ms: np.ndarray  # [steps, ranks] of each rank's own documents, all layers

    @classmethod
    def load(cls, path: Path, skip: int, num_steps: int) -> "Measured":
        """Steps [skip, skip + num_steps) of the benchmark's --out; raises ValueError naming the
        file and what is wrong."""
        chosen = slice(skip, skip + num_steps)
        try:
            content = json.loads(path.read_text())
            variants = {name: _first(content["variants"], VARIANTS[name]) for name in VARIANTS}
            steps = {name: each["step_ms"][chosen] for name, each in variants.items() if each}
            if "fixed" not in steps:
                raise ValueError("no variant plain, in which ranks do not balance")
            attention = np.array(content["attention_ms"]["plain"][chosen], dtype=float)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"measured {path}: {error!r}; expected a file of benchmarks/training_step.py --out"
            ) from error
        if any(len(each) != num_steps for each in (*steps.values(), attention)):
            raise ValueError(
                f"measured {path}: holds fewer than skip + steps = {skip + num_steps} steps"
            )
        return cls(steps, attention)


def _first(variants: dict, names: tuple[str, ...]) -> dict | None:
    return next((variants[name] for name in names if name in variants), None)


def comparison(
    measured: Measured, scenario: Scenario, drawn: list[Documents], results: list[Result]
) -> str:
    """Mean and slowest tenth of both variants, and attention alone."""
    lines = [f"{'measured / predicted, ms':<30}{'mean':>24}{'slowest tenth':>28}"]
    by_name = {result.system.name: result for result in results}
    for name, step_ms in measured.step_ms.items():
        if name in by_name:
            predicted = 1e3 * np.array(by_name[name].step_seconds)
            lines.append(_line(f"step, {by_name[name].system.label}", step_ms, predicted))
    packs = scenario.packs * scenario.micro_batches
    shape = (NUM_PASSES, scenario.micro_batches, packs // scenario.micro_batches)
    attention = np.array(
        [plain_attention(scenario, each, packs).reshape(shape).sum(axis=(0, 1)) for each in drawn]
    )
    attention *= 1e3 * scenario.model.layers
    lines.append(
        _line("attention, mean of ranks", measured.attention_ms.mean(1), attention.mean(1))
    )
    lines.append(_line("attention, slowest rank", measured.attention_ms.max(1), attention.max(1)))
    return "\n".join(lines)


def _line(name: str, measured, predicted) -> str:
    line = f"{name:<30}"
    for figure in (np.mean, slowest_tenth):
        theirs, ours = float(figure(measured)), float(figure(predicted))
        line += f"{theirs:>10.1f} /{ours:>8.1f} ({100 * (ours / theirs - 1):+.1f} %)"
    return line
