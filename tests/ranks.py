"""Processes of one torch.distributed group on this machine, for tests."""

import faulthandler
import gc
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from programs import preloaded

import distca
from distca.planning import solver

TIMEOUT_S = 120
MAX_THREADS = 60  # of a rank
# Options that claim such fast links and slow attention that plans move rows even in tiny steps.
MOVE_ALWAYS = {"link_gb_per_s": 1e5, "node_link_gb_per_s": 1e5, "attention_tflops": 0.03}


class RankError(AssertionError):
    """Carries the tracebacks of the ranks that raised."""


@dataclass
class Outcome:
    """What one rank's call came to: a result, an error, or neither if the process died."""

    rank: int
    result: object = None
    error_type: str | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float = 0.0


def take_device(rank: int, world_size: int) -> None:
    """Set the rank's CUDA device. Ranks share devices if there are too few.

    NCCL lets ranks share a device only if they are on different hosts. They pretend to be.
    """
    num_devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_devices)
    if world_size > num_devices:
        host = f"host {rank // num_devices}"
        os.environ.update(NCCL_HOSTID=host, NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")


def _join_group(rank: int, world_size: int, port: int, backend: str) -> None:
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        take_device(rank, world_size)
        distca.configure(distca.Options(**MOVE_ALWAYS))
        solver.DEVICES_OF_CHOICE = ()  # halves run even where whole blocks are faster
        solver.DEVICES_OF_MOVING_PART = ()  # rows move for any gain
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _call(function: Callable, rank: int, world_size: int, args: tuple) -> Outcome:
    start = time.perf_counter()
    try:
        outcome = Outcome(rank, result=function(rank, world_size, *args))
    except Exception as error:  # handed to the test as it is
        outcome = Outcome(
            rank,
            error_type=type(error).__name__,
            error=str(error),
            traceback=traceback.format_exc(),
        )
    outcome.seconds = time.perf_counter() - start
    return outcome


def _serve(
    rank: int, world_size: int, port: int, backend: str, calls: mp.Queue, outcomes: mp.Queue
) -> None:
    faulthandler.register(signal.SIGUSR1)
    gc.freeze()  # neither collections nor distca's search for models walk all of PyTorch's objects
    _join_group(rank, world_size, port, backend)
    while (call := calls.get()) is not None:
        outcomes.put(_call(*call[:1], rank, world_size, call[1]))
    dist.destroy_process_group()


def open_store() -> dist.TCPStore:
    """A store at a port of its own, which no other group can have taken before ranks meet there."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Ranks:
    """`world_size` processes that wait for calls. `run` raises if any rank raised."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        # CUDA does not survive a fork; without it, processes need not import PyTorch once more.
        context = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if not torch.cuda.is_available():
            context.set_forkserver_preload(preloaded())
        self.world_size = world_size
        self._outcomes = context.Queue()
        self._calls = [context.Queue() for _ in range(world_size)]
        self._store = open_store()
        port = self._store.port
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, world_size, port, backend, self._calls[rank], self._outcomes),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def outcomes(
        self,
        function: Callable,
        *args,
        timeout_s: float = TIMEOUT_S,
        stopped: Collection[int] = (),
    ) -> list[Outcome]:
        """function(rank, world_size, *args) on every rank: what each came to, by rank. A rank whose
        process died, or that is not awaited because it stops, has neither result nor error."""
        for calls in self._calls:
            calls.put((function, args))
        found = {rank: Outcome(rank) for rank in range(self.world_size)}
        waiting = set(found) - set(stopped)
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            try:
                outcome = self._outcomes.get(timeout=0.1)
                found[outcome.rank] = outcome
                waiting.discard(outcome.rank)
            except queue.Empty:
                dead = {r for r in waiting if not self.processes[r].is_alive()}
                waiting -= dead
        if waiting:
            self._print_stacks(waiting)
            self.stop()
            returned = "\n".join(str(found[rank]) for rank in sorted(set(found) - waiting))
            raise RankError(
                f"ranks {sorted(waiting)} did not return within {timeout_s} s; the others:\n"
                f"{returned}"
            )
        return [found[rank] for rank in range(self.world_size)]

    def run(self, function: Callable, *args, timeout_s: float = TIMEOUT_S) -> list:
        """Results by rank; raises RankError with every traceback if any rank raised or died."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        failed = [o for o in outcomes if o.traceback]
        dead = [r for r, process in enumerate(self.processes) if not process.is_alive()]
        if failed or dead:
            self.stop()
            text = "\n".join(f"rank {o.rank}: {o.traceback}" for o in failed)
            raise RankError(f"ranks {dead} died; errors:\n{text}")
        return [outcome.result for outcome in outcomes]

    def is_crowded(self) -> bool:
        """Return whether open process groups slow down the machine: each of gloo's has a thread
        that polls a hundred times a second."""
        alive = [each.pid for each in self.processes if each.is_alive()]
        return max((len(os.listdir(f"/proc/{pid}/task")) for pid in alive), default=0) > MAX_THREADS

    def _print_stacks(self, waiting: set[int]) -> None:
        """Make processes that hang write their Python stacks to stderr."""
        for rank in waiting:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
