"""Run two functions on two host threads that take turns."""

import contextlib
import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import torch

from distca import ops
from distca.ranks.planner_thread import PlannerThread

AUTOCAST_DEVICES = ("cuda", "cpu")
NODES_OF_A_SLOT = 1024  # most autograd nodes between two calls of attention in a half
POLL_S = 0.5  # a lock does not notice Ctrl-C that comes just before the system waits for it
NUM_SLOTS = 4  # for each call of attention: see Relay


class Stopped(BaseException):
    """Ends the second function after the first has raised an error."""


class _Threads(threading.local):
    """Holds the thread that runs second functions for the current thread."""

    def __init__(self) -> None:
        self.second = PlannerThread()


_threads = _Threads()


class Relay:
    """Runs a first function on this thread and a second one on another thread. Only one of them
    runs at a time: the first until it calls hand_over, then the second until it calls hand_over,
    and so on.

    Both functions see the state that torch keeps for the thread that calls `run` (grad mode,
    autocast, modes, hooks of saved tensors), and the context variables of that thread.

    Of the autograd nodes that are ready, the backward pass runs the one with the highest sequence
    number. Each thread numbers its nodes by itself. So each part of a function starts with the
    first number of a slot, which is a range of numbers. If both functions call attention once, the
    slots are those of

    0. what the first function does before it calls attention,
    1. what the second function does before it calls attention,
    2. attention of the first function,
    3. what follows attention in the first function,
    4. attention of the second function,
    5. what follows attention in the second function.

    Then the backward pass runs attention of the second function (4) before what follows attention
    in the first (3), and attention of the first (2) before what precedes it in the second (1). Each
    further call adds NUM_SLOTS slots in the order of slots 2 to 5.
    """

    def __init__(self, stop: Callable[[BaseException], Any]) -> None:
        """If Ctrl-C reaches the first function while it waits for the second, `stop` gets the
        exception, and must end what the second waits for."""
        self._stop = stop
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._are_over = [False, False]
        self._error: BaseException | None = None
        self._first_ident = threading.get_ident()
        self._base = ops.raise_sequence_number(0)
        self._num_calls = [0, 0]

    @property
    def number(self) -> int:
        """0 in the first function, and 1 in the second."""
        return int(threading.get_ident() != self._first_ident)

    def run(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """Run both functions, and return their results. If one of them raises an error, the other
        one ends at its next turn, and `run` raises the error."""
        state, context = _State(), contextvars.copy_context()
        ended = _threads.second.submit(context.run, self._run_second, second, state)
        results = []
        try:
            results.append(first())
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._are_over[0] = True
            self._wait_in_turn(lambda seconds: bool(futures.wait([ended], seconds).done))
            results.append(ended.result())
            torch.clear_autocast_cache()
            error, self._error = self._error, None
            try:
                if error is not None and len(results) == 2:  # only the second has raised
                    raise error
            finally:
                del error  # its traceback holds this frame, which would hold the error
        last = self._base + NODES_OF_A_SLOT * self._slot_after(1)
        ops.raise_sequence_number(last + NODES_OF_A_SLOT)
        return tuple(results)

    def _run_second(self, second: Callable[[], Any], state: "_State") -> Any:
        try:
            self._turns[1].acquire()
            if self._error is not None:
                return None
            with state.applied():
                self._raise_number(1)
                return self._ended_here(second)
        except Stopped:
            return None
        except BaseException as error:
            self._error = error
            return None
        finally:
            self._are_over[1] = True
            self._turns[0].release()

    def _wait_in_turn(self, has_come: Callable[[float], bool]) -> None:
        """Let the other function run, and wait until `has_come`, which waits for some seconds. The
        other function must not outlive an interrupted wait."""
        try:
            self._turns[1 - self.number].release()
            while not has_come(POLL_S):
                pass
        except BaseException as error:
            self._stop(error)
            raise

    def _ended_here(self, function: Callable[[], Any]) -> Any:
        """Call a function. If it raises an error, clear its frames on this thread. Contexts that
        end with their frames, such as those of torch.utils.checkpoint, then end here."""
        try:
            return function()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise

    def call(self) -> None:
        """Note that the function on this thread is about to call attention."""
        number = self.number
        self._num_calls[number] += 1
        self._raise_number(NUM_SLOTS * self._num_calls[number] - 2 + 2 * number)

    def hand_over(self) -> None:
        """Let the other function run until it hands over or ends. For use after each call of
        attention."""
        number = self.number
        if not self._are_over[1 - number]:
            torch.clear_autocast_cache()  # the other stream does not wait for these casts
            self._wait_in_turn(lambda seconds: self._turns[number].acquire(timeout=seconds))
            torch.clear_autocast_cache()
        if self._error is not None:
            raise Stopped if number == 1 else self._error
        self._raise_number(self._slot_after(number))

    def _slot_after(self, number: int) -> int:
        return NUM_SLOTS * self._num_calls[number] - 1 + 2 * number

    def _raise_number(self, slot: int) -> None:
        if torch.is_grad_enabled():
            ops.raise_sequence_number(self._base + NODES_OF_A_SLOT * slot)


class _State:
    """The state that torch keeps for the thread that creates this object."""

    def __init__(self) -> None:
        self._state = torch.classes.distca.ThreadState()
        self._dtypes = {each: torch.get_autocast_dtype(each) for each in AUTOCAST_DEVICES}
        self._caches = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the current thread this state, and restore its own state at the end."""
        own = _State()
        self._apply()
        try:
            yield
        finally:
            own._apply()

    def _apply(self) -> None:
        self._state.apply()
        for device, dtype in self._dtypes.items():
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._caches)
