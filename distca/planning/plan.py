"""A plan of one step: its tasks for all ranks, and this rank's layout."""

import functools
import math
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distca import _torch_private, ops
from distca.options import Options
from distca.planning.cluster import (
    DEVICES_OF_PARTS,
    Cluster,
    cluster_of,
    early_parts,
    held_row_bytes,
    input_row_bytes,
    link_room,
    measures_memory,
    memory_cap_bytes,
    parts_of,
    parts_worth_taking,
    why_kept,
)
from distca.planning.cost import AttentionShape, cost_tensor, flops_per_second
from distca.planning.documents import Documents
from distca.planning.exchange import (
    HEADER_WORDS,
    HIDING_WORD,
    MEMORY_WORDS,
    NODE_WORD,
    PACE_WORDS,
    SHAPE_WORDS,
    TIMES_WORDS,
    TRAFFIC_WORDS,
    WAITS_WORDS,
    exchange,
    has_attended,
    shape_of,
    words_of,
)
from distca.planning.halves import hidden_by_halves, pay
from distca.planning.plan_report import PlanReport
from distca.ranks import memory, pace, waits
from distca.ranks.fsdp_traffic import FsdpTraffic, common_traffic
from distca.ranks.hiding import hidden_seconds
from distca.ranks.links import Links, ranks_of_a_node
from distca.ranks.notices import Kind, tell
from distca.ranks.opening import measures_links
from distca.ranks.peers import Way
from distca.ranks.session import Session, configured
from distca.watching.figures import LINKS

CAUSAL = (-1, 0)
# On these, blocks in ping-pong run whole if that is faster. On others, halves hide nothing.
DEVICES_OF_CHOICE = ("cuda",)
ANY_IMBALANCE = 1e9  # a tolerance that nothing exceeds: max / mean is at most the number of ranks


PLAN_HEADER_WORDS = 5  # of an encoded plan; its tasks follow
TASK_WORDS = 5


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


class Plan:
    """One rank's share of a plan. Operators can use it once `wait` has returned."""

    def __init__(
        self,
        pending: Future,
        device: torch.device,
        session: Session | None = None,
        batch: int | None = None,
    ) -> None:
        self._pending, self._device = pending, device
        self._report: PlanReport | None = None
        self.group = session.group if session else None  # None: this rank alone
        self.group_name = session.group_name if session else ""
        self.batch = batch  # see Problem
        self.observer: Callable[[PlanReport], object] | None = None  # told of the report
        self.layout: Tensor | None = None  # int64, CPU
        self.rows: Tensor | None = None  # int32, on the device
        self.kept_rows = (0, 0)  # see Solution

    def wait(self) -> "Plan":
        """Wait for the planner thread. Raises the error of that thread, on every call."""
        if self.layout is not None:
            return self
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "distca: the plan is not ready; call plan.wait() before compiled code"
            )
        start = time.perf_counter()
        solution = self.solution()
        waited_ms = 1e3 * (time.perf_counter() - start)
        packed_rows = solution.packed_rows.to(self._device, non_blocking=True)
        self.rows = ops.unpack_rows(solution.layout, packed_rows)
        self.layout, self.kept_rows = solution.layout, solution.kept_rows
        for tensor in (self.layout, self.rows):  # lengths differ from plan to plan: compile once
            _torch_private.mark_dynamic(tensor, 0)
        self._report = replace(solution.report, waited_ms=waited_ms)
        if self.observer is not None:
            self.observer(self._report)
        return self

    def solution(self) -> Solution:
        """Wait for the planner thread, and return its result."""
        if self._pending.done():
            return self._pending.result()
        with torch.profiler.record_function("distca wait for plan"):
            # Ranks that wait for this one elsewhere learn of it.
            if self.group_name:
                ops.await_plan(self.group_name, True)
            try:
                return self._pending.result()
            finally:
                if self.group_name:
                    ops.await_plan(self.group_name, False)

    def report(self) -> PlanReport:
        """Wait for the plan, and return its figures."""
        self.wait()
        return self._report


def submit(
    session: Session,
    documents: Documents,
    window_size: tuple[int, int],
    device: torch.device,
    shape: AttentionShape | None,
    may_keep: bool = True,
    note: dict | None = None,
) -> Plan:
    """Let the planner thread plan `documents`, and attach the plan to them. Servers may keep inputs
    (`may_keep`) if forward and backward passes have the same plan. The plan's record includes
    `note`."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    session.time_step(session.num_plans)
    problem = next_problem(session, window_size, device, documents.chunk_size)
    problem = replace(problem, may_keep=may_keep)
    key = documents.plan_key(window_size)
    batches = {  # by key, of the plans for these documents over this group
        other: plan.batch
        for other, plan in documents._plans.items()
        if plan.group_name == session.group_name
    }
    # The newest batch that has no plan of this key yet, else a new one.
    newest = max(batches.values(), default=problem.step)
    batch = newest if batches.get(key) != newest else problem.step
    shape_words = astuple(shape) if shape is not None else (0,) * SHAPE_WORDS
    details = [batch, *window_size, documents.chunk_size or 0, device.type == "cuda", *shape_words]
    tell(session, Kind.PLAN, problem.step, details)
    words = words_of(session, problem.step, key, shape)
    pending = session.planner.submit(
        _solve_together, session, documents, replace(problem, batch=batch), words, device
    )
    plan = documents._plans[key] = Plan(pending, device, session, batch)
    if session.monitor is not None:  # records on the planner thread, which has time
        can_ping_pong = device.type == "cuda" and session.cut is None and not session.servers
        note = {"can_ping_pong": can_ping_pong, **(note or {})}
        plan.observer = functools.partial(_record, session, plan, problem.step, words, note)
    return plan


def _record(
    session: Session,
    plan: Plan,
    step: int,
    words: list[int],
    note: dict,
    report: PlanReport,
) -> None:
    """Record a report. A plan without a shape, before any attention ran, assumes one."""
    shape = plan.solution().shape
    is_assumed = session.num_ranks > 1 and astuple(shape) != tuple(words[HEADER_WORDS:NODE_WORD])
    work = (shape.tile_flops(1), sum(shape.row_bytes()))
    record = {**report.record(), **note}
    what = f"record of step {step}"
    session.planner.save(what, session.monitor.record, step, record, work, is_assumed)


def group_of(documents: Documents) -> ProcessGroup | None:
    """Return the group that documents are planned over, or None if they have no plan."""
    return next((plan.group for plan in documents._plans.values()), None)


def next_problem(
    session: Session,
    window_size: tuple[int, int],
    device: torch.device,
    chunk_size: int | None = None,
) -> "Problem":
    """Return the problem of a session's next plan, and count that plan."""
    problem = Problem(session.rank, session.num_ranks, window_size, device.type, session.num_plans)
    has_halves = session.cut is not None and window_size[1] == 0 and chunk_size is None
    session.num_plans += 1
    if session.num_ranks == 1:
        return problem
    members = {"way": session.way, "servers": session.servers}
    problem = replace(problem, **members, has_halves=has_halves)
    calls = ops.agreed_calls(session.group_name, problem.step, *window_size)
    speeds = {"links": session.links, "attention_seconds": session.attention_seconds}
    return replace(problem, **speeds, calls=calls)


def local_plan(documents: Documents, window_size: tuple[int, int], device: torch.device) -> Plan:
    """Return the plan of a rank on its own, without communication. Cached on `documents`.

    Raises ValueError for documents that cross ranks, whose keys are elsewhere.
    """
    key = (tuple(window_size), device)
    plan = documents._local_plans.get(key)
    if plan is not None:
        return plan
    if documents.crosses_ranks:
        raise ValueError(
            f"{documents} cross ranks and have no plan for window_size {window_size}; call "
            "distca.plan(documents) on every rank first"
        )
    pending: Future = Future()
    problem = Problem(0, 1, tuple(window_size), device.type, step=-1)
    pending.set_result(_solve(problem, documents.pieces(0), configured(), AttentionShape()))
    plan = documents._local_plans[key] = Plan(pending, device)
    return plan.wait()


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
    may_keep: bool = True  # inputs, for a backward pass under the same plan


def _solve_together(
    session: Session,
    documents: Documents,
    problem: Problem,
    words: list[int],
    device: torch.device,
) -> Solution:
    """Exchange pieces, plan, lay out and agree, on the planner thread."""
    start = time.perf_counter()
    pieces, headers = documents.pieces(session.rank), torch.tensor([words])
    if session.num_ranks > 1:
        measured = _words_of_measurements(session, problem, device)
        pieces, headers = exchange(session, pieces, [*words, *measured])
        problem = _with_measurements(problem, session, pieces, headers)
    times_ms = headers[:, TIMES_WORDS].T / 1e3
    attention_ms, exposed_ms = times_ms.tolist() if (times_ms >= 0).all() else ([], [])
    solution = _solve(problem, pieces, session.options, shape_of(headers))
    speeds = _cluster_of(problem, session.options).speeds
    speed = 1.0 if speeds is None else speeds[session.rank]
    seconds = speed * solution.report.seconds_after[session.rank]
    session.pace.note(problem.step, seconds, documents.num_tokens)
    agree_on_plan(session, problem, solution.layout)
    plan_ms = 1e3 * (time.perf_counter() - start)
    measured = {"plan_ms": plan_ms, "attention_ms": attention_ms, "exposed_ms": exposed_ms}
    return replace(solution, report=replace(solution.report, **measured))


def _words_of_measurements(session: Session, problem: Problem, device: torch.device) -> list[int]:
    """Return what this rank has measured in training, in the order of the exchange's words."""
    is_measured = measures_memory(session.options)
    about_memory = session.memory.words(device) if is_measured else memory.UNKNOWN
    about_waits = waits.UNKNOWN
    if problem.has_halves:
        about_waits = session.waits.words([each.group_name for each in session.halves])
    if about_waits == waits.UNKNOWN:  # blocks in ping-pong may also run whole
        about_waits = session.waits.words([session.group_name])
    about_pace = [pace.UNKNOWN] * pace.NUM_WORDS
    if measures_links(session):
        about_pace = session.pace.words(session.group_name)
    about_traffic = session.traffic.words(has_attended(session))
    return [*about_memory, *about_waits, session.hiding.word(), *about_pace, *about_traffic]


def _with_measurements(
    problem: Problem, session: Session, pieces: Tensor, headers: Tensor
) -> Problem:
    """Return the problem with what all ranks have measured, from their headers."""
    nodes = headers[:, NODE_WORD].tolist()
    limit = memory.common_limit(headers[:, MEMORY_WORDS])
    problem = replace(problem, ranks_per_node=ranks_of_a_node(nodes), kept_limit_bytes=limit)
    if not (session.pools_stages or session.options.deterministic):
        problem = replace(problem, traffic=common_traffic(headers[:, TRAFFIC_WORDS]))
    if not measures_links(session):
        return problem
    bandwidth = _cluster_of(problem, session.options).slowest_bytes_per_second
    session.waits.add(headers[:, WAITS_WORDS], bandwidth)
    session.pace.add(headers[:, PACE_WORDS])
    measured = {"transfer_waits": session.waits.seconds(), "speeds": session.pace.speeds()}
    if problem.has_halves:
        measured["hidden_seconds"] = hidden_seconds(headers[:, HIDING_WORD])
    elif not (session.pools_stages or session.servers):
        measured["lags"] = session.pace.lags(tokens_of(pieces, session.num_ranks))
    return replace(problem, **measured)


def tokens_of(pieces: Tensor, num_ranks: int) -> list[int]:
    """Return the tokens that each rank holds, context left out. `pieces` are those of all ranks."""
    tokens = torch.zeros(num_ranks, dtype=torch.int64)
    return tokens.scatter_add(0, pieces[:, 0], pieces[:, 3] - pieces[:, 4]).tolist()


def agree_on_plan(session: Session, problem: Problem, layout: Tensor) -> None:
    """Raise ValueError on every rank if plans differ, on the planner thread. Announce the calls of
    attention that this rank expects, so that training does not wait for agreement on them."""
    if problem.calls is not None:
        ops.agree_on_plan(layout, problem.calls, session.group_name)


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


def _solve(problem: Problem, pieces: Tensor, options: Options, shape: AttentionShape) -> Solution:
    start = time.perf_counter()
    cost = cost_tensor(options, shape, problem.device_type, problem.attention_seconds)
    cluster = _cluster_of_pass(problem, pieces, options, cost, shape)
    tolerance = options.tolerance if options.enabled else ANY_IMBALANCE

    def balanced(on: Cluster) -> tuple[Tensor, Tensor]:
        return balance(pieces, problem.window_size, cost, shape, on, tolerance)

    encoded, loads = balanced(cluster)
    pays_in_halves = True  # unless a comparison shows otherwise
    if problem.has_halves:
        halves = problem.num_ranks, problem.window_size, problem.hidden_seconds
        in_halves = replace(cluster, **hidden_by_halves(pieces, *halves))
        others = balanced(in_halves)
        # The work before attention is measured in blocks that run in halves.
        has_choice = problem.device_type in DEVICES_OF_CHOICE and problem.hidden_seconds > 0
        pays_in_halves = not has_choice or pay(
            in_halves, others[1], cluster, loads, problem.hidden_seconds
        )
        if pays_in_halves:
            cluster, (encoded, loads) = in_halves, others
    num_parts = parts_worth_taking(cluster, loads)
    early_part = early_parts(cluster, loads, num_parts)[problem.rank].item()
    laid_out = lay_out(problem, pieces, encoded, options, shape, num_parts, early_part)
    plan_ms = 1e3 * (time.perf_counter() - start)
    report = _report_of(problem, cluster, loads, options, plan_ms, pays_in_halves)
    return Solution(*laid_out, pieces, encoded, shape, num_parts, early_part, report)


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
    cluster = replace(_cluster_of(problem, options), transfer_waits=problem.transfer_waits)
    if not problem.may_keep:
        cluster = replace(cluster, kept_cap_bytes=0)
    if problem.traffic is not None:
        tokens = sum(tokens_of(pieces, problem.num_ranks)) / problem.num_ranks
        speed = flops_per_second(cost, shape)
        cluster = replace(cluster, link_room=link_room(cluster, problem.traffic, tokens, speed))
    if problem.way.device is None and problem.device_type in DEVICES_OF_PARTS:
        cluster = replace(cluster, **parts_of(shape))
    return cluster


def _cluster_of(problem: Problem, options: Options) -> Cluster:
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
