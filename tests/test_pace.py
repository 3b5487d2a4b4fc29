"""Speeds of ranks are measured in training, and plans give slow ranks less."""

import time
from unittest import mock

import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS
from test_core_attention import place
from torch.utils.checkpoint import checkpoint

import distca
from distca import ops
from distca.planning import plan as plans
from distca.ranks.pace import (
    LEAST_LAG_SAMPLES,
    LEAST_SAMPLES,
    LEAST_SECONDS,
    LEAST_TOKEN_SAMPLES,
    NUM_WORDS,
    SCALE,
    UNKNOWN,
    Pace,
    layer_seconds,
)
from distca.ranks.session import find

CASE = Case([[900, 400, 100], [100, 200]])
MS = 1_000_000  # ns
GAP_S = 0.01


def times(*rows: tuple[int, int, bool, int]) -> torch.Tensor:
    """(step, layer, is backward, ns) of each."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def words_of(pace: Pace, tasks: torch.Tensor, gaps: torch.Tensor) -> list[int]:
    with (
        mock.patch.object(ops, "take_task_times", lambda _: tasks),
        mock.patch.object(ops, "take_gap_times", lambda _: gaps),
    ):
        return pace.words("")


def word_of(pace: Pace, *rows) -> int:
    word, others = words_of(pace, times(*rows), times())
    assert others == UNKNOWN
    return word


def test_a_layer_takes_the_time_of_both_passes():
    rows = [(3, 0, False, MS), (3, 0, False, MS), (3, 1, False, 4 * MS), (3, 0, True, 7 * MS)]
    assert layer_seconds(times(*rows, (4, 0, False, MS))) == {3: pytest.approx(10e-3)}


def test_words_are_predicted_over_measured_seconds():
    pace = Pace(2)
    for step in range(4):
        pace.note(step, 5e-3, 100)
    assert word_of(pace) == UNKNOWN
    # The latest plan is still in use.
    assert word_of(pace, (0, 0, False, 2 * MS), (0, 0, True, 8 * MS)) == UNKNOWN
    assert word_of(pace, (1, 0, False, MS)) == SCALE / 2
    # Its backward pass comes after the forward pass of the next plan.
    assert word_of(pace, (2, 0, False, MS)) == UNKNOWN
    word = word_of(pace, (1, 0, True, 3 * MS), (2, 0, True, MS), (3, 0, False, MS))
    assert word == pytest.approx(SCALE * (5 / 4 + 5 / 2) / 2)


def test_words_of_other_work_are_picoseconds_of_a_token():
    pace = Pace(2)
    pace.note(0, 5e-3, 1000)
    pace.note(1, 5e-3, 0)  # a rank without tokens
    gaps = times((0, 1, False, MS), (0, 0, True, 2 * MS), (1, 1, False, 1), (1, 0, True, 1))
    assert words_of(pace, times(), gaps) == [UNKNOWN, 3_000_000]
    assert words_of(pace, times(), times((2, 1, False, MS))) == [UNKNOWN, UNKNOWN]


def test_short_tasks_say_nothing():
    pace = Pace(1)
    pace.note(0, LEAST_SECONDS / 2, 100)
    assert word_of(pace, (0, 0, False, MS), (0, 0, True, MS), (1, 0, False, MS)) == UNKNOWN


def add(pace: Pace, *rows) -> None:
    pace.add(torch.tensor([*zip(*rows, strict=True)]))


def test_the_fastest_rank_has_speed_1():
    pace, unknown = Pace(4), [UNKNOWN] * 4
    for _ in range(LEAST_SAMPLES - 1):
        add(pace, [800_000, 400_000, 780_000, UNKNOWN], unknown)
    assert pace.speeds() == []
    add(pace, [800_000, 400_000, 780_000, UNKNOWN], unknown)
    assert pace.speeds() == [1, 0.5, 1, 1], "rank 2 is alike, and rank 3 unknown"
    assert pace.lags([1] * 4) == []


def test_one_slow_step_does_not_count():
    pace = Pace(2)
    for word in [1_000_000] * 7 + [100_000]:
        add(pace, [1_000_000, word], [1_000_000, 10**12 // word])
    assert pace.speeds() == []
    assert pace.lags([1000, 1000]) == []


def test_ranks_lag_by_their_tokens_and_their_speed():
    pace = Pace(2)
    for ps in [1_800_000] + [2_000_000] * (LEAST_LAG_SAMPLES - 1):
        assert pace.lags([1000, 1000]) == []
        add(pace, [UNKNOWN] * 2, [1_000_000, ps])
    add(pace, [UNKNOWN] * 2, [1_000_000, 9_000_000])  # it waited for the other rank
    assert pace.lags([1000, 1000]) == [0.0, pytest.approx(1e-3)]
    assert pace.lags([3000, 1000]) == [pytest.approx(1e-3), 0.0]
    assert pace.lags([2000, 1000]) == []
    assert pace.lags([0, 1000]) == [0.0, pytest.approx(2e-3)]


def test_tokens_count_before_speeds_are_known():
    pace = Pace(2)
    for ps in [50_000_000] + [1_000_000] * (LEAST_TOKEN_SAMPLES - 1):  # the first step warms up
        assert pace.lags([3000, 1000]) == []
        add(pace, [UNKNOWN] * 2, [ps, 2 * ps])
    assert pace.lags([3000, 1000]) == [pytest.approx(2e-3), 0.0]
    assert pace.lags([1000, 1000]) == []


def test_ranks_that_lag_by_turns_are_alike():
    pace = Pace(2)
    for step in range(8):
        add(pace, [UNKNOWN] * 2, [1_000_000, 1_030_000][:: 1 if step % 2 else -1])
    assert pace.lags([1000, 1000]) == []


def test_lags_wait_for_all_ranks():
    pace = Pace(2)
    for _ in range(LEAST_LAG_SAMPLES):
        add(pace, [UNKNOWN] * 2, [1_000_000, UNKNOWN])
    assert pace.lags([1, 9]) == []


def reports_of(
    rank: int, world_size: int, options: dict, words: list[list[int]]
) -> list[distca.PlanReport]:
    """Return the reports of plans on ranks that measure `words`, [num_ranks, NUM_WORDS]."""
    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS, **options))
    with (
        mock.patch.object(plans, "measures_links", lambda _: True),
        mock.patch.object(Pace, "words", lambda self, _: words[rank]),
    ):
        reports = [
            distca.plan(place(rank, world_size, CASE)[0]).report()
            for _ in range(LEAST_LAG_SAMPLES + 1)
        ]
    distca.close()
    return reports


@pytest.mark.parametrize("given", [None, "1,2"])
def test_a_slow_rank_gets_less(ranks, given):
    options = {} if given is None else {"server_speeds": given}
    words = [[round(SCALE / (1 + rank)), UNKNOWN] for rank in range(2)]
    for reports in ranks(2).run(reports_of, options, words):
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


def test_a_rank_that_lags_gets_less(ranks):
    (before, *_), _ = ranks(2).run(reports_of, {}, [[UNKNOWN] * NUM_WORDS] * 2)
    attention = sum(before.seconds_after)
    # 1,400 tokens in a tenth of all attention, and 300 tokens in three tenths.
    words = [[UNKNOWN, round(1e12 * attention * each)] for each in (0.1 / 1400, 0.3 / 300)]
    for reports in ranks(2).run(reports_of, {}, words):
        first, *_, last = reports
        assert first.lags_ms == [] and first.imbalance_after < 1.03
        assert last.lags_ms == [0, pytest.approx(200 * attention, rel=1e-2)]
        assert last.seconds_after == [
            pytest.approx(0.6 * attention, rel=0.05),
            pytest.approx(0.4 * attention, rel=0.05),
        ]
        assert last.imbalance_after < 1.03, "lags count"
        assert last.imbalance_before > 1.2


def timed_calls(
    rank: int,
    world_size: int,
    lengths: list[list[int]],
    num_layers: int,
    recomputes: bool,
    first_step: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the times of tasks and of gaps in four steps, from `first_step` on."""

    def layer(x: torch.Tensor, *keys) -> torch.Tensor:
        time.sleep(GAP_S)
        return distca.core_attention(x, *keys, documents)

    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS))
    name = find().group_name
    ops.take_task_times(name)  # from now on both are timed
    ops.take_gap_times(name)
    with mock.patch.object(Pace, "words", lambda *_: [UNKNOWN] * NUM_WORDS):  # takes no times
        for _ in range(first_step):
            distca.plan(place(rank, world_size, Case(lengths))[0]).wait()
        for _ in range(4):
            documents, (x, *keys), grad_out = place(rank, world_size, Case(lengths))
            distca.plan(documents)
            for _ in range(num_layers):
                if recomputes:
                    x = checkpoint(layer, x, *keys, use_reentrant=False)
                else:
                    x = layer(x, *keys)
            x.backward(grad_out)
        taken = ops.take_task_times(name), ops.take_gap_times(name)
    assert not len(ops.take_task_times(name)) and not len(ops.take_gap_times(name))
    distca.close()
    return taken


@pytest.mark.parametrize("lengths", [CASE.lengths, [[900], [900]]], ids=["moved", "balanced"])
def test_tasks_of_one_call_in_four_are_timed(ranks, lengths):
    for taken, gaps in ranks(2).run(timed_calls, lengths, 1, False):
        step, layer, is_backward, ns = taken.unbind(1)
        assert step.unique().tolist() == [0] and layer.unique().tolist() == [0]
        assert is_backward.unique().tolist() == [0, 1]
        assert (ns >= 0).all() and ns.max() > 1000
        assert gaps.tolist() == [], "one layer has no call before it"


@pytest.mark.parametrize("recomputes", [False, True])
def test_gaps_between_calls_of_the_first_steps_are_timed(ranks, recomputes):
    for _, gaps in ranks(2).run(timed_calls, CASE.lengths, 3, recomputes):
        assert gaps[:, 0].unique().tolist() == [0, 1, 2, 3]
        forward = [[1, 0], [2, 0]]
        backward = [[1, 1], [0, 1]]
        if recomputes:  # each layer has a recomputed call before its backward call
            backward = [[2, 1], [1, 1], [1, 1], [0, 1], [0, 1]]
        assert gaps[gaps[:, 0] == 2, 1:3].tolist() == forward + backward
        assert (gaps[gaps[:, 2] == 0, 3] >= 1e9 * GAP_S).all(), "the layer's other work"
        assert (gaps[:, 3] < 1e9 * 50 * GAP_S).all(), "calls are left out"


def test_gaps_of_some_later_steps_are_timed(ranks):
    for _, gaps in ranks(2).run(timed_calls, CASE.lengths, 2, False, 16):
        assert gaps[:, 0].unique().tolist() == [18]
