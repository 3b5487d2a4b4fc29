"""Other work that takes a fixed part of the time of a rank's device.

The work is a process of its own. It shares the device with the rank, but neither a stream nor
Python's global interpreter lock. It computes matrix products in its own device memory. In each
period of 20 ms, it runs as many products as take `part` of the period on an idle device, and rests
until the next period. By default, a GPU divides its time equally between processes that have work,
and Linux does the same with a core. So the work reaches any part below one half, even beside a rank
that never rests. If it falls behind, it does not rest until it has caught up. At the end it reports
the part that it took, because only runs beside equal work can be compared.
"""

import contextlib
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

PERIOD_S = 0.02
LARGEST_PART = 0.5  # of the time of a device that two processes use
SIZES = {"cuda": (4096, torch.bfloat16), "cpu": (256, torch.float32)}  # of square factors
WARM_UP_S = 0.5  # until clocks are up
NUM_TIMED = 20  # products
BEGIN, END = b"+", b"-"


class OtherWork:
    """Starts and controls the process, which ends when the rank ends, or before."""

    def __init__(self, device: torch.device, part: float) -> None:
        """Start the process, and wait until it has timed its products. Until then, the device must
        be idle."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(device), str(part)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._answer()

    def begin(self) -> None:
        self._process.stdin.write(BEGIN)

    def end(self) -> float:
        """Stop the work. Return the part of the device's time that it took since `begin`."""
        self._process.stdin.write(END)
        return self._answer()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self) -> float:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the other work ended with exit code {self._process.wait()}")
        return float(line)


@contextlib.contextmanager
def own_core(number: int) -> Iterator[None]:
    """Pin this thread, and the processes that it starts, to one core. `number` selects it among the
    cores that the thread may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def num_products(part: float, seconds: float) -> int:
    """Return how many products, of `seconds` each, take `part` of a period; at least 1."""
    return max(1, round(part * PERIOD_S / seconds))


def work(burst: Callable[[], None], burst_s: float, is_over: Callable[[float], bool]) -> float:
    """Run a burst in each period until is_over returns True. is_over gets the seconds to the next
    period, and waits for at most as long. Return the part of the time that bursts have taken, if
    each counts as `burst_s`, its seconds on an idle device."""
    start = time.perf_counter()
    for num_bursts in range(1, sys.maxsize):
        burst()
        rest_s = start + num_bursts * PERIOD_S - time.perf_counter()
        if is_over(max(0.0, rest_s)):
            return num_bursts * burst_s / (time.perf_counter() - start)
    raise AssertionError


class Products:
    """Matrix products on a device."""

    def __init__(self, device: torch.device) -> None:
        size, dtype = SIZES[device.type]
        self._factor = torch.randn(size, size, device=device, dtype=dtype)
        self._out = torch.empty_like(self._factor)
        self._device = device

    def run(self, number: int) -> None:
        """Compute `number` products, and wait for them."""
        for _ in range(number):
            torch.mm(self._factor, self._factor, out=self._out)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self) -> float:
        """Return the seconds of a product on the idle device: the least of several means."""
        self.run(1)
        least, start = math.inf, time.perf_counter()
        while (begin := time.perf_counter()) < start + WARM_UP_S:
            self.run(NUM_TIMED)
            least = min(least, (time.perf_counter() - begin) / NUM_TIMED)
        return least


def main() -> None:
    """Work from each BEGIN on standard input to the next END, and then print the part of the time
    that the work took. Return at the end of the input."""
    device, part = torch.device(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    products = Products(device)
    seconds = products.seconds()
    number = num_products(part, seconds)
    print(seconds, flush=True)
    while os.read(0, 1):
        taken = work(
            lambda: products.run(number),
            number * seconds,
            lambda rest_s: bool(select.select([0], [], [], rest_s)[0]),
        )
        if os.read(0, 1):
            print(taken, flush=True)


if __name__ == "__main__":
    main()
