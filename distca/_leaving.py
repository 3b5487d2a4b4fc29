"""How a rank leaves its groups: by distca.close, by an exception, or with its process."""

import atexit
import os
import sys
from collections.abc import Callable, Collection

import torch

MOMENT_S = 2.0  # in which a plan that all ranks are making is made
LIMIT_S = 30.0  # of a plan that is being computed, without other ranks


def leave(session, how: str) -> None:
    """Ends this rank's part in a group: `how` as in "has closed its session".

    Plans that are being made may end if the other ranks make them too, which takes no more than a
    moment. Then waits are given up, and the others learn that this rank is not to come.
    """
    session.planner.close()
    session.planner.join(0 if session.has_failed else MOMENT_S)
    for each in (*session.halves, session):
        if each.data is not None:
            torch.ops.distca.leave_session(each.group_name, how)
    session.planner.join(LIMIT_S)
    if session.monitor is not None:
        session.monitor.close()


def failure_under_way() -> BaseException | None:
    """The exception that is being handled, such as in a `finally` that it passes; None where it
    says that all went well, as the end of an iteration does."""
    error = sys.exc_info()[1]
    if isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit)):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    return error


def watch_exits(sessions: Callable[[], Collection]) -> None:
    """From now on this process leaves all of `sessions()` before the interpreter ends, and an
    uncaught exception tells the other ranks. To be called whenever a session opens: what was
    registered last runs first, before the program's records end."""
    _Exits.sessions, _Exits.process = sessions, os.getpid()
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


class _Exits:
    sessions: Callable[[], Collection] = tuple
    process: int | None = None  # its forks share no session


def _own_sessions() -> list:
    return list(_Exits.sessions()) if os.getpid() == _Exits.process else []


def _leave_all() -> None:
    for session in _own_sessions():
        leave(session, "has ended its process")
