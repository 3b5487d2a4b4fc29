"""Times of one layer on every rank: plain packing and context parallelism.

A layer's times are float64 [micro_batches, 2, kinds, groups], seconds: forward and backward, by
KINDS. What a rank waits for inside the layer, for its partners, is one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.model import ELEMENT_BYTES, GRADIENT_BYTES
from distca.simulate.packing import Documents
from distca.simulate.scenario import Scenario

KINDS = ("linear", "attention", "exchange", "tensor_parallel", "parameters", "waiting")
LINEAR, ATTENTION, EXCHANGE, TENSOR_PARALLEL, PARAMETERS, WAITING = range(len(KINDS))
COMMUNICATION = [EXCHANGE, TENSOR_PARALLEL, PARAMETERS]
NUM_PASSES = 2


@dataclass
class Layers:
    """What a system makes of a step's documents, for one layer of a stage."""

    seconds: np.ndarray  # [micro_batches, 2, kinds, groups]
    tokens: np.ndarray  # [micro_batches, groups]
    workspace_bytes: np.ndarray  # [groups] beside activations, while attention runs
    hidden: np.ndarray  # [micro_batches, 2] seconds of exchanges under this layer's compute


def layers_of(scenario: Scenario, tokens: np.ndarray, attention: np.ndarray) -> Layers:
    """Without any communication for attention. `tokens` [micro_batches, groups], `attention`
    [micro_batches, 2, groups] seconds."""
    num_micro_batches, num_groups = tokens.shape
    seconds = np.zeros((num_micro_batches, NUM_PASSES, len(KINDS), num_groups))
    seconds[:, FORWARD, LINEAR], seconds[:, BACKWARD, LINEAR] = scenario.linear_seconds(tokens)
    seconds[:, :, ATTENTION] = attention
    seconds[:, :, TENSOR_PARALLEL] = scenario.tensor_parallel_seconds(tokens)[:, None]
    hidden = np.zeros((num_micro_batches, NUM_PASSES))
    return Layers(seconds, tokens, np.zeros(num_groups), hidden)


def repeat_forward(layers: Layers) -> None:
    """Block recomputation: backward begins with the whole forward pass."""
    layers.seconds[:, BACKWARD] += layers.seconds[:, FORWARD]
    layers.hidden[:, BACKWARD] += layers.hidden[:, FORWARD]


def plain_attention(scenario: Scenario, documents: Documents, num_packs: int) -> np.ndarray:
    """[2, packs] seconds when a pack's documents are computed where they lie."""
    each = scenario.attention_cost().seconds(np.zeros_like(documents.lengths), documents.lengths)
    return np.stack([np.bincount(documents.pack, one, num_packs) for one in each])


def mirrored_attention(
    scenario: Scenario, documents: Documents, num_packs: int, cp: int
) -> np.ndarray:
    """[2, packs, cp] seconds under per-document context parallelism: rank j has runs j and
    2 * cp - 1 - j of the 2 * cp equal ones of every document."""
    if cp == 1:
        return plain_attention(scenario, documents, num_packs)[:, :, None]
    lengths, index = np.unique(documents.lengths, return_inverse=True)
    bounds = lengths * np.arange(2 * cp + 1)[:, None] // (2 * cp)  # [2 * cp + 1, lengths]
    cost = scenario.attention_cost()
    seconds = np.empty((NUM_PASSES, num_packs, cp))
    for rank in range(cp):
        runs = (rank, 2 * cp - 1 - rank)
        both = sum(cost.seconds(bounds[run], bounds[run + 1]) for run in runs)
        for pass_idx in (FORWARD, BACKWARD):
            seconds[pass_idx, :, rank] = np.bincount(
                documents.pack, both[pass_idx][index], num_packs
            )
    return seconds


@dataclass(frozen=True)
class KeyTransfer:
    """How the ranks of a context parallel group come by each other's keys."""

    exposed: Callable[[Scenario, np.ndarray, int, int, np.ndarray], np.ndarray]
    """(scenario, tokens of a pack, cp, pass, attention of the slowest rank) -> seconds."""
    copies: Callable[[int], float]
    """Of a rank's own keys, that it holds beside them at degree cp, gradients included."""


def context_parallel(
    scenario: Scenario, documents: Documents, tokens: np.ndarray, cp: int, keys: KeyTransfer
) -> Layers:
    """Packs `documents.pack` [micro_batches * packs], each on `cp` groups that follow one another;
    `tokens` [micro_batches, packs] in each."""
    num_micro_batches, num_packs = tokens.shape
    attention = mirrored_attention(scenario, documents, tokens.size, cp)
    attention = attention.reshape(NUM_PASSES, num_micro_batches, num_packs, cp)
    by_group = attention.swapaxes(0, 1).reshape(num_micro_batches, NUM_PASSES, -1)
    layers = layers_of(scenario, np.repeat(tokens / cp, cp, axis=1), by_group)
    if cp == 1:
        return layers
    slowest = attention.max(axis=-1, keepdims=True)
    waiting = slowest - attention
    for pass_idx in (FORWARD, BACKWARD):
        exchange = keys.exposed(scenario, tokens, cp, pass_idx, slowest[pass_idx, :, :, 0])
        layers.seconds[:, pass_idx, EXCHANGE] = np.repeat(exchange, cp, axis=1)
        layers.seconds[:, pass_idx, WAITING] = waiting[pass_idx].reshape(num_micro_batches, -1)
    workspace = tokens.max(axis=0) / cp * workspace_of_token(scenario, cp, keys)
    layers.workspace_bytes = np.repeat(workspace, cp)
    return layers


def workspace_of_token(scenario: Scenario, cp: int, keys: KeyTransfer) -> float:
    """Bytes beside activations for each token of a group."""
    return keys.copies(cp) * _key_bytes(scenario) if cp > 1 else 0.0


def _key_bytes(scenario: Scenario) -> float:
    """k and v of one token on one rank."""
    shape = scenario.attention_shape
    return 2.0 * shape.heads_kv * shape.head_dim * shape.element_bytes


def _gather_exchange(
    scenario: Scenario, tokens: np.ndarray, cp: int, pass_idx: int, slowest: np.ndarray
) -> np.ndarray:
    gather = np.vectorize(
        lambda num_bytes: scenario.machine.gather_seconds(num_bytes, cp, scenario.groups_per_node),
        otypes=[float],
    )(_key_bytes(scenario) * tokens)
    return gather if pass_idx == FORWARD else 2 * gather


def _ring_exchange(
    scenario: Scenario, tokens: np.ndarray, cp: int, pass_idx: int, slowest: np.ndarray
) -> np.ndarray:
    """What cp - 1 hops take beyond the attention of the step they run beside."""
    num_bytes = _key_bytes(scenario) * tokens / cp * (1 if pass_idx == FORWARD else 2)
    inside = cp <= scenario.groups_per_node
    hop = scenario.machine.send_seconds(num_bytes, inside)
    return (cp - 1) * np.maximum(0.0, hop - slowest / cp)


ALL_GATHER = KeyTransfer(_gather_exchange, copies=lambda cp: 2.0 * cp)
RING = KeyTransfer(_ring_exchange, copies=lambda cp: 4.0)  # two neighbours'


def add_parameters(scenario: Scenario, layers: Layers) -> None:
    """What FSDP's collectives take beyond the compute that hides them, and its meetings: in a
    micro-batch no rank gets far ahead of another."""
    if scenario.sharding != "fsdp" or scenario.groups == 1:
        return
    machine, per_node = scenario.machine, scenario.groups_per_node
    params = scenario.model.layer_params / scenario.tp
    gather = machine.gather_seconds(ELEMENT_BYTES * params, scenario.groups, per_node)
    reduce = machine.gather_seconds(GRADIENT_BYTES * params, scenario.groups, per_node)
    seconds = layers.seconds
    for pass_idx, collective in ((FORWARD, gather), (BACKWARD, gather + reduce)):
        compute = seconds[:, pass_idx, [LINEAR, ATTENTION]].sum(axis=1)  # [micro_batches, groups]
        exposed = np.maximum(0.0, collective + layers.hidden[:, pass_idx, None] - compute)
        edge = gather if pass_idx == FORWARD else reduce  # the first gather, the last reduction
        seconds[:, pass_idx, PARAMETERS] = np.where(
            seconds[:, pass_idx, LINEAR] > 0,  # others have no parameters to wait for
            np.minimum(exposed, collective) + edge / scenario.stage_layers,
            0.0,
        )
    total = seconds.sum(axis=2)  # [micro_batches, 2, groups]
    seconds[:, :, WAITING] += total.max(axis=2, keepdims=True) - total
