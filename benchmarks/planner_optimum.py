"""Clusters of unequal servers and links for benchmarks/planner.py, and a lower bound on makespans.

The optimum is a lower bound: no plan is faster under the planner's own costs. It is the least T
that satisfies three conditions:

- All servers together can do all work: sum of work <= T * sum of speeds.
- Every rank can give away its surplus of work over both its links.
- Every node can give away the surplus of its ranks over their links to other nodes.

It remains to bound the work that a rank can give away for b bytes. Lengths are in tiles. Row y of a
document has k + 1 tiles of work, where k = floor(y). No cut makes the remaining work less than that
of its rows, because every row of a query tile costs as much as the tile's last row. A visit is the
set of a document's rows that one server computes. It holds at most D tiles, the work of a server in
T. It costs A bytes for each row and B * e bytes for keys, where e is the end of its last row. Let a
tile of work have the value of c bytes, and a row the value

    v(y) = max(0, c * (k + 1) - A - B * y * sqrt(y^2 + D) / D).

No visit is worth more than its rows, c * work - A * rows - B * e <= integral of v, provided that
the integral of B * y * sqrt(y^2 + D) / D over its rows is at most B * e. Substitute u = y^2 / 2.
The rows cover a length U <= D of u, because y <= k + 1. The integral becomes that of
B * sqrt(2 * u + D) / D, and is largest for the rows just below e, where U = min(D, e^2 / 2). The
root is concave, so its mean over them is at most sqrt(e^2 - U + D). For U = D this is e. For
U = e^2 / 2 < D the integral is at most B * e * (e * sqrt(e^2 / 2 + D)) / (2 * D) <= B * e, because
e and the root are at most sqrt(2 * D). Visits share no rows. So c * work - b <= V, where V is the
value of all rows of the rank's documents, and for every c the work is at most (V + b) / c.
"""

import math
from dataclasses import dataclass

import numpy as np
from planner_reference import Pack, Prices

from distca.planning.cluster import Cluster

# Parts of a layer's seconds and bytes, forward and backward, see csrc/planner/model/loads.cpp.
PASSES = ((2 / 7, 0.37), (5 / 7, 0.63))
NUM_BISECTIONS = 24
PRICES_OF_TILE = np.geomspace(0.9, 8, 40)  # any values are valid; more values tighten the bound
NODE_RANKS = 8
NODE_LINK = 50e9  # bytes per second


def alike(num_ranks: int, link: float) -> Cluster:
    """Return a cluster of equal servers and equal links."""
    return Cluster(num_ranks, link_bytes_per_second=link)


def mixed(num_ranks: int, link: float) -> Cluster:
    """Return a cluster in which every other server has half the speed."""
    speeds = tuple(0.5 if rank % 2 else 1.0 for rank in range(num_ranks))
    return Cluster(num_ranks, speeds=speeds, link_bytes_per_second=link)


def dedicated(num_ranks: int, link: float) -> Cluster:
    """Return a cluster in which one of eight ranks computes for all."""
    speeds = tuple(float(rank % 8 == 7) for rank in range(num_ranks))
    return Cluster(num_ranks, speeds=speeds, link_bytes_per_second=link)


def nodes(num_ranks: int, link: float) -> Cluster:
    """Return a cluster of nodes of eight ranks, with 50 GB/s per rank between nodes."""
    return Cluster(
        num_ranks,
        ranks_per_node=NODE_RANKS,
        link_bytes_per_second=link,
        node_link_bytes_per_second=NODE_LINK,
    )


CLUSTERS = {"alike": alike, "mixed": mixed, "dedicated": dedicated, "nodes": nodes}


@dataclass(frozen=True)
class Problem:
    """Work of every rank, in tiles, and its links."""

    speeds: np.ndarray  # [num_ranks] tiles per second
    node: np.ndarray  # [num_ranks]
    inside: float  # bytes per second
    between: float
    home: np.ndarray  # [documents] rank
    full: np.ndarray  # [documents] number of full query tiles
    part: np.ndarray  # [documents] filled fraction of the last query tile
    query_bytes: float  # per tile of rows
    key_bytes: float

    @classmethod
    def of(cls, pack: Pack, cluster: Cluster, prices: Prices) -> "Problem":
        ranks_per_node, inside, between, *_ = cluster.links().tolist()
        speeds = np.ones(pack.num_ranks) if cluster.speeds is None else np.array(cluster.speeds)
        full, rest = np.divmod(pack.lengths, prices.tile)
        return cls(
            speeds / prices.seconds_per_tile,
            np.arange(pack.num_ranks) // int(ranks_per_node),
            inside,
            between if ranks_per_node < pack.num_ranks else 0.0,
            pack.home,
            full,
            rest / prices.tile,
            float(prices.query_bytes * prices.tile),
            float(prices.key_bytes * prices.tile),
        )

    def by_rank(self, of_documents: np.ndarray) -> np.ndarray:
        return np.bincount(self.home, of_documents, self.speeds.size)

    @property
    def work(self) -> np.ndarray:
        """Return the tiles [num_ranks] of each rank's own rows, counted row by row."""
        return self.by_rank((self.full + 1) * (self.full / 2 + self.part))


def optimum(pack: Pack, home_seconds: np.ndarray, cluster: Cluster, prices: Prices) -> float:
    """Return a lower bound, in seconds, on the makespan of any plan."""
    problem = Problem.of(pack, cluster, prices)
    low = home_seconds.sum() / (problem.speeds.sum() * prices.seconds_per_tile)
    if is_possible(problem, low):
        return low
    high = 2 * low
    while not is_possible(problem, high):
        low, high = high, 2 * high
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(problem, middle) else (middle, high)
    return low


def is_possible(problem: Problem, seconds: float) -> bool:
    largest = seconds * problem.speeds.max()
    inside, between = seconds * problem.inside, seconds * problem.between
    surplus = problem.work - seconds * problem.speeds
    slack = 1e-9 * problem.work.sum()
    if (surplus > max_tiles_out(problem, inside + between, largest) + slack).any():
        return False
    tiles_out = max_tiles_out(problem, between, largest)
    surplus_of_node = np.bincount(problem.node, surplus)
    return bool((surplus_of_node <= np.bincount(problem.node, tiles_out) + slack).all())


def max_tiles_out(problem: Problem, num_bytes: float, largest: float) -> np.ndarray:
    """Bound the tiles [num_ranks] that each rank can give away for `num_bytes` bytes.

    Servers compute at most `largest` tiles each. The module's docstring has the proof.
    """
    query, key = problem.query_bytes, problem.key_bytes
    row = np.arange(problem.full.max() + 1.0)
    row_bytes = query + key * row * np.sqrt(row * row + largest) / largest
    least = problem.work
    # Prices around the bytes per tile of the cheapest visit.
    for price in PRICES_OF_TILE * 2 * math.sqrt(key * (query + key / 2) / largest):
        worth = np.maximum(0, price * (row + 1) - row_bytes)
        before = np.concatenate([[0.0], worth.cumsum()])
        of_documents = before[problem.full] + problem.part * worth[problem.full]
        least = np.minimum(least, (problem.by_rank(of_documents) + num_bytes) / price)
    return least
