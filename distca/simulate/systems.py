"""The systems that are compared, each a way to run the same documents on the same ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.simulate.disaggregated import (
    Attend,
    Work,
    dedicated_ping_pong,
    held_bytes,
    in_turn,
    ping_pong,
)
from distca.simulate.layers import (
    ALL_GATHER,
    LINEAR,
    NUM_PASSES,
    RING,
    TENSOR_PARALLEL,
    WAITING,
    KeyTransfer,
    Layers,
    add_parameters,
    context_parallel,
    layers_of,
    plain_attention,
    repeat_forward,
    workspace_of_token,
)
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.packing import Documents, balanced_packs
from distca.simulate.pipeline import IDLE, Schedule, one_f_one_b, ticks
from distca.simulate.scenario import Scenario
from distca.simulate.step import Step


@dataclass(frozen=True)
class Outcome:
    """One step under one system."""

    schedule: Schedule
    memory_bytes: np.ndarray  # [stages * groups] of one rank of each group


def fixed(step: Step, cp: int) -> Outcome:
    return _packed(step, step.documents.pack, step.scenario.least_cp, ALL_GATHER)


def all_gather(step: Step, cp: int) -> Outcome:
    merged = step.documents.pack // (cp // step.scenario.least_cp)
    return _packed(step, merged, cp, ALL_GATHER)


def ring(step: Step, cp: int) -> Outcome:
    merged = step.documents.pack // (cp // step.scenario.least_cp)
    return _packed(step, merged, cp, RING)


def variable(step: Step, cp: int) -> Outcome:
    scenario, lengths = step.scenario, step.documents.lengths
    num_packs = scenario.groups // cp * scenario.micro_batches
    attention = step.cost.seconds(np.zeros_like(lengths), lengths).sum(axis=0) / cp
    work = attention + sum(scenario.linear_seconds(lengths / cp))
    most_tokens = cp * scenario.most_tokens(workspace_of_token(scenario, cp, ALL_GATHER))
    pack = balanced_packs(lengths, work, num_packs, most_tokens)
    # Packs of like work meet in one micro-batch.
    dearest_first = np.argsort(-np.bincount(pack, work, num_packs), kind="stable")
    place = np.empty(num_packs, dtype=np.int64)
    place[dearest_first] = np.arange(num_packs)
    return _packed(step, place[pack], cp, ALL_GATHER)


def _packed(step: Step, pack: np.ndarray, cp: int, keys: KeyTransfer) -> Outcome:
    scenario = step.scenario
    shape = (scenario.micro_batches, scenario.groups // cp)
    tokens = np.bincount(pack, step.documents.lengths, shape[0] * shape[1]).reshape(shape)
    documents = Documents(step.documents.lengths, pack)
    return _outcome(scenario, context_parallel(scenario, documents, tokens, cp, keys))


def balanced_limit(step: Step, cp: int) -> Outcome:
    """Attention spread evenly for free."""
    scenario = step.scenario
    num_packs = scenario.packs * scenario.micro_batches
    attention = plain_attention(scenario, step.documents, num_packs)
    mean = attention.reshape(NUM_PASSES, scenario.micro_batches, -1).sum(axis=2).T
    shape = (scenario.micro_batches, NUM_PASSES, scenario.groups)
    even = np.broadcast_to(mean[:, :, None] / scenario.groups, shape)
    return _outcome(scenario, layers_of(scenario, step.even_tokens, even))


def distca(step: Step, cp: int) -> Outcome:
    return _served(step, step.even_tokens, step.in_place, in_turn)


def distca_ping_pong(step: Step, cp: int) -> Outcome:
    return _served(step, step.even_tokens, step.in_place_ping_pong, ping_pong)


def dedicated(step: Step, cp: int) -> Outcome:
    return _served(step, step.home_tokens, step.dedicated, in_turn)


def dedicated_pong(step: Step, cp: int) -> Outcome:
    return _served(step, step.home_tokens, step.dedicated, dedicated_ping_pong)


def _served(step: Step, tokens: np.ndarray, plans: list[Work], attend: Attend) -> Outcome:
    return _outcome(step.scenario, _with_plans(step.scenario, tokens, plans, attend))


def same_phase(step: Step, cp: int) -> Outcome:
    return _in_ticks(step, step.of_ticks, in_turn)


def same_phase_ping_pong(step: Step, cp: int) -> Outcome:
    return _in_ticks(step, step.of_ticks_ping_pong, ping_pong)


def _in_ticks(step: Step, plans: list[Work], attend: Attend) -> Outcome:
    scenario = step.scenario
    layers = _with_plans(scenario, step.tokens_of_ticks, plans, attend)
    by_stage = layers.seconds.reshape(*layers.seconds.shape[:3], scenario.pp, scenario.groups)
    by_stage[:, BACKWARD] = by_stage[:, BACKWARD, :, ::-1].copy()  # what forward ticks mirror
    layers.tokens = step.even_tokens
    return _outcome(scenario, layers, ticks)


def _with_plans(
    scenario: Scenario, tokens: np.ndarray, plans: list[Work], attend: Attend
) -> Layers:
    """`tokens` [plans, ranks]; a rank without any has no linear work."""
    layers = layers_of(scenario, tokens, np.zeros((len(tokens), NUM_PASSES, tokens.shape[1])))
    layers.seconds[:, :, TENSOR_PARALLEL] *= tokens[:, None] > 0
    for i, work in enumerate(plans):
        for pass_idx in (FORWARD, BACKWARD):
            at = layers.seconds[i, pass_idx]
            linear = at[LINEAR].copy()
            at[LINEAR] = 0.0
            times, layers.hidden[i, pass_idx] = attend(scenario, work, pass_idx, linear)
            at += times
            at[WAITING] += at[TENSOR_PARALLEL].max() - at[TENSOR_PARALLEL]
    layers.workspace_bytes = np.max([held_bytes(scenario, work) for work in plans], axis=0)
    return layers


def _outcome(
    scenario: Scenario,
    layers: Layers,
    arrange: Callable[[Scenario, Layers], Schedule] = one_f_one_b,
) -> Outcome:
    if scenario.recompute:
        repeat_forward(layers)
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
        if each.micro_batch == IDLE:
            continue
        if each.pass_idx == FORWARD:
            held[each.stage] += tokens[each.micro_batch]
            most = np.maximum(most, held)
        else:
            held[each.stage] -= tokens[each.micro_batch]
    kept = (state + most * scenario.token_bytes()).ravel()
    return kept + np.resize(layers.workspace_bytes, kept.size)


@dataclass(frozen=True)
class System:
    name: str
    label: str
    simulate: Callable[[Step, int], Outcome]  # of a step and a context parallel degree
    is_baseline: bool
    sweeps: bool = False  # has a choice of context parallel degree

    def degrees(self, scenario: Scenario) -> list[int]:
        if not self.sweeps:
            return [scenario.least_cp]
        degrees = scenario.degrees()
        if self.name == "variable":
            return degrees
        return [cp for cp in degrees if cp > 1] or degrees


SYSTEMS = (
    System("fixed", "fixed packing", fixed, True),
    System("variable", "variable-length packing", variable, True, sweeps=True),
    System("all-gather", "context parallel, all-gather", all_gather, True, sweeps=True),
    System("ring", "context parallel, ring", ring, True, sweeps=True),
    System("distca", "distca", distca, False),
    System("distca-ping-pong", "distca, ping-pong", distca_ping_pong, False),
    System("dedicated", "distca, dedicated", dedicated, False),
    System("dedicated-ping-pong", "distca, dedicated, ping-pong", dedicated_pong, False),
    System("ticks", "distca, same-phase", same_phase, False),
    System("ticks-ping-pong", "distca, same-phase, ping-pong", same_phase_ping_pong, False),
    System("limit", "balanced for free", balanced_limit, False),
)


def systems_for(scenario: Scenario, names: list[str] | None = None) -> list[System]:
    """Those that exist for the scenario; raises ValueError for a name that does not."""
    known = {system.name: system for system in SYSTEMS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"system is {name!r}; expected some of {', '.join(known)}")
    chosen = [system for system in SYSTEMS if names is None or system.name in names]
    has_servers = scenario.pp == 1 and scenario.groups >= round(1 / scenario.server_share)
    skipped = set() if has_servers else {"dedicated", "dedicated-ping-pong"}
    if scenario.pp == 1:
        skipped |= {"ticks", "ticks-ping-pong"}
    return [system for system in chosen if system.name not in skipped]
