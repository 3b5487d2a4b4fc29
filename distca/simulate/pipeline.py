"""Arranges the times of layers as the operations of a step, in 1F1B order or in ticks. With one
stage, the passes of the micro-batches follow each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.ticks import Tick
from distca.simulate.layers import KINDS, LINEAR, PARAMETERS, WAITING, Layers
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.scenario import ELEMENT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, Scenario


@dataclass(frozen=True)
class Operation:
    """One pass of one micro-batch through all layers of a stage."""

    stage: int
    micro_batch: int | None  # None: an idle stage, which computes others' attention
    pass_idx: int
    start: np.ndarray  # [groups] seconds since the step began
    seconds: np.ndarray  # [kinds, groups]

    @property
    def end(self) -> np.ndarray:
        return self.start + self.seconds.sum(axis=0)


@dataclass(frozen=True)
class Schedule:
    seconds: float  # of the step
    operations: list[Operation]
    closing: np.ndarray  # [kinds, groups] at the end of the step, same on every stage

    def busy(self, scenario: Scenario) -> np.ndarray:
        """[kinds, stages * groups] seconds; what is left of the step is waiting."""
        total = np.tile(self.closing[:, None], (1, scenario.pp, 1))
        for each in self.operations:
            total[:, each.stage] += each.seconds
        total[WAITING] += self.seconds - total.sum(axis=0)
        return total.reshape(len(KINDS), -1)


def send_seconds(scenario: Scenario) -> float:
    """Activations of a micro-batch to the next stage."""
    if scenario.pp == 1:
        return 0.0
    num_bytes = ELEMENT_BYTES * scenario.model.hidden * scenario.tokens / scenario.tp
    return scenario.machine.send_seconds(
        num_bytes, inside=scenario.ranks <= scenario.machine.gpus_per_node
    )


def one_f_one_b(scenario: Scenario, layers: Layers) -> Schedule:
    """Every stage has the same times; groups of one stage run apart from each other."""
    stage_seconds = layers.seconds * scenario.stage_layers
    num_micro_batches, pp = len(stage_seconds), scenario.pp
    send = send_seconds(scenario)
    waiting = [_alternating(num_micro_batches, ahead=pp - stage - 1)[::-1] for stage in range(pp)]
    free = np.zeros((pp, stage_seconds.shape[-1]))
    ready: dict[tuple[int, int, int], np.ndarray | float] = {
        (0, FORWARD, i): 0.0 for i in range(num_micro_batches)
    }
    operations = []
    while any(waiting):
        for stage in range(pp):
            while waiting[stage] and (stage, *waiting[stage][-1]) in ready:
                pass_idx, i = waiting[stage].pop()
                start = np.maximum(free[stage], ready[stage, pass_idx, i])
                operation = Operation(stage, i, pass_idx, start, stage_seconds[i, pass_idx])
                operations.append(operation)
                free[stage] = operation.end
                following = stage + 1 if pass_idx == FORWARD else stage - 1
                if 0 <= following < pp:
                    ready[following, pass_idx, i] = operation.end + send
                elif pass_idx == FORWARD:
                    ready[stage, BACKWARD, i] = operation.end
    return _closed(scenario, operations)


def _alternating(count: int, ahead: int) -> list[tuple[int, int]]:
    """(pass, index): `ahead` forward passes, then one of each in turn, then the rest backward."""
    ahead = min(ahead, count)
    order = [(FORWARD, i) for i in range(ahead)]
    for i in range(count - ahead):
        order += [(FORWARD, ahead + i), (BACKWARD, i)]
    return order + [(BACKWARD, i) for i in range(count - ahead, count)]


def in_ticks(scenario: Scenario, ticks: Sequence[Tick], layers: Sequence[np.ndarray]) -> Schedule:
    """Return the schedule of these ticks. `layers` has the times of one layer in each tick, [kinds,
    stages, groups]. They add up to the same time on all ranks."""
    operations, start = [], np.zeros(scenario.groups)
    for tick, layer in zip(ticks, layers, strict=True):
        pass_idx = FORWARD if tick.is_forward else BACKWARD
        for stage in range(scenario.pp):
            own = tick.passes.get(stage)
            seconds = scenario.stage_layers * layer[:, stage]
            micro_batch = None if own is None else own.micro_batch
            operations.append(Operation(stage, micro_batch, pass_idx, start, seconds))
        start = operations[-1].end + send_seconds(scenario)
    return _closed(scenario, operations)


def _closed(scenario: Scenario, operations: list[Operation]) -> Schedule:
    """The end of the step: gradients meet where they have not, then the optimizer."""
    end = max(float(each.end.max()) for each in operations)
    closing = np.zeros((len(KINDS), scenario.groups))
    machine = scenario.machine
    if scenario.sharding == "zero1":
        ranks = (scenario.groups, scenario.groups_per_node)
        collectives = sum(
            machine.gather_seconds(size * scenario.stage_params, *ranks)
            for size in (GRADIENT_BYTES, ELEMENT_BYTES)
        )
        last = operations[-1].seconds.sum(axis=0).min()
        closing[PARAMETERS] = max(0.0, collectives - last)
    if machine.linear_seconds_per_token is None:  # a measured constant includes the optimizer
        # Memory bounds it: it reads and writes weights and moments, and reads gradients.
        num_bytes = (2 * OPTIMIZER_BYTES + GRADIENT_BYTES) * scenario.stage_params / scenario.groups
        closing[LINEAR] = num_bytes / (machine.memory_tb_per_s * 1e12)
    return Schedule(end + float(closing.sum(axis=0).max()), operations, closing)
