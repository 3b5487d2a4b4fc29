"""Seconds of calls, and the bar that says how many are left."""

import statistics
import sys
import time
from collections.abc import Callable

import torch

BAR_WIDTH = 30
NUM_WARM_UP_CALLS = 2


class ProgressBar:
    """One line on a terminal's stderr; nothing where stderr is no terminal."""

    def __init__(self, num_steps: int, shown: bool = True) -> None:
        self._num_steps = num_steps
        self._num_done = 0
        self._shown = shown and sys.stderr.isatty()

    def advance(self, doing: str, end: str = "") -> None:
        """A step begins: `doing` says which."""
        if self._shown:
            bar = "#" * (BAR_WIDTH * self._num_done // max(1, self._num_steps))
            count = f"{self._num_done}/{self._num_steps}"
            sys.stderr.write(f"\r[{bar:.<{BAR_WIDTH}}] {count} {doing:<40.40}{end}")
            sys.stderr.flush()
        self._num_done += 1

    def finish(self) -> None:
        self.advance("done", end="\n")


def median_seconds(
    call: Callable[[], object], device: torch.device, repeats: int, budget_s: float
) -> float:
    """Of warm calls: `repeats`, or as many as fit in budget_s, at least one."""
    first_s = _seconds(call, device, NUM_WARM_UP_CALLS) / NUM_WARM_UP_CALLS
    if first_s >= budget_s:  # nothing about so long a call was cold
        return first_s
    count = int(max(1, min(repeats, budget_s / first_s)))
    if device.type != "cuda":
        return statistics.median(_seconds(call, device, 1) for _ in range(count))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    pairs = zip(events, events[1:], strict=False)
    return statistics.median(1e-3 * begin.elapsed_time(end) for begin, end in pairs)


def _seconds(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Of `count` calls, on the host's clock, until the device is done."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    if is_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
