"""Times of one layer on every rank: plain packing and context parallelism.

A layer's times are float64 [micro_batches, 2, kinds, groups], seconds: forward and backward, by
KINDS. What a rank waits for inside the layer, for its partners, is one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.planning.cluster import input_row_bytes
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.packing import Documents
from distca.simulate.scenario import ELEMENT_BYTES, GRADIENT_BYTES, Scenario

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
    return Layers(seconds, tokens, np.zeros(num_groups), np.zeros(seconds.shape[:2]))


def plain_attention(scenario: Scenario, documents: Documents, num_packs: int) -> np.ndarray:
    """[2, packs] seconds when a pack's documents are computed where they lie."""
    return mirrored_attention(scenario, documents, num_packs, cp=1)[:, :, 0]


def mirrored_attention(
    scenario: Scenario, documents: Documents, num_packs: int, cp: int
) -> np.ndarray:
    """[2, packs, cp] seconds under per-document context parallelism: rank j has runs j and
    2 * cp - 1 - j of the 2 * cp equal ones of every document; the only rank has all of it."""
    lengths, index = np.unique(documents.lengths, return_inverse=True)
    bounds = lengths * np.arange(2 * cp + 1)[:, None] // (2 * cp)  # [2 * cp + 1, lengths]
    cost = scenario.attention_cost()
    seconds = np.empty((NUM_PASSES, num_packs, cp))
    for rank in range(cp):
        runs = [(rank, rank + 1), (2 * cp - 1 - rank, 2 * cp - rank)] if cp > 1 else [(0, 2)]
        of_lengths = sum(cost.seconds(bounds[begin], bounds[end]) for begin, end in runs)
        seconds[:, :, rank] = [
            np.bincount(documents.pack, each[index], num_packs) for each in of_lengths
        ]
    return seconds


# How the ranks of a context parallel group come by each other's keys: (scenario, bytes of each
# pack's keys, cp, attention of its slowest rank [2, ...]) -> exposed seconds [2, ...].
KeyExchange = Callable[[Scenario, np.ndarray, int, np.ndarray], np.ndarray]


def all_gather(
    scenario: Scenario, num_bytes: np.ndarray, cp: int, slowest: np.ndarray
) -> np.ndarray:
    """Keys are gathered in both passes, and their gradients reduced and scattered."""
    gather = scenario.machine.gather_seconds(num_bytes, cp, scenario.groups_per_node)
    return np.stack([gather, 2 * gather])


def ring(scenario: Scenario, num_bytes: np.ndarray, cp: int, slowest: np.ndarray) -> np.ndarray:
    """What cp - 1 hops take beyond the attention of the step they run beside."""
    inside = cp <= scenario.groups_per_node
    hops = [scenario.machine.send_seconds(count * num_bytes / cp, inside) for count in (1, 2)]
    return (cp - 1) * np.maximum(0.0, np.stack(hops) - slowest / cp)


def workspace_of_token(scenario: Scenario, cp: int, keys: KeyExchange) -> float:
    """Bytes beside activations for each token of a group: keys and their gradients, of all ranks or
    of two neighbours."""
    copies = 2.0 * (cp if keys is all_gather else 2)
    return copies * input_row_bytes(scenario.attention_shape)[1] if cp > 1 else 0.0


def context_parallel(
    scenario: Scenario, documents: Documents, tokens: np.ndarray, cp: int, keys: KeyExchange
) -> Layers:
    """Packs `documents.pack` [micro_batches * packs], each on `cp` groups that follow one another;
    `tokens` [micro_batches, packs] in each."""
    attention = mirrored_attention(scenario, documents, tokens.size, cp)
    attention = attention.reshape(NUM_PASSES, *tokens.shape, cp)

    def by_group(seconds: np.ndarray) -> np.ndarray:
        """[micro_batches, 2, groups] of [2, micro_batches, packs, cp]"""
        return seconds.swapaxes(0, 1).reshape(len(tokens), NUM_PASSES, -1)

    layers = layers_of(scenario, np.repeat(tokens / cp, cp, axis=1), by_group(attention))
    if cp > 1:
        slowest = attention.max(axis=-1, keepdims=True)
        num_bytes = input_row_bytes(scenario.attention_shape)[1] * tokens
        exchange = keys(scenario, num_bytes, cp, slowest[..., 0])
        layers.seconds[:, :, EXCHANGE] = by_group(exchange[..., None].repeat(cp, axis=-1))
        layers.seconds[:, :, WAITING] = by_group(slowest - attention)
        workspace = tokens.max(axis=0) / cp * workspace_of_token(scenario, cp, keys)
        layers.workspace_bytes = np.repeat(workspace, cp)
    return layers


def add_parameters(scenario: Scenario, layers: Layers) -> None:
    """What FSDP's collectives take beyond the compute that hides them, and its meetings: in a
    micro-batch no rank gets far ahead of another."""
    if scenario.sharding != "fsdp" or scenario.groups == 1:
        return
    params = scenario.model.layer_params / scenario.tp
    gather, reduce = (
        scenario.machine.gather_seconds(size * params, scenario.groups, scenario.groups_per_node)
        for size in (ELEMENT_BYTES, GRADIENT_BYTES)
    )
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
