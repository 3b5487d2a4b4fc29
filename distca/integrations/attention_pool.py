"""The attention of all stages of a pipeline as one pool. In a tick all ranks make the same calls. A
rank whose stage takes no part in a call, or which has no stage to run, serves: it makes the call
without rows of its own."""

import contextlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distca import attention, ops
from distca._torch_private import checkpoint_hooks, has_dispatch_mode
from distca.integrations.tick_clock import TickClock
from distca.planning import plan as plans
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.plan import Plan
from distca.planning.plan_report import PlanReport
from distca.planning.ticks import Pass, Tick, common_calls
from distca.ranks.notices import Kind
from distca.ranks.session import Session
from distca.watching.figures import FORWARD_SHARE
from distca.watching.ticks import TickTimes, save_ticks

# Numbers of c10::ScalarType.
DTYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}
# Callers of csrc/transport/where.h: ticks have numbers above those of most models' modules.
FIRST_CALLER, NUM_CALLERS = 3072, 1023
SETTINGS = ("micro-batches", "stages", "max_in_flight", "split_backward", "recompute")
NAMES = {Kind.FORWARD: "forward", Kind.RECOMPUTED: "recomputed", Kind.BACKWARD: "backward"}


class CallKind(NamedTuple):
    """What is equal on all ranks that take part in a call, in int64."""

    window_left: int
    window_right: int
    chunk_size: int  # 0: whole documents
    heads_q: int  # this and the following: details of a notice, see csrc/ops/servers.h
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: int
    softmax_scale: int  # bits of the double
    softcap: int  # likewise

    def __str__(self) -> str:
        scale, softcap = struct.unpack("2d", struct.pack("2q", *self[8:]))
        chunks = f", chunks of {self.chunk_size}" if self.chunk_size else ""
        return (
            f"window {self[:2]}{chunks}, {self.heads_q} and {self.heads_kv} heads of "
            f"{self.head_dim} and {self.head_dim_v}, {self.torch_dtype}, scale {scale:g}, softcap "
            f"{softcap:g}"
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return next(each for each, number in DTYPES.items() if number == self.dtype)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(*self[3:6], self.torch_dtype.itemsize, self.head_dim_v)


def kind_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window_size: tuple[int, int],
    softmax_scale: float,
    softcap: float,
) -> CallKind:
    """Return the kind of a call with the arguments of attend_rows' `compute`."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3 or tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {list(tensor.shape)}; expected [tokens, heads, "
                f"head_dim] of {', '.join(map(str, DTYPES))}"
            )
    bits = struct.unpack("2q", struct.pack("2d", softmax_scale, softcap))
    heads = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    return CallKind(*window_size, documents.chunk_size or 0, *heads, DTYPES[q.dtype], *bits)


class Recorder:
    """A route of attention that records its calls, and returns zeros."""

    def __init__(self) -> None:
        self.kinds: list[CallKind] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, *settings):
        return attention.attend_rows(q, k, v, documents, *settings, self._record)

    def _record(self, q: Tensor, k: Tensor, v: Tensor, *others) -> tuple[Tensor, Tensor]:
        self.kinds.append(kind_of(q, k, v, *others))
        dtype = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(q.shape[:2], dtype=dtype)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            # From this pass, stages infer which of their outputs need gradients.
            return out.requires_grad_().clone(), lse.requires_grad_().clone()
        return out, lse


@dataclass(frozen=True)
class PlannedCall:
    kind: CallKind
    stages: frozenset[int]  # that have rows in it
    plan: Plan


class AttentionPool:
    """The calls of attention of all stages of a session, and the tick that runs."""

    def __init__(self, session: Session, recompute: bool) -> None:
        self.session, self.recompute = session, recompute
        self.running: RunningTick | None = None
        self.reports: list[tuple[str, PlanReport]] = []  # of the last step, by tick
        self.clock: TickClock | None = None  # of the current step, if it is timed
        self._stopped: TickClock | None = None  # of an ended step, until its times are saved
        self._num_steps = 0
        self._calls: dict[int, list[CallKind]] = {}  # of a forward pass, by stage

    def declare(self, own: dict[int, list[CallKind]], settings: Sequence[int]) -> None:
        """Tell all ranks the calls that the stages of this rank make, and the settings of its
        schedule. Collective. Raises ValueError on every rank if ranks differ."""
        words = [*settings]
        for stage, kinds in own.items():
            words += [stage, len(kinds), *(word for kind in kinds for word in kind)]
        gathered = [torch.tensor(words)]
        if self.session.num_ranks > 1:
            name = self.session.group_name
            arguments = (gathered[0], name, self.session.num_plans)
            pending = self.session.planner.submit(ops.gather, *arguments)
            ops.await_plan(name, True)
            try:
                gathered = pending.result()
            finally:
                ops.await_plan(name, False)
        first_ranks: dict[int, int] = {}  # by stage: the first rank that has it
        for rank, (theirs, *words) in enumerate(
            (tuple(each[: len(SETTINGS)].tolist()), *each[len(SETTINGS) :].tolist())
            for each in gathered
        ):
            if theirs != tuple(settings):
                raise ValueError(
                    f"rank {rank} has a schedule of {_named(theirs)}, this one of "
                    f"{_named(settings)}; expected equal ones on all ranks"
                )
            self._add(rank, words, first_ranks)
        num_stages = settings[SETTINGS.index("stages")]
        if sorted(self._calls) != list(range(num_stages)):
            raise ValueError(
                f"the group has stages {sorted(self._calls)}; expected all {num_stages}: pass the "
                'ranks of all stages to distca.init, such as mesh["pp", "dp"]'
            )

    def _add(self, rank: int, words: list[int], first_ranks: dict[int, int]) -> None:
        width = len(CallKind._fields)
        while words:
            stage, count = words[:2]
            kinds = [CallKind(*words[2 + i * width :][:width]) for i in range(count)]
            words = words[2 + count * width :]
            declared = self._calls.setdefault(stage, kinds)
            first_rank = first_ranks.setdefault(stage, rank)
            if declared != kinds:
                raise ValueError(
                    f"stage {stage} makes {len(declared)} calls of attention on rank {first_rank}, "
                    f"{_listed(declared)}, and {count} on rank {rank}, {_listed(kinds)}; expected "
                    "the same calls on all ranks of a stage"
                )

    def plan(
        self, ticks: Sequence[Tick], rank: int, documents: Sequence[Documents], device: torch.device
    ) -> list[list[PlannedCall]]:
        """Let the planner thread plan the calls of each tick. `rank` is this rank's in the
        pipeline, and `documents` are those of its micro-batches."""
        return [
            self._plan_tick(named(number, tick), tick, tick.passes.get(rank), documents, device)
            for number, tick in enumerate(ticks)
        ]

    def begin_step(self, device: torch.device) -> None:
        """Time the ticks of this step if it is one of the steps to time."""
        self._save_ticks()
        if self._stopped is None and self.session.times_ticks(self._num_steps):
            self.clock = TickClock(self._num_steps, device)
        self._num_steps += 1

    def end_step(self) -> None:
        """Save the times of a timed step. If the device is still busy, a later step saves them."""
        if self.clock is not None:
            self._stopped, self.clock = self.clock, None
        self._save_ticks()

    def _save_ticks(self) -> None:
        clock, session = self._stopped, self.session
        if clock is not None and clock.has_stopped():
            self._stopped, place = None, (session.watching.run_dir, session.rank, clock.step)
            session.planner.save(
                f"ticks of step {clock.step}", lambda: save_ticks(*place, clock.times())
            )

    def attending(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that times a call of attention if the step is timed."""
        return contextlib.nullcontext() if self.clock is None else self.clock.attention()

    def _plan_tick(
        self,
        name: str,
        tick: Tick,
        own: Pass | None,
        documents: Sequence[Documents],
        device: torch.device,
    ) -> list[PlannedCall]:
        calls = {stage: self._calls[stage] for stage in tick.stages}
        if not tick.is_forward:
            calls = {stage: kinds[::-1] for stage, kinds in calls.items()}
        planned: list[PlannedCall] = []
        by_rows: dict[tuple, Plan] = {}
        for kind, stages in common_calls(calls):
            key = (*kind[:3], stages)
            if key not in by_rows:
                takes_part = own is not None and own.stage in stages
                held = documents[own.micro_batch].unplanned() if takes_part else Documents([0])
                if kind.chunk_size:
                    held = held.chunked(kind.chunk_size)
                arguments = (self.session, held, kind[:2], device, kind.shape)
                by_rows[key] = plans.submit(*arguments, may_keep=False, note={"tick": name})
            planned.append(PlannedCall(kind, stages, by_rows[key]))
        return planned


def named(number: int, tick: Tick) -> str:
    """Return the name of a tick, such as "tick 4: 0F3 1F2"."""
    return f"tick {number}: {tick}"


def _named(settings: Sequence[int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(SETTINGS, settings, strict=True))


def _listed(kinds: Sequence[CallKind]) -> str:
    return "; ".join(map(str, dict.fromkeys(kinds))) or "none"


class RunningTick:
    """The calls of a tick on this rank. Raises ValueError if its stage makes other calls than those
    that it declared."""

    def __init__(
        self,
        pool: AttentionPool,
        number: int,
        tick: Tick,
        own: Pass | None,
        documents: Documents | None,
        calls: Sequence[PlannedCall],
    ) -> None:
        self.pool, self.caller = pool, FIRST_CALLER + number % NUM_CALLERS
        self.name = named(number, tick)
        ops.name_caller(self.caller, self.name)
        self._tick, self._own, self._documents = tick, own, documents
        self._stage = -1 if own is None else own.stage
        kinds = [Kind.FORWARD] if tick.is_forward else [Kind.BACKWARD]
        if pool.recompute and not tick.is_forward:
            kinds = [Kind.RECOMPUTED, Kind.BACKWARD]
        self._steps = [(which, call) for call in calls for which in kinds]
        self._next = 0  # of _steps

    def timed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that times this tick in a timed step. Call wait_for_plans() first."""
        if self.pool.clock is None:
            return contextlib.nullcontext()
        own = "" if self._own is None else self._tick.label(self._own)
        seconds = sum(
            (1 - FORWARD_SHARE if which == Kind.BACKWARD else FORWARD_SHARE)
            * call.plan.report().seconds_after[self.pool.session.rank]
            for which, call in self._steps
        )
        times = TickTimes(self.name, own, self._tick.is_forward, 1e3 * seconds)
        return self.pool.clock.tick(times)

    def wait_for_plans(self) -> None:
        """Wait for the plans of this tick. Call this outside checkpoints, because selective
        checkpointing refuses operators that run only when it recomputes."""
        for _, call in self._steps:
            call.plan.wait()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, *settings):
        """Compute what attend_rows would, for a call of core_attention in this tick."""
        whole = self._documents
        if documents.chunk_size is not None and whole is not None:
            whole = whole.chunked(documents.chunk_size)
        if documents is not whole:
            raise ValueError(f"documents are {documents} in {self.name}; expected {whole}")
        if documents.spans is not None:
            raise ValueError(f"documents have spans in {self.name}; expected none in a pipeline")
        return attention.attend_rows(q, k, v, documents, *settings, self._compute)

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, *others) -> tuple[Tensor, Tensor]:
        kind = kind_of(q, k, v, *others)
        if self._tick.is_forward:
            self._check_checkpoint()
            plan = self.take(Kind.FORWARD, kind)
        elif self.pool.recompute:
            plan = self.take(Kind.RECOMPUTED, kind)
        else:  # selective checkpointing has the result, so the operator does not run
            plan = next(call.plan for _, call in self._steps if self._stage in call.stages)
        return _Attention.apply(q, k, v, self.pool, plan, *others[2:])

    def _check_checkpoint(self) -> None:
        if not torch.is_grad_enabled():
            return
        is_inside, recompute = checkpoint_hooks() is not None, self.pool.recompute
        if is_inside == recompute or (is_inside and has_dispatch_mode()):
            return
        where = "inside" if is_inside else "outside"
        raise ValueError(
            f"recompute is {recompute}, but stage {self._stage} calls attention {where} "
            f"torch.utils.checkpoint; pass recompute={is_inside} to the schedule"
        )

    def take(self, which: Kind, kind: CallKind | None = None) -> Plan:
        """Serve calls of other stages up to the next one of this rank's stage. Return its plan."""
        while self._next < len(self._steps) and not self._is_own(self._next):
            self._serve()
        expected = f"no more than {self._num_own(0)}, as in the first step"
        if self._next < len(self._steps):
            next_which, call = self._steps[self._next]
            if which == next_which and kind in (None, call.kind):
                self._next += 1
                return call.plan
            expected = f"a {NAMES[next_which]} call of {call.kind}"
        actual = f"a {NAMES[which]} call of attention" + (f" of {kind}" if kind is not None else "")
        raise ValueError(f"{self.name}: stage {self._stage} makes {actual}; expected {expected}")

    def finish(self) -> None:
        """Serve the rest of the tick."""
        missing = self._num_own(self._next)
        if missing:
            raise ValueError(
                f"{self.name}: stage {self._stage} has made {self._num_own(0) - missing} calls of "
                f"attention; expected {self._num_own(0)}, as in the first step"
            )
        while self._next < len(self._steps):
            self._serve()
        used = {id(call.plan): call.plan for _, call in self._steps}
        self.pool.reports += [(self.name, plan.report()) for plan in used.values()]

    def _is_own(self, idx: int) -> bool:
        return self._stage in self._steps[idx][1].stages

    def _num_own(self, first: int) -> int:
        return sum(self._is_own(idx) for idx in range(first, len(self._steps)))

    def _serve(self) -> None:
        which, call = self._steps[self._next]
        plan, details = call.plan, call.kind[3:]
        notice = [which, -1, self.caller, 0, *details, *[0] * (18 - len(details))]
        with self.pool.attending():
            ops.serve_call(notice, plan.layout, plan.rows, None, plan.group_name)
        self._next += 1


class _Attention(torch.autograd.Function):
    """Attention whose backward pass takes the plan of the tick that it runs in."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pool: AttentionPool,
        plan: Plan,
        softmax_scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        settings = (softmax_scale, plan.group_name, 0, 0, pool.running.caller, softcap)
        with pool.attending():
            out, lse, _ = ops.core_attention(q, k, v, plan.layout, plan.rows, *settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.pool, ctx.softmax_scale, ctx.softcap = pool, softmax_scale, softcap
        return out, lse

    @staticmethod
    def backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
        if ctx.pool.running is None:
            raise ValueError("a backward pass runs outside the schedule's ticks")
        q, k, v, out, lse = ctx.saved_tensors
        plan = ctx.pool.running.take(Kind.BACKWARD)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        with ctx.pool.attending():
            gradients = ops.core_attention_backward(
                *(grad_out, q, k, v, out, lse, plan.layout, plan.rows, ctx.softmax_scale),
                *(plan.group_name, None, ctx.pool.running.caller, grad_lse, ctx.softcap),
            )
        return *gradients, None, None, None, None
