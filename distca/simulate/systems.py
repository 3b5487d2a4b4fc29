"""The systems that are compared, each a way to run the same documents on the same ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from distca.planning.halves import pay
from distca.planning.packs import Pack
from distca.planning.ticks import Tick, ticks_of
from distca.simulate.disaggregated import (
    Attend,
    Work,
    cluster_of,
    held_bytes,
    in_turn,
    joined,
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
    WAITING,
    KeyExchange,
    Layers,
    add_parameters,
    context_parallel,
    layers_of,
    plain_attention,
    workspace_of_token,
)
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.packing import Documents, balanced_packs, karmarkar_karp
from distca.simulate.pipeline import Schedule, in_ticks, one_f_one_b
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

    def drawn(self, runs: int) -> list[Pack]:
        """Return the pack of each micro-batch, as the documents were drawn."""
        return [pack_on(lengths, self.scenario.groups, runs) for lengths in self.micro_batches]

    def sorted(self, runs: int) -> list[Pack]:
        """Return the pack of each micro-batch after the loader has sorted documents, for ranks with
        different numbers of tokens."""
        cp, groups = self.scenario.least_cp, self.scenario.groups
        order = np.argsort(self.sorted_pack, kind="stable")
        lengths, pack = self.documents.lengths[order], self.sorted_pack[order]
        num_packs = groups // cp * self.scenario.micro_batches
        in_packs = np.split(lengths, np.searchsorted(pack, np.arange(1, num_packs)))
        on_groups = [pack_on(each, cp, runs) for each in in_packs]
        edges = range(0, num_packs, groups // cp)
        return [joined(on_groups[first : first + groups // cp]) for first in edges]

    @cached_property
    def sorted_pack(self) -> np.ndarray:
        """[num_documents] pack of each document that the loader has sorted by predicted work."""
        cp = self.scenario.least_cp
        num_packs = self.scenario.groups // cp * self.scenario.micro_batches
        return karmarkar_karp(self.predicted_work(cp).tolist(), num_packs)

    def predicted_work(self, cp: int) -> np.ndarray:
        """[num_documents] seconds of attention and linear work on each of `cp` groups."""
        lengths = self.documents.lengths
        attention = self.cost.seconds(np.zeros_like(lengths), lengths).sum(axis=0) / cp
        return attention + sum(self.scenario.linear_seconds(lengths / cp))

    def late_starts(self, pack: Pack) -> np.ndarray:
        """Return the seconds by which attention of a layer begins later on each rank than on the
        first, [2, ranks], because the rank holds more tokens."""
        linear = np.stack(self.scenario.linear_seconds(pack.tokens))
        return linear - linear.min(axis=1, keepdims=True)

    def work(
        self, pack: Pack, attend: Attend, starts: np.ndarray | float = 0.0
    ) -> tuple[Work, Attend, float]:
        """Return the work of a micro-batch under a plan, how ranks attend, and the planner's
        processor time in seconds. Under ping-pong, blocks run whole if that is predicted to be
        faster, and ranks then attend as in in_turn."""
        scenario, whole = self.scenario, cluster_of(self.scenario)
        lags = np.sum(starts, axis=0)
        if np.any(lags > 0):
            whole = replace(whole, lags=tuple(lags.tolist()))
        tasks, *parts, loads, seconds = plan(scenario, pack, whole, self.cost)
        if attend is ping_pong:
            in_halves, before = cluster_of(scenario, pack), scenario.seconds_before_attention()
            others, *their_parts, their_loads, more = plan(scenario, pack, in_halves, self.cost)
            seconds += more
            if pay(in_halves, their_loads, whole, loads, before):
                tasks, parts = others, their_parts
            else:
                attend = in_turn
        return replace(work_of(pack, tasks, self.cost, *parts), starts=starts), attend, seconds


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
    work = step.predicted_work(cp)
    most_tokens = cp * scenario.most_tokens(workspace_of_token(scenario, cp, keys))
    pack = balanced_packs(lengths, work, num_packs, most_tokens)
    # Packs of like work meet in one micro-batch.
    dearest_first = np.argsort(-np.bincount(pack, work, num_packs), kind="stable")
    place = np.empty(num_packs, dtype=np.int64)
    place[dearest_first] = np.arange(num_packs)
    return _packed(step, place[pack], cp, keys)


def sorted_by_loader(step: Step, cp: int, keys: KeyExchange = GATHER_ONCE) -> Outcome:
    """The packs of Step.sorted, whose number of tokens nothing limits but memory."""
    return _packed(step, step.sorted_pack, cp, keys)


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
    attention = np.broadcast_to(mean[:, :, None], (*mean.shape, scenario.groups))
    tokens = np.full((scenario.micro_batches, scenario.groups), scenario.tokens)
    return _outcome(scenario, layers_of(scenario, tokens, attention))


def distca(
    step: Step,
    cp: int,
    attend: Attend,
    packs: Callable[[Step, int], list[Pack]] = Step.drawn,
    has_servers: bool = False,
) -> Outcome:
    """Return the outcome with a plan for each micro-batch. Plans are computed during the step
    before, so planning shows only if it takes longer than a step. Ping-pong needs two runs on each
    rank if documents cross ranks. `has_servers`: GPUs that run no model compute attention, too."""
    scenario, planning = step.scenario, 0.0
    num_trainers = scenario.groups
    pool = Step(scenario.with_servers, step.documents) if has_servers else step
    idle = _empty_pack(pool.scenario.groups - num_trainers)
    held = packs(step, 2 if attend is ping_pong and scenario.least_cp > 1 else 1)
    tokens = np.stack([each.tokens for each in held])
    layers = layers_of(scenario, tokens, np.zeros((len(held), NUM_PASSES, num_trainers)))
    for i, pack in enumerate(held):
        starts = np.pad(step.late_starts(pack), ((0, 0), (0, idle.num_ranks)))
        work, how, seconds = pool.work(joined([pack, idle]), attend, starts)
        planning += seconds
        for pass_idx in (FORWARD, BACKWARD):
            times, layers.beside[i, pass_idx] = how(pool.scenario, work, pass_idx)
            layers.seconds[i, pass_idx] += times[:, :num_trainers]
        workspace = held_bytes(pool.scenario, work)[:num_trainers]
        layers.workspace_bytes = np.maximum(layers.workspace_bytes, workspace)
    return _planned(_outcome(scenario, layers), planning)


def _planned(outcome: Outcome, seconds: float) -> Outcome:
    """Return the outcome if its plans take `seconds` beside the step before."""
    seconds = max(outcome.schedule.seconds, seconds)
    return replace(outcome, schedule=replace(outcome.schedule, seconds=seconds))


def distca_in_ticks(step: Step, cp: int) -> Outcome:
    """Return the outcome if all stages share attention, with one plan for each tick of
    distca.integrations.pipelining.SchedulePooled."""
    scenario, planning = step.scenario, 0.0
    pool, held = Step(scenario.pool, step.documents), step.drawn(1)
    ticks = ticks_of(range(scenario.pp), scenario.micro_batches)
    layers, workspace = [], np.zeros(pool.scenario.groups)
    for tick in ticks:
        pack = joined([_pack_in(tick, stage, held) for stage in range(scenario.pp)])
        work, _, seconds = pool.work(pack, in_turn)
        planning += seconds
        workspace = np.maximum(workspace, held_bytes(pool.scenario, work))
        layers.append(_layer_in(tick, scenario, pack, work))
    schedule = in_ticks(scenario, ticks, layers)
    tokens = np.stack([each.tokens for each in held])
    memory = _memory(scenario, tokens, workspace, schedule)
    return _planned(Outcome(schedule, memory), planning)


def _pack_in(tick: Tick, stage: int, held: list[Pack]) -> Pack:
    """Return the pack in `held` that the stage runs in this tick, or an empty one if it is idle."""
    if stage in tick.passes:
        return held[tick.passes[stage].micro_batch]
    return _empty_pack(held[0].num_ranks)


def _empty_pack(num_ranks: int) -> Pack:
    return Pack(num_ranks, 0, np.empty((0, 4), dtype=np.int64))


def _layer_in(tick: Tick, scenario: Scenario, pack: Pack, work: Work) -> np.ndarray:
    """Return the times of one layer in this tick, [kinds, stages, groups]."""
    shape = (scenario.pp, scenario.groups)
    layer = layers_of(
        scenario, pack.tokens.reshape(shape), np.zeros((shape[0], NUM_PASSES, shape[1]))
    )
    for pass_idx in (FORWARD, BACKWARD):
        times, beside = in_turn(scenario.pool, work, pass_idx)
        layer.seconds[:, pass_idx] += times.reshape(-1, *shape).swapaxes(0, 1)
        layer.beside[:, pass_idx] = beside
    _repeat_forward(scenario, layer)
    running = sorted(tick.passes)
    of_running = replace(layer, seconds=layer.seconds[running], beside=layer.beside[running])
    add_parameters(scenario, of_running)
    layer.seconds[running] = of_running.seconds
    seconds = layer.seconds[:, FORWARD if tick.is_forward else BACKWARD].swapaxes(0, 1)
    total = seconds.sum(axis=0)
    seconds[WAITING] += total.max() - total
    return seconds


def _repeat_forward(scenario: Scenario, layers: Layers) -> None:
    if scenario.recompute:  # backward begins with the whole forward pass
        layers.seconds[:, BACKWARD] += layers.seconds[:, FORWARD]
        layers.beside[:, BACKWARD] += layers.beside[:, FORWARD]


def _outcome(scenario: Scenario, layers: Layers) -> Outcome:
    _repeat_forward(scenario, layers)
    add_parameters(scenario, layers)
    schedule = one_f_one_b(scenario, layers)
    return Outcome(schedule, _memory(scenario, layers.tokens, layers.workspace_bytes, schedule))


def _memory(
    scenario: Scenario, tokens: np.ndarray, workspace_bytes: np.ndarray, schedule: Schedule
) -> np.ndarray:
    """Return the peak bytes of one rank, [stages * groups]. Activations are kept from a
    micro-batch's forward pass to the end of its backward pass. `tokens` is [micro_batches, groups].
    `workspace_bytes` is [groups] or [stages * groups], and adds to activations."""
    state = scenario.state_bytes() + tokens.max(axis=0) * scenario.repeated_bytes()
    held = np.zeros((scenario.pp, scenario.groups))
    most = held.copy()
    for each in schedule.operations:  # those of a stage are in order
        if each.micro_batch is None:
            continue
        sign = 1 if each.pass_idx == FORWARD else -1
        held[each.stage] += sign * tokens[each.micro_batch]
        most = np.maximum(most, held)
    workspace = workspace_bytes.reshape(-1, scenario.groups)
    return (state + most * scenario.token_bytes() + workspace).ravel()


@dataclass(frozen=True)
class System:
    name: str
    label: str
    ways: tuple[Way, ...]  # the best one counts
    least_cp: int | None = None  # of the degrees to try; None: no choice
    is_baseline: bool = False
    needs_stages: bool = False
    needs_servers: bool = False

    def lacks(self, scenario: Scenario) -> str | None:
        """Return what this system needs but the scenario lacks, or None."""
        if self.needs_stages and scenario.pp == 1:
            return "pipeline stages, but pp is 1; raise --pp"
        if self.needs_servers and scenario.servers == 0:
            return "servers, but there are none; pass --servers"
        return None

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
    baseline("sorted", "sorted by the loader", (sorted_by_loader,)),
    baseline("all-gather", "context parallel, all-gather", _by_gathers(fixed), least_cp=2),
    baseline("ring", "context parallel, ring", (partial(fixed, keys=RING),), least_cp=2),
    System(
        "sorted-distca",
        "sorted by the loader, distca",
        (partial(distca, attend=in_turn, packs=Step.sorted),),
    ),
    System("distca", "distca", (partial(distca, attend=in_turn),)),
    System("distca-ping-pong", "distca, ping-pong", (partial(distca, attend=ping_pong),)),
    System("distca-ticks", "distca, stages as one pool", (distca_in_ticks,), needs_stages=True),
    System(
        "distca-servers",
        "distca, servers",
        (partial(distca, attend=in_turn, has_servers=True),),
        needs_servers=True,
    ),
    System("limit", "balanced for free", (balanced_limit,)),
)


def systems_of(names: list[str] | None, scenario: Scenario) -> list[System]:
    """Return the systems with these names, or all that this scenario can run. Raises ValueError for
    an unknown name, and for a system that needs stages or servers if there are none."""
    all_names = [system.name for system in SYSTEMS]
    if names is None:
        return [each for each in SYSTEMS if each.lacks(scenario) is None]
    for name in names:
        if name not in all_names:
            raise ValueError(f"system is {name!r}; expected some of {', '.join(all_names)}")
    chosen = [each for each in SYSTEMS if each.name in names]
    for each in chosen:
        if each.lacks(scenario) is not None:
            raise ValueError(f"system {each.name} needs {each.lacks(scenario)}")
    return chosen
