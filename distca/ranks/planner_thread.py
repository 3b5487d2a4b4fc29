"""The thread that makes a group's plans."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

PATIENCE_S = 0.01  # of the threads of groups whose attention runs on CUDA devices

_log = logging.getLogger("distca")


class PlannerThread:
    """Runs calls one after the other in the background. It starts with the first call.

    A step's next plan is submitted when the step begins, and then the device is idle until Python
    has launched the step's first kernels. The interpreter runs one thread at a time, so a call
    first waits for `patience_s` seconds. It begins at once if anyone waits for a result.

    It is a daemon, because it may be waiting for other ranks when the process ends. But the
    interpreter must not end it inside an operator: C++ frames that may not throw would abort the
    process. `distca.ranks.leaving` joins the thread before that.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._patience_s = patience_s
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_awaited = threading.Event()

    def submit(self, function: Callable, *args) -> Future:
        """Returns a future of function(*args)."""
        future = _Result(self._is_awaited)
        self._is_awaited.clear()
        self._calls.put((future, time.monotonic() + self._patience_s, function, args))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="distca-planner", daemon=True)
            self._thread.start()
        return future

    def save(self, what: str, function: Callable, *args) -> None:
        """Calls function(*args) in the background, which saves `what`. Turns an error into a
        warning, because training can go on without `what`."""

        def try_to_save() -> None:
            try:
                function(*args)
            except Exception as error:
                _log.warning("%s not saved: %s: %s", what, type(error).__name__, error)

        self.submit(try_to_save)

    def close(self) -> None:
        """Ends the thread after the calls submitted so far. Does not wait for them."""
        self._is_awaited.set()
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the thread, at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, begin, function, args = call
            self._is_awaited.wait(max(0.0, begin - time.monotonic()))
            try:
                future.set_result(function(*args))
            except BaseException as error:  # raised again where the result is used
                future.set_exception(error)
            del call, future, function, args  # while this waits for the next one


class _Result(Future):
    """A future that says when it is awaited."""

    def __init__(self, is_awaited: threading.Event) -> None:
        super().__init__()
        self._is_awaited = is_awaited

    def result(self, timeout: float | None = None):
        if not self.done():
            self._is_awaited.set()
        return super().result(timeout)
