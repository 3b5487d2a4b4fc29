"""Times of one layer on every rank: plain packing and context parallelism.

A layer's times are float64 [micro_batches, 2, kinds, groups], seconds: forward and backward, by
KINDS. What a rank waits for inside the layer, for its partners, is one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
    beside: np.ndarray  # [micro_batches, 2] seconds of exchanges beside this layer's compute


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


class KeyExchange(NamedTuple):
    """How the ranks of a context parallel group get each other's keys."""

    # (scenario, bytes of each pack's keys, cp, attention of its slowest rank [2, ...]) -> exposed
    # seconds [2, ...]
    seconds: Callable[[Scenario, np.ndarray, int, np.ndarray], np.ndarray]
    # (scenario, cp) -> keys and gradients that a rank holds, as a multiple of its own keys
    copies: Callable[[Scenario, int], float]


def _gather(
    scenario: Scenario, num_bytes: np.ndarray, cp: int, slowest: np.ndarray, backward: int
) -> np.ndarray:
    """Return the exposed seconds of gathers: one forward, and `backward` collectives backward."""
    gather = scenario.machine.gather_seconds(num_bytes, cp, scenario.groups_per_node)
    return np.stack([gather, backward * gather])


def _hops(scenario: Scenario, num_bytes: np.ndarray, cp: int, slowest: np.ndarray) -> np.ndarray:
    """What cp - 1 hops take beyond the attention of the step they run beside."""
    inside = cp <= scenario.groups_per_node
    hops = [scenario.machine.send_seconds(count * num_bytes / cp, inside) for count in (1, 2)]
    return (cp - 1) * np.maximum(0.0, np.stack(hops) - slowest / cp)


# A rank holds the gradients of one layer's keys, and gathered keys. It keeps the keys of all layers
# for the backward pass (as in benchmarks/context_parallel.py), or gathers those of each layer again
# (as in Llama 3's training). In a ring it holds keys and gradients of two neighbours.
GATHER_ONCE = KeyExchange(partial(_gather, backward=1), lambda s, cp: cp * (s.live_layers + 1))
GATHER_TWICE = KeyExchange(partial(_gather, backward=2), lambda s, cp: 2 * cp)
RING = KeyExchange(_hops, lambda s, cp: 4)


def workspace_of_token(scenario: Scenario, cp: int, keys: KeyExchange) -> float:
    """Return the bytes that each token of a group needs beside activations."""
    copies = keys.copies(scenario, cp) if cp > 1 else 0.0
    return copies * input_row_bytes(scenario.attention_shape)[1]


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
        exchange = keys.seconds(scenario, num_bytes, cp, slowest[..., 0])
        layers.seconds[:, :, EXCHANGE] = by_group(exchange[..., None].repeat(cp, axis=-1))
        layers.seconds[:, :, WAITING] = by_group(slowest - attention)
        workspace = tokens.max(axis=0) / cp * workspace_of_token(scenario, cp, keys)
        layers.workspace_bytes = np.repeat(workspace, cp)
    return layers


def fsdp_seconds(scenario: Scenario, num_params: float) -> tuple[float, float]:
    """Return the seconds of FSDP's all-gather and reduce-scatter for a module."""
    if scenario.sharding != "fsdp" or scenario.groups == 1:
        return 0.0, 0.0
    gather, reduce = (
        scenario.machine.gather_seconds(
            size * num_params / scenario.tp, scenario.groups, scenario.groups_per_node
        )
        for size in (ELEMENT_BYTES, GRADIENT_BYTES)
    )
    return gather, reduce


def fsdp_seconds_of_layer(scenario: Scenario, pass_idx: int) -> float:
    gather, reduce = fsdp_seconds(scenario, scenario.model.layer_params)
    return gather if pass_idx == FORWARD else gather + reduce


def add_parameters(scenario: Scenario, layers: Layers) -> None:
    """Add the time of FSDP's collectives that neither compute nor waits for attention hide. Also
    add waits of ranks for each other: in a micro-batch no rank gets far ahead of another."""
    if scenario.sharding != "fsdp" or scenario.groups == 1:
        return
    modules = scenario.model.layer_params, scenario.model.edge_params / scenario.pp
    # Nothing hides the first gathers and the last reductions: those of embedding, head and one
    # layer.
    edges = np.sum([fsdp_seconds(scenario, each) for each in modules], axis=0)
    seconds = layers.seconds
    for pass_idx in (FORWARD, BACKWARD):
        collective = fsdp_seconds_of_layer(scenario, pass_idx)
        # [micro_batches, groups]
        hiding = seconds[:, pass_idx, [LINEAR, ATTENTION, WAITING]].sum(axis=1)
        exposed = np.maximum(0.0, collective + layers.beside[:, pass_idx, None] - hiding)
        edge = edges[pass_idx] / scenario.stage_layers
        seconds[:, pass_idx, PARAMETERS] = np.minimum(exposed, collective) + edge
    total = seconds.sum(axis=2)  # [micro_batches, 2, groups]
    seconds[:, :, WAITING] += total.max(axis=2, keepdims=True) - total
