"""A plan of one step: its tasks for all ranks, and this rank's layout."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distca import _torch_private, ops
from distca.planning.cluster import (
    measures_memory,
)
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.exchange import (
    HEADER_WORDS,
    HIDING_WORD,
    MEMORY_WORDS,
    NODE_WORD,
    PACE_WORDS,
    PACK_WORDS,
    SHAPE_WORDS,
    TIMES_WORDS,
    TRAFFIC_WORDS,
    WAITS_WORDS,
    check_packs,
    exchange,
    has_attended,
    shape_of,
    words_of,
)
from distca.planning.plan_report import PlanReport
from distca.planning.solver import Problem, Solution, cluster_of_problem, solve, tokens_of
from distca.ranks import memory, pace, waits
from distca.ranks.fsdp_traffic import common_traffic
from distca.ranks.hiding import hidden_seconds
from distca.ranks.links import ranks_of_a_node
from distca.ranks.notices import Kind, tell
from distca.ranks.opening import measures_links
from distca.ranks.session import Session, configured

CAUSAL = (-1, 0)


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
        """Wait for the planner thread. Raises the error of that thread, on every call. In compiled
        code, a wait for a plan that is not ready breaks the graph."""
        if self.layout is None:
            if torch.compiler.is_compiling():
                self._wait_outside_compiled_code()
            else:
                self._take_solution()
        return self

    @_torch_private.not_compiled
    def _wait_outside_compiled_code(self) -> None:
        self._take_solution()

    def _take_solution(self) -> None:
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
    pending.set_result(solve(problem, documents.pieces(0), configured(), AttentionShape()))
    plan = documents._local_plans[key] = Plan(pending, device)
    return plan.wait()


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
        about_training = _words_of_measurements(session, problem, device)
        words = [*words, *about_training, *documents.pack_words]
        pieces, headers = exchange(session, pieces, words)
        check_packs(headers[:, PACK_WORDS])
        problem = _with_measurements(problem, session, pieces, headers)
    times_ms = headers[:, TIMES_WORDS].T / 1e3
    attention_ms, exposed_ms = times_ms.tolist() if (times_ms >= 0).all() else ([], [])
    solution = solve(problem, pieces, session.options, shape_of(headers))
    speeds = cluster_of_problem(problem, session.options).speeds
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
    about_memory = memory.words(device) if is_measured else memory.UNKNOWN
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
    bandwidth = cluster_of_problem(problem, session.options).slowest_bytes_per_second
    session.waits.add(headers[:, WAITS_WORDS], bandwidth)
    session.pace.add(headers[:, PACE_WORDS])
    measured = {"transfer_waits": session.waits.seconds(), "speeds": session.pace.speeds()}
    if problem.has_halves:
        measured["hidden_seconds"] = hidden_seconds(headers[:, HIDING_WORD])
    if not (session.pools_stages or session.servers):
        measured["lags"] = session.pace.lags(tokens_of(pieces, session.num_ranks))
        is_early = problem.step < pace.MAX_PLANS_TO_LAGS
        measured["times_whole_blocks"] = is_early and not session.pace.knows_lags
    return replace(problem, **measured)


def agree_on_plan(session: Session, problem: Problem, layout: Tensor) -> None:
    """Raise ValueError on every rank if plans differ, on the planner thread. Announce the calls of
    attention that this rank expects, so that training does not wait for agreement on them."""
    if problem.calls is not None:
        ops.agree_on_plan(layout, problem.calls, session.group_name)
