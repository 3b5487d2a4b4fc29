"""Times of one layer under a plan: what every rank computes, sends and waits for.

Ranks of the planner are tensor parallel groups: heads, and with them seconds and bytes, are those
of one GPU of a group.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from distca.planning.cluster import Cluster, held_row_bytes
from distca.planning.packs import Pack, cut_pack
from distca.planning.plan import CAUSAL, balance, tasks_of
from distca.planning.task_rows import rows_of_tasks
from distca.simulate.layers import (
    ATTENTION,
    EXCHANGE,
    KINDS,
    LINEAR,
    WAITING,
)
from distca.simulate.machine import BACKWARD, FORWARD, AttentionCost
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


def plan(scenario: Scenario, pack: Pack, cluster: Cluster, cost: AttentionCost) -> np.ndarray:
    """Tasks, int64 [num_tasks, 4]: document, first query, last query + 1, server."""
    shape, tolerance = scenario.attention_shape, scenario.tolerance
    encoded, _ = balance(pack.as_tensor(), CAUSAL, cost.tensor(), shape, cluster, tolerance)
    return tasks_of(encoded)[:, :4].numpy()


def work_of(pack: Pack, tasks: np.ndarray, cost: AttentionCost) -> Work:
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


@dataclass(frozen=True)
class Exchanges:
    """Seconds of a pass's dispatch and combine on every rank, [ranks], latencies included."""

    arrival: np.ndarray  # when all that visits a server is there
    sent: np.ndarray  # results have left the server
    received: np.ndarray  # results have come home


def row_bytes(scenario: Scenario) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """By pass, bytes of a (query row, key row) on their way out and home."""
    shape = scenario.attention_shape
    q = shape.heads_q * shape.head_dim * shape.element_bytes
    kv = 2 * shape.heads_kv * shape.head_dim * shape.element_bytes
    lse = 4 * shape.heads_q
    return {
        FORWARD: ((q, kv), (q + lse, 0)),
        BACKWARD: ((2 * q + 2 * lse, kv), (q, kv)),
    }


def exchanges_of(scenario: Scenario, work: Work, pass_idx: int, share: float = 1.0) -> Exchanges:
    """`share` of the plan's rows travels at a time."""
    num_ranks = work.home_seconds.shape[1]
    (q_out, kv_out), (q_home, kv_home) = row_bytes(scenario)[pass_idx]
    rows = (work.query_rows * share, work.key_rows * share)
    machine, per_node = scenario.machine, scenario.groups_per_node
    inside = work.home // per_node == work.server // per_node

    def seconds(rank: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        """Of all that goes through a rank's links in one direction; both links work at once."""
        links = ((inside, machine.inside), (~inside, machine.between))
        by_link = []
        for chosen, link in links:
            total = np.bincount(rank[chosen], num_bytes[chosen], num_ranks)
            latency = link.latency_s * (np.bincount(rank[chosen], minlength=num_ranks) > 0)
            by_link.append(latency + total / link.bytes_per_second)
        return np.maximum(*by_link)

    out = rows[0] * q_out + rows[1] * kv_out
    leaving, arriving = seconds(work.home, out), seconds(work.server, out)
    arrival = arriving.copy()
    np.maximum.at(arrival, work.server, leaving[work.home])
    back = rows[0] * q_home + rows[1] * kv_home
    return Exchanges(arrival, seconds(work.server, back), seconds(work.home, back))


# (scenario, work, pass, linear work of a layer on every rank [ranks]) -> (seconds of the layer
# [kinds, ranks], of exchanges hidden behind the layer's compute).
Attend = Callable[[Scenario, Work, int, np.ndarray], tuple[np.ndarray, float]]


def in_turn(
    scenario: Scenario, work: Work, pass_idx: int, linear: np.ndarray
) -> tuple[np.ndarray, float]:
    """Without ping-pong (see Attend): all linear work, then inputs travel beside home tasks, then
    visiting tasks, then results."""
    moved = exchanges_of(scenario, work, pass_idx)
    at_home, visiting = work.home_seconds[pass_idx], work.visiting_seconds[pass_idx]
    stall = np.where(visiting > 0, np.maximum(0.0, moved.arrival - at_home), 0.0)
    done = at_home + stall + visiting
    finished = done + moved.sent
    arrived = done[work.server] + np.maximum(moved.sent[work.server], moved.received[work.home])
    np.maximum.at(finished, work.home, arrived)
    end = finished.max(initial=0.0)
    results = np.minimum(np.maximum(moved.sent, moved.received), end - done)
    times = np.zeros((len(KINDS), done.size))
    times[LINEAR] = linear
    times[ATTENTION] = at_home + visiting
    times[EXCHANGE] = stall + results
    times[WAITING] = end - done - results + linear.max() - linear
    return times, 0.0


def ping_pong(
    scenario: Scenario, work: Work, pass_idx: int, linear: np.ndarray
) -> tuple[np.ndarray, float]:
    """Of two halves (see Attend): both halves' work, and what of a half's exchanges is longer than
    the linear work of the other."""
    moved = exchanges_of(scenario, work, pass_idx, share=0.5)
    attention = work.home_seconds[pass_idx] + work.visiting_seconds[pass_idx]
    round_trip = moved.arrival.max() + max(moved.sent.max(), moved.received.max())
    hidden = min(round_trip, linear.max() / 2)
    times = np.zeros((len(KINDS), attention.size))
    times[LINEAR], times[ATTENTION] = linear, attention
    times[EXCHANGE] = 2 * (round_trip - hidden)
    times[WAITING] = attention.max() - attention + linear.max() - linear
    return times, 2 * hidden


def dedicated_ping_pong(
    scenario: Scenario, work: Work, pass_idx: int, linear: np.ndarray
) -> tuple[np.ndarray, float]:
    """When ranks with tokens and servers work on different halves at the same time (see Attend).
    Two halves go round; each rank's work and the way round bound how often."""
    moved = exchanges_of(scenario, work, pass_idx, share=0.5)
    attention = work.home_seconds[pass_idx] + work.visiting_seconds[pass_idx]
    exchange = moved.arrival.max() + max(moved.sent.max(), moved.received.max())
    own = linear + attention
    round_trip = linear.max() / 2 + exchange + attention.max() / 2
    exposed = max(own.max(), round_trip) - own.max()
    times = np.zeros((len(KINDS), attention.size))
    times[LINEAR], times[ATTENTION] = linear, attention
    times[EXCHANGE] = exposed
    times[WAITING] = own.max() - own
    return times, 2 * exchange - exposed


def held_bytes(scenario: Scenario, work: Work) -> np.ndarray:
    """[ranks] Rows of other homes that a server holds for one layer."""
    query, key = held_row_bytes(scenario.attention_shape)
    num_bytes = work.query_rows * query + work.key_rows * key
    return np.bincount(work.server, num_bytes, work.home_seconds.shape[1])
