"""Faults in a pipeline whose stages share attention: a rank dies, stops, raises or calls
attention differently."""

import functools
import os
import re
import signal
import threading

import kill_at
import pipelined
import pytest
import torch
from pipelined import Pipeline
from ranks import MOVE_ALWAYS, Outcome, Ranks
from torch import Tensor

import distca

CASE = Pipeline()
TIMEOUT_S = 6.0
HANG_S = 60
EXIT_AFTER_S = 1.0
CALL = 2  # of the second step
STAGE_OF = (0, 0, 1, 1)  # by rank


@pytest.fixture
def broken_ranks():
    """Start four ranks for one test, which breaks them."""
    started = Ranks(4)
    yield started
    for process in started.processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)
    started.stop()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise RuntimeError("planted")


class Attention:
    """Calls core_attention, with a fault in one call of this rank's second step or in that call's
    backward pass."""

    def __init__(self, fault: str, in_backward: bool) -> None:
        self.fault, self.in_backward = fault, in_backward
        self.num_calls: int | None = None  # in the second step

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *arguments, **keywords) -> Tensor:
        attend = functools.partial(distca.core_attention, q, k, v, *arguments, **keywords)
        if self.num_calls is None:
            return attend() + attend() if self.fault == "one more in each step" else attend()
        self.num_calls += 1
        if self.num_calls != CALL + 1:
            return attend()
        if self.in_backward:
            out = attend()
            out.register_hook(lambda _: self.act())
            return out
        if self.fault == "skip":
            return torch.zeros_like(q)
        if self.fault == "repeat":
            return attend() + attend()
        self.act()
        return attend()

    def act(self) -> None:
        {"die": kill_at.die, "stop": stop, "raise": raise_error}[self.fault]()


def train(rank: int, world_size: int, victim: int, fault: str, in_backward: bool) -> None:
    distca.configure(distca.Options(timeout_s=TIMEOUT_S, **MOVE_ALWAYS))
    attend = Attention(fault, in_backward) if rank == victim else distca.core_attention
    mesh, parts, schedule = pipelined.open_pipeline(CASE, world_size, attend)
    pipelined.run_step(CASE, mesh, parts, schedule)
    if rank == victim:
        attend.num_calls = 0
    try:
        pipelined.run_step(CASE, mesh, parts, schedule)
    except Exception:
        # End as a script would, after the outcome is reported: others may wait in FSDP.
        threading.Timer(EXIT_AFTER_S, os._exit, [1]).start()
        raise


def others_of(group: Ranks, victim: int, fault: str, in_backward: bool = False) -> list[Outcome]:
    """Return the outcomes of all ranks but the victim, and check that each has an error."""
    stopped = (victim,) if fault == "stop" else ()
    outcomes = group.outcomes(train, victim, fault, in_backward, timeout_s=HANG_S, stopped=stopped)
    del outcomes[victim]
    for outcome in outcomes:
        assert outcome.error is not None, outcome
    return outcomes


@pytest.mark.parametrize(
    "fault, victim, in_backward",
    [
        ("die", 0, False),
        ("die", 2, True),
        ("stop", 1, True),
        ("stop", 3, False),
        ("raise", 3, False),
        ("raise", 1, True),
    ],
)
def test_the_rank_at_fault_is_named(broken_ranks, fault, victim, in_backward):
    word = "backward" if in_backward else "forward"
    what = {"die": f"rank {victim} is dead", "stop": f"rank {victim}", "raise": "planted"}[fault]
    for outcome in others_of(broken_ranks, victim, fault, in_backward):
        assert what in outcome.error and f"{word} pass" in outcome.error, outcome
        assert re.search(r"tick \d+: \d[FB]\d", outcome.error), outcome


@pytest.mark.parametrize("fault, words", [("skip", "has made"), ("repeat", "makes a forward call")])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_with_other_calls_is_named(broken_ranks, victim, fault, words):
    for outcome in others_of(broken_ranks, victim, fault):
        assert f"rank {victim} failed: " in outcome.error, outcome
        assert re.search(rf"tick \d+: .*: stage {STAGE_OF[victim]} {words}", outcome.error), outcome


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_with_a_layer_more_is_named(broken_ranks, victim):
    for outcome in others_of(broken_ranks, victim, "one more in each step"):
        assert f"stage {STAGE_OF[victim]} makes" in outcome.error, outcome
        assert f"on rank {victim}" in outcome.error, outcome
