"""Notices from ranks that train to the servers of their group, which run no model."""

import enum
from collections.abc import Sequence

from distca import ops


class Kind(enum.IntEnum):
    """What comes next. Notice::Kind in csrc/ops/servers.h has the same numbers."""

    END = 0
    PLAN = 1
    JOIN = 2
    REFUSED = 3
    FORWARD = 4
    RECOMPUTED = 5
    BACKWARD = 6


def tell(session, kind: Kind, step: int = -1, details: Sequence[int] = ()) -> None:
    """Tell the servers of a session, if it has any, what comes next. Every rank that trains calls
    this, in the order in which the servers take part."""
    if session.servers:
        ops.tell_servers(session.group_name, kind, step, details)
