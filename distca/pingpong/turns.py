"""Streams of two halves that take turns, and the events between them."""

import contextlib
import functools

import torch
from torch import Tensor

from distca._torch_private import pytree


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
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
    the other travel. In the backward pass the first half follows the second likewise.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = _streams(device) if device.type == "cuda" else ()
        self._reached: torch.cuda.Event | None = None  # the first half has queries, keys, values
        self._turned: torch.cuda.Event | None = None  # the second half has its gradient, backward

    def __enter__(self) -> None:
        for stream in self.streams:
            stream.wait_stream(self._current())

    def __exit__(self, *_) -> None:
        self.join()  # again, after an error
        for stream in self.streams:
            stream.wait_stream(self._current())

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.streams[0].device)

    def half(self, idx: int) -> contextlib.AbstractContextManager:
        """The stream of a half as the current one."""
        if not self.streams:
            return contextlib.nullcontext()
        if idx == 1 and self._reached is not None:
            self.streams[1].wait_event(self._reached)
        return torch.cuda.stream(self.streams[idx])

    def join(self) -> None:
        """The current stream waits for both halves."""
        for stream in self.streams:
            self._current().wait_stream(stream)

    def mark(self) -> torch.cuda.Event | None:
        """What the first half has computed so far, when it calls attention."""
        if not self.streams:
            return None
        event = self._current().record_event()
        self._reached = self._reached or event
        return event

    def mark_backward(self, out: Tensor) -> None:
        """The gradient of what the second half's attention gave: backward, its last call first."""
        if self.streams and out.requires_grad:
            out.register_hook(self._turn)

    def _turn(self, _: Tensor) -> None:
        self._turned = self._turned or self._current().record_event()

    def follow(self, results: object) -> None:
        """Lets the backward pass of the first half's results wait for the second's attention."""
        for leaf in pytree.tree_leaves(results):
            if self.streams and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._follow)

    def _follow(self, _: Tensor) -> None:
        if self._turned is not None:
            self._current().wait_event(self._turned)
