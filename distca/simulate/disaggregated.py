"""Times of one layer under a plan: what every rank computes, sends and waits for.

Ranks of the planner are tensor parallel groups: heads, and with them seconds and bytes, are those
of one GPU of a group.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from distca.planning.cluster import Cluster, held_row_bytes, input_row_bytes
from distca.planning.packs import Pack, cut_pack
from distca.planning.plan import CAUSAL, balance, tasks_of
from distca.planning.task_rows import rows_of_tasks
from distca.simulate.layers import ATTENTION, EXCHANGE, KINDS, LINEAR, WAITING
from distca.simulate.machine import BACKWARD, FORWARD, TableCost, TileCost
from distca.simulate.scenario import Scenario


def pack_on(lengths: np.ndarray, ranks: np.ndarray, num_ranks: int) -> Pack:
    """Return documents laid out one after another over `ranks`. These hold equally many tokens (up
    to one). All other ranks of `num_ranks` hold none."""
    pack = cut_pack(lengths, ranks.size, int(lengths.sum()), crossing=True)
    pack.pieces[:, 0] = ranks[pack.pieces[:, 0]]
    return replace(pack, num_ranks=num_ranks)


@dataclass(frozen=True)
class Work:
    """A plan in numbers, of one layer."""

    home_seconds: np.ndarray  # [2, ranks] of tasks whose rows and keys are the server's own
    visiting_seconds: np.ndarray  # [2, ranks] of the others
    home: np.ndarray  # [pairs] rank whose rows travel
    server: np.ndarray  # [pairs] and where to
    query_rows: np.ndarray  # [pairs]
    key_rows: np.ndarray  # [pairs] once a document and server

    @property
    def seconds(self) -> np.ndarray:
        """[2, ranks]"""
        return self.home_seconds + self.visiting_seconds


def cluster_of(
    scenario: Scenario,
    num_ranks: int,
    speeds: tuple[float, ...] | None = None,
    link_factor: float = 1.0,
) -> Cluster:
    """What the planner is told, links `link_factor` times as fast as they are."""
    machine = scenario.machine
    return Cluster(
        num_ranks,
        speeds=speeds,
        ranks_per_node=min(scenario.groups_per_node, num_ranks),
        link_bytes_per_second=link_factor * machine.inside.bytes_per_second,
        node_link_bytes_per_second=link_factor * machine.between.bytes_per_second,
    )


def plan(
    scenario: Scenario, pack: Pack, cluster: Cluster, cost: TileCost | TableCost
) -> np.ndarray:
    """Tasks, int64 [num_tasks, 4]: document, first query, last query + 1, server."""
    shape, tolerance = scenario.attention_shape, scenario.tolerance
    encoded, _ = balance(pack.as_tensor(), CAUSAL, cost.tensor(), shape, cluster, tolerance)
    return tasks_of(encoded)[:, :4].numpy()


def work_of(pack: Pack, tasks: np.ndarray, cost: TileCost | TableCost) -> Work:
    """Count the rows of tasks, as `plan` returns them."""
    _, begin, end, server = tasks.T
    rows = rows_of_tasks(pack, tasks, CAUSAL)
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
    counts = (np.bincount(at, each[moves], pairs.size) for each in (rows.queries, rows.new_keys))
    return Work(*by_place, *np.divmod(pairs, pack.num_ranks), *counts)


def held_bytes(scenario: Scenario, work: Work) -> np.ndarray:
    """[ranks] Rows of other homes that a server holds for one layer."""
    query, key = held_row_bytes(scenario.attention_shape)
    num_bytes = work.query_rows * query + work.key_rows * key
    return np.bincount(work.server, num_bytes, work.home_seconds.shape[1])


def row_bytes(scenario: Scenario) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """By pass, bytes of a (query row, key row) on their way out and home."""
    q, kv = input_row_bytes(scenario.attention_shape)
    lse = 4 * scenario.attention_shape.heads_q
    return {
        FORWARD: ((q, kv), (q + lse, 0)),
        BACKWARD: ((2 * q + 2 * lse, kv), (q, kv)),
    }


def exchange_seconds(
    scenario: Scenario, work: Work, pass_idx: int, share: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When `share` of the rows travels, each [ranks], latencies included: when all that visits a
    server is there; then how long until its results have left, and a home's have come."""
    num_ranks = work.home_seconds.shape[1]
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

    out, back = (
        share * work.query_rows * query + share * work.key_rows * key
        for query, key in row_bytes(scenario)[pass_idx]
    )
    arrival = seconds(work.server, out)
    np.maximum.at(arrival, work.server, seconds(work.home, out)[work.home])
    return arrival, seconds(work.server, back), seconds(work.home, back)


# Seconds of the layer [kinds, ranks], and of exchanges hidden behind the layer's compute.
Times = tuple[np.ndarray, float]
# (scenario, work, pass, seconds of a layer's linear work on every rank [ranks]).
Attend = Callable[[Scenario, Work, int, np.ndarray], Times]


def _by_kind(linear, attention, exchange, waiting) -> np.ndarray:
    """[kinds, ranks]"""
    times = np.zeros((len(KINDS), attention.size))
    kinds = [LINEAR, ATTENTION, EXCHANGE, WAITING]
    times[kinds] = np.broadcast_arrays(linear, attention, exchange, waiting)
    return times


def in_turn(scenario: Scenario, work: Work, pass_idx: int, linear: np.ndarray) -> Times:
    """In turn: linear work, then inputs travel beside home tasks, then visiting tasks, then
    results."""
    arrival, sent, received = exchange_seconds(scenario, work, pass_idx)
    at_home, visiting = work.home_seconds[pass_idx], work.visiting_seconds[pass_idx]
    stall = np.where(visiting > 0, np.maximum(0.0, arrival - at_home), 0.0)
    done = at_home + stall + visiting
    finished = done + sent
    arrived = done[work.server] + np.maximum(sent[work.server], received[work.home])
    np.maximum.at(finished, work.home, arrived)
    end = finished.max(initial=0.0)
    results = np.minimum(np.maximum(sent, received), end - done)
    waiting = end - done - results + linear.max() - linear
    return _by_kind(linear, at_home + visiting, stall + results, waiting), 0.0


def ping_pong(scenario: Scenario, work: Work, pass_idx: int, linear: np.ndarray) -> Times:
    """Of two halves: both halves' work, and what of a half's exchanges is longer than the linear
    work of the other."""
    attention, exchange = work.seconds[pass_idx], _exchange_of_half(scenario, work, pass_idx)
    hidden = min(exchange, linear.max() / 2)
    waiting = attention.max() - attention + linear.max() - linear
    return _by_kind(linear, attention, 2 * (exchange - hidden), waiting), 2 * hidden


def dedicated_ping_pong(scenario: Scenario, work: Work, pass_idx: int, linear: np.ndarray) -> Times:
    """When ranks with tokens and servers work on different halves at the same time. Two halves go
    round; each rank's work and the way round bound how often."""
    attention, exchange = work.seconds[pass_idx], _exchange_of_half(scenario, work, pass_idx)
    own = linear + attention
    round_trip = linear.max() / 2 + exchange + attention.max() / 2
    exposed = max(own.max(), round_trip) - own.max()
    return _by_kind(linear, attention, exposed, own.max() - own), 2 * exchange - exposed


def _exchange_of_half(scenario: Scenario, work: Work, pass_idx: int) -> float:
    arrival, sent, received = exchange_seconds(scenario, work, pass_idx, share=0.5)
    return arrival.max() + max(sent.max(), received.max())
