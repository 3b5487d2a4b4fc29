"""Uneven data: ranks that run out of batches take part with empty ones until all are done."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca import ops
from distca.options import check
from distca.ranks.notices import Kind, tell
from distca.ranks.session import Session, opened

Batch = TypeVar("Batch")
NONE_LEFT = object()


def join(
    batches: Iterable[Batch],
    empty: Callable[[], Batch],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Iterator[Batch]:
    """Yield this rank's `batches`, then `empty()` until no rank of `group` (default: as for `init`)
    has a batch left. All ranks make the same number of steps.

    Every rank must iterate over it, in step with its calls of `distca.plan`. `empty` returns a new
    batch at every call. The batch must have no weight in the loss: use `Documents([0])` and no
    tokens, or one token whose label is ignored if the model needs a token. Run the step on an empty
    batch as on any other, forward and backward, so that collectives of DDP and FSDP stay in step
    too. Ranks tell each other in the background whether they have data left. This happens one batch
    early, so `batches` is read one batch ahead.
    """
    expected = "a function that returns a new empty batch"
    check("empty", empty, callable(empty), expected)
    return _joined(opened(group), iter(batches), empty)


def _joined(
    session: Session, source: Iterator[Batch], empty: Callable[[], Batch]
) -> Iterator[Batch]:

    def any_rank_has(batch: object) -> Future:
        has_batch = batch is not NONE_LEFT
        if session.num_ranks == 1:
            return session.planner.submit(bool, has_batch)
        tell(session, Kind.JOIN)
        return session.planner.submit(ops.any_has_batch, session.group_name, has_batch)

    coming = next(source, NONE_LEFT)
    goes_on = any_rank_has(coming)
    while goes_on.result():
        batch = coming
        if coming is not NONE_LEFT:
            coming = next(source, NONE_LEFT)
        goes_on = any_rank_has(coming)
        yield empty() if batch is NONE_LEFT else batch
