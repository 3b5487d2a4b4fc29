"""Ranks whose attention calls differ in order, number or pass.

Every rank raises an error within seconds that names the odd rank and both calls, and returns no
wrong result before.
"""

import call_orders
import pytest
from call_orders import LIMIT_S, VICTIM, WAYS
from ranks import Ranks

HANG_S = 30.0


@pytest.fixture
def broken_ranks():
    started = Ranks(3)
    yield started
    started.stop()


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_with_other_calls_is_named(broken_ranks, way):
    outcomes = broken_ranks.outcomes(call_orders.train, way, timeout_s=HANG_S)
    for outcome in outcomes:
        assert outcome.error_type in ("DistBackendError", "ValueError"), outcome
        assert f"rank {VICTIM} " in outcome.error, outcome
        assert " while rank" in outcome.error, outcome
        assert "every rank" not in outcome.error


def test_groups_in_another_order(broken_ranks):
    """Ranks wait for each other in different groups."""
    outcomes = broken_ranks.outcomes(call_orders.use_groups, (1, 0), timeout_s=HANG_S)
    for outcome in outcomes:
        assert outcome.error_type == "DistBackendError", outcome
        assert outcome.seconds < LIMIT_S, outcome
        assert f"rank {VICTIM} waits in " in outcome.error, outcome
        assert ", while ranks 0 2 wait in " in outcome.error and "process group" in outcome.error


def test_groups_in_the_same_order(broken_ranks):
    broken_ranks.run(call_orders.use_groups, (0, 1), timeout_s=HANG_S)
