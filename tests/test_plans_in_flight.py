"""Calls that alternate between plans: ranks do not wait to agree on them, and layers keep their
numbers."""

import extension
import kill_at
import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case
from profiled import ranges_of
from ranks import Ranks
from small_step import SHARDED, WHOLE, Step, small_step

import distca

WINDOWS = [(-1, 0), (200, 0)]
NUM_LAYERS = 6
NUM_MICRO_BATCHES = 4
HANG_S = 30


def windows_by_layer() -> list[tuple[int, int]]:
    return [WINDOWS[layer % len(WINDOWS)] for layer in range(NUM_LAYERS)]


def alternate(rank: int, world_size: int) -> tuple[dict[str, int], list[float]]:
    """Return the profiler's ranges, and each layer's error against a run of one plan at a time."""
    first = small_step(rank, world_size, SHARDED)
    distca.plan(first.documents)
    first.attend()  # from now on, plans go by the shape of this attention
    alone = []
    for window in WINDOWS:
        own = small_step(rank, world_size, SHARDED)
        distca.plan(own.documents, window_size=window)
        alone.append(own.attend(window_size=window).detach())
    step = small_step(rank, world_size, SHARDED)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for window in WINDOWS:
            distca.plan(step.documents, window_size=window)
        outs = [step.attend(window_size=window) for window in windows_by_layer()]
        sum(outs).sum().backward()
    errors = [oracle.relative_error(out.detach(), alone[i % 2]) for i, out in enumerate(outs)]
    return ranges_of(profile), errors


def test_layers_of_two_windows_do_not_wait_to_agree(ranks):
    for ranges, errors in ranks(3).run(alternate):
        assert "distca agreement" not in ranges
        for each in ("forward", "backward"):
            for layer in range(NUM_LAYERS):
                assert ranges[f"distca {each} layer {layer} dispatch"] == 1, (each, layer)
        assert max(errors) == 0


def one_forward_one_backward(num_warm_up: int) -> list[tuple[str, int]]:
    """Return the passes of a pipeline's stage in order, as (pass, micro-batch)."""
    order = [("forward", i) for i in range(num_warm_up)]
    for i in range(NUM_MICRO_BATCHES - num_warm_up):
        order += [("forward", num_warm_up + i), ("backward", i)]
    first = NUM_MICRO_BATCHES - num_warm_up
    return order + [("backward", i) for i in range(first, NUM_MICRO_BATCHES)]


def run_a_stage(rank: int, world_size: int) -> tuple[dict[str, int], float]:
    """Run two stages of two ranks. Return the stage's ranges, and the largest error of its
    gradients against a run of one micro-batch after another."""
    distca.close()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, own = divmod(rank, 2)
    distca.init(groups[stage])
    case = Case([[300, 11], [5]], dtype=torch.float32)

    def micro_batch() -> Step:
        return small_step(own, 2, case)

    def gradient_alone() -> torch.Tensor:
        step = micro_batch()
        distca.plan(step.documents)
        sum(step.attend() for _ in range(3)).sum().backward()
        return step.q.grad

    gradient_alone()  # after it, all plans are for the shape of attention that ranks have seen
    steps = [micro_batch() for _ in range(NUM_MICRO_BATCHES)]
    outs: dict[int, torch.Tensor] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for each, i in one_forward_one_backward(2 - stage):
            if each == "forward":
                distca.plan(steps[i].documents)
                outs[i] = sum(steps[i].attend() for _ in range(3))
            else:
                outs[i].sum().backward()
    truth = gradient_alone()
    errors = [oracle.relative_error(step.q.grad, truth) for step in steps]
    ranges = ranges_of(profile)
    distca.close()
    return ranges, max(errors)


def test_ranks_of_a_pipeline_do_not_wait_to_agree():
    fresh = Ranks(4)  # shared ranks may be in unequal numbers of groups
    try:
        results = fresh.run(run_a_stage)
    finally:
        fresh.stop()
    for ranges, error in results:
        assert "distca agreement" not in ranges
        for each in ("forward", "backward"):
            for layer in range(3):
                name = f"distca {each} layer {layer} dispatch"
                assert ranges[name] == NUM_MICRO_BATCHES, name
        assert error == 0


def die_in_a_layer(rank: int, world_size: int, place: str) -> None:
    extension.load()
    step = small_step(rank, world_size, SHARDED)
    for window in WINDOWS:
        distca.plan(step.documents, window_size=window)
    if rank == kill_at.VICTIM:
        extension.at_phase(f"distca {place} visiting tasks", 0.2, 0)
    sum(step.attend(window_size=window) for window in windows_by_layer()).sum().backward()
    raise AssertionError("no error")


@pytest.mark.usefixtures("test_extension")
@pytest.mark.parametrize("place", ["forward layer 3", "backward layer 2"])
def test_a_failure_names_the_layer_among_those_of_all_plans(place):
    broken = Ranks(3)
    try:
        outcomes = broken.outcomes(die_in_a_layer, place, timeout_s=HANG_S)
    finally:
        broken.stop()
    which, _, layer = place.split()
    for rank in {0, 1, 2} - {kill_at.VICTIM}:
        error = outcomes[rank].error
        assert f"of attention layer {layer}, {which} pass" in error, error
        assert f"rank {kill_at.VICTIM} is dead" in error, error


def batches_of(rank: int, world_size: int) -> list[int]:
    """Return the batches of plans for two windows in two steps, then of a plan over another group.

    Rank 0 plans the same documents again, and the other ranks plan new ones.
    """
    distca.close()
    step = small_step(rank, world_size, SHARDED)
    plans = []
    for _ in range(2):
        if rank > 0:
            step = small_step(rank, world_size, SHARDED)
        plans += [distca.plan(step.documents, window_size=window) for window in WINDOWS]
    whole = small_step(rank, world_size, WHOLE).documents
    distca.plan(whole, window_size=WINDOWS[0])
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    plans.append(distca.plan(whole, window_size=WINDOWS[1], group=alone))
    distca.close()
    return [plan.batch for plan in plans]


def test_plans_for_the_windows_of_one_step_are_one_batch():
    fresh = Ranks(3)
    try:
        assert fresh.run(batches_of) == [[0, 0, 2, 2, 0]] * 3
    finally:
        fresh.stop()
