"""Phases of attention by layer: ranges of torch's profiler, and the timeline of a step."""

import time

import pytest
import torch
from profiled import ranges_of
from small_step import SHARDED, WHOLE, small_step
from torch.utils.checkpoint import checkpoint

import distca

PHASES = (
    "attention",
    "dispatch",
    "early home tasks",
    "wait for rows",
    "visiting tasks",
    "combine",
    "late home tasks",
    "wait for results",
)
DELAY_S = 0.2


def named_phases(num_layers: int, passes: tuple[str, ...]) -> dict[str, int]:
    return {
        f"distca {each} layer {layer} {phase}": 1
        for each in passes
        for layer in range(num_layers)
        for phase in PHASES
    }


def profiled(rank: int, world_size: int, recompute: bool) -> dict[str, int]:
    """Return the number of ranges by name, for two layers, forward and backward."""
    distca.close()  # so that ranks have no calls to announce with the plan
    step = small_step(rank, world_size, SHARDED)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        distca.plan(step.documents)
        layers = [
            checkpoint(step.attend, use_reentrant=False) if recompute else step.attend()
            for _ in range(2)
        ]
        sum(layers).sum().backward()
    return ranges_of(profile)


@pytest.mark.parametrize("recompute", [False, True])
def test_phases_are_ranges_of_the_profiler(ranks, recompute):
    passes = ("forward", "backward", *(["recomputed forward"] if recompute else []))
    once = {"distca agreement": 1, "distca wait for plan": 1}
    wanted = {**named_phases(2, passes), **once}
    for ranges in ranks(3).run(profiled, recompute):
        assert ranges == wanted


def profiled_alone() -> set[str]:
    step = small_step(0, 1, WHOLE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step.attend().sum().backward()
    return set(ranges_of(profile))


def test_attention_of_one_rank_is_a_range():
    assert profiled_alone() == {"distca forward attention", "distca backward attention"}


def timed(rank: int, world_size: int, compiled: bool) -> dict:
    """Run three steps of two layers and time the first. Rank 1 is late for each layer."""
    distca.close()
    group_name = distca.init(options=distca.Options()).group_name
    steps = [small_step(rank, world_size, SHARDED) for _ in range(3)]
    torch.ops.distca.watch_step(group_name, 0)
    times_by_step, seconds = [], 0.0
    for step in steps:
        distca.plan(step.documents)
        attend = torch.compile(step.attend, backend="aot_eager") if compiled else step.attend
        start = time.perf_counter()
        for _ in range(2):
            time.sleep(DELAY_S * (rank == 1))
            attend().sum().backward()
        seconds = seconds or time.perf_counter() - start
        times_by_step.append(torch.ops.distca.attention_times(group_name))
    phases, times = torch.ops.distca.spans(group_name)
    distca.close()
    return {"times_by_step": times_by_step, "phases": phases, "times": times, "seconds": seconds}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_has_separate_times_for_attention_and_waits(ranks, compiled):
    waiting, late, _ = ranks(3).run(timed, compiled)
    for result in (waiting, late):
        before, after, later = result["times_by_step"]
        assert before == later == [], "times appear once, after the timed step"
        attention_us, waiting_us = after
        assert 0 < waiting_us < attention_us < 1e6 * result["seconds"]
    # Before the first layer the others wait to agree with rank 1, not for its rows.
    assert waiting["times_by_step"][1][1] > 0.9e6 * DELAY_S > late["times_by_step"][1][1]


def test_spans_are_those_of_the_step_in_order_of_time(ranks):
    for result in ranks(3).run(timed, False):
        both = zip(result["phases"], result["times"].tolist(), strict=True)
        names = [(*phase.split(" ", 1), layer) for phase, (layer, _, _) in both]
        wanted = [
            (each, phase, layer)
            for layer in range(2)
            for each in ("forward", "backward")
            for phase in (*PHASES[1:], PHASES[0])
        ]
        # A backward pass between forward passes belongs to the previous layer.
        assert [name[:2] for name in names] == [name[:2] for name in wanted]
        begins, ends = result["times"][:, 1], result["times"][:, 2]
        assert (ends >= begins).all() and (ends.diff() >= 0).all()
        assert abs(ends[-1].item() / 1e9 - time.time()) < 60, "since 1970"
        whole = [idx for idx, name in enumerate(names) if name[1] == "attention"]
        for idx in whole:
            inside = slice(idx - len(PHASES) + 1, idx)
            assert (begins[inside] >= begins[idx]).all()
            assert (ends - begins)[inside].sum() <= (ends - begins)[idx]


def attend_without_end(rank: int, world_size: int) -> tuple[list[int], int]:
    """Call attention under one plan more often than spans are kept, then run another step."""
    distca.close()
    distca.init(options=distca.Options())
    documents, q = distca.Documents([0, 1]), torch.ones(1, 1, 1, requires_grad=True)
    torch.ops.distca.watch_step("", 0)
    distca.plan(documents)
    for _ in range(20_000):
        distca.core_attention(q, q, q, documents)
    distca.plan(documents)
    distca.core_attention(q, q, q, documents).sum().backward()
    times = torch.ops.distca.attention_times("")
    distca.close()
    return times, len(torch.ops.distca.spans("")[0])


def test_many_calls_under_one_plan_fill_no_memory(ranks):
    assert ranks(1).run(attend_without_end) == [([-1, -1], 0)]
