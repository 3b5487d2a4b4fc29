"""Time a pipeline step's ticks, and the attention in them, without waiting for the device."""

import contextlib
import time
from collections.abc import Iterator

import torch

from distca.watching.ticks import TickTimes

Moment = int | torch.cuda.Event  # nanoseconds since 1970, or an event on a stream


class TickClock:
    """The times of one step's ticks on this rank."""

    def __init__(self, step: int, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            # Each thread has a current device of its own, and the planner thread takes the times.
            device = torch.device("cuda", torch.cuda.current_device())
        self.step, self._device = step, device
        # For each tick, its begin and end, and then those of each call of attention in it.
        self._ticks: list[tuple[TickTimes, list[Moment]]] = []

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return time.time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def tick(self, times: TickTimes) -> Iterator[None]:
        """Time a tick."""
        moments = [self._now()]
        self._ticks.append((times, moments))
        yield
        moments.insert(1, self._now())

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Time a call of attention in the latest tick."""
        begin = self._now()
        yield
        self._ticks[-1][1].extend((begin, self._now()))

    def has_stopped(self) -> bool:
        """Return whether the device has reached the end of all ticks."""
        moments = [each for _, moments in self._ticks for each in moments]
        return self._device.type != "cuda" or all(each.query() for each in moments)

    def times(self) -> list[TickTimes]:
        """Return the times of all ticks. Call this after has_stopped() returned True."""
        first = self._ticks[0][1][0]
        origin = first if isinstance(first, int) else time.time_ns() - self._since(first, None)
        for times, moments in self._ticks:
            begin, end, *calls = (origin + self._since(first, each) for each in moments)
            times.begin, times.end = begin, end
            times.attention = list(zip(calls[::2], calls[1::2], strict=True))
        return [times for times, _ in self._ticks]

    def _since(self, first: Moment, later: Moment | None) -> int:
        """Return nanoseconds from `first` to `later`, or to now on a device."""
        if isinstance(first, int):
            return later - first
        if later is None:  # a new stream has no work, so it reaches the event at once
            later = torch.cuda.Event(enable_timing=True)
            later.record(torch.cuda.Stream(self._device))
            later.synchronize()
        return int(1e6 * first.elapsed_time(later))
