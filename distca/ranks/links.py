"""Measures latency and bandwidth of rows in transit, inside a node and between nodes."""

import functools
import itertools
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distca import ops
from distca.options import check_number, digest_of

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128  # of the rows that are sent
SMALL_BYTES, PROBE_BYTES, LARGE_BYTES = 2**16, 2**20, 2**25  # that a rank sends in one call
LARGE_S = 0.01  # links that need longer for LARGE_BYTES send less
NUM_BATCHES, NUM_CALLS = 3, 4  # for each size
MAX_PEER_NODES = 8
BEFORE_STEPS = -1  # step number of the plans here

Peers = list[list[int]]  # for each rank, the ranks that it sends to


@dataclass(frozen=True)
class Link:
    """A link on which a message of n bytes takes latency_s + n / bytes_per_second seconds."""

    latency_s: float
    bytes_per_second: float
    """The rate at which one rank sends while half of the ranks send and the others receive."""

    def __post_init__(self) -> None:
        check_number("latency_s", self.latency_s, zero=True)
        check_number("bytes_per_second", self.bytes_per_second)

    def __str__(self) -> str:
        return f"{1e-9 * self.bytes_per_second:.3g} GB/s, {1e6 * self.latency_s:.0f} us latency"


@dataclass(frozen=True)
class Links:
    """The links of a group. None: not measured."""

    inside: Link | None = None
    """Between ranks of one node."""
    between: Link | None = None
    """Between ranks of different nodes."""


def gather_seconds(num_bytes, members: int, members_in_node: int, inside: Link, between: Link):
    """Return the seconds of an all-gather after which each of `members` ranks has `num_bytes`, or
    of a reduce-scatter of `num_bytes` on each of them. `num_bytes` may be an array."""
    if members == 1:
        return 0.0
    in_node = max(1, min(members, members_in_node))
    seconds = num_bytes * (members - 1) / members / inside.bytes_per_second
    if in_node == members:
        return inside.latency_s + seconds
    across = num_bytes * (1 - in_node / members) / (in_node * between.bytes_per_second)
    latency = max(inside.latency_s, between.latency_s)
    return latency + np.maximum(seconds if in_node > 1 else 0.0, across)


@functools.cache
def node() -> int:
    """Return 63 bits that differ between hosts."""
    return digest_of(socket.gethostname().encode())


def ranks_of_a_node(nodes: Sequence[int | str]) -> int:
    """Return the number of ranks that share a node. `nodes` names the node of each rank, in rank
    order. If nodes hold unequal runs of ranks, returns the greatest common divisor of their
    lengths. The planner then assumes that some links are slower than they are."""
    return math.gcd(*(len(list(run)) for _, run in itertools.groupby(nodes)))


def peers_of_ranks(num_ranks: int, ranks_per_node: int) -> dict[str, Peers]:
    """Return the peers of each rank by level. Peers "inside" are the other ranks of its node, and
    peers "between" are the ranks at the same position in up to MAX_PEER_NODES other nodes."""
    peers: dict[str, Peers] = {}
    for level, (groups, most) in _groups(num_ranks, ranks_per_node).items():
        peers[level] = [[] for _ in range(num_ranks)]
        for group in groups:
            for place, rank in enumerate(group):
                peers[level][rank] = (group[place + 1 :] + group[:place])[:most]
    return peers


def directions_of_ranks(num_ranks: int, ranks_per_node: int) -> dict[str, list[Peers]]:
    """Return two lists of peers for each level of peers_of_ranks. In each list, a rank sends or
    receives, but not both, and ranks change roles in the second list. If the number of ranks or
    nodes is odd, one takes no part in each list. In training, too, a rank mostly sends or mostly
    receives at any one time."""
    return {
        level: [
            _peers_one_way(num_ranks, ordered, most)
            for ordered in (groups, [group[1:] + group[:1] for group in groups])
        ]
        for level, (groups, most) in _groups(num_ranks, ranks_per_node).items()
    }


def _groups(num_ranks: int, ranks_per_node: int) -> dict[str, tuple[list[list[int]], int]]:
    """Return by level the groups of ranks that send to each other, and the most peers that a rank
    may have."""
    ranks = list(range(num_ranks))
    nodes = [ranks[first:][:ranks_per_node] for first in ranks[::ranks_per_node]]
    positions = [ranks[place::ranks_per_node] for place in range(min(ranks_per_node, num_ranks))]
    return {"inside": (nodes, num_ranks), "between": (positions, MAX_PEER_NODES)}


def _peers_one_way(num_ranks: int, groups: list[list[int]], most: int) -> Peers:
    """Return the peers of each rank if ranks at even places of a group send to up to `most` ranks
    at odd places. Each receiver has as many senders as a sender has receivers. In a group of odd
    size, the last rank takes no part."""
    peers: Peers = [[] for _ in range(num_ranks)]
    for group in groups:
        pairs = len(group) // 2
        senders, receivers = group[: 2 * pairs : 2], group[1 : 2 * pairs : 2]
        for place, sender in enumerate(senders):
            peers[sender] = (receivers[place:] + receivers[:place])[:most]
    return peers


def measure(session, device: torch.device) -> Links:
    """Measure the links that rows of an open session take on `device`. Return them, equal on all
    ranks. A link whose bandwidth the options name is left out. Collective."""
    options = session.options
    told = {"inside": options.link_gb_per_s, "between": options.node_link_gb_per_s}
    return Links(
        **{
            level: _measure_link(session, device, directions)
            for level, directions in directions_of_ranks(*_shape(session)).items()
            if told[level] is None and any(directions[0])
        }
    )


def connect(session, device: torch.device) -> None:
    """Send a few rows over the links of an open session. NCCL connects two ranks when they first
    exchange rows, so without this, the first step that moves rows would take longer. Collective."""
    for peers in peers_of_ranks(*_shape(session)).values():
        if any(peers):
            call, _ = _exchange(session, device, peers, SMALL_BYTES)
            call()


def _shape(session) -> tuple[int, int]:
    """Return the number of ranks of an open session and the number of ranks per node.
    Collective."""
    per_node = session.options.ranks_per_node or ranks_of_a_node(_gather(session, node()))
    return session.num_ranks, per_node


def _measure_link(session, device: torch.device, directions: list[Peers]) -> Link:
    """Return the link as the slowest rank measures it in the slower direction. Figures are rounded
    to two significant digits, so that plans differ little between runs."""

    def seconds(num_bytes: float, peers: Peers) -> tuple[int, float]:
        call, sent_bytes = _exchange(session, device, peers, num_bytes)
        return sent_bytes, largest(session, seconds_of(call, device))

    latencies, speeds = [], []
    for peers in directions:
        latencies.append(seconds(SMALL_BYTES, peers)[1])
        probe_bytes, probe_s = seconds(PROBE_BYTES, peers)
        in_time = probe_bytes * LARGE_S / probe_s
        sent_bytes, large_s = seconds(min(LARGE_BYTES, max(PROBE_BYTES, in_time)), peers)
        speeds.append(sent_bytes / large_s)
    return Link(float(f"{max(latencies):.2g}"), float(f"{min(speeds):.2g}"))


def largest(session, seconds: float) -> float:
    """Return the largest number of seconds that a rank passes, at least a nanosecond.
    Collective."""
    return 1e-9 * max(1, *_gather(session, int(1e9 * seconds)))


def _exchange(
    session, device: torch.device, peers: Peers, num_bytes: float
) -> tuple[Callable[[], None], int]:
    """Return a call in which each rank sends rows of a document, equally many to each peer. Also
    return the bytes that a rank with the most peers sends, which are about `num_bytes`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    row_bytes = dtype.itemsize * HEAD_DIM * (HEADS_Q + 2 * HEADS_KV)
    most_peers = max(map(len, peers))
    part = max(1, int(num_bytes) // (row_bytes * most_peers))  # rows
    homes = [rank for rank, its_peers in enumerate(peers) if its_peers]
    pieces = [(rank, document, 0, part * len(peers[rank])) for document, rank in enumerate(homes)]
    tasks = [
        (document, part * place, part * (place + 1), server)
        for document, rank in enumerate(homes)
        for place, server in enumerate(peers[rank])
    ]
    tasks.sort(key=lambda task: (task[3], task[0]))
    pieces = torch.tensor(pieces)
    plan = ops.plan_of_tasks(pieces, torch.tensor(tasks), session.num_ranks, 0, 0)
    layout, packed_rows = ops.layout(
        pieces,
        plan,
        session.rank,
        BEFORE_STEPS,
        device.type,
        by_peer_memory=session.way.is_peer,
        ranks_per_node=session.way.ranks_per_node,
    )
    rows = ops.unpack_rows(layout, packed_rows.to(device))
    inputs: list[Tensor] = [
        torch.zeros(part * len(peers[session.rank]), heads, HEAD_DIM, dtype=dtype, device=device)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    ]

    def call() -> None:
        ops.exchange(*inputs, layout, rows, session.group_name)

    return call, part * most_peers * row_bytes


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of a call: the median over batches of calls."""
    seconds = []
    for _ in range(NUM_BATCHES):
        call()  # so that ranks start together
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        total_s = time.perf_counter() - start
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize(device)
            total_s = 1e-3 * begin.elapsed_time(end)
        seconds.append(total_s / NUM_CALLS)
    return statistics.median(seconds)


def _gather(session, word: int) -> list[int]:
    """Return the words of all ranks, by rank."""
    return torch.cat(ops.gather(torch.tensor([word]), session.group_name, BEFORE_STEPS)).tolist()
