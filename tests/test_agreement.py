"""Ranks announce their calls with a plan, so that training does not wait for agreement on them.

A rank that calls otherwise than it announced is named on every rank, with both calls. If all ranks
change their calls alike, they agree anew, and go on.
"""

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case
from small_step import SHARDED, Step, small_step

import distca
from distca import ops

LIMIT_S = 10.0
HANG_S = 30
CAUSAL, SLIDING = (-1, 0), (200, 0)
ODD = 1
NUM_STEPS = 3
PLANS_IN_FLIGHT = 256  # kPlansInFlight
EVEN = Case([[64], [64], [64]], dtype=torch.float32)  # its plan moves no rows
SMALL = Case([[300], [5]], dtype=torch.float32)


def planned(rank: int, world_size: int, windows: list[tuple[int, int]], ahead: bool) -> Step:
    step = small_step(rank, world_size, SHARDED)
    for window in windows:
        distca.plan(step.documents, window_size=window, ahead=ahead)
    return step


def train(step: Step, windows: list[tuple[int, int]]) -> None:
    sum(step.attend(window_size=window) for window in 2 * windows).sum().backward()


CASES = {  # windows of the layers, micro-batches
    "one plan": ([CAUSAL], 1),
    "two windows": ([CAUSAL, SLIDING], 1),
    "4 micro-batches": ([CAUSAL], 4),
}


def agreements_by_step(profile: torch.profiler.profile) -> list[int]:
    """Return the number of agreements in each range "step ..." of a profile."""
    # profile.events() would take seconds to build a tree of all operators.
    events = profile.profiler.kineto_results.events()
    starts = [each.start_ns() for each in events if each.name() == "distca agreement"]
    steps = [each for each in events if each.name().startswith("step ")]
    return [sum(step.start_ns() <= start < step.end_ns() for start in starts) for step in steps]


def agreements(rank: int, world_size: int, case: str, ahead: bool) -> list[int]:
    """Return how often the training thread takes part in an agreement, by step."""
    distca.close()
    windows, num_batches = CASES[case]

    def plan_all() -> list[Step]:
        return [planned(rank, world_size, windows, ahead) for _ in range(num_batches)]

    steps = plan_all()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(NUM_STEPS):
            coming = plan_all() if ahead else []
            with torch.profiler.record_function(f"step {number}"):
                for step in steps:
                    train(step, windows)
            steps = coming or plan_all()
    return agreements_by_step(profile)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("case", CASES)
def test_training_does_not_wait_for_agreement_after_the_first_step(ranks, case, ahead):
    windows, num_batches = CASES[case]
    num_plans = len(windows) * num_batches
    # Plans that are made ahead of the first step have no calls to announce either.
    first = [num_plans, num_plans] if ahead else [num_plans, 0]
    assert ranks(3).run(agreements, case, ahead) == [[*first, 0]] * 3


def _other_scale(step: Step) -> dict:
    return {"softmax_scale": 0.5}


def _other_dtype(step: Step) -> dict:
    step.q, step.k, step.v = (each.detach().double() for each in (step.q, step.k, step.v))
    return {}


def _fewer_heads(step: Step) -> dict:
    step.q = step.q.detach()[:, :2]
    return {}


def _other_head_dim(step: Step) -> dict:
    step.q, step.k, step.v = (each.detach()[..., :8] for each in (step.q, step.k, step.v))
    return {}


def _other_width_of_v(step: Step) -> dict:
    step.v = step.v.detach()[..., :8]
    return {}


CHANGES = {
    "softmax_scale 0.5 instead of 0.204": _other_scale,
    "dtype Double instead of Float": _other_dtype,
    "heads_q 2 instead of 4": _fewer_heads,
    "head_dim 8 instead of 24": _other_head_dim,
    "v's head_dim 8 instead of 24": _other_width_of_v,
}


def change_alone(rank: int, world_size: int, change: str) -> None:
    for _ in range(2):
        train(planned(rank, world_size, [CAUSAL], False), [CAUSAL])
    step = planned(rank, world_size, [CAUSAL], False)
    step.attend(**CHANGES[change](step) if rank == ODD else {})


@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_that_changes_alone_is_named(fresh_ranks, change):
    for outcome in fresh_ranks.outcomes(change_alone, change, timeout_s=HANG_S):
        assert outcome.error_type == "DistBackendError" and outcome.seconds < LIMIT_S, outcome
        assert f"rank {ODD} waits in an agreement on {change}" in outcome.error, outcome
        assert "while ranks 0 2 wait in dispatch of attention layer 0" in outcome.error, outcome


def refuse_alone(rank: int, world_size: int) -> None:
    train(planned(rank, world_size, [CAUSAL], False), [CAUSAL])
    step = planned(rank, world_size, [CAUSAL], False)
    if rank == ODD:
        step.q = step.q[1:]
    step.attend()


def test_a_rank_that_refuses_its_arguments_is_named(fresh_ranks):
    outcomes = fresh_ranks.outcomes(refuse_alone, timeout_s=HANG_S)
    for outcome in outcomes:
        assert "tokens, but the documents of this rank have" in outcome.error, outcome
        assert outcome.seconds < LIMIT_S, outcome
        assert outcome.rank == ODD or f"rank {ODD} failed" in outcome.error, outcome
    assert outcomes[ODD].error_type == "ValueError"


def change_together(rank: int, world_size: int) -> tuple[list[int], float]:
    """Train, evaluate in another dtype, and train again. Return the number of agreements in each
    step, and the largest error."""
    distca.close()
    errors = []
    truth = oracle.forward_backward(SHARDED)[0][SHARDED.rows_of(rank)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for change in (None, None, _other_dtype, _other_dtype, None, None):
            step = planned(rank, world_size, [CAUSAL], False)
            if change is not None:
                change(step)
            with torch.profiler.record_function("step "):
                errors.append(oracle.relative_error(step.attend().detach(), truth))
    return agreements_by_step(profile), max(errors)


def test_ranks_that_change_together_agree_anew(ranks):
    for by_step, error in ranks(3).run(change_together):
        assert by_step == [1, 0, 1, 0, 1, 0]
        assert error < 1e-5


def change_alone_at_home(rank: int, world_size: int) -> None:
    """Call with fewer heads on rank ODD, under a plan that moves no rows, and train on."""
    distca.close()
    for number in range(5):
        step = small_step(rank, world_size, EVEN)
        distca.plan(step.documents)
        if number == 2 and rank == ODD:
            _fewer_heads(step)
        step.attend()
        dist.all_reduce(
            torch.ones(1)
        )  # of gradients: a rank that does not get here blocks the others


def test_a_rank_that_changes_alone_is_named_though_nobody_waits_for_its_rows(fresh_ranks):
    for outcome in fresh_ranks.outcomes(change_alone_at_home, timeout_s=HANG_S):
        assert outcome.error_type == "DistBackendError" and outcome.seconds < LIMIT_S, outcome
        assert "agreement on a plan, step 4: ranks made different attention calls" in outcome.error
        assert f"heads_q: 2 on rank {ODD}, 4 on ranks 0 2" in outcome.error


def plan_far_ahead(rank: int, world_size: int) -> list[int]:
    """Plan one step more than ranks keep announcements for. Return the number of agreements on
    calls under the first two of these plans, and under the last."""
    distca.close()
    first = small_step(rank, world_size, SMALL)
    distca.plan(first.documents)
    first.attend()
    steps = [small_step(rank, world_size, SMALL) for _ in range(PLANS_IN_FLIGHT + 1)]
    plans = [distca.plan(step.documents, ahead=True) for step in steps]
    if rank == ODD:  # planner's threads may be at different plans
        plans[-1].wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in (*steps[:2], steps[-1]):
            with torch.profiler.record_function("step "):
                step.attend()
    return agreements_by_step(profile)


def test_ranks_forget_the_same_announcements(ranks):
    assert ranks(2).run(plan_far_ahead) == [[1, 0, 0]] * 2


def two_models(rank: int, world_size: int, swap: bool) -> list[int]:
    """Run two models with different heads under each plan. In the last step, rank ODD may swap
    them."""
    distca.close()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for number in range(3):
            step = planned(rank, world_size, [CAUSAL], False)
            small = planned(rank, world_size, [], False)
            small.documents = step.documents
            _fewer_heads(small)
            models = [step, small]
            if swap and number == 2 and rank == ODD:
                models.reverse()
            with torch.profiler.record_function("step "):
                for model in models:
                    model.attend()
    return agreements_by_step(profile)


def test_calls_of_two_models_are_announced_in_their_order(ranks, fresh_ranks):
    assert ranks(3).run(two_models, False) == [[2, 0, 0]] * 3
    for outcome in fresh_ranks.outcomes(two_models, True, timeout_s=HANG_S):
        assert f"rank {ODD} waits in an agreement on heads_q 2 instead of 4" in outcome.error
        assert outcome.seconds < LIMIT_S, outcome


def plan_otherwise(rank: int, world_size: int) -> str:
    """Compute another plan on rank ODD, in the second step."""
    distca.close()
    train(planned(rank, world_size, [CAUSAL], False), [CAUSAL])
    real_plan = ops.plan

    def other_plan(pieces, num_ranks, left, right, *others):
        encoded, loads = real_plan(pieces, num_ranks, left, right, *others)
        documents = [[0, 0, 10, 0], [1, 0, 50, 0], [2, 0, 100, 0], [3, 0, 1200, 0], [4, 0, 30, 0]]
        return ops.plan_of_tasks(pieces, torch.tensor(documents), num_ranks, left, right), loads

    try:
        if rank == ODD:
            ops.plan = other_plan
        with pytest.raises(ValueError) as different:
            planned(rank, world_size, [CAUSAL], False)
    finally:
        ops.plan = real_plan
    train(planned(rank, world_size, [CAUSAL], False), [CAUSAL])
    return str(different.value)


def test_plans_that_differ_are_refused_before_a_call(ranks):
    for message in ranks(3).run(plan_otherwise):
        assert "ranks disagree on core attention, nothing was sent: plan digest: " in message
        assert f" on rank {ODD}" in message and " on ranks 0 2" in message
