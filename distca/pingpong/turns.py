"""Streams of two halves that take turns, and the events between them."""

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from distca import ops
from distca._torch_private import pytree


@functools.cache
def _streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    # Gradients of parameters come from the halves' streams on purpose.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Turns:
    """The streams of the halves; on the CPU they run one after the other.

    Both wait for the current stream when they start; when they end, it waits for both, and both
    wait for it. So no half touches memory before all who used it are done, whichever stream it was
    allocated for: nothing needs record_stream. In the backward pass autograd runs each node on its
    stream of the forward pass, and does the same at every edge between streams.

    The second half follows the first to its first attention, so that one computes while rows of
    the other travel. After each attention, a half waits until rows of the other's attention are on
    their way. Otherwise kernels of both halves would alternate on the device, and these rows would
    leave only when nothing is left to compute. In the backward pass the halves swap roles.

    `group_names` are those of the halves' sessions. With `is_timed`, `before_attention` returns the
    events around the first half's work before attention.
    """

    def __init__(
        self, device: torch.device, group_names: Sequence[str] = (), is_timed: bool = False
    ) -> None:
        self.streams = _streams_of(device) if device.type == "cuda" else ()
        self._group_names, self._is_timed = group_names, is_timed
        self._begin: torch.cuda.Event | None = None  # of the first half
        self._reached: torch.cuda.Event | None = None  # the first half has queries, keys, values

    def __enter__(self) -> None:
        for stream in self.streams:
            stream.wait_stream(self._current())

    def __exit__(self, *_) -> None:
        self.join()  # again, after an error
        for stream in self.streams:
            stream.wait_stream(self._current())

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.streams[0].device)

    @contextlib.contextmanager
    def half(self, idx: int):
        """The stream of a half as the current one, on the thread of the half."""
        if not self.streams:
            yield
            return
        if idx == 0 and self._is_timed:
            self._begin = self.streams[0].record_event(torch.cuda.Event(enable_timing=True))
        if idx == 1 and self._reached is not None:
            self.streams[1].wait_event(self._reached)
        with torch.cuda.stream(self.streams[idx]):  # and its device
            yield

    def join(self) -> None:
        """The current stream waits for both halves."""
        for stream in self.streams:
            self._current().wait_stream(stream)

    def mark(self) -> torch.cuda.Event | None:
        """What the first half has computed so far, when it calls attention."""
        if not self.streams:
            return None
        event = self._current().record_event(torch.cuda.Event(enable_timing=self._is_timed))
        self._reached = self._reached or event
        return event

    @property
    def before_attention(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        is_whole = self._begin is not None and self._reached is not None
        return (self._begin, self._reached) if is_whole else None

    def follow(self, idx: int) -> None:
        """Let half `idx`, on the current stream, wait until the rows of the other half's latest
        attention are on their way."""
        if self.streams:
            ops.await_dispatch(self._group_names[1 - idx])

    def follow_backward(self, idx: int, tensors: object) -> None:
        """Let half `idx` follow the other one in the backward pass, once it has the gradients of
        these tensors: of the inputs of its attention, and of the results of the first half."""
        for leaf in pytree.tree_leaves(tensors):
            if self.streams and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.follow(idx))
