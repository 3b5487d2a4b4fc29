"""How long one step's layers spend in core attention on this rank, waits for rows included."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

LAG = 2  # steps after which a step's backward passes have been launched


class AttentionClock:
    """Times the layers of step `step`: two events a pass on CUDA, nothing that waits."""

    def __init__(self, device: torch.device, step: int) -> None:
        self.step = step
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple] = []  # begin and end of each pass of a layer
        self._entered = None  # when the backward pass that runs began
        self._num_awaited = 0  # backward passes to come

    def attend(self, forward: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """out of forward(), (out, lse) of the operator; its backward pass is timed, too."""
        begin = self._now()
        out, _ = forward()
        self._spans.append((begin, self._now()))
        # What checkpointing computes again has no backward pass of its own.
        if out.grad_fn is not None and torch._C._current_graph_task_id() == -1:
            self._num_awaited += 1
            out.grad_fn.register_prehook(self._enter)
            out.grad_fn.register_hook(self._leave)
        return out

    def milliseconds(self, step: int) -> float | None:
        """Forward and backward of all layers; None while step `step` is too early to tell."""
        if step < self.step + LAG or self._num_awaited or not self._spans:
            return None
        if not self._on_cuda:
            return 1e3 * sum(end - begin for begin, end in self._spans)
        if not all(end.query() for _, end in self._spans):
            return None
        return sum(begin.elapsed_time(end) for begin, end in self._spans)

    def _enter(self, grad_outputs) -> None:
        self._entered = self._now()

    def _leave(self, grad_inputs, grad_outputs) -> None:
        self._spans.append((self._entered, self._now()))
        self._num_awaited -= 1

    def _now(self):
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
