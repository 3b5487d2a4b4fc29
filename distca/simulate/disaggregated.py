"""Times of one layer under a plan: what every rank computes, sends and waits for.

Ranks of the planner are tensor parallel groups: heads, and with them seconds and bytes, are those
of one GPU of a group.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from distca.planning.cluster import (
    Cluster,
    early_parts,
    held_row_bytes,
    input_row_bytes,
    key_parts_of,
    parts_of,
    parts_worth_taking,
)
from distca.planning.halves import FIRST_PART, first_part_of, hidden_by_halves
from distca.planning.packs import Pack, cut_pack
from distca.planning.plan import CAUSAL
from distca.planning.solver import balance, tasks_of
from distca.planning.task_rows import rows_of_tasks
from distca.simulate.layers import (
    ATTENTION,
    EXCHANGE,
    KINDS,
    WAITING,
    fsdp_seconds_of_layer,
)
from distca.simulate.machine import BACKWARD, FORWARD, TableCost, TileCost
from distca.simulate.scenario import Scenario


def pack_on(lengths: np.ndarray, num_ranks: int, runs: int = 1) -> Pack:
    """Return documents that lie one after another over `num_ranks` ranks. With two `runs`, they lie
    over all ranks once and then again, as distca.shard_batch cuts them."""
    pack = cut_pack(lengths, runs * num_ranks, int(lengths.sum()), crossing=True)
    pieces = pack.pieces
    pieces[:, 0] %= num_ranks
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    in_order = pieces[pieces[:, 2] == 0, 1]  # documents are counted by their first pieces
    pieces[:, 1] = np.argsort(in_order)[pieces[:, 1]]
    return Pack(num_ranks, pack.num_documents, pieces)


def joined(packs: Sequence[Pack]) -> Pack:
    """Return packs side by side, on the ranks of all of them."""
    firsts = np.cumsum([(0, 0), *((each.num_ranks, each.num_documents) for each in packs)], axis=0)
    pieces = [each.pieces + [*first, 0, 0] for each, first in zip(packs, firsts[:-1], strict=True)]
    return Pack(*firsts[-1].tolist(), np.concatenate(pieces))


@dataclass(frozen=True)
class Work:
    """A plan in numbers, of one layer."""

    home_seconds: np.ndarray  # [2, ranks] of tasks whose rows and keys are the server's own
    visiting_seconds: np.ndarray  # [2, ranks] of the others
    home: np.ndarray  # [pairs] rank whose rows travel
    server: np.ndarray  # [pairs] and where to
    query_rows: np.ndarray  # [pairs]
    key_rows: np.ndarray  # [pairs] once a document and server
    kept_query_rows: np.ndarray  # [pairs] those whose q the server keeps for the backward pass
    kept_key_rows: np.ndarray  # [pairs] those whose k and v it keeps
    num_parts: int = 1  # in which rows travel, each with some of the heads
    early_part: np.ndarray | float = 0.5  # [ranks] of home tasks, before visiting ones
    first_part: float = FIRST_PART  # of the tokens, in the first half under ping-pong
    starts: np.ndarray | float = 0.0  # [2, ranks] of attention, after that of the first rank

    def start(self, pass_idx: int) -> np.ndarray:
        """[ranks]"""
        return np.broadcast_to(self.starts, self.home_seconds.shape)[pass_idx]

    @property
    def seconds(self) -> np.ndarray:
        """[2, ranks]"""
        return self.home_seconds + self.visiting_seconds


def cluster_of(scenario: Scenario, in_halves: Pack | None = None) -> Cluster:
    """Return the planner's cluster. Under ping-pong, `in_halves` is the pack to plan."""
    machine, hidden = scenario.machine, {}
    if in_halves is not None:
        before = scenario.seconds_before_attention()
        hidden = hidden_by_halves(in_halves.as_tensor(), scenario.groups, CAUSAL, before)
    cap_bytes, gain = scenario.kept_cap
    return Cluster(
        scenario.groups,
        kept_cap_bytes=cap_bytes,
        kept_gain=gain,
        ranks_per_node=min(scenario.groups_per_node, scenario.groups),
        link_bytes_per_second=machine.inside.bytes_per_second,
        node_link_bytes_per_second=machine.between.bytes_per_second,
        link_room=link_room_of(scenario),
        **(parts_of(scenario.attention_shape) | hidden),
    )


def link_room_of(scenario: Scenario) -> tuple[float, float]:
    """Return Cluster.link_room, where FSDP's is the only other traffic."""
    forward, backward = (
        sum(scenario.seconds_around_attention(each)) - fsdp_seconds_of_layer(scenario, each)
        for each in (FORWARD, BACKWARD)
    )
    return forward, backward


def plan(
    scenario: Scenario, pack: Pack, cluster: Cluster, cost: TileCost | TableCost
) -> tuple[np.ndarray, int, np.ndarray, Tensor, float]:
    """Return tasks, int64 [num_tasks, 5] (see tasks_of), the number of parts in which their rows
    travel, early_parts, the loads of ranks, and the planner's processor time in seconds."""
    shape, tolerance = scenario.attention_shape, scenario.tolerance
    start = time.thread_time()
    encoded, loads = balance(pack.as_tensor(), CAUSAL, cost.tensor(), shape, cluster, tolerance)
    seconds = time.thread_time() - start
    num_parts = parts_worth_taking(cluster, loads)
    early = early_parts(cluster, loads, num_parts).numpy()
    return tasks_of(encoded).numpy(), num_parts, early, loads, seconds


def work_of(
    pack: Pack,
    tasks: np.ndarray,
    cost: TileCost | TableCost,
    num_parts: int = 1,
    early_part: np.ndarray | float = 0.5,
) -> Work:
    """Count the rows of tasks, as `plan` returns them."""
    _, begin, end, server, is_kept = tasks.T
    rows = rows_of_tasks(pack, tasks[:, :4], CAUSAL)
    away = rows.rank != server[rows.task]
    is_visiting = np.zeros(len(tasks), dtype=bool)
    is_visiting[rows.task[away & (rows.keys > 0)]] = True
    seconds = cost.seconds(begin, end)
    by_place = [
        np.stack([np.bincount(server[chosen], one[chosen], pack.num_ranks) for one in seconds])
        for chosen in (~is_visiting, is_visiting)
    ]
    moves = away & (rows.queries + rows.new_keys > 0)
    of_pair = rows.rank[moves] * pack.num_ranks + server[rows.task[moves]]
    pairs, at = np.unique(of_pair, return_inverse=True)
    counts = [
        np.bincount(at, each[moves] * share[rows.task[moves]], pairs.size)
        for share in (np.ones(len(tasks)), is_kept)
        for each in (rows.queries, rows.new_keys)
    ]
    first = first_part_of(pack.as_tensor())
    rest = num_parts, early_part, first
    return Work(*by_place, *np.divmod(pairs, pack.num_ranks), *counts, *rest)


def held_bytes(scenario: Scenario, work: Work) -> np.ndarray:
    """Return the bytes of other homes' rows that a server holds, [ranks]: those of one layer, and
    the inputs that it keeps of all layers."""
    query, key = held_row_bytes(scenario.attention_shape)
    kept_query, kept_key = input_row_bytes(scenario.attention_shape)
    kept = work.kept_query_rows * kept_query + work.kept_key_rows * kept_key
    num_bytes = work.query_rows * query + work.key_rows * key + scenario.live_layers * kept
    return np.bincount(work.server, num_bytes, scenario.groups)


@dataclass(frozen=True)
class Share:
    """The fraction of a layer's rows and heads that travels together."""

    queries: float = 1.0
    keys: float = 1.0
    key_gradients: float = 1.0


def moved_bytes(
    scenario: Scenario, work: Work, pass_idx: int, share: Share
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that travel to servers, and those that travel home, each [pairs]."""
    q, out, kv = scenario.attention_shape.tensor_row_bytes()
    lse = 4 * scenario.attention_shape.heads_q
    queries, keys = share.queries * work.query_rows, share.keys * work.key_rows
    if pass_idx == FORWARD:
        return queries * q + keys * kv, queries * (out + lse)
    kept_queries, kept_keys = share.queries * work.kept_query_rows, share.keys * work.kept_key_rows
    to_servers = queries * (q + out + 2 * lse) - kept_queries * q + (keys - kept_keys) * kv
    return to_servers, queries * q + share.key_gradients * work.key_rows * kv


def exchange_seconds(
    scenario: Scenario, work: Work, pass_idx: int, share: Share
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds for the transfers of `share`, latencies included, as three arrays [ranks]:
    until all inputs of a server have arrived, to send the results of a server, and to receive the
    results of a home rank."""
    num_ranks = scenario.groups
    machine, per_node = scenario.machine, scenario.groups_per_node
    inside = work.home // per_node == work.server // per_node

    def seconds(rank: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        """Of all that goes through a rank's links in one direction; both links work at once."""
        by_link = []
        for chosen, link in ((inside, machine.inside), (~inside, machine.between)):
            total = np.bincount(rank[chosen], num_bytes[chosen], num_ranks)
            latency = link.latency_s * (np.bincount(rank[chosen], minlength=num_ranks) > 0)
            by_link.append(latency + total / link.bytes_per_second)
        return np.maximum(*by_link)

    out, back = moved_bytes(scenario, work, pass_idx, share)
    arrival = seconds(work.server, out)
    np.maximum.at(arrival, work.server, seconds(work.home, out)[work.home])
    return arrival, seconds(work.server, back), seconds(work.home, back)


# Seconds of a layer's attention [kinds, ranks], and of the exchanges beside the layer's compute.
Times = tuple[np.ndarray, float]
Attend = Callable[[Scenario, Work, int], Times]  # (scenario, work of a plan, pass) -> times


def _by_kind(attention, exchange, waiting) -> np.ndarray:
    """[kinds, ranks]"""
    times = np.zeros((len(KINDS), attention.size))
    times[[ATTENTION, EXCHANGE, WAITING]] = np.broadcast_arrays(attention, exchange, waiting)
    return times


def shares_of_parts(scenario: Scenario, num_parts: int) -> list[Share]:
    """Return what travels in each part. If consecutive parts share key heads, the first of them
    brings the key heads, and the last takes their gradients home."""
    num_key_parts = key_parts_of(scenario.attention_shape, num_parts)
    sharing = num_parts // num_key_parts
    return [
        Share(
            1 / num_parts,
            (part % sharing == 0) / num_key_parts,
            ((part + 1) % sharing == 0) / num_key_parts,
        )
        for part in range(num_parts)
    ]


def in_turn(scenario: Scenario, work: Work, pass_idx: int) -> Times:
    """Return the times of a layer. A rank runs early home tasks while inputs travel. Visiting tasks
    follow, part by part as they arrive. Then the other home tasks run while the last results
    travel."""
    shares = shares_of_parts(scenario, work.num_parts)
    exchanges = [exchange_seconds(scenario, work, pass_idx, share) for share in shares]
    arrivals = np.cumsum([arrival for arrival, _, _ in exchanges], axis=0)
    home, visiting = work.home_seconds[pass_idx], work.visiting_seconds[pass_idx]
    early = work.early_part * home
    late = home - early
    start = work.start(pass_idx)
    sent_at = np.zeros_like(home)  # by the last home of a server's rows
    np.maximum.at(sent_at, work.server, start[work.home])
    served, left, arrived = start + early, np.zeros_like(home), np.zeros(work.home.size)
    for arrival, (_, sent, received) in zip(arrivals, exchanges, strict=True):
        there = np.where(visiting > 0, sent_at + arrival, 0.0)
        served = np.maximum(served, there) + visiting / work.num_parts
        left = np.maximum.reduce([left, served, arrivals[-1]]) + sent
        back = np.maximum(sent[work.server], received[work.home])
        arrived = np.maximum(arrived, served[work.server]) + back
    finished = np.maximum(served + late, left)
    np.maximum.at(finished, work.home, arrived)
    end = finished.max(initial=0.0)
    results = np.minimum(np.maximum(0.0, np.maximum(sent, received) - late), end - served - late)
    exposed = np.maximum(0.0, served - start - early - visiting) + results
    exchange = sum(
        arrival.max() + max(sent.max(), received.max()) for arrival, sent, received in exchanges
    )
    attention = home + visiting
    waiting = end - start - attention - exposed
    return _by_kind(attention, exposed, waiting), max(0.0, exchange - exposed.max())


def ping_pong(scenario: Scenario, work: Work, pass_idx: int) -> Times:
    """Return the times of a layer in ping-pong. The exchange of the first half runs beside the
    second half's attention and work before attention. The exchange of the second half runs beside
    the first half's attention and work after it. Rows of a half travel in one part. FSDP's
    collectives share the links."""
    attention, others = work.seconds[pass_idx], scenario.seconds_around_attention(pass_idx)
    slower = 1 + min(
        1.0, fsdp_seconds_of_layer(scenario, pass_idx) / (sum(others) + attention.mean())
    )
    first, total, exposed = work.first_part, 0.0, 0.0
    for part, work_beside in ((first, others[0]), (1 - first, others[1])):
        arrival, sent, received = exchange_seconds(
            scenario, work, pass_idx, Share(part, part, part)
        )
        alone = arrival + np.maximum(sent, received)
        total += alone.max()
        exposed += max(0.0, slower * alone.max() - (1 - part) * (work_beside + attention.mean()))
    ends = work.start(pass_idx) + attention
    waiting = ends.max() - ends
    return _by_kind(attention, exposed, waiting), max(0.0, total - exposed)
