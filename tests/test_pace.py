"""Speeds of ranks are measured in training, and plans give slow ranks less."""

from unittest import mock

import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS
from test_core_attention import place

import distca
from distca import ops
from distca.planning import plan as plans
from distca.ranks.pace import LEAST_SAMPLES, LEAST_SECONDS, SCALE, UNKNOWN, Pace, layer_seconds
from distca.ranks.session import find

CASE = Case([[900, 400, 100], [100, 200]])
MS = 1_000_000  # ns


def times(*rows: tuple[int, int, bool, int]) -> torch.Tensor:
    """(step, layer, is backward, ns) of each."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def word_of(pace: Pace, *rows) -> int:
    with mock.patch.object(ops, "take_task_times", lambda _: times(*rows)):
        return pace.word("")


def test_a_layer_takes_the_time_of_both_passes():
    rows = [(3, 0, False, MS), (3, 0, False, MS), (3, 1, False, 4 * MS), (3, 0, True, 7 * MS)]
    assert layer_seconds(times(*rows, (4, 0, False, MS))) == {3: pytest.approx(10e-3)}


def test_words_are_predicted_over_measured_seconds():
    pace = Pace(2)
    for step in range(4):
        pace.predict(step, 5e-3)
    assert word_of(pace) == UNKNOWN
    # The latest plan is still in use.
    assert word_of(pace, (0, 0, False, 2 * MS), (0, 0, True, 8 * MS)) == UNKNOWN
    assert word_of(pace, (1, 0, False, MS)) == SCALE / 2
    # Its backward pass comes after the forward pass of the next plan.
    assert word_of(pace, (2, 0, False, MS)) == UNKNOWN
    word = word_of(pace, (1, 0, True, 3 * MS), (2, 0, True, MS), (3, 0, False, MS))
    assert word == pytest.approx(SCALE * (5 / 4 + 5 / 2) / 2)


def test_short_tasks_say_nothing():
    pace = Pace(1)
    pace.predict(0, LEAST_SECONDS / 2)
    assert word_of(pace, (0, 0, False, MS), (0, 0, True, MS), (1, 0, False, MS)) == UNKNOWN


def test_the_fastest_rank_has_speed_1():
    pace = Pace(4)
    for _ in range(LEAST_SAMPLES - 1):
        pace.add(torch.tensor([800_000, 400_000, 780_000, UNKNOWN]))
    assert pace.speeds() == []
    pace.add(torch.tensor([800_000, 400_000, 780_000, UNKNOWN]))
    assert pace.speeds() == [1, 0.5, 1, 1], "rank 2 is alike, and rank 3 unknown"


def test_one_slow_step_does_not_count():
    pace = Pace(2)
    for word in [1_000_000] * 4 + [100_000]:
        pace.add(torch.tensor([1_000_000, word]))
    assert pace.speeds() == []


def reports_of(rank: int, world_size: int, options: dict) -> list[distca.PlanReport]:
    """Return the reports of plans in a group whose second rank is half as fast."""
    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS, **options))
    with (
        mock.patch.object(plans, "measures_links", lambda _: True),
        mock.patch.object(Pace, "word", lambda self, _: round(SCALE / (1 + rank))),
    ):
        reports = [
            distca.plan(place(rank, world_size, CASE)[0]).report() for _ in range(LEAST_SAMPLES + 1)
        ]
    distca.close()
    return reports


@pytest.mark.parametrize("given", [None, "1,2"])
def test_a_slow_rank_gets_less(ranks, given):
    for reports in ranks(2).run(reports_of, {} if given is None else {"server_speeds": given}):
        first, *_, last = reports
        assert first.measured_speeds == [] and last.measured_speeds == [1, 0.5]
        believed = 1 if given is None else 2  # speed of rank 1, before it is measured
        work = [
            [report.seconds_after[0], report.seconds_after[1] * speed]
            for report, speed in ((first, believed), (last, believed / 2))
        ]
        for (_, slow), speed in zip(work, (believed, believed / 2), strict=True):
            assert slow == pytest.approx(sum(work[0]) * speed / (1 + speed), rel=0.05)
        assert sum(work[0]) == pytest.approx(sum(work[1])), "all work is done"


def timed_calls(rank: int, world_size: int, lengths: list[list[int]]) -> torch.Tensor:
    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS))
    ops.take_task_times(find().group_name)  # from now on tasks are timed
    with mock.patch.object(Pace, "word", lambda *_: UNKNOWN):  # it takes the times
        for _ in range(4):
            documents, leaves, grad_out = place(rank, world_size, Case(lengths))
            distca.plan(documents)
            distca.core_attention(*leaves, documents).backward(grad_out)
        taken = ops.take_task_times(find().group_name)
    assert not len(ops.take_task_times(find().group_name))
    distca.close()
    return taken


@pytest.mark.parametrize("lengths", [CASE.lengths, [[900], [900]]], ids=["moved", "balanced"])
def test_tasks_of_one_call_in_four_are_timed(ranks, lengths):
    for taken in ranks(2).run(timed_calls, lengths):
        step, layer, is_backward, ns = taken.unbind(1)
        assert step.unique().tolist() == [0] and layer.unique().tolist() == [0]
        assert is_backward.unique().tolist() == [0, 1]
        assert (ns >= 0).all() and ns.max() > 1000
