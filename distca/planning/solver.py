"""Solve a planning problem: tasks for all ranks, this rank's layout, and the report.

Nothing here communicates. Ranks with equal problems and pieces get equal plans.
"""

import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distca import ops
from distca.options import Options
from distca.planning.cluster import (
    DEVICES_OF_MOVING_PART,
    DEVICES_OF_PARTS,
    MOVING_PART,
    MOVING_PART_OF_PEER,
    Cluster,
    cluster_of,
    early_parts,
    held_row_bytes,
    input_row_bytes,
    memory_cap_bytes,
    other_work,
    parts_of,
    parts_worth_taking,
    why_kept,
)
from distca.planning.cost import AttentionShape, cost_tensor, flops_per_second
from distca.planning.halves import hidden_by_halves, pay
from distca.planning.plan_report import PlanReport
from distca.ranks.fsdp_traffic import FsdpTraffic
from distca.ranks.links import Links
from distca.ranks.peers import Way
from distca.watching.figures import LINKS

# On these, blocks in ping-pong run whole if that is faster. On others, halves hide nothing.
DEVICES_OF_CHOICE = ("cuda",)
ANY_IMBALANCE = 1e9  # a tolerance that nothing exceeds: max / mean is at most the number of ranks
PLAN_HEADER_WORDS = 5  # of an encoded plan; its tasks follow
TASK_WORDS = 5


@dataclass(frozen=True)
class Problem:
    """The input of a plan, apart from the pieces."""

    rank: int
    num_ranks: int
    window_size: tuple[int, int]
    device_type: str
    step: int
    batch: int | None = None  # step of the first plan for the same documents; None: this one
    ranks_per_node: int | None = None  # as host names say
    way: Way = Way()  # how rows travel
    has_halves: bool = False  # ping-pong: each half hides transfers of the other
    links: Links = Links()  # these two measured when the group opened
    attention_seconds: float | None = None
    transfer_waits: tuple[float, float] = (0.0, 0.0)  # these three measured in training
    hidden_seconds: float = 0.0
    speeds: Sequence[float] = ()  # of ranks, relative to the fastest; empty: all equal
    lags: Sequence[float] = ()  # of ranks, behind the fastest, in seconds; empty: none
    calls: Tensor | None = None  # those that ranks last agreed on for this window
    kept_limit_bytes: int | None = None  # measured; of each rank, for a layer
    servers: tuple[int, ...] = ()  # ranks that run no model
    traffic: FsdpTraffic | None = None  # of a layer, on the links that rows use; None: unknown
    times_whole_blocks: bool = False  # so blocks in ping-pong run whole
    may_keep: bool = True  # inputs, for a backward pass under the same plan


@dataclass(frozen=True)
class Solution:
    """The planner thread's result, on the host."""

    layout: Tensor
    packed_rows: Tensor
    kept_rows: tuple[int, int]  # numbers of query and key rows that may be kept: see lay_out
    pieces: Tensor  # of all ranks
    encoded: Tensor  # as torch.ops.distca.plan returns it
    shape: AttentionShape
    num_parts: int  # in which rows travel
    early_part: float  # of this rank's home tasks, if it has visiting tasks
    report: PlanReport


def solve(problem: Problem, pieces: Tensor, options: Options, shape: AttentionShape) -> Solution:
    """Return the tasks of all ranks and the layout of `problem.rank`. `pieces` are those of all
    ranks."""
    start = time.perf_counter()
    cost = cost_tensor(options, shape, problem.device_type, problem.attention_seconds)
    cluster = _cluster_of_pass(problem, pieces, options, cost, shape)
    tolerance = options.tolerance if options.enabled else ANY_IMBALANCE

    def balanced(on: Cluster) -> tuple[Tensor, Tensor]:
        return balance(pieces, problem.window_size, cost, shape, on, tolerance)

    encoded, loads = balanced(cluster)
    # The work before attention is measured in blocks that run in halves.
    has_choice = problem.device_type in DEVICES_OF_CHOICE and problem.hidden_seconds > 0
    pays_in_halves = not (has_choice and problem.times_whole_blocks)
    if problem.has_halves and pays_in_halves:
        halves = problem.num_ranks, problem.window_size, problem.hidden_seconds
        in_halves = replace(cluster, **hidden_by_halves(pieces, *halves))
        others = balanced(in_halves)
        if has_choice:
            pays_in_halves = pay(in_halves, others[1], cluster, loads, problem.hidden_seconds)
        if pays_in_halves:
            cluster, (encoded, loads) = in_halves, others
    num_parts = parts_worth_taking(cluster, loads)
    early_part = early_parts(cluster, loads, num_parts)[problem.rank].item()
    laid_out = lay_out(problem, pieces, encoded, options, shape, num_parts, early_part)
    plan_ms = 1e3 * (time.perf_counter() - start)
    report = _report_of(problem, cluster, loads, options, plan_ms, pays_in_halves)
    return Solution(*laid_out, pieces, encoded, shape, num_parts, early_part, report)


def balance(
    pieces: Tensor,
    window_size: tuple[int, int],
    cost: Tensor,
    shape: AttentionShape,
    cluster: Cluster,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Return (plan, loads) of torch.ops.distca.plan for the ranks of a cluster. `pieces` are those
    of all ranks, and `cost` comes from cost_tensor. Raises ValueError as the operator does."""
    return ops.plan(
        pieces,
        cluster.num_ranks,
        *window_size,
        cost,
        shape.row_bytes(),
        cluster.servers(),
        cluster.links(),
        tolerance,
        cluster.rounds,
        cluster.kept_cap_bytes,
        held_row_bytes(shape),
        input_row_bytes(shape),
        cluster.kept_gain,
    )


def _report_of(
    problem: Problem,
    cluster: Cluster,
    loads: Tensor,
    options: Options,
    plan_ms: float,
    pays_in_halves: bool,
) -> PlanReport:
    before, after, bytes_out, bytes_in, *_, kept = loads.T.tolist()
    moved = (list(map(int, bytes_out)), list(map(int, bytes_in)))
    figures = {"kept_bytes": list(map(int, kept))}
    if problem.num_ranks > 1 and problem.may_keep:
        limit = problem.kept_limit_bytes
        figures["keeping"] = why_kept(options, problem.device_type, limit, any(kept))
    speeds = cluster.speeds or ()
    return PlanReport(
        before,
        after,
        *moved,
        plan_ms,
        0.0,
        **figures,
        **gb_per_s_of(cluster),
        servers=list(problem.servers),
        idle=[rank for rank, speed in enumerate(speeds) if speed == 0],
        transfer_waits_ms=[1e3 * each for each in problem.transfer_waits],
        hidden_ms=1e3 * problem.hidden_seconds,
        link_room_ms=[1e3 * each for each in cluster.link_room if each < math.inf],
        measured_speeds=list(problem.speeds),
        lags_ms=[1e3 * each for each in problem.lags],
        pays_in_halves=pays_in_halves,
    )


def _cluster_of_pass(
    problem: Problem, pieces: Tensor, options: Options, cost: Tensor, shape: AttentionShape
) -> Cluster:
    """Return the cluster with what its links and servers can do for these pieces."""
    cluster = replace(cluster_of_problem(problem, options), transfer_waits=problem.transfer_waits)
    if not problem.may_keep:
        cluster = replace(cluster, kept_cap_bytes=0)
    if problem.traffic is not None:
        tokens = sum(tokens_of(pieces, problem.num_ranks)) / problem.num_ranks
        speed = flops_per_second(cost, shape)
        cluster = replace(cluster, **other_work(cluster, problem.traffic, tokens, speed))
    is_peer = problem.way.is_peer
    if problem.device_type in DEVICES_OF_MOVING_PART:
        cluster = replace(cluster, moving_part=MOVING_PART_OF_PEER if is_peer else MOVING_PART)
    if not is_peer and problem.device_type in DEVICES_OF_PARTS:
        cluster = replace(cluster, **parts_of(shape))
    return cluster


def cluster_of_problem(problem: Problem, options: Options) -> Cluster:
    """Return the cluster that options describe, with the speeds and lags that ranks measured."""
    cluster = cluster_of(
        options,
        problem.num_ranks,
        problem.device_type,
        problem.ranks_per_node,
        problem.links,
        problem.kept_limit_bytes,
    )
    if problem.lags:
        cluster = replace(cluster, lags=tuple(problem.lags))
    if not problem.speeds:
        return cluster
    expected = cluster.speeds or (1.0,) * problem.num_ranks
    return replace(cluster, speeds=tuple(map(operator.mul, expected, problem.speeds)))


def lay_out(
    problem: Problem,
    pieces: Tensor,
    encoded: Tensor,
    options: Options,
    shape: AttentionShape,
    num_parts: int = 1,
    early_part: float = 0.5,
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return this rank's layout, its packed rows for the upload to its device, and the numbers of
    visiting query and key rows whose inputs core_attention may keep for the backward pass."""
    layout, packed_rows = ops.layout(
        pieces,
        encoded,
        problem.rank,
        problem.step,
        problem.device_type,
        options.deterministic,
        held_row_bytes(shape),
        memory_cap_bytes(options),
        problem.way.is_peer,
        problem.batch,
        problem.way.ranks_per_node,
        num_parts,
        early_part,
    )
    if problem.device_type == "cuda":
        packed_rows = packed_rows.pin_memory()
    may_keep = options.keep_inputs_gb or tasks_of(encoded)[:, 4].any()
    if not may_keep:
        return layout, packed_rows, (0, 0)
    queries, keys = ops.kept_rows(layout)
    # At least two of each if any may be kept, because torch.compile specialises 0 and 1.
    return layout, packed_rows, (max(2, queries), max(2, keys))


def tokens_of(pieces: Tensor, num_ranks: int) -> list[int]:
    """Return the tokens that each rank holds, context left out. `pieces` are those of all ranks."""
    tokens = torch.zeros(num_ranks, dtype=torch.int64)
    return tokens.scatter_add(0, pieces[:, 0], pieces[:, 3] - pieces[:, 4]).tolist()


def gb_per_s_of(cluster: Cluster) -> dict[str, float]:
    """Return the bandwidths of the links that a cluster has, under their names in PlanReport."""
    ranks_per_node, inside, between, *_ = cluster.links().tolist()
    exist = (min(ranks_per_node, cluster.num_ranks) > 1, ranks_per_node < cluster.num_ranks)
    each = zip(LINKS, (inside, between), exist, strict=True)
    return {name: 1e-9 * bandwidth for name, bandwidth, exists in each if exists}


def tasks_of(encoded: Tensor) -> Tensor:
    """Return the tasks of a plan, a view of it, int64 [num_tasks, 5]: document, first query, last
    query + 1, server, whether the server keeps their inputs for the backward pass."""
    return encoded[PLAN_HEADER_WORDS:].reshape(-1, TASK_WORDS)
