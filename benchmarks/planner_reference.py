"""Packs, costs of tasks, lower bounds and baseline planners for benchmarks/planner.py, in numpy.

Tasks are int64 [num_tasks, 4]: document, first query, last query + 1, server. Documents are
numbered in the order of their ranks' rows, as in the planner. All attention is causal, and every
document of a pack lies whole on its home rank.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import distca
from distca.planning import packs
from distca.planning.cost import AttentionShape, cost_tensor

ROUNDING = 1e-9
DOCUMENT, BEGIN, END, SERVER = range(4)  # columns of tasks


@dataclass(frozen=True)
class Pack:
    """The documents of a step, with an equal number of tokens on every rank."""

    num_ranks: int
    lengths: np.ndarray  # [num_documents] tokens
    home: np.ndarray  # [num_documents] rank, never decreasing

    def pieces(self) -> Tensor:
        """Return the pieces for torch.ops.distca.plan: int64 [num_documents, 4]."""
        index = np.arange(self.lengths.size)
        columns = [self.home, index, np.zeros_like(index), self.lengths]
        return torch.from_numpy(np.stack(columns, axis=1))

    def home_tasks(self) -> np.ndarray:
        """Return tasks that compute every document on its home rank."""
        return self.tasks_on(self.home)

    def tasks_on(self, server: np.ndarray) -> np.ndarray:
        """Return tasks that compute every document whole on `server` [num_documents]."""
        index = np.arange(self.lengths.size)
        return np.stack([index, np.zeros_like(index), self.lengths, server], axis=1)


def draw_pack(lengths: list[int], num_ranks: int, tokens: int, seed: int) -> Pack:
    """Draw the first step of training_step.py with this seed.

    Shuffled documents are cut into packs of `tokens` tokens. The rest of a document that was cut
    starts the next pack as a separate document.
    """
    drawn = packs.draw_pack(lengths, num_ranks, tokens, seed)
    rank, _, _, length = drawn.pieces.T
    return Pack(num_ranks, length, rank)


@dataclass(frozen=True)
class Prices:
    """The planner's costs of kernels and rows."""

    cost: Tensor  # argument of torch.ops.distca.plan
    tile: int  # query and key rows of a kernel tile
    seconds_per_tile: float
    query_bytes: int  # per visiting query row, forward and backward of a layer
    key_bytes: int

    @classmethod
    def of(cls, options: distca.Options, shape: AttentionShape) -> "Prices":
        cost = cost_tensor(options, shape, "cuda")
        tile, tile_keys, seconds_per_tile, seconds_per_task, *table = cost.tolist()
        assert tile == tile_keys and seconds_per_task == 0 and table == [0, 0]
        return cls(cost, int(tile), seconds_per_tile, *shape.row_bytes())

    @property
    def bytes_of_pair(self) -> float:
        """Return the least bytes that bring one (query, key) pair if rows are divisible."""
        return 2 * math.sqrt(self.query_bytes * self.key_bytes)

    def tiles(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Count the kernel tiles of causal tasks that hold a visible pair.

        Query tiles start at `begin`.
        """
        num_q_tiles = -((begin - end) // self.tile)
        full_height = (num_q_tiles - 1) * -(-begin // self.tile)
        return full_height + num_q_tiles * (num_q_tiles - 1) // 2 - (-end // self.tile)


@dataclass(frozen=True)
class Loads:
    seconds: np.ndarray  # [num_ranks] of attention at speed 1
    seconds_visiting: np.ndarray  # [num_ranks] the part of them that needs other ranks' rows
    bytes_out: np.ndarray  # [num_ranks]
    bytes_in: np.ndarray
    node_bytes_out: np.ndarray  # [num_ranks] the part of these between nodes
    node_bytes_in: np.ndarray


def loads_of(pack: Pack, tasks: np.ndarray, prices: Prices, ranks_per_node: int = 2**31) -> Loads:
    """Count from the rows of `tasks` what they cost every rank.

    A query row of another rank travels to its server and its results return, once per task. The
    keys of a document, up to the last query, travel once to each server, and their gradients
    return.
    """
    document, begin, end, server = tasks.T
    seconds = prices.tiles(begin, end) * prices.seconds_per_tile
    away = tasks[server != pack.home[document]]
    visits, visit_of_task = np.unique(
        away[:, DOCUMENT] * pack.num_ranks + away[:, SERVER], return_inverse=True
    )
    num_keys = np.zeros(visits.size, dtype=np.int64)
    np.maximum.at(num_keys, visit_of_task, away[:, END])

    by_rank = np.zeros((4, pack.num_ranks), dtype=np.int64)  # bytes out, in; between nodes
    query_bytes = (away[:, END] - away[:, BEGIN]) * prices.query_bytes
    ends_of_rows = (away[:, DOCUMENT], away[:, SERVER]), np.divmod(visits, pack.num_ranks)
    for (documents, servers), num_bytes in zip(
        ends_of_rows, (query_bytes, num_keys * prices.key_bytes), strict=True
    ):
        homes = pack.home[documents]
        leaves = homes // ranks_per_node != servers // ranks_per_node
        for way, ranks in enumerate((homes, servers)):
            np.add.at(by_rank[way], ranks, num_bytes)
            np.add.at(by_rank[2 + way], ranks, num_bytes * leaves)
    by_server, visiting = (
        np.bincount(server[chosen], weights=seconds[chosen], minlength=pack.num_ranks)
        for chosen in (slice(None), server != pack.home[document])
    )
    return Loads(by_server, visiting, *by_rank)


def check_cover(pack: Pack, tasks: np.ndarray) -> None:
    """Raise RuntimeError unless every query is computed once, on a rank that exists."""
    document, begin, end, server = tasks[np.lexsort((tasks[:, BEGIN], tasks[:, DOCUMENT]))].T
    first = np.diff(document, prepend=-1) != 0
    last = np.roll(first, -1)
    covered = (
        np.array_equal(document[first], np.arange(pack.lengths.size))
        and (begin < end).all()
        and (begin[first] == 0).all()
        and np.array_equal(end[last], pack.lengths)
        and np.array_equal(end[~last], begin[~first])
        and ((server >= 0) & (server < pack.num_ranks)).all()
    )
    if not covered:
        raise RuntimeError(f"{len(tasks)} tasks do not compute every query of the pack once")


@dataclass(frozen=True)
class Bounds:
    """The least bytes of a plan that brings every rank to the mean, for one pack.

    A task of n query rows over m keys holds at most n * m (query, key) pairs and moves
    A * n + B * m bytes, where A and B are the bytes of a query and a key row. For P pairs the
    minimum is 2 * sqrt(A * B * P), at m = A / B * n. Documents that lie whole on their home have no
    keys elsewhere, and the root is subadditive, so no set of tasks with P pairs on one server moves
    less. A and B count both passes. (Forward alone, A is 2 * a and B is b, with a bytes per query
    row each way and b bytes per key row. A causal task has only n * (m - n / 2) pairs, so its
    minimum is larger by a factor of sqrt(1 + B / (2 * A)), 7 % for 32 query and 8 key heads. The
    bounds ignore this.)

    P is a rank's surplus or deficit: its home seconds minus the mean, in kernel tiles that count as
    full. A plan with a tolerance leaves some surplus at home, so it may move less.
    """

    total: float
    """Sum over receivers, if each takes its whole deficit in one task."""
    egress: np.ndarray
    """[num_ranks] Least bytes out for a rank's surplus if no receiver takes more than its deficit.
    The largest deficits are filled first, with one task each, because the root is concave."""
    ingress: np.ndarray
    """[num_ranks] Least bytes in for a rank's deficit, from the largest surpluses."""

    @classmethod
    def of(cls, home_seconds: np.ndarray, prices: Prices) -> "Bounds":
        surplus, deficit = excess_pairs(home_seconds, home_seconds.mean(), prices)
        return cls(
            prices.bytes_of_pair * float(np.sqrt(deficit).sum()),
            prices.bytes_of_pair * least_roots(surplus, deficit),
            prices.bytes_of_pair * least_roots(deficit, surplus),
        )


def least_bytes_within(limit: float, home_seconds: np.ndarray, prices: Prices) -> float:
    """Return the least bytes of a plan whose slowest rank needs `limit` seconds.

    Only work above the limit leaves its rank, and it fills the ranks with most room up to the
    limit.
    """
    surplus, room = excess_pairs(home_seconds, limit, prices)
    return prices.bytes_of_pair * float(least_roots(surplus.sum(keepdims=True), room)[0])


def excess_pairs(
    seconds: np.ndarray, limit: float, prices: Prices
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (query, key) pairs of each rank above and below the limit."""
    pairs = (seconds - limit) / prices.seconds_per_tile * prices.tile**2
    return np.maximum(pairs, 0), np.maximum(-pairs, 0)


def least_roots(amounts: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Split each amount over the capacities. Return the least sum of the parts' square roots.

    Amounts are at most the sum of the capacities, up to rounding.
    """
    largest_first = np.sort(capacities)[::-1]
    filled = np.concatenate([[0.0], largest_first.cumsum()])
    roots = np.concatenate([[0.0], np.sqrt(largest_first).cumsum()])
    num_full = np.searchsorted(filled[1:], amounts * (1 - ROUNDING))
    return roots[num_full] + np.sqrt(np.maximum(amounts - filled[num_full], 0))


def greedy(pack: Pack, prices: Prices, tolerance: float) -> np.ndarray:
    """Return the tasks of the greedy planner.

    The most loaded rank gives query tiles from the end of its most expensive document to the least
    loaded rank, regardless of bytes, until all are within `tolerance` of the mean.
    """
    left = -(-pack.lengths // prices.tile)  # query tiles of each document still at home
    load = np.bincount(pack.home, triangle(left), pack.num_ranks).astype(np.int64).tolist()
    left = left.tolist()
    first = np.searchsorted(pack.home, np.arange(pack.num_ranks + 1))
    mean = sum(load) / pack.num_ranks
    limit = (1 + tolerance) * mean
    donors = [(-tiles, rank) for rank, tiles in enumerate(load) if tiles > limit]
    receivers = [(tiles, rank) for rank, tiles in enumerate(load) if tiles < mean]
    heapq.heapify(donors)
    heapq.heapify(receivers)
    tasks = []
    while donors and receivers:
        donor, server = donors[0][1], receivers[0][1]
        wanted, room = math.ceil(load[donor] - mean), math.floor(limit - load[server])
        for document in sorted(range(first[donor], first[donor + 1]), key=lambda d: -left[d]):
            whole = triangle(left[document])
            keep = max(largest_base(whole - wanted), largest_base(whole - room - 1) + 1)
            if keep < left[document]:
                break
        else:  # no part of this donor's work fits anywhere
            heapq.heappop(donors)
            continue
        end = min(left[document] * prices.tile, int(pack.lengths[document]))
        tasks.append((document, keep * prices.tile, end, server))
        left[document] = keep
        load[donor] -= whole - triangle(keep)
        load[server] += whole - triangle(keep)
        for heap, entry in ((donors, (-load[donor], donor)), (receivers, (load[server], server))):
            stays = load[donor] > limit if heap is donors else load[server] < mean
            heapq.heapreplace(heap, entry) if stays else heapq.heappop(heap)
    at_home = pack.home_tasks()
    at_home[:, END] = np.minimum(np.array(left) * prices.tile, pack.lengths)
    moved = np.array(tasks, dtype=np.int64).reshape(-1, 4)
    return np.concatenate([at_home[at_home[:, END] > 0], moved])


def triangle(base):
    """Count the tiles of the first `base` query tiles of a causal document."""
    return base * (base + 1) // 2


def largest_base(tiles: int) -> int:
    """Return the largest base >= 0 of a triangle of at most `tiles`, or -1 if `tiles` < 0."""
    return (math.isqrt(8 * tiles + 1) - 1) // 2 if tiles >= 0 else -1


def longest_first(pack: Pack, prices: Prices, tolerance: float) -> np.ndarray:
    """Assign whole documents, longest first, to the rank with least work so far.

    Homes and the tolerance have no influence.
    """
    longest = np.argsort(-pack.lengths, kind="stable")
    tiles = triangle(-(-pack.lengths // prices.tile))
    loads = [(0, rank) for rank in range(pack.num_ranks)]
    server = np.empty_like(pack.home)
    for document in longest.tolist():
        load, rank = loads[0]
        server[document] = rank
        heapq.heapreplace(loads, (load + int(tiles[document]), rank))
    return pack.tasks_on(server)


BASELINES = {"greedy": greedy, "longest first": longest_first}
