"""Ranks with different attention calls, where devices wait for rows and the host runs ahead.

No wrong row is used, because devices also compare calls.
"""

import os
import re

import call_orders
import pytest
import torch
from call_orders import VICTIM, WAYS
from oracle import Case
from ranks import Ranks

pytestmark = pytest.mark.gpu

HANG_S = 60.0
START_S = 60.0
CASE = Case([[100, 500, 1000, 3000, 30], []], 4, 2, 64, dtype=torch.bfloat16, sharded=True)


def run(rank: int, world_size: int, way: str, transport: str) -> None:
    call_orders.train(rank, world_size, way, CASE, "cuda", transport=transport)


@pytest.fixture
def broken_ranks(monkeypatch):
    """A group of two that the test breaks."""
    monkeypatch.setitem(os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    started: list[Ranks] = []

    def start(transport: str) -> Ranks:
        if transport == "peer" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("peer memory needs a Hopper GPU")
        started.append(Ranks(2, "nccl"))
        started[0].run(call_orders.warm_up, timeout_s=START_S)
        return started[0]

    yield start
    for ranks in started:
        ranks.stop()


@pytest.mark.parametrize("transport", ["peer", "process_group"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_with_other_calls_is_named(broken_ranks, way, transport):
    outcomes = broken_ranks(transport).outcomes(run, way, transport, timeout_s=HANG_S)
    for outcome in outcomes:
        assert outcome.error_type in ("DistBackendError", "ValueError"), outcome
        assert re.search(rf"ranks? \[?{VICTIM}\b", outcome.error), outcome
        assert "every rank" not in outcome.error
