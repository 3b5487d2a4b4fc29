"""Streams of two halves that take turns, and the events between them."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distca import ops
from distca._torch_private import pytree

MAX_WAIT_NS = 20_000_000
ALLOWED_LATE, WAITS_TO_ONE_LATE = 16, 16  # halves stop waiting after more time-outs
NUM_WORDS = 4096  # two for each block whose backward pass is still to come
MAX_CALLS = 64  # of attention in a block; calls from this number on do not wait


class Word:
    """A word of device memory with the number of the attention call that a half has reached."""

    def __init__(self, element: Tensor, first: int) -> None:
        self._element, self._first = element, first  # earlier uses wrote at most `first`

    def begin(self, group_name: str, number: int) -> None:
        """Note that the group's next call is call `number` of the half, counted from 1."""
        if number < MAX_CALLS:
            ops.begin_turn(group_name, self._element, self._first + number)

    def wait(self, number: int, num_late: Tensor) -> None:
        if number < MAX_CALLS:
            ops.await_turn(self._element, self._first + number, MAX_WAIT_NS, num_late)


class Device:
    """The halves' streams on a device, their words, and the number of waits that timed out."""

    def __init__(self, device: torch.device) -> None:
        # Gradients of parameters come from the halves' streams on purpose.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._words = torch.zeros(NUM_WORDS, dtype=torch.int32, device=device)
        self._num_words = 0  # handed out so far
        self._num_late = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # counted by kernels
        self._num_waits = 0

    def new_word(self) -> Word:
        time, idx = divmod(self._num_words, NUM_WORDS)
        self._num_words += 1
        return Word(self._words[idx], time * MAX_CALLS)

    def wait(self, word: Word, number: int) -> None:
        """Make the current stream wait until a half has reached call `number`. Do nothing if waits
        often time out, for example because the host waits for the device inside a block, or because
        streams share a queue."""
        if self._num_late.item() > ALLOWED_LATE + self._num_waits // WAITS_TO_ONE_LATE:
            return
        self._num_waits += 1
        word.wait(number, self._num_late)


@functools.cache
def _device_of(device: torch.device) -> Device:
    return Device(device)


class Turns:
    """The streams of the halves; on the CPU they run one after the other.

    Both wait for the current stream when they start; when they end, it waits for both, and both
    wait for it. So no half touches memory before all who used it are done, whichever stream it was
    allocated for: nothing needs record_stream. In the backward pass autograd runs each node on its
    stream of the forward pass, and does the same at every edge between streams.

    The second half follows the first to its first attention, so that one computes while rows of
    the other travel. After its attention, the first half waits until the second half's rows are on
    their way. Otherwise kernels of both halves would alternate on the device, and these rows would
    leave only when nothing is left to compute. In the backward pass the halves swap roles.

    `group_names` are those of the halves' sessions. With `is_timed`, `before_attention` returns the
    events around the first half's work before attention.
    """

    def __init__(
        self, device: torch.device, group_names: Sequence[str] = (), is_timed: bool = False
    ) -> None:
        self._device = _device_of(device) if device.type == "cuda" else None
        self.streams = self._device.streams if self._device is not None else ()
        self._group_names, self._is_timed = group_names, is_timed
        self._begin: torch.cuda.Event | None = None  # of the first half
        self._reached: torch.cuda.Event | None = None  # the first half has queries, keys, values
        self._turned: torch.cuda.Event | None = None  # the second half has its gradient, backward
        if self._device is not None:
            # Calls that the second half has reached forward, and the first half backward.
            self._second, self._first = self._device.new_word(), self._device.new_word()
        self._num_backward = [0, 0]  # calls of each half

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
        if idx == 0 and self._is_timed:
            self._begin = self.streams[0].record_event(torch.cuda.Event(enable_timing=True))
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
        event = self._current().record_event(torch.cuda.Event(enable_timing=self._is_timed))
        self._reached = self._reached or event
        return event

    @property
    def before_attention(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        is_whole = self._begin is not None and self._reached is not None
        return (self._begin, self._reached) if is_whole else None

    @contextlib.contextmanager
    def call(self, idx: int, number: int, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Take turns with the other half at call `number` (from 1) of attention in half `idx`."""
        if not self.streams:
            yield
            return
        if idx == 1:
            self._second.begin(self._group_names[1], number)
            self._await_backward(inputs)
        yield
        if idx == 1:
            ops.end_turn(self._group_names[1])  # a call that moves no rows does not end its turn
        else:
            self._device.wait(self._second, number)
            self._end_backward(inputs)

    def mark_backward(self, out: Tensor) -> None:
        """The gradient of what the second half's attention gave: backward, its last call first."""
        if self.streams and out.requires_grad:
            out.register_hook(self._turn)

    def _turn(self, _: Tensor) -> None:
        self._turned = self._turned or self._current().record_event()

    def begin_backward(self, out: Tensor) -> None:
        """Begin a turn in the backward pass of the first half's attention. The second half waits
        for this turn."""
        if self.streams and out.requires_grad:
            out.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        self._num_backward[0] += 1
        self._first.begin(self._group_names[0], self._num_backward[0])

    def _end_backward(self, inputs: Sequence[Tensor]) -> None:
        """End the turn in the backward pass, because a call that moves no rows does not end it."""
        for each in inputs:
            if each.requires_grad:
                each.register_hook(lambda _: ops.end_turn(self._group_names[0]))

    def _await_backward(self, inputs: Sequence[Tensor]) -> None:
        """Make the second half wait after the backward pass of a call, until the first half has
        reached the backward pass of its own call."""
        is_first = [True]

        def wait(_: Tensor) -> None:
            if is_first[0]:  # the gradients of all inputs come together
                is_first[0] = False
                self._num_backward[1] += 1
                self._device.wait(self._first, self._num_backward[1])

        for each in inputs:
            if each.requires_grad:
                each.register_hook(wait)

    def follow(self, results: object) -> None:
        """Lets the backward pass of the first half's results wait for the second's attention."""
        for leaf in pytree.tree_leaves(results):
            if self.streams and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._follow)

    def _follow(self, _: Tensor) -> None:
        if self._turned is not None:
            self._current().wait_event(self._turned)
