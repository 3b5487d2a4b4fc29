"""Linear work before attention is measured, and plans under ping-pong take it into account."""

from unittest import mock

import pytest
import torch
from oracle import Case
from test_core_attention import place

import distca
from distca.planning import plan as plans
from distca.planning import solver
from distca.ranks.hiding import NUM_SAMPLES, UNKNOWN, WorkBeforeAttention, hidden_seconds
from distca.ranks.pace import LEAST_LAG_SAMPLES, Pace

CASE = Case([[900, 400, 100], [100, 200]])
SLOW = {"link_gb_per_s": 1.0, "attention_tflops": 1e-3}


class Event:
    """A stand-in for a CUDA event that the device has reached, or not yet."""

    def __init__(self, ms: float, has_come: bool = True) -> None:
        self.ms, self.has_come = ms, has_come

    def query(self) -> bool:
        return self.has_come

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


def test_the_median_of_whole_blocks_counts():
    work = WorkBeforeAttention()
    assert work.word() == UNKNOWN
    for ms in (2.0, 50.0, 3.0):
        work.add(Event(1.0), Event(1.0 + ms), 0.25)
    work.add(Event(0.0), Event(1.0, has_come=False), 0.25)
    assert work.word() == 12_000_000
    for _ in range(NUM_SAMPLES - 1):
        work.add(Event(0.0), Event(1.0), 1.0)
    assert work.word() == 12_000_000, "nothing has come since"


def test_one_block_in_four_is_timed():
    work = WorkBeforeAttention()
    assert [work.is_due() for _ in range(8)] == 2 * [False, False, False, True]


def test_the_rank_with_the_least_work_counts():
    assert hidden_seconds(torch.tensor([4_000_000, 3_000_000])) == pytest.approx(9e-3)
    assert hidden_seconds(torch.tensor([4_000_000, UNKNOWN])) == 0


def reports_of(rank: int, world_size: int, ns: int) -> list[distca.PlanReport]:
    """Return the reports of a plan without ping-pong and of a plan for its halves."""
    distca.close()
    session = distca.init(options=distca.Options(**SLOW))
    reports = []
    with (
        mock.patch.object(plans, "measures_links", lambda _: True),
        mock.patch.object(WorkBeforeAttention, "word", lambda _: (1 + rank) * ns),
    ):
        for cut in (None, lambda documents: documents.num_tokens // 2):
            session.cut = cut
            step = place(rank, world_size, CASE)[0]
            reports.append(distca.plan(step).report())
    distca.close()
    return reports


def test_plans_move_more_where_linear_work_hides_transfers(ranks):
    ns = 50_000_000
    little, much = (ranks(2).run(reports_of, each) for each in (0, ns))
    for (whole, _), (whole_again, halves) in zip(little, much, strict=True):
        assert whole.hidden_ms == whole_again.hidden_ms == 0
        assert halves.hidden_ms == pytest.approx(3 * 1e-6 * ns)
    assert sum(much[0][1].bytes_out) >= sum(little[0][1].bytes_out)


def choices_of(rank: int, world_size: int, word: int) -> list[bool]:
    """Return whether each of 18 plans pays in halves, on ranks that measure `word` as other work of
    a whole block."""
    distca.close()
    session = distca.init(options=distca.Options(**SLOW))
    session.cut = lambda documents: documents.num_tokens // 2
    with (
        mock.patch.object(solver, "DEVICES_OF_CHOICE", ("cpu",)),
        mock.patch.object(solver, "pay", lambda *_: True),
        mock.patch.object(plans, "measures_links", lambda _: True),
        mock.patch.object(WorkBeforeAttention, "word", lambda _: 1_000_000),
        mock.patch.object(Pace, "words", lambda *_: [UNKNOWN, word]),
    ):
        steps = [place(rank, world_size, CASE)[0] for _ in range(18)]
        choices = [distca.plan(step).report().pays_in_halves for step in steps]
    distca.close()
    return choices


@pytest.mark.parametrize("word, num_whole", [(UNKNOWN, 16), (1_000_000, LEAST_LAG_SAMPLES - 1)])
def test_blocks_run_whole_until_lags_are_known(ranks, word, num_whole):
    for choices in ranks(2).run(choices_of, word):
        assert choices == [idx >= num_whole for idx in range(18)]
