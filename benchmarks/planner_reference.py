"""For benchmarks/planner.py, in numpy: packs, what given tasks cost, lower bounds, plain planners.

Tasks are int64 [num_tasks, 4]: document, first query, last query + 1, server; documents are counted
in the order of their ranks' rows, as the planner counts them. All attention is causal and every
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
    """A step of all ranks, each with equally many tokens."""

    num_ranks: int
    lengths: np.ndarray  # [num_documents] tokens
    home: np.ndarray  # [num_documents] rank, never decreasing

    def pieces(self) -> Tensor:
        """As torch.ops.distca.plan takes them: int64 [num_documents, 4]."""
        index = np.arange(self.lengths.size)
        columns = [self.home, index, np.zeros_like(index), self.lengths]
        return torch.from_numpy(np.stack(columns, axis=1))

    def home_tasks(self) -> np.ndarray:
        """Every document on its own rank."""
        return self.tasks_on(self.home)

    def tasks_on(self, server: np.ndarray) -> np.ndarray:
        """Every document whole on `server` [num_documents]."""
        index = np.arange(self.lengths.size)
        return np.stack([index, np.zeros_like(index), self.lengths, server], axis=1)


def draw_pack(lengths: list[int], num_ranks: int, tokens: int, seed: int) -> Pack:
    """The first step of training_step.py with this seed: documents in shuffled order, cut into
    packs of equally many tokens; the rest of one starts the next pack, as a document of its own."""
    drawn = packs.draw_pack(lengths, num_ranks, tokens, seed)
    rank, _, _, length = drawn.pieces.T
    return Pack(num_ranks, length, rank)


@dataclass(frozen=True)
class Prices:
    """What the planner is told about kernels and rows."""

    cost: Tensor  # as torch.ops.distca.plan takes it
    tile: int  # query and key rows of a kernel tile
    seconds_per_tile: float
    query_bytes: int  # of a query row that travels, forward and backward of a layer
    key_bytes: int

    @classmethod
    def of(cls, options: distca.Options, shape: AttentionShape) -> "Prices":
        cost = cost_tensor(options, shape, "cuda")
        tile, tile_keys, seconds_per_tile, seconds_per_task, *table = cost.tolist()
        assert tile == tile_keys and seconds_per_task == 0 and table == [0, 0]
        return cls(cost, int(tile), seconds_per_tile, *shape.row_bytes())

    @property
    def bytes_of_pair(self) -> float:
        """Least bytes that bring one (query, key) pair, were rows divisible: see Bounds."""
        return 2 * math.sqrt(self.query_bytes * self.key_bytes)

    def tiles(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Kernel tiles of causal tasks that hold a visible pair; query tiles start at `begin`."""
        num_q_tiles = -((begin - end) // self.tile)
        full_height = (num_q_tiles - 1) * -(-begin // self.tile)
        return full_height + num_q_tiles * (num_q_tiles - 1) // 2 - (-end // self.tile)


@dataclass(frozen=True)
class Loads:
    seconds: np.ndarray  # [num_ranks] of attention at speed 1
    bytes_out: np.ndarray  # [num_ranks]
    bytes_in: np.ndarray
    node_bytes_out: np.ndarray  # [num_ranks] of these, between nodes
    node_bytes_in: np.ndarray


def loads_of(pack: Pack, tasks: np.ndarray, prices: Prices, ranks_per_node: int = 2**31) -> Loads:
    """What `tasks` cost every rank, counted from their rows. A query row of another rank comes and
    its results go home, once a task; a document's keys, from its first token to the last query's,
    come once to each server, however many tasks read them, and their gradients go home."""
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
    by_server = np.bincount(server, weights=seconds, minlength=pack.num_ranks)
    return Loads(by_server, *by_rank)


def check_cover(pack: Pack, tasks: np.ndarray) -> None:
    """Raises RuntimeError unless every token's query is computed once, on a rank that exists."""
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
    """Least bytes of a plan that brings every rank to the mean, for one pack.

    A task of n query rows over m keys holds at most n * m (query, key) pairs and moves
    A * n + B * m bytes, A and B those of a query and a key row. For P pairs that is least at
    m = A / B * n, where it is 2 * sqrt(A * B * P). Documents that lie whole on their home have no
    keys elsewhere, and the root is subadditive, so no set of tasks with P pairs on one server moves
    less. (Forward alone, with a bytes a query row each way and b bytes a key row, A is 2 * a and B
    is b; here both passes count. A causal task has only n * (m - n / 2) pairs, which raises the
    least by sqrt(1 + B / (2 * A)), 7 % for 32 query and 8 key heads; that is left out.)

    P is a rank's surplus or deficit: its home seconds less the mean, in kernel tiles, each
    counted as full. A plan with a tolerance leaves some of it at home, and may so move less.
    """

    total: float
    """Sum over receivers, each taking its whole deficit in one task."""
    egress: np.ndarray
    """[num_ranks] Least bytes out for a rank's surplus if no receiver takes more than its deficit:
    the largest deficits are filled first, one task each, since the root is concave."""
    ingress: np.ndarray
    """[num_ranks] The same for a rank's deficit, out of the largest surpluses."""

    @classmethod
    def of(cls, home_seconds: np.ndarray, prices: Prices) -> "Bounds":
        surplus, deficit = excess_pairs(home_seconds, home_seconds.mean(), prices)
        return cls(
            prices.bytes_of_pair * float(np.sqrt(deficit).sum()),
            prices.bytes_of_pair * least_roots(surplus, deficit),
            prices.bytes_of_pair * least_roots(deficit, surplus),
        )


def least_bytes_within(limit: float, home_seconds: np.ndarray, prices: Prices) -> float:
    """Least bytes of a plan whose slowest rank needs `limit` seconds: only what is above the limit
    leaves, and fills the ranks with most room up to it."""
    surplus, room = excess_pairs(home_seconds, limit, prices)
    return prices.bytes_of_pair * float(least_roots(surplus.sum(keepdims=True), room)[0])


def excess_pairs(
    seconds: np.ndarray, limit: float, prices: Prices
) -> tuple[np.ndarray, np.ndarray]:
    """(query, key) pairs of each rank above and below the limit."""
    pairs = (seconds - limit) / prices.seconds_per_tile * prices.tile**2
    return np.maximum(pairs, 0), np.maximum(-pairs, 0)


def least_roots(amounts: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """For each amount the least sum of square roots of its parts, none above its capacity.

    Amounts are at most the sum of the capacities, up to rounding.
    """
    largest_first = np.sort(capacities)[::-1]
    filled = np.concatenate([[0.0], largest_first.cumsum()])
    roots = np.concatenate([[0.0], np.sqrt(largest_first).cumsum()])
    num_full = np.searchsorted(filled[1:], amounts * (1 - ROUNDING))
    return roots[num_full] + np.sqrt(np.maximum(amounts - filled[num_full], 0))


def greedy(pack: Pack, prices: Prices, tolerance: float) -> np.ndarray:
    """Tasks when the most loaded rank gives the least loaded one query tiles off the end of its
    dearest document, whatever that moves, until all are within `tolerance` of the mean."""
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
        else:  # nothing of this donor fits anywhere
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
    """Tiles of the first `base` query tiles of a causal document."""
    return base * (base + 1) // 2


def largest_base(tiles: int) -> int:
    """The largest base >= 0 of a triangle of at most `tiles`; -1 if they are negative."""
    return (math.isqrt(8 * tiles + 1) - 1) // 2 if tiles >= 0 else -1


def longest_first(pack: Pack, prices: Prices, tolerance: float) -> np.ndarray:
    """Tasks when whole documents, longest first, go to the rank that has least work so far,
    wherever they lie; no tolerance stops it."""
    dearest_first = np.argsort(-pack.lengths, kind="stable")
    tiles = triangle(-(-pack.lengths // prices.tile))
    loads = [(0, rank) for rank in range(pack.num_ranks)]
    server = np.empty_like(pack.home)
    for document in dearest_first.tolist():
        load, rank = loads[0]
        server[document] = rank
        heapq.heapreplace(loads, (load + int(tiles[document]), rank))
    return pack.tasks_on(server)


BASELINES = {"greedy": greedy, "longest first": longest_first}
