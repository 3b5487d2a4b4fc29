"""A rank dies, and within seconds every other rank raises an error.

The error names the dead rank, the layer, the pass and the phase.
"""

import re

import kill_at
import oracle
import pytest
import torch
from oracle import Case
from ranks import Outcome, Ranks
from small_step import small_step

import distca

LIMIT_S = 6.0 + kill_at.DELAY_S
HANG_S = 20
pytestmark = pytest.mark.usefixtures("test_extension")


@pytest.fixture
def broken_ranks():
    """A group of three that the test breaks."""
    started = Ranks(3)
    yield started
    started.stop()


def survivors_of(group: Ranks, scenario: str, victim: int = kill_at.VICTIM) -> list[Outcome]:
    """Run a scenario. Return the outcomes of the survivors, and check that the victim is dead."""
    outcomes = group.outcomes(kill_at.run, scenario, victim, timeout_s=HANG_S)
    dead = outcomes.pop(victim)
    group.processes[victim].join(5)
    assert group.processes[victim].exitcode == -9 and dead.error is None, dead
    for outcome in outcomes:
        assert outcome.seconds < LIMIT_S, f"rank {outcome.rank} took {outcome.seconds:.1f} s"
        assert f"rank {victim} is dead" in outcome.error, outcome
        for innocent in {0, 1, 2} - {victim}:
            assert f"rank {innocent} " not in outcome.error, outcome
        assert "Restart the job from its last checkpoint" in outcome.error
    return outcomes


WHERE = {
    "before_dispatch": "dispatch of attention layer 2, forward pass, step 0",
    "inside_dispatch": "dispatch of attention layer 2, forward pass, step 0",
    "inside_attend": "combine of attention layer 2, forward pass, step 0",
    "inside_combine": "combine of attention layer 2, forward pass, step 0",
    "before_backward_dispatch": "dispatch of attention layer 2, backward pass, step 0",
    "inside_backward_dispatch": "dispatch of attention layer 2, backward pass, step 0",
    "inside_backward_attend": "combine of attention layer 2, backward pass, step 0",
    "inside_backward_combine": "combine of attention layer 2, backward pass, step 0",
}


@pytest.mark.parametrize("scenario", WHERE)
def test_a_killed_rank_is_named_with_layer_pass_and_phase(broken_ranks, scenario):
    for outcome in survivors_of(broken_ranks, scenario):
        assert outcome.error_type == "DistBackendError", outcome
        assert f"distca: {WHERE[scenario]}: " in outcome.error, outcome


def test_the_rank_that_holds_the_store_is_killed(broken_ranks):
    for outcome in survivors_of(broken_ranks, "inside_combine", victim=0):
        assert outcome.error_type == "DistBackendError", outcome
        assert f"distca: {WHERE['inside_combine']}: " in outcome.error, outcome


def die_beside_a_busy_store(rank: int, world_size: int) -> None:
    """Die while, in every process, a thread waits in the store that the group was opened with.

    The store's client serves one call at a time.
    """
    distca.init()  # torch opens groups through the store
    kill_at.occupy_store(HANG_S)
    kill_at.run(rank, world_size, "inside_dispatch")


def test_a_busy_store_delays_no_error(broken_ranks):
    outcomes = broken_ranks.outcomes(die_beside_a_busy_store, timeout_s=HANG_S)
    for rank in (0, 2):
        assert outcomes[rank].seconds < LIMIT_S, outcomes[rank]
        assert f"rank {kill_at.VICTIM} is dead" in outcomes[rank].error, outcomes[rank]


@pytest.mark.parametrize("scenario", ["before_plan", "before_plan_ahead", "inside_plan_ahead"])
def test_a_rank_killed_while_planning_is_named(broken_ranks, scenario):
    for outcome in survivors_of(broken_ranks, scenario):
        assert "distca: plan, step 1: " in outcome.error, outcome


def use_a_failed_plan_again(rank: int, world_size: int) -> tuple[str, str]:
    step = small_step(rank, world_size)
    distca.plan(step.documents)
    if rank == kill_at.VICTIM:
        kill_at.die()
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            distca.plan(step.documents)
        messages.append(str(raised.value))
    return messages


def test_after_a_death_every_use_raises(broken_ranks):
    outcomes = broken_ranks.outcomes(use_a_failed_plan_again, timeout_s=HANG_S)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank]
        for step, message in enumerate(outcomes[rank].result, start=1):
            assert re.search(rf"plan, step {step}: rank 1 is dead", message), message


FEW_TOKENS = {
    "none": Case([[], [], []]),
    "empty documents": Case([[0], [0, 0], []]),
    "an empty pack": Case([[0, 0], [], []], sharded=True),
    "one token over three ranks": Case([[1], [], []], sharded=True),
    "two documents on three ranks": Case([[1, 0, 3], [], []], sharded=True),
}


def forward_backward(rank: int, world_size: int, case: Case) -> list[torch.Tensor]:
    step = small_step(rank, world_size, case)
    distca.plan(step.documents)
    out = step.attend()
    out.backward(case.inputs()[3][case.rows_of(rank)])
    return [out.detach(), step.q.grad, step.k.grad, step.v.grad]


@pytest.mark.parametrize("documents", FEW_TOKENS)
def test_ranks_with_few_tokens_are_right(ranks, documents):
    case = FEW_TOKENS[documents]
    per_rank = ranks(3).run(forward_backward, case, timeout_s=HANG_S)
    results = [torch.cat(parts) for parts in zip(*per_rank, strict=True)]
    if case.num_tokens == 0:
        assert all(tensor.shape[0] == 0 for tensor in results)
        return
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)
