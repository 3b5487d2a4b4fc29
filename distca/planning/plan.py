"""A plan of one step: its tasks for all ranks, and this rank's layout."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distca import _torch_private, ops
from distca.options import Options
from distca.planning.cluster import (
    Cluster,
    cluster_of,
    held_row_bytes,
    input_row_bytes,
    memory_cap_bytes,
    ranks_of_a_node,
)
from distca.planning.cost import AttentionShape, cost_tensor
from distca.planning.documents import Documents
from distca.planning.exchange import (
    NODE_WORD,
    TIMES_WORDS,
    exchange,
    header_of,
    node,
    shape_words,
)
from distca.ranks.session import NOT_TIMED, Session, configured
from distca.watching.figures import max_over_mean

CAUSAL = (-1, 0)
ANY_IMBALANCE = 1e9  # a tolerance that nothing exceeds: max / mean is at most the number of ranks

PLAN_HEADER_WORDS = 5  # of an encoded plan; its tasks follow
TASK_WORDS = 5


@dataclass(frozen=True)
class PlanReport:
    """Balance and cost of a plan, predicted for one layer, forward and backward."""

    seconds_before: list[float]
    """Attention time of each rank without balancing, in seconds."""
    seconds_after: list[float]
    """Attention time of each rank under the plan, in seconds."""
    bytes_out: list[int]
    """Bytes that each rank sends."""
    bytes_in: list[int]
    """Bytes that each rank receives."""
    plan_ms: float
    """Time for the exchange of pieces, the plan and this rank's layout, in milliseconds."""
    waited_ms: float
    """Part of plan_ms that the training thread waited for."""
    attention_ms: list[float] = field(default_factory=list)
    """Measured attention time of each rank in an earlier step: all layers, forward and backward,
    including waits for rows. Empty if nothing was measured (Watching.log_every)."""
    exposed_ms: list[float] = field(default_factory=list)
    """Measured part of attention_ms in which the rank computed nothing, because rows of other ranks
    were on their way or not sent yet."""

    @property
    def imbalance_before(self) -> float:
        """max / mean of seconds_before. 1 is perfect balance."""
        return max_over_mean(self.seconds_before)

    @property
    def imbalance_after(self) -> float:
        """max / mean of seconds_after."""
        return max_over_mean(self.seconds_after)

    def figures(self) -> dict[str, float]:
        """Return the figures that logs show. moved_mb: bytes that all ranks send for one layer,
        forward and backward, in 1e6 bytes."""
        return {
            "imbalance_before": self.imbalance_before,
            "imbalance_after": self.imbalance_after,
            "moved_mb": sum(self.bytes_out) / 1e6,
            "plan_ms": self.plan_ms,
            "waited_ms": self.waited_ms,
        }

    def record(self) -> dict:
        """Return figures and lists by rank, as in steps.jsonl."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return {**self.figures(), **lists}


@dataclass(frozen=True)
class Solution:
    """The planner thread's result: host tensors and figures."""

    layout: Tensor
    packed_rows: Tensor
    loads: list[list[float]]
    plan_ms: float
    pieces: Tensor
    """Of all ranks."""
    encoded: Tensor
    """As torch.ops.distca.plan returns it."""
    shape: AttentionShape
    kept_rows: tuple[int, int]
    attention_ms: list[float] = field(default_factory=list)
    exposed_ms: list[float] = field(default_factory=list)


class Plan:
    """One rank's share of a plan. Operators can use it once `wait` has returned."""

    def __init__(
        self, pending: Future, device: torch.device, session: Session | None = None
    ) -> None:
        self._pending = pending
        self._device = device
        self._report: PlanReport | None = None
        self.group = session.group if session else None  # None: this rank alone
        self.group_name = session.group_name if session else ""
        self.batch: int | None = None  # see Problem
        self.observer: Callable[[PlanReport], object] | None = None  # told of the report
        self.layout: Tensor | None = None  # int64, CPU
        self.rows: Tensor | None = None  # int32, on the device
        self.kept_rows = (0, 0)  # room for so many queries, keys: see kept_rows_of

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
        before, after, bytes_out, bytes_in, *_ = zip(*solution.loads, strict=True)
        self._report = PlanReport(
            list(before),
            list(after),
            [int(value) for value in bytes_out],
            [int(value) for value in bytes_in],
            solution.plan_ms,
            waited_ms,
            solution.attention_ms,
            solution.exposed_ms,
        )
        if self.observer is not None:
            self.observer(self._report)
        return self

    def solution(self) -> Solution:
        """Wait for the planner thread, and return its result."""
        if self._pending.done():
            return self._pending.result()
        with torch.profiler.record_function("distca wait for plan"), awaited(self.group_name):
            return self._pending.result()

    def report(self) -> PlanReport:
        """Wait for the plan, and return its figures."""
        self.wait()
        return self._report


@contextlib.contextmanager
def awaited(group_name: str) -> Iterator[None]:
    """Marks a scope in which this rank waits for the planner thread of its group, so that ranks
    that wait for this one elsewhere learn of it."""
    if not group_name:
        yield
        return
    ops.await_plan(group_name, True)
    try:
        yield
    finally:
        ops.await_plan(group_name, False)


def submit(
    session: Session,
    documents: Documents,
    window_size: tuple[int, int],
    device: torch.device,
    shape: AttentionShape | None,
) -> Plan:
    """Let the planner thread plan `documents`, and attach the plan to them."""
    session.read_times()
    problem = next_problem(session, window_size, device)
    problem = replace(problem, batch=_batch_of(session, documents, window_size, problem.step))
    pending = session.planner.submit(
        _solve_together, session, documents, problem, shape_words(session, shape)
    )
    plan = documents._plans[window_size] = Plan(pending, device, session)
    plan.batch = problem.batch
    session.time_step(problem.step)
    if session.monitor is not None:
        plan.observer = functools.partial(_record, session, problem.step)
    return plan


def _batch_of(
    session: Session, documents: Documents, window_size: tuple[int, int], step: int
) -> int:
    """Return the newest batch of the documents' plans over this group that has no plan for this
    window yet, or else `step`, which begins a batch."""
    batches = {
        window: plan.batch
        for window, plan in documents._plans.items()
        if plan.group_name == session.group_name
    }
    newest = max(batches.values(), default=step)
    return newest if batches.get(window_size) != newest else step


def group_of(documents: Documents) -> ProcessGroup | None:
    """Return the group that documents are planned over, or None if they have no plan."""
    return next((plan.group for plan in documents._plans.values()), None)


def next_problem(session: Session, window_size: tuple[int, int], device: torch.device) -> "Problem":
    """Return the problem of a session's next plan, and count that plan."""
    step = session.num_plans
    session.num_plans += 1
    return Problem(
        session.rank,
        session.num_ranks,
        window_size,
        device.type,
        step,
        times_us=session.times_us,
        by_peer_memory=session.by_peer_memory,
    )


def _record(session: Session, step: int, report: PlanReport) -> None:
    """On the planner thread, which has time."""
    session.planner.submit(session.monitor.record, step, report.record())


def local_plan(documents: Documents, window_size: tuple[int, int], device: torch.device) -> Plan:
    """Return the plan of a rank on its own, without communication. Cached on `documents`.

    Raises ValueError for documents that cross ranks, whose keys are elsewhere.
    """
    key = (tuple(window_size), device)
    if key in documents._local_plans:
        return documents._local_plans[key]
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
    times_us: tuple[int, int] = NOT_TIMED  # this rank's latest, for the other ranks
    by_peer_memory: bool = False  # how rows travel


def _solve_together(
    session: Session, documents: Documents, problem: Problem, attention_shape: list[int]
) -> Solution:
    """On the planner thread: exchange, plan, layout."""
    start = time.perf_counter()
    options = session.options
    pieces, shape = documents.pieces(session.rank), AttentionShape.from_words(attention_shape)
    times = torch.tensor([problem.times_us])
    if session.num_ranks > 1:
        words = [*header_of(problem.step, options, problem.window_size), *attention_shape]
        words += [node(), *problem.times_us]
        pieces, shape, headers = exchange(session, pieces, words)
        nodes, times = headers[:, NODE_WORD].tolist(), headers[:, TIMES_WORDS]
        problem = replace(problem, ranks_per_node=ranks_of_a_node(nodes))
    measured = (times / 1e3).T.tolist() if (times >= 0).all() else [[], []]
    solution = _solve(problem, pieces, options, shape)
    plan_ms = 1e3 * (time.perf_counter() - start)
    return replace(solution, plan_ms=plan_ms, attention_ms=measured[0], exposed_ms=measured[1])


def balance(
    pieces: Tensor,
    window_size: tuple[int, int],
    cost: Tensor,
    shape: AttentionShape,
    cluster: Cluster,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """(plan, loads) of torch.ops.distca.plan, for the ranks of a cluster. `pieces` are those of all
    ranks, `cost` is as cost_tensor makes it. Raises ValueError as the operator does."""
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
    )


def tasks_of(encoded: Tensor) -> Tensor:
    """int64 [num_tasks, 5]: document, first query, last query + 1, server, whether the server keeps
    their inputs for the backward pass; a view of the plan."""
    return encoded[PLAN_HEADER_WORDS:].reshape(-1, TASK_WORDS)


def _solve(problem: Problem, pieces: Tensor, options: Options, shape: AttentionShape) -> Solution:
    start = time.perf_counter()
    cost = cost_tensor(options, shape, problem.device_type)
    cluster = cluster_of(options, problem.num_ranks, problem.device_type, problem.ranks_per_node)
    tolerance = options.tolerance if options.enabled else ANY_IMBALANCE
    encoded, loads = balance(pieces, problem.window_size, cost, shape, cluster, tolerance)
    layout, packed_rows = lay_out(problem, pieces, encoded, options, shape)
    kept_rows = kept_rows_of(layout, options)
    plan_ms = 1e3 * (time.perf_counter() - start)
    return Solution(layout, packed_rows, loads.tolist(), plan_ms, pieces, encoded, shape, kept_rows)


def kept_rows_of(layout: Tensor, options: Options) -> tuple[int, int]:
    """Visiting query and key rows for whose inputs core_attention makes room, to keep them for the
    backward pass. Two at least where any may be: torch.compile specialises 0 and 1."""
    if options.keep_inputs_gb == 0:
        return 0, 0
    queries, keys = ops.kept_rows(layout)
    return max(2, queries), max(2, keys)


def lay_out(
    problem: Problem, pieces: Tensor, encoded: Tensor, options: Options, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """This rank's layout and packed rows, for the upload to its device."""
    layout, packed_rows = ops.layout(
        pieces,
        encoded,
        problem.rank,
        problem.step,
        problem.device_type,
        options.deterministic,
        held_row_bytes(shape),
        memory_cap_bytes(options),
        problem.by_peer_memory,
        problem.batch,
    )
    if problem.device_type == "cuda":
        packed_rows = packed_rows.pin_memory()
    return layout, packed_rows
