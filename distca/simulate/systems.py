"""The systems that are compared, each a way to run the same documents on the same ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from distca.simulate.disaggregated import (
    Attend,
    Work,
    cluster_of,
    held_bytes,
    in_turn,
    pack_on,
    ping_pong,
    plan,
    work_of,
)
from distca.simulate.layers import (
    GATHER_ONCE,
    GATHER_TWICE,
    NUM_PASSES,
    RING,
    KeyExchange,
    Layers,
    add_parameters,
    context_parallel,
    layers_of,
    plain_attention,
    workspace_of_token,
)
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.packing import Documents, balanced_packs
from distca.simulate.pipeline import Schedule, one_f_one_b
from distca.simulate.scenario import Scenario

MAX_CP = 64  # tried, unless packs need more


class Step:
    """A step's documents, and plans for them."""

    def __init__(self, scenario: Scenario, documents: Documents) -> None:
        self.scenario = scenario
        self.documents = documents
        self.cost = scenario.attention_cost()

    @cached_property
    def micro_batches(self) -> list[np.ndarray]:
        """Lengths of the documents of each micro-batch."""
        edges = np.arange(1, self.scenario.micro_batches) * self.scenario.packs
        return np.split(self.documents.lengths, np.searchsorted(self.documents.pack, edges))

    def work(self, lengths: np.ndarray, is_ping_pong: bool) -> tuple[Work, float]:
        """Return the work of a plan for a micro-batch, and the planner's processor time in seconds.
        Ping-pong needs two runs on each rank if documents cross ranks."""
        scenario = self.scenario
        runs = 2 if is_ping_pong and scenario.least_cp > 1 else 1
        pack = pack_on(lengths, scenario.groups, runs)
        cluster = cluster_of(scenario, is_ping_pong)
        tasks, num_parts, seconds = plan(scenario, pack, cluster, self.cost)
        return work_of(pack, tasks, self.cost, num_parts), seconds


@dataclass(frozen=True)
class Outcome:
    """One step under one system."""

    schedule: Schedule
    memory_bytes: np.ndarray  # [stages * groups] of one rank of each group


Way = Callable[[Step, int], Outcome]  # (step, context parallel degree) -> outcome


def fixed(step: Step, cp: int, keys: KeyExchange = GATHER_ONCE) -> Outcome:
    """`cp` groups share the packs that they hold together."""
    return _packed(step, step.documents.pack // (cp // step.scenario.least_cp), cp, keys)


def variable(step: Step, cp: int, keys: KeyExchange) -> Outcome:
    scenario, lengths = step.scenario, step.documents.lengths
    num_packs = scenario.groups // cp * scenario.micro_batches
    attention = step.cost.seconds(np.zeros_like(lengths), lengths).sum(axis=0) / cp
    work = attention + sum(scenario.linear_seconds(lengths / cp))
    most_tokens = cp * scenario.most_tokens(workspace_of_token(scenario, cp, keys))
    pack = balanced_packs(lengths, work, num_packs, most_tokens)
    # Packs of like work meet in one micro-batch.
    dearest_first = np.argsort(-np.bincount(pack, work, num_packs), kind="stable")
    place = np.empty(num_packs, dtype=np.int64)
    place[dearest_first] = np.arange(num_packs)
    return _packed(step, place[pack], cp, keys)


def _packed(step: Step, pack: np.ndarray, cp: int, keys: KeyExchange) -> Outcome:
    scenario = step.scenario
    shape = (scenario.micro_batches, scenario.groups // cp)
    tokens = np.bincount(pack, step.documents.lengths, shape[0] * shape[1]).reshape(shape)
    documents = Documents(step.documents.lengths, pack)
    return _outcome(scenario, context_parallel(scenario, documents, tokens, cp, keys))


def balanced_limit(step: Step, cp: int) -> Outcome:
    """Attention spread evenly for free."""
    scenario = step.scenario
    attention = plain_attention(
        scenario, step.documents, scenario.packs * scenario.micro_batches
    ).reshape(NUM_PASSES, scenario.micro_batches, -1)
    mean = attention.sum(axis=2).T / scenario.groups
    return _outcome(scenario, _layers(scenario, mean[:, :, None]))


def distca(step: Step, cp: int, attend: Attend) -> Outcome:
    """Return the outcome with a plan for each micro-batch. Plans are computed during the step
    before, so planning shows only if it takes longer than a step."""
    scenario, planning = step.scenario, 0.0
    layers = _layers(scenario, np.zeros((scenario.micro_batches, NUM_PASSES, 1)))
    for i, lengths in enumerate(step.micro_batches):
        work, seconds = step.work(lengths, attend is ping_pong)
        planning += seconds
        for pass_idx in (FORWARD, BACKWARD):
            times, layers.beside[i, pass_idx] = attend(scenario, work, pass_idx)
            layers.seconds[i, pass_idx] += times
        held = held_bytes(scenario, work)
        layers.workspace_bytes = np.maximum(layers.workspace_bytes, held)
    outcome = _outcome(scenario, layers)
    seconds = max(outcome.schedule.seconds, planning)
    return replace(outcome, schedule=replace(outcome.schedule, seconds=seconds))


def _layers(scenario: Scenario, attention: np.ndarray) -> Layers:
    """Return the layers of groups that hold `scenario.tokens` tokens each."""
    shape = (scenario.micro_batches, NUM_PASSES, scenario.groups)
    tokens = np.full((scenario.micro_batches, scenario.groups), scenario.tokens)
    return layers_of(scenario, tokens, np.broadcast_to(attention, shape))


def _outcome(scenario: Scenario, layers: Layers) -> Outcome:
    if scenario.recompute:  # backward begins with the whole forward pass
        layers.seconds[:, BACKWARD] += layers.seconds[:, FORWARD]
        layers.beside[:, BACKWARD] += layers.beside[:, FORWARD]
    add_parameters(scenario, layers)
    schedule = one_f_one_b(scenario, layers)
    return Outcome(schedule, _memory(scenario, layers, schedule))


def _memory(scenario: Scenario, layers: Layers, schedule: Schedule) -> np.ndarray:
    """[stages * groups] bytes of one rank at its fullest: activations are kept from a micro-batch's
    forward pass to the end of its backward pass."""
    tokens = layers.tokens
    state = scenario.state_bytes() + tokens.max(axis=0) * scenario.repeated_bytes()
    held = np.zeros((scenario.pp, scenario.groups))
    most = held.copy()
    for each in schedule.operations:  # those of a stage are in order
        sign = 1 if each.pass_idx == FORWARD else -1
        held[each.stage] += sign * tokens[each.micro_batch]
        most = np.maximum(most, held)
    return (state + most * scenario.token_bytes() + layers.workspace_bytes).ravel()


@dataclass(frozen=True)
class System:
    name: str
    label: str
    ways: tuple[Way, ...]  # the best one counts
    least_cp: int | None = None  # of the degrees to try; None: no choice
    is_baseline: bool = False

    def degrees(self, scenario: Scenario) -> list[int]:
        """Context parallel degrees to try: powers of two times the least."""
        least = scenario.least_cp
        if self.least_cp is None:
            return [least]
        if scenario.cp is not None:
            return [scenario.cp]
        tried = (least << i for i in range(MAX_CP.bit_length()))
        possible = [cp for cp in tried if scenario.groups % cp == 0 and cp <= max(MAX_CP, least)]
        return [cp for cp in possible if cp >= self.least_cp] or possible


def _by_gathers(function: Callable[..., Outcome]) -> tuple[Way, ...]:
    return tuple(partial(function, keys=keys) for keys in (GATHER_ONCE, GATHER_TWICE))


baseline = partial(System, is_baseline=True)
SYSTEMS = (
    baseline("fixed", "fixed packing", _by_gathers(fixed)),
    baseline("variable", "variable-length packing", _by_gathers(variable), least_cp=1),
    baseline("all-gather", "context parallel, all-gather", _by_gathers(fixed), least_cp=2),
    baseline("ring", "context parallel, ring", (partial(fixed, keys=RING),), least_cp=2),
    System("distca", "distca", (partial(distca, attend=in_turn),)),
    System("distca-ping-pong", "distca, ping-pong", (partial(distca, attend=ping_pong),)),
    System("limit", "balanced for free", (balanced_limit,)),
)


def systems_of(names: list[str] | None) -> list[System]:
    """Return the systems with these names, or all. Raises ValueError for an unknown name."""
    all_names = [system.name for system in SYSTEMS]
    for name in names or ():
        if name not in all_names:
            raise ValueError(f"system is {name!r}; expected some of {', '.join(all_names)}")
    return [each for each in SYSTEMS if each.name in (names or all_names)]
