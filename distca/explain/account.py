"""What a plan's tasks cost, each on its own: seconds, bytes, and the ranks they come from."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distca.planning.cluster import MAX_RANKS, Cluster
from distca.planning.cost import AttentionShape
from distca.planning.packs import Pack
from distca.planning.solver import ANY_IMBALANCE, balance, tasks_of
from distca.planning.task_rows import TaskRows, keys_of, rows_of_tasks


@dataclass(frozen=True)
class Step:
    """What is planned."""

    pack: Pack
    window: tuple[int, int]
    shape: AttentionShape
    cost: Tensor  # as torch.ops.distca.plan takes it
    cluster: Cluster
    tolerance: float

    @property
    def speeds(self) -> np.ndarray:
        """[num_ranks]"""
        speeds = self.cluster.speeds
        return np.ones(self.cluster.num_ranks) if speeds is None else np.array(speeds)


@dataclass(frozen=True)
class Tasks:
    """By (server, document, q_begin). Each field is an array [num_tasks]."""

    document: np.ndarray
    q_begin: np.ndarray
    q_end: np.ndarray
    server: np.ndarray
    k_begin: np.ndarray  # keys [k_begin, k_end) that any of the queries sees
    k_end: np.ndarray
    seconds: np.ndarray  # on its server
    home: np.ndarray  # rank that holds most of its queries
    num_homes: np.ndarray  # ranks that hold queries of it
    num_bytes: np.ndarray  # that travel for it, over all links


@dataclass(frozen=True)
class Transfers:
    """Rows of one home rank that travel for one task. Each field is an array."""

    task: np.ndarray  # index into Tasks
    home: np.ndarray
    num_bytes: np.ndarray


@dataclass(frozen=True)
class Account:
    step: Step
    tasks: Tasks
    transfers: Transfers
    seconds_before: np.ndarray  # [num_ranks] of attention, nothing moved
    seconds_after: np.ndarray
    bytes_out: np.ndarray  # [num_ranks] of its own rows, whichever way they travel
    bytes_in: np.ndarray

    @property
    def mean_seconds(self) -> float:
        """Of the work, nothing moved, spread over the servers by their speeds."""
        speeds = self.step.speeds
        work = self.seconds_before * np.where(speeds > 0, speeds, 1)  # of others counted at speed 1
        return float(work.sum() / speeds.sum())

    def excess(self, seconds: np.ndarray) -> np.ndarray:
        """[num_ranks] above (+) or below (-) the mean; ranks that serve nothing should have 0."""
        return seconds - np.where(self.step.speeds > 0, self.mean_seconds, 0.0)

    @property
    def is_moved(self) -> np.ndarray:
        """[num_tasks] Whether any row of it travels."""
        return self.tasks.num_bytes > 0

    @property
    def bytes_over_least(self) -> np.ndarray:
        """[num_tasks] Bytes over those of the cheapest shape with as much work. Moved tasks of one
        document and server share keys, and so this; it may be below 1 where rows lie on the server.
        """
        of_task = np.stack([self.tasks.document, self.tasks.server, self.is_moved])
        visits, at = np.unique(of_task, axis=1, return_inverse=True)
        work = self.tasks.seconds * self.step.speeds[self.tasks.server]
        num_pairs = np.bincount(at, work, visits.shape[1]) / seconds_per_pair(self.step.cost)
        num_bytes = np.bincount(at, self.tasks.num_bytes, visits.shape[1])
        return (num_bytes / self.step.shape.least_bytes(num_pairs))[at]

    @property
    def least_bytes(self) -> float:
        """Lower bound of a plan that brings every server to the mean, one task for each."""
        deficits = np.maximum(-self.excess(self.seconds_before), 0) * self.step.speeds
        return float(self.step.shape.least_bytes(deficits / seconds_per_pair(self.step.cost)).sum())

    def bandwidth(self, home: np.ndarray, server: np.ndarray) -> np.ndarray:
        """Bytes per second of the links from `home` to `server`."""
        ranks_per_node, inside, between, *_ = self.step.cluster.links().tolist()
        return np.where(home // ranks_per_node == server // ranks_per_node, inside, between)

    def links(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(home, server, bytes) of all pairs of ranks between which rows travel, most bytes
        first."""
        num_ranks, server = self.step.pack.num_ranks, self.tasks.server[self.transfers.task]
        pairs, at = np.unique(self.transfers.home * num_ranks + server, return_inverse=True)
        num_bytes = _sums(at, self.transfers.num_bytes, pairs.size)
        order = np.argsort(-num_bytes, kind="stable")
        return *np.divmod(pairs[order], num_ranks), num_bytes[order]


def _sums(index: np.ndarray, num_bytes: np.ndarray, count: int) -> np.ndarray:
    """[count] of integers; float64 holds sums of bytes exactly."""
    return np.bincount(index, num_bytes, count).astype(np.int64)


def seconds_per_pair(cost: Tensor) -> float:
    """Of a (query, key) pair in a full tile, or in the largest task of a table."""
    tile_q, tile_k, seconds_per_tile, per_task, num_rows, num_keys, *table = cost.tolist()
    if not table:
        return seconds_per_tile / (tile_q * tile_k)
    num_rows, num_keys = int(num_rows), int(num_keys)
    return (table[-1] - per_task) / (table[num_rows - 1] * table[num_rows + num_keys - 1])


def explain(step: Step) -> Account:
    """Plan the step and account for its tasks. Servers keep no inputs, so inputs travel twice."""
    pieces = step.pack.as_tensor()
    cluster = replace(step.cluster, kept_cap_bytes=0)
    encoded, loads = balance(pieces, step.window, step.cost, step.shape, cluster, step.tolerance)
    tasks, transfers = account_for(step, tasks_of(encoded)[:, :4])
    before, after, bytes_out, bytes_in, *_ = loads.numpy().T
    num_bytes = (bytes_out.astype(np.int64), bytes_in.astype(np.int64))
    return Account(step, tasks, transfers, before, after, *num_bytes)


def account_for(step: Step, words: Tensor) -> tuple[Tasks, Transfers]:
    """`words`: int64 [num_tasks, 4] (document, q_begin, q_end, server), in the plan's order."""
    tasks = words.numpy()
    document, q_begin, q_end, server = tasks.T
    keys = keys_of(step.window, q_begin, q_end, step.pack.lengths[document])
    rows = rows_of_tasks(step.pack, tasks, step.window)
    query_bytes, key_bytes = step.shape.row_bytes()
    moves = (rows.rank != server[rows.task]) & (rows.queries + rows.new_keys > 0)
    travelling = (query_bytes * rows.queries + key_bytes * rows.new_keys)[moves]
    transfers = Transfers(rows.task[moves], rows.rank[moves], travelling)
    num_bytes = _sums(transfers.task, travelling, len(tasks))
    seconds = seconds_of(step, tasks) / step.speeds[server]
    return Tasks(*tasks.T, *keys, seconds, *_homes(rows, len(tasks)), num_bytes), transfers


def seconds_of(step: Step, tasks: np.ndarray) -> np.ndarray:
    """[num_tasks] At speed 1, from the planner's own cost model: each task is given to it as a rank
    that holds just its queries."""
    order = np.lexsort((tasks[:, 1], tasks[:, 0]))
    document, q_begin, q_end, _ = tasks[order].T
    seconds = np.empty(len(tasks))
    # As many tasks at a time as there may be ranks, of whole documents.
    edges = np.flatnonzero(np.diff(document, prepend=-1, append=-1))
    begin = 0
    while begin < len(tasks):
        end = int(edges[edges <= begin + MAX_RANKS][-1])
        part = slice(begin, end)
        columns = [np.arange(end - begin), document[part], q_begin[part], (q_end - q_begin)[part]]
        pieces = torch.from_numpy(np.stack(columns, axis=1))
        alone = Cluster(end - begin)
        _, loads = balance(pieces, step.window, step.cost, step.shape, alone, ANY_IMBALANCE)
        seconds[order[part]] = loads[:, 0].numpy()  # seconds at home
        begin = end
    return seconds


def _homes(rows: TaskRows, num_tasks: int) -> tuple[np.ndarray, np.ndarray]:
    """(home, num_homes) of each task."""
    held = rows.queries > 0
    num_ranks = int(rows.rank.max()) + 1
    pairs, at = np.unique(rows.task[held] * num_ranks + rows.rank[held], return_inverse=True)
    task, rank = np.divmod(pairs, num_ranks)
    most_last = np.lexsort((-rank, np.bincount(at, rows.queries[held]), task))
    last = np.flatnonzero(np.diff(task[most_last], append=num_tasks))
    return rank[most_last][last], np.bincount(task, minlength=num_tasks)
