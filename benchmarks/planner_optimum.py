"""For benchmarks/planner.py: clusters of unequal servers and links, and the least time that any
plan needs there.

The optimum is a lower bound: no plan is faster under the planner's own costs. It is the least T for
which

- all servers together can do all work: sum of work <= T * sum of speeds;
- every rank can give away what it has too much of, over both its links;
- every node can give away what its ranks together have too much of, over their links to other
  nodes.

What a rank can give away for b bytes. Lengths are in tiles. Row y of a document, k = floor(y),
is k + 1 tiles of work; no cut makes the rest less than its rows, since a query tile costs for each
of its rows what the last one costs. A visit is what one server computes of one document: rows that
hold at most D tiles, what a server does in T. It takes A a row and, for keys, B * e, e being the
end of its last row. Let a tile of work be worth c bytes, and a row

    v(y) = max(0, c * (k + 1) - A - B * y * sqrt(y^2 + D) / D).

No visit is worth more than its rows, c * work - A * rows - B * e <= integral of v, if the integral
of B * y * sqrt(y^2 + D) / D over them does not pass B * e. In u = y^2 / 2, of which they hold
U <= D since y <= k + 1, it is the integral of B * sqrt(2 * u + D) / D, largest for the rows just
below e, where U = min(D, e^2 / 2). The root is concave, so its mean over them is no more than
sqrt(e^2 - U + D). For U = D that is e; for U = e^2 / 2 < D the integral is no more than
B * e * (e * sqrt(e^2 / 2 + D)) / (2 * D) <= B * e, as e and the root are at most sqrt(2 * D).
Visits share no rows, so c * work - b <= V, what all rows of the rank's documents are worth: for
every c, work is at most (V + b) / c.
"""

import math
from dataclasses import dataclass

import numpy as np
from planner_reference import Pack, Prices

from distca.planning.cluster import Cluster

ONE_WAY = 2 / 3  # of a row's bytes go the same way at most, see csrc/planner/model/loads.h
NUM_BISECTIONS = 24
PRICES_OF_TILE = np.geomspace(0.9, 8, 40)  # any are right; more bring the bound closer
NODE_RANKS = 8
NODE_LINK = 50e9  # bytes per second


def alike(num_ranks: int, link: float) -> Cluster:
    """Equal servers, one link everywhere."""
    return Cluster(num_ranks, link_bytes_per_second=link)


def mixed(num_ranks: int, link: float) -> Cluster:
    """Every other server has half the speed."""
    speeds = tuple(0.5 if rank % 2 else 1.0 for rank in range(num_ranks))
    return Cluster(num_ranks, speeds=speeds, link_bytes_per_second=link)


def dedicated(num_ranks: int, link: float) -> Cluster:
    """One of eight ranks computes for all."""
    speeds = tuple(float(rank % 8 == 7) for rank in range(num_ranks))
    return Cluster(num_ranks, speeds=speeds, link_bytes_per_second=link)


def nodes(num_ranks: int, link: float) -> Cluster:
    """Nodes of eight ranks, 50 GB/s a rank between them."""
    return Cluster(
        num_ranks,
        ranks_per_node=NODE_RANKS,
        link_bytes_per_second=link,
        node_link_bytes_per_second=NODE_LINK,
    )


CLUSTERS = {"alike": alike, "mixed": mixed, "dedicated": dedicated, "nodes": nodes}


@dataclass(frozen=True)
class Problem:
    """Work, in tiles, and links of every rank."""

    speeds: np.ndarray  # [num_ranks] tiles per second
    node: np.ndarray  # [num_ranks]
    inside: float  # bytes per second
    between: float
    home: np.ndarray  # [documents] rank
    full: np.ndarray  # [documents] tiles of query rows that are full
    part: np.ndarray  # [documents] of the last one that is not
    query_bytes: float  # of a tile of rows
    key_bytes: float

    @classmethod
    def of(cls, pack: Pack, cluster: Cluster, prices: Prices) -> "Problem":
        ranks_per_node, inside, between = cluster.links().tolist()
        speeds = np.ones(pack.num_ranks) if cluster.speeds is None else np.array(cluster.speeds)
        full, rest = np.divmod(pack.lengths, prices.tile)
        return cls(
            speeds / prices.seconds_per_tile,
            np.arange(pack.num_ranks) // int(ranks_per_node),
            inside / ONE_WAY,
            between / ONE_WAY if ranks_per_node < pack.num_ranks else 0.0,
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
        """[num_ranks] Tiles, nothing moved, each row counted by itself."""
        return self.by_rank((self.full + 1) * (self.full / 2 + self.part))


def optimum(pack: Pack, home_seconds: np.ndarray, cluster: Cluster, prices: Prices) -> float:
    """Seconds that no plan's makespan is below; see the module."""
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
    if (surplus > most_given(problem, inside + between, largest) + slack).any():
        return False
    give_out = most_given(problem, between, largest)
    surplus_of_node = np.bincount(problem.node, surplus)
    return bool((surplus_of_node <= np.bincount(problem.node, give_out) + slack).all())


def most_given(problem: Problem, num_bytes: float, largest: float) -> np.ndarray:
    """[num_ranks] Most tiles that each rank gives away for so many bytes to servers that compute
    at most `largest` tiles each; see the module."""
    query, key = problem.query_bytes, problem.key_bytes
    row = np.arange(problem.full.max() + 1.0)
    row_bytes = query + key * row * np.sqrt(row * row + largest) / largest
    least = problem.work
    # About the bytes a tile in the visit of fewest for its size, and more.
    for price in PRICES_OF_TILE * 2 * math.sqrt(key * (query + key / 2) / largest):
        worth = np.maximum(0, price * (row + 1) - row_bytes)
        before = np.concatenate([[0.0], worth.cumsum()])
        of_documents = before[problem.full] + problem.part * worth[problem.full]
        least = np.minimum(least, (problem.by_rank(of_documents) + num_bytes) / price)
    return least
