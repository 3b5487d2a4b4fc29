"""The streams of two halves, and the events by which they wait for each other."""

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


def _own_node(value: object) -> object:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


class Turns:
    """The streams of the halves. On the CPU, there are none.

    Both streams wait for the current stream when they start. At the end, the current stream waits
    for both, and both wait for it. So no half touches memory before all earlier uses of it have
    ended, whichever stream it was allocated for, and record_stream is not needed. In the backward
    pass, autograd runs each node on its stream of the forward pass, and adds such waits at every
    edge between streams.

    The second half starts when the first has the inputs of its first attention, so that one
    computes while rows of the other travel. After each attention, a half waits until rows of the
    other half's attention are on their way. Otherwise kernels of both halves would alternate on the
    device, and these rows would leave only when nothing is left to compute. In the backward pass,
    the halves swap roles.

    `group_names` are the names of the groups of the halves' sessions. With `is_timed`,
    `before_attention` returns the events around the first half's work before attention.
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
        """Make the stream of half `idx` the current one, on the thread that runs the half."""
        if not self.streams:
            yield
            return
        if idx == 0 and self._is_timed:
            self._begin = self.streams[0].record_event(torch.cuda.Event(enable_timing=True))
        if idx == 1 and self._reached is not None:
            self.streams[1].wait_event(self._reached)
        with torch.cuda.stream(self.streams[idx]):  # and its device
            yield

    def bordered(self, values):
        """Give each tensor in `values` that requires a gradient an autograd node on the current
        stream, and return the result. `values` are the inputs or results of a whole block. In the
        backward pass, autograd makes the current stream and the block's stream wait for each other
        at these nodes, as it does where halves are cut and joined. On the CPU, do nothing."""
        return pytree.tree_map(_own_node, values) if self.streams else values

    def join(self) -> None:
        """Let the current stream wait for both halves."""
        for stream in self.streams:
            self._current().wait_stream(stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after what the first half has computed until it calls attention."""
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
        """Let half `idx` wait for the other one in the backward pass, as `follow` does, once it has
        the gradients of these tensors: inputs of its attention, or results of the first half."""
        for leaf in pytree.tree_leaves(tensors):
            if self.streams and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.follow(idx))
