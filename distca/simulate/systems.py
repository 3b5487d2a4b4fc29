"""The systems that are compared, each a way to run the same documents on the same ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from distca.planning.packs import Pack
from distca.simulate.disaggregated import (
    Attend,
    Work,
    cluster_of,
    dedicated_ping_pong,
    held_bytes,
    in_turn,
    pack_on,
    ping_pong,
    plan,
    work_of,
)
from distca.simulate.layers import (
    LINEAR,
    NUM_PASSES,
    TENSOR_PARALLEL,
    WAITING,
    KeyExchange,
    Layers,
    add_parameters,
    all_gather,
    context_parallel,
    layers_of,
    plain_attention,
    ring,
    workspace_of_token,
)
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.packing import Documents, balanced_packs
from distca.simulate.pipeline import IDLE, Schedule, micro_batch_of, one_f_one_b, ticks
from distca.simulate.scenario import Scenario

MAX_CP = 64  # tried, unless packs need more
LINK_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the ratio of linear work to attention


class Step:
    """A step's documents, where they lie, and plans for them."""

    def __init__(self, scenario: Scenario, documents: Documents) -> None:
        self.scenario = scenario
        self.documents = documents
        self.cost = scenario.attention_cost()

    def _packs(self, holds: np.ndarray, stages: int = 1) -> list[Pack]:
        """By forward tick, over the groups of `stages` stages; `holds` [groups] says which have
        tokens. Ticks of one stage are micro-batches."""
        scenario = self.scenario
        edges = np.arange(1, scenario.micro_batches) * scenario.packs
        lengths = np.split(self.documents.lengths, np.searchsorted(self.documents.pack, edges))
        packs = []
        for tick in range(scenario.micro_batches + stages - 1):
            order = np.array([micro_batch_of(scenario, FORWARD, tick, i) for i in range(stages)])
            in_order = np.concatenate([lengths[i] for i in order if i != IDLE])
            ranks = np.flatnonzero(np.outer(order != IDLE, holds))
            packs.append(pack_on(in_order, ranks, stages * scenario.groups))
        return packs

    @cached_property
    def in_place(self) -> list[Pack]:
        """By micro-batch, over the groups of a stage; packs lie where they were drawn."""
        return self._packs(np.ones(self.scenario.groups))

    @cached_property
    def of_ticks(self) -> list[Pack]:
        """By forward tick, over all stages. Backward ticks have the same, mirrored."""
        return self._packs(np.ones(self.scenario.groups), self.scenario.pp)

    @cached_property
    def is_server(self) -> np.ndarray:
        """[groups] Dedicated servers, evenly spread so that nodes have alike many."""
        every = round(1 / self.scenario.server_share)
        return np.arange(1, self.scenario.groups + 1) % every == 0

    @cached_property
    def beside_servers(self) -> list[Pack]:
        """By micro-batch; dedicated servers hold no tokens."""
        return self._packs(~self.is_server)

    def work(
        self, pack: Pack, speeds: tuple[float, ...] | None = None, link_factor: float = 1.0
    ) -> Work:
        cluster = cluster_of(self.scenario, pack.num_ranks, speeds, link_factor)
        return work_of(pack, plan(self.scenario, pack, cluster, self.cost), self.cost)

    def work_ping_pong(self, pack: Pack) -> Work:
        """Exchanges may last as long as the linear work that hides them; the planner weighs them
        against attention. So it is told of links that are faster by up to the ratio of the two, and
        the plan with the shortest layer is taken."""
        linear = self.scenario.linear_seconds(pack.tokens)
        lengths = pack.lengths
        attention = self.cost.seconds(np.zeros_like(lengths), lengths).sum() / pack.num_ranks
        factors = {max(1.0, share * sum(linear).max() / attention) for share in LINK_SHARES}

        def layer_seconds(work: Work) -> float:
            passes = enumerate(linear)
            times = [ping_pong(self.scenario, work, idx, each)[0] for idx, each in passes]
            return sum(float(each.sum(axis=0).max()) for each in times)

        works = [self.work(pack, link_factor=factor) for factor in sorted(factors)]
        return min(works, key=layer_seconds)

    def works(self, packs: list[Pack], attend: Attend) -> list[Work]:
        return list(map(self.work_ping_pong if attend is ping_pong else self.work, packs))

    @cached_property
    def dedicated(self) -> list[Work]:
        """Of packs beside servers."""
        speeds = tuple(self.is_server.astype(float).tolist())
        return [self.work(pack, speeds) for pack in self.beside_servers]


@dataclass(frozen=True)
class Outcome:
    """One step under one system."""

    schedule: Schedule
    memory_bytes: np.ndarray  # [stages * groups] of one rank of each group


def fixed(step: Step, cp: int, keys: KeyExchange = all_gather) -> Outcome:
    """`cp` groups share the packs that they hold together."""
    return _packed(step, step.documents.pack // (cp // step.scenario.least_cp), cp, keys)


def variable(step: Step, cp: int) -> Outcome:
    scenario, lengths = step.scenario, step.documents.lengths
    num_packs = scenario.groups // cp * scenario.micro_batches
    attention = step.cost.seconds(np.zeros_like(lengths), lengths).sum(axis=0) / cp
    work = attention + sum(scenario.linear_seconds(lengths / cp))
    most_tokens = cp * scenario.most_tokens(workspace_of_token(scenario, cp, all_gather))
    pack = balanced_packs(lengths, work, num_packs, most_tokens)
    # Packs of like work meet in one micro-batch.
    dearest_first = np.argsort(-np.bincount(pack, work, num_packs), kind="stable")
    place = np.empty(num_packs, dtype=np.int64)
    place[dearest_first] = np.arange(num_packs)
    return _packed(step, place[pack], cp, all_gather)


def _packed(step: Step, pack: np.ndarray, cp: int, keys: KeyExchange) -> Outcome:
    scenario = step.scenario
    shape = (scenario.micro_batches, scenario.groups // cp)
    tokens = np.bincount(pack, step.documents.lengths, shape[0] * shape[1]).reshape(shape)
    documents = Documents(step.documents.lengths, pack)
    return _outcome(scenario, context_parallel(scenario, documents, tokens, cp, keys))


def balanced_limit(step: Step, cp: int) -> Outcome:
    """Attention spread evenly for free."""
    scenario = step.scenario
    shape = (scenario.micro_batches, NUM_PASSES, scenario.groups)
    attention = plain_attention(scenario, step.documents, scenario.packs * shape[0])
    mean = attention.reshape(NUM_PASSES, shape[0], -1).sum(axis=2).T / scenario.groups
    even = np.broadcast_to(mean[:, :, None], shape)
    tokens = np.full((shape[0], scenario.groups), scenario.tokens)
    return _outcome(scenario, layers_of(scenario, tokens, even))


def distca(step: Step, cp: int, attend: Attend) -> Outcome:
    works = step.works(step.in_place, attend)
    return _outcome(step.scenario, _with_plans(step.scenario, step.in_place, works, attend))


def dedicated(step: Step, cp: int, attend: Attend) -> Outcome:
    layers = _with_plans(step.scenario, step.beside_servers, step.dedicated, attend)
    return _outcome(step.scenario, layers)


def same_phase(step: Step, cp: int, attend: Attend) -> Outcome:
    scenario = step.scenario
    works = step.works(step.of_ticks, attend)
    layers = _with_plans(scenario, step.of_ticks, works, attend)
    by_stage = layers.seconds.reshape(*layers.seconds.shape[:3], scenario.pp, scenario.groups)
    by_stage[:, BACKWARD] = by_stage[:, BACKWARD, :, ::-1].copy()  # what forward ticks mirror
    layers.tokens = np.full((scenario.micro_batches, scenario.groups), scenario.tokens)
    return _outcome(scenario, layers, ticks)


def _with_plans(scenario: Scenario, packs: list[Pack], works: list[Work], attend: Attend) -> Layers:
    """A plan for each pack. A rank without tokens has no linear work."""
    tokens = np.stack([pack.tokens for pack in packs])
    layers = layers_of(scenario, tokens, np.zeros((len(tokens), NUM_PASSES, tokens.shape[1])))
    layers.seconds[:, :, TENSOR_PARALLEL] *= tokens[:, None] > 0
    for i, work in enumerate(works):
        for pass_idx in (FORWARD, BACKWARD):
            at = layers.seconds[i, pass_idx]
            linear = at[LINEAR].copy()
            at[LINEAR] = 0.0
            times, layers.hidden[i, pass_idx] = attend(scenario, work, pass_idx, linear)
            at += times
            at[WAITING] += at[TENSOR_PARALLEL].max() - at[TENSOR_PARALLEL]
    layers.workspace_bytes = np.max([held_bytes(scenario, work) for work in works], axis=0)
    return layers


def _outcome(
    scenario: Scenario,
    layers: Layers,
    arrange: Callable[[Scenario, Layers], Schedule] = one_f_one_b,
) -> Outcome:
    if scenario.recompute:  # backward begins with the whole forward pass
        layers.seconds[:, BACKWARD] += layers.seconds[:, FORWARD]
        layers.hidden[:, BACKWARD] += layers.hidden[:, FORWARD]
    add_parameters(scenario, layers)
    schedule = arrange(scenario, layers)
    return Outcome(schedule, _memory(scenario, layers, schedule))


def _memory(scenario: Scenario, layers: Layers, schedule: Schedule) -> np.ndarray:
    """[stages * groups] bytes of one rank at its fullest: activations are kept from a micro-batch's
    forward pass to the end of its backward pass."""
    tokens = layers.tokens
    holds = tokens.sum(axis=0) > 0
    state = np.where(holds, scenario.state_bytes(int(holds.sum())), 0.0)
    state += tokens.max(axis=0) * scenario.repeated_bytes()
    held = np.zeros((scenario.pp, scenario.groups))
    most = held.copy()
    for each in schedule.operations:  # those of a stage are in order
        if each.micro_batch != IDLE:
            sign = 1 if each.pass_idx == FORWARD else -1
            held[each.stage] += sign * tokens[each.micro_batch]
            most = np.maximum(most, held)
    kept = (state + most * scenario.token_bytes()).ravel()
    return kept + np.resize(layers.workspace_bytes, kept.size)


@dataclass(frozen=True)
class System:
    name: str
    label: str
    simulate: Callable[[Step, int], Outcome]  # of a step and a context parallel degree
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


baseline = partial(System, is_baseline=True)
SYSTEMS = (
    baseline("fixed", "fixed packing", fixed),
    baseline("variable", "variable-length packing", variable, least_cp=1),
    baseline("all-gather", "context parallel, all-gather", fixed, least_cp=2),
    baseline("ring", "context parallel, ring", partial(fixed, keys=ring), least_cp=2),
    System("distca", "distca", partial(distca, attend=in_turn)),
    System("distca-ping-pong", "distca, ping-pong", partial(distca, attend=ping_pong)),
    System("dedicated", "distca, dedicated", partial(dedicated, attend=in_turn)),
    System(
        "dedicated-ping-pong",
        "distca, dedicated, ping-pong",
        partial(dedicated, attend=dedicated_ping_pong),
    ),
    System("ticks", "distca, same-phase", partial(same_phase, attend=in_turn)),
    System(
        "ticks-ping-pong", "distca, same-phase, ping-pong", partial(same_phase, attend=ping_pong)
    ),
    System("limit", "balanced for free", balanced_limit),
)


def systems_for(scenario: Scenario, names: list[str] | None = None) -> list[System]:
    """Those that exist for the scenario; raises ValueError for a name that does not."""
    all_names = [system.name for system in SYSTEMS]
    for name in names or ():
        if name not in all_names:
            raise ValueError(f"system is {name!r}; expected some of {', '.join(all_names)}")
    has_servers = scenario.pp == 1 and scenario.groups >= round(1 / scenario.server_share)
    skipped = () if has_servers else ("dedicated", "dedicated-ping-pong")
    if scenario.pp == 1:
        skipped += ("ticks", "ticks-ping-pong")
    return [
        each for each in SYSTEMS if each.name in (names or all_names) and each.name not in skipped
    ]
