"""Leave the groups of a rank: by distca.close, by an exception, or when its process ends."""

import atexit
import os
import sys
from collections.abc import Callable, Collection
from types import SimpleNamespace

from distca import ops

MOMENT_S = 2.0  # for a plan that all ranks are still making
LIMIT_S = 30.0  # for the computation of a plan, which waits for no other rank


def leave(session, how: str) -> None:
    """Ends this rank's part in a group. `how` says it to the others: "has closed its session".

    Plans that all ranks are still making have MOMENT_S to finish. Then this rank gives up its
    waits, and the other ranks learn that it has left.
    """
    session.planner.close()
    session.planner.join(0 if session.has_failed else MOMENT_S)
    for each in session.parts:
        ops.leave_session(each.group_name, how)
    session.planner.join(LIMIT_S)
    if session.monitor is not None:
        session.monitor.close()


def failure_under_way() -> BaseException | None:
    """Returns the exception that is being handled, also in a `finally` block.

    Returns None for exceptions that are not failures: the end of an iteration, and exit code 0.
    """
    error = sys.exc_info()[1]
    is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
    is_end = isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit))
    return None if is_exit or is_end else error


def watch_exits(sessions: Callable[[], Collection]) -> None:
    """Makes this process leave all of `sessions()` before the interpreter ends, and tell the other
    ranks of an uncaught exception.

    Call it whenever a session opens: exit handlers run in reverse order of registration, and this
    one must run before the handler that ends the records of plans.
    """
    _exits.sessions, _exits.process = sessions, os.getpid()
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)
    previous = sys.excepthook
    if getattr(previous, "announces_to_distca", False):
        return

    def hook(kind, error, traceback):
        try:
            for session in _own_sessions():
                session.announce(error)
        finally:
            previous(kind, error, traceback)

    hook.announces_to_distca = True
    sys.excepthook = hook


_exits = SimpleNamespace(sessions=tuple, process=None)  # a fork of the process has no sessions


def _own_sessions() -> list:
    return list(_exits.sessions()) if os.getpid() == _exits.process else []


def _leave_all() -> None:
    for session in _own_sessions():
        leave(session, "has ended its process")
