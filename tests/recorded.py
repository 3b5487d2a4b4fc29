"""Calls of the planner, as the integrations make them."""

import contextlib
import unittest.mock
from collections.abc import Iterator

from distca.integrations import boundaries


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[bool]]:
    """Record, for each plan of a forward pass's documents, whether it was made ahead."""
    are_ahead, plan = [], boundaries.plan

    def recorded(*args, **kwargs):
        are_ahead.append(kwargs.get("ahead", False))
        return plan(*args, **kwargs)

    with unittest.mock.patch.object(boundaries, "plan", recorded):
        yield are_ahead
