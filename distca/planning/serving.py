"""Serve attention: compute this rank's tasks of other ranks' calls, without a model."""

import contextlib
import logging

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca import ops
from distca.planning import plan as plans
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.plan import Plan
from distca.ranks.notices import Kind
from distca.ranks.session import Session, close_session, find

_log = logging.getLogger("distca")

MAX_PLANS = 256  # kPlansInFlight of csrc/ops/session.h


def serve(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Compute attention for the ranks of `group` (default: as for `init`) that train, until they
    close their sessions or end. Then close this rank's session.

    Call it on the ranks that `distca.init` was given as `servers`, with the current device set.
    They run no model and hold no tokens. Raises DistBackendError if a rank fails, is lost, or
    makes other calls than the others.
    """
    session = find(group)
    if session is None or session.rank not in session.servers:
        where = "the group is not open" if session is None else f"this is rank {session.rank}"
        servers = () if session is None else session.servers
        raise ValueError(
            f"distca.serve: {where}, and its servers are {servers}; call distca.init(servers=...) "
            "on all ranks, and distca.serve on the servers"
        )
    serve_session(session)


def serve_session(session: Session) -> None:
    """Serve an open session, and close it at the end."""
    try:
        server = _Server(session)
        while server.follow(ops.next_notice(session.group_name)):
            pass
    finally:  # closing tells the other ranks of an exception
        close_session(session)


class _Server:
    """The plans of a server, and the inputs that it keeps for backward passes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plans: dict[int, Plan] = {}  # by step
        self._documents: dict[int, Documents] = {}  # by batch
        self._kept: dict[int, Tensor] = {}  # inputs, by number of the forward call

    def follow(self, notice: list[int]) -> bool:
        """Take part in what a notice announces. Return False for the last notice."""
        kind, step, _, number = notice[:4]
        details, released = notice[4:14], notice[14:]
        for each in released:
            self._kept.pop(each, None)
        if kind == Kind.PLAN:
            self._plan(step, *details)
        elif kind == Kind.JOIN:
            session = self._session
            session.planner.submit(ops.any_has_batch, session.group_name, False)
        elif kind == Kind.REFUSED:
            with contextlib.suppress(ValueError):  # of the plan
                if step in self._plans:
                    self._plans[step].wait()
            ops.agree_on_refusal(self._session.group_name, step)
        elif kind != Kind.END:
            self._compute(self._plans[step], notice, number)
        return kind != Kind.END

    def _plan(
        self,
        step: int,
        batch: int,
        left: int,
        right: int,
        chunk_size: int,
        is_cuda: int,
        *shape: int,
    ) -> None:
        device = torch.device("cuda" if is_cuda else "cpu")
        documents = self._documents.setdefault(batch, Documents([0]))
        if chunk_size:
            documents = documents.chunked(chunk_size)
        self._plans[step] = plans.submit(
            self._session,
            documents,
            (left, right),
            device,
            AttentionShape.from_words(shape) if any(shape) else None,
        )
        for remembered in (self._plans, self._documents):
            while len(remembered) > MAX_PLANS:
                del remembered[next(iter(remembered))]

    def _compute(self, plan: Plan, notice: list[int], number: int) -> None:
        """Compute this rank's tasks of a call, and keep what the backward pass needs."""
        plan.wait()
        try:
            kept = ops.serve_call(
                notice, plan.layout, plan.rows, self._kept.get(number), self._session.group_name
            )
        except (ValueError, torch.OutOfMemoryError) as error:
            # If all ranks raise it, the group goes on. Otherwise no further notice arrives.
            _log.warning("distca: a call was not served: %s", error)
            return
        if number > 0:
            self._kept[number] = kept
