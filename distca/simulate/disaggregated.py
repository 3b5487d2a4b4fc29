"""Times of one layer under a plan: what every rank computes, sends and waits for.

Ranks of the planner are tensor parallel groups: heads, and with them seconds and bytes, are those
of one GPU of a group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from distca.planning.cluster import Cluster, held_row_bytes
from distca.planning.packs import cut_pack
from distca.planning.plan import CAUSAL, balance, tasks_of
from distca.simulate.layers import (
    ATTENTION,
    EXCHANGE,
    KINDS,
    LINEAR,
    WAITING,
)
from distca.simulate.machine import BACKWARD, FORWARD, AttentionCost
from distca.simulate.scenario import Scenario

DOCUMENT, BEGIN, END, SERVER = range(4)  # columns of tasks


@dataclass(frozen=True)
class Homes:
    """Where the documents' rows lie: pieces in order of (rank, row)."""

    num_ranks: int
    rank: np.ndarray  # [num_pieces]
    document: np.ndarray  # [num_pieces] dense, in order of their first piece
    start: np.ndarray  # [num_pieces] position in the document
    length: np.ndarray  # [num_pieces]

    @classmethod
    def of(cls, lengths: np.ndarray, ranks: np.ndarray) -> "Homes":
        """Documents one after another over `ranks`, which hold equally many tokens (up to one)."""
        pack = cut_pack(lengths, ranks.size, int(lengths.sum()), crossing=True)
        place, document, start, length = pack.pieces.T
        return cls(int(ranks.max()) + 1, ranks[place], document, start, length)

    def within(self, num_ranks: int) -> "Homes":
        """The same, with ranks that hold no tokens up to `num_ranks`."""
        return Homes(num_ranks, self.rank, self.document, self.start, self.length)

    def tokens(self) -> np.ndarray:
        """[num_ranks]"""
        return np.bincount(self.rank, self.length, self.num_ranks)

    def pieces(self) -> torch.Tensor:
        columns = [self.rank, self.document, self.start, self.length]
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.int64))


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


def plan(scenario: Scenario, homes: Homes, cluster: Cluster, cost: AttentionCost) -> np.ndarray:
    """Tasks, int64 [num_tasks, 4]: document, first query, last query + 1, server."""
    shape, tolerance = scenario.attention_shape, scenario.tolerance
    encoded, _ = balance(homes.pieces(), CAUSAL, cost.tensor(), shape, cluster, tolerance)
    return tasks_of(encoded)[:, :4].numpy()


def work_of(homes: Homes, tasks: np.ndarray, cost: AttentionCost) -> Work:
    """Counted from the tasks' rows."""
    first = np.searchsorted(homes.document, np.arange(homes.document[-1] + 2))
    begin, end, server = tasks[:, BEGIN], tasks[:, END], tasks[:, SERVER]
    count = np.diff(first)[tasks[:, DOCUMENT]]
    task = np.repeat(np.arange(len(tasks)), count)
    piece = np.arange(task.size) - np.repeat(count.cumsum() - count, count)
    piece += np.repeat(first[tasks[:, DOCUMENT]], count)
    away = homes.rank[piece] != server[task]
    task, piece = task[away], piece[away]
    starts, ends = homes.start[piece], homes.start[piece] + homes.length[piece]
    queries = np.minimum(end[task], ends) - np.maximum(begin[task], starts)
    keys = np.minimum(end[task], ends) - starts

    at_home = np.ones(len(tasks), dtype=bool)
    at_home[task[keys > 0]] = False
    seconds = cost.seconds(begin, end)
    by_place = [
        np.stack([np.bincount(server[chosen], one[chosen], homes.num_ranks) for one in seconds])
        for chosen in (at_home, ~at_home)
    ]

    # A piece's keys come to a server once, as many as its last task needs.
    of_piece = piece * homes.num_ranks + server[task]
    visits, index = np.unique(of_piece, return_inverse=True)
    key_rows = np.zeros(visits.size, dtype=np.int64)
    np.maximum.at(key_rows, index, keys)
    query_rows = np.bincount(index, np.maximum(queries, 0), visits.size)
    visited, servers = np.divmod(visits, homes.num_ranks)
    pairs, pair = np.unique(homes.rank[visited] * homes.num_ranks + servers, return_inverse=True)
    rows = [np.bincount(pair, each, pairs.size) for each in (query_rows, key_rows)]
    travels = rows[0] + rows[1] > 0
    home, pair_server = np.divmod(pairs[travels], homes.num_ranks)
    return Work(*by_place, home, pair_server, rows[0][travels], rows[1][travels])


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
