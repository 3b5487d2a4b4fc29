"""Runs systems over steps, and what comes of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.simulate.layers import ATTENTION, COMMUNICATION, LINEAR, WAITING
from distca.simulate.packing import Documents
from distca.simulate.scenario import Scenario
from distca.simulate.systems import Outcome, Step, System, Way, fixed, systems_of

FIT_PRECISION = 1e-6


@dataclass(frozen=True)
class Result:
    """One system over all steps."""

    system: System
    scenario: Scenario
    cp: int
    outcome: Outcome  # of the first step
    step_seconds: list[float]
    memory_max: float  # bytes of the fullest rank in any step
    means: dict[str, float]
    """Over steps. attention_imbalance: max / mean over the ranks that have any; compute_imbalance:
    of linear work and attention; exposed_communication_ms: that nothing hides, mean over ranks;
    waiting_ms: for other ranks and in bubbles, mean over ranks; memory_mean_bytes."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.step_seconds))

    @property
    def slowest_decile(self) -> float:
        return slowest_tenth(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.scenario.step_tokens / self.mean

    @property
    def fits(self) -> bool:
        return bool(self.memory_max <= self.scenario.machine.usable_bytes)

    def speed_up_over(self, other: "Result") -> float:
        return other.mean / self.mean


def run(scenario: Scenario, steps: list[Step], names: list[str] | None = None) -> list[Result]:
    """Return the result of each system in its best way, at its best context parallel degree."""
    results = []
    for system in systems_of(names, scenario):
        tried = [
            run_system(system, way, scenario, steps, cp)
            for way in system.ways
            for cp in system.degrees(scenario)
        ]
        results.append(best(tried))
    return results


def best(results: Iterable[Result]) -> Result:
    """Return the fastest result. If any result fits in memory, only those that fit count."""
    return min(results, key=lambda result: (not result.fits, result.mean))


def run_system(system: System, way: Way, scenario: Scenario, steps: list[Step], cp: int) -> Result:
    outcomes = [way(step, cp) for step in steps]
    by_step = []
    for outcome in outcomes:
        busy = 1e3 * outcome.schedule.busy(scenario)
        figures = {
            "attention_imbalance": max_over_mean(busy[ATTENTION][busy[ATTENTION] > 0]),
            "compute_imbalance": max_over_mean(busy[ATTENTION] + busy[LINEAR]),
            "exposed_communication_ms": busy[COMMUNICATION].sum(axis=0).mean(),
            "waiting_ms": busy[WAITING].mean(),
            "memory_mean_bytes": outcome.memory_bytes.mean(),
        }
        by_step.append(figures)
    means = {name: float(np.mean([each[name] for each in by_step])) for name in figures}
    step_seconds = [outcome.schedule.seconds for outcome in outcomes]
    memory_max = max(float(outcome.memory_bytes.max()) for outcome in outcomes)
    return Result(system, scenario, cp, outcomes[0], step_seconds, memory_max, means)


def slowest_tenth(values: Sequence[float]) -> float:
    """Mean of the largest tenth, at least of one."""
    count = max(1, len(values) // 10)
    return float(np.sort(values)[-count:].mean())


def max_over_mean(values: np.ndarray) -> float:
    return float(values.max() / values.mean()) if values.any() else 1.0


def fitted(scenario: Scenario, drawn: list[Documents], step_seconds: float) -> Scenario:
    """With the linear work per token that makes fixed packing's mean step `step_seconds`, which was
    measured with these documents. Raises ValueError if attention and communication alone last
    longer."""

    def with_linear(per_token: float) -> Scenario:
        machine = replace(scenario.machine, linear_seconds_per_token=per_token)
        return replace(scenario, machine=machine)

    def mean_step(per_token: float) -> float:
        tried, cp = with_linear(per_token), scenario.least_cp
        steps = [fixed(Step(tried, documents), cp) for documents in drawn]
        return float(np.mean([step.schedule.seconds for step in steps]))

    low, high = 1e-15, step_seconds / scenario.tokens
    if mean_step(low) > step_seconds:
        raise ValueError(
            f"fit_step_ms is {1e3 * step_seconds:.6g}, but attention and communication alone take "
            f"{1e3 * mean_step(low):.6g}; are the attention speeds those of the measured run?"
        )
    while high - low > FIT_PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if mean_step(middle) < step_seconds else (low, middle)
    return with_linear(high)
