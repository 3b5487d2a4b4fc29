"""For benchmarks/planner.py: clusters of unequal servers and links, and the least time that any
plan needs there.

The optimum is the least T for which work, were it divisible at will, could be spread so that every
server computes, and every link sends and receives, for at most T. It is a lower bound: no plan is
faster under the planner's own costs. For a given T

- all servers together must do all work: sum of work <= T * sum of speeds;
- a rank must be able to give away what it has too much of, over both its links, and a node what its
  ranks together have too much of, over their links to other nodes;
- what ranks can take in, over both their links and up to T of compute, must be enough for all that
  has to leave.

What a rank can give away for given bytes is a fractional knapsack of its documents, those that give
most work a byte first. n query tiles up to key tile m are n * (m - n / 2 + 1 / 2) tiles and take
A * n + B * m bytes a row of tiles, A and B those of a query and a key row. A document of length L
gives most a byte at m = L + 1 / 2, where n / m solves a quadratic; and a slice that nobody could
compute within T gives no more than the best slice of that size, 2 * sqrt(B * (A + B / 2) * tiles)
bytes less the half tile of keys.
"""

import math
from dataclasses import dataclass

import numpy as np
from planner_reference import Pack, Prices

from distca.cluster import Cluster

ONE_WAY = 2 / 3  # of a row's bytes go the same way at most, see csrc/planner/loads.h
NUM_BISECTIONS = 40
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
    """Work and links of every rank."""

    work: np.ndarray  # [num_ranks] seconds at speed 1, nothing moved
    speeds: np.ndarray  # [num_ranks]
    node: np.ndarray  # [num_ranks]
    inside: float  # bytes per second
    between: float
    first: np.ndarray  # [num_ranks + 1] first document of each rank, its longest first
    tiles: np.ndarray  # [documents] work
    lengths: np.ndarray  # [documents] in tiles

    @classmethod
    def of(cls, pack: Pack, home_seconds: np.ndarray, cluster: Cluster, prices: Prices):
        ranks_per_node, inside, between = cluster.links().tolist()
        ranks = np.arange(pack.num_ranks)
        order = np.lexsort((-pack.lengths, pack.home))
        lengths = pack.lengths[order]
        return cls(
            home_seconds,
            np.ones(pack.num_ranks) if cluster.speeds is None else np.array(cluster.speeds),
            ranks // int(ranks_per_node),
            inside,
            between if ranks_per_node < pack.num_ranks else 0.0,
            np.searchsorted(pack.home[order], np.arange(pack.num_ranks + 1)),
            prices.tiles(np.zeros_like(lengths), lengths).astype(np.float64),
            -(-lengths // prices.tile) + 0.5,
        )


def optimum(pack: Pack, home_seconds: np.ndarray, cluster: Cluster, prices: Prices) -> float:
    """Seconds that no plan's makespan is below; see the module."""
    problem = Problem.of(pack, home_seconds, cluster, prices)
    low = home_seconds.sum() / problem.speeds.sum()
    if is_possible(problem, prices, low):
        return low
    high = 2 * low
    while not is_possible(problem, prices, high):
        low, high = high, 2 * high
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(problem, prices, middle) else (middle, high)
    return low


def is_possible(problem: Problem, prices: Prices, seconds: float) -> bool:
    ratio = tiles_of_byte(problem, prices, seconds * problem.speeds.max() / prices.seconds_per_tile)
    inside, between = (seconds * link / ONE_WAY for link in (problem.inside, problem.between))
    surplus = problem.work - seconds * problem.speeds
    slack = 1e-9 * seconds
    give_all = given(problem, ratio, inside + between) * prices.seconds_per_tile
    if (np.maximum(surplus, 0) > give_all + slack).any():
        return False
    give_out = given(problem, ratio, between) * prices.seconds_per_tile
    surplus_of_node = np.bincount(problem.node, surplus)
    if (surplus_of_node > np.bincount(problem.node, give_out) + slack).any():
        return False
    most_in = ratio.max() * (inside + between) * prices.seconds_per_tile
    taken = np.minimum(np.maximum(-surplus, 0), most_in).sum()
    return bool(np.maximum(surplus, 0).sum() <= taken + slack * surplus.size)


def tiles_of_byte(problem: Problem, prices: Prices, largest: float) -> np.ndarray:
    """[documents] most work that a byte out of the document brings, in tiles; `largest` is the most
    that a server computes."""
    query, key = prices.query_bytes * prices.tile, prices.key_bytes * prices.tile
    # (x - x^2 / 2) / (A * x + B) is greatest at x = n / m, where A / 2 * x^2 + B * x - B = 0.
    share = min(1.0, (math.sqrt(key * key + 2 * query * key) - key) / query)
    of_length = (share - share * share / 2) / (query * share + key) * problem.lengths
    of_length *= problem.lengths / (problem.lengths - 0.5)  # keys end half a tile before that m
    of_size = largest / (2 * math.sqrt(key * (query + key / 2) * largest) - key / 2)
    return np.minimum(of_length, of_size)


def given(problem: Problem, ratio: np.ndarray, num_bytes: float) -> np.ndarray:
    """[num_ranks] most tiles that each rank gives away for so many bytes."""
    by_bytes = np.concatenate([[0.0], (problem.tiles / ratio).cumsum()])
    by_tiles = np.concatenate([[0.0], problem.tiles.cumsum()])
    first, last = problem.first[:-1], problem.first[1:]
    end = np.minimum(by_bytes[first] + num_bytes, by_bytes[last])
    return np.interp(end, by_bytes, by_tiles) - by_tiles[first]
