"""Waits of transfers for other traffic are measured in training, and plans weigh them."""

from unittest import mock

import pytest
import torch
from oracle import Case
from test_core_attention import place

import distca
from distca.planning import plan as plans
from distca.planning.cost import AttentionShape, cost_tensor
from distca.ranks import speed, waits
from distca.ranks.waits import LEAST_SAMPLES, UNKNOWN, Waits

GB = 1e9
# Rank 1 comes last to dispatches and rank 0 to combines. By kind: bytes, ns.
EARLY, LATE = [10**6, 9_000_000], [10**6, 3_000_000]
FORWARD_S = 2 * 2e-3  # without 1 ms for the bytes, dispatch and combine
WORDS = torch.tensor(
    [[*EARLY, *LATE, *EARLY, *LATE], [*LATE, *EARLY, *LATE, *EARLY]], dtype=torch.int64
)
CASE = Case([[900, 400, 100], [100, 200]])
SLOW = {"link_gb_per_s": 1.0, "attention_tflops": 1e-3}


def test_the_last_rank_waits_for_other_traffic_only():
    measured = Waits()
    for _ in range(LEAST_SAMPLES):
        assert measured.seconds() == (0.0, 0.0)
        measured.add(WORDS, GB)
    assert measured.seconds() == pytest.approx((FORWARD_S, FORWARD_S))


def test_an_exchange_faster_than_its_bytes_does_not_wait():
    measured = Waits()
    for _ in range(LEAST_SAMPLES):
        measured.add(WORDS, 1e3)
    assert measured.seconds() == (0.0, 0.0)


def test_waits_fade_while_nothing_moves():
    measured = Waits()
    for _ in range(LEAST_SAMPLES):
        measured.add(WORDS, GB)
    one_unknown = WORDS.clone()
    one_unknown[1] = torch.tensor(UNKNOWN)
    for _ in range(35):
        measured.add(one_unknown, GB)
    assert measured.seconds()[0] == pytest.approx(0.5 * FORWARD_S, rel=0.02)


def test_exchanges_count_by_kind_and_call():
    rows = [[0, 0, 10, 5], [0, 0, 30, 7], [0, 1, 20, 9], [1, 0, 40, 4], [1, 1, 50, 6]]
    taken = iter([torch.tensor(rows[:4]), torch.tensor(rows[4:]), torch.empty(0, 4).long()])
    measured = Waits()
    with mock.patch.object(waits.ops, "take_exchange_times", lambda _: next(taken)):
        assert measured.words([]) == UNKNOWN
        assert measured.words(["group"]) == UNKNOWN  # no combine in the backward pass yet
        assert measured.words(["group"]) == [40, 12, 20, 9, 40, 4, 50, 6]
        assert measured.words(["group"]) == UNKNOWN


def test_exchanges_without_backward_passes_do_not_pile_up():
    measured, forward = Waits(), torch.tensor([[0, 0, 10, 5], [0, 1, 20, 9]])
    with mock.patch.object(waits.ops, "take_exchange_times", lambda _: forward.repeat(500, 1)):
        for _ in range(10):
            assert measured.words(["group"]) == UNKNOWN
    assert [len(each) for each in measured._times.values()] == [waits.MAX_TIMES]


def reports_of_steps(rank: int, world_size: int, num_steps: int) -> list[distca.PlanReport]:
    """Return the reports of steps with one layer of CASE."""
    reports = []
    for _ in range(num_steps):
        documents, leaves, grad_out = place(rank, world_size, CASE)
        plan = distca.plan(documents, shape=CASE.shape)
        distca.core_attention(*leaves, documents).backward(grad_out)
        reports.append(plan.report())
    return reports


def reports_of(rank: int, world_size: int, wait_ns: int) -> list[distca.PlanReport]:
    distca.close()
    distca.init(options=distca.Options(**SLOW))
    words = [0, wait_ns] * len(waits.KINDS) if rank == 0 else [0, 10 * wait_ns] * len(waits.KINDS)
    with (
        mock.patch.object(plans, "measures_links", lambda _: True),
        mock.patch.object(Waits, "words", lambda *_: words),
    ):
        reports = reports_of_steps(rank, world_size, LEAST_SAMPLES + 1)
    distca.close()
    return reports


@pytest.mark.parametrize("wait_ns, moves", [(10, True), (10**10, False)])
def test_plans_move_nothing_that_waits_longer_than_it_saves(ranks, wait_ns, moves):
    first, second = ranks(2).run(reports_of, wait_ns)
    for one, other in zip(first, second, strict=True):
        assert one.transfer_waits_ms == other.transfer_waits_ms
        assert one.bytes_out == other.bytes_out
    assert [sum(each.bytes_out) > 0 for each in first[: LEAST_SAMPLES - 1]] == [True] * 2
    assert first[-1].transfer_waits_ms == pytest.approx([2e-6 * wait_ns] * 2)
    assert (sum(first[-1].bytes_out) > 0) == moves


def speed_of(rank: int, world_size: int) -> float:
    distca.close()
    with mock.patch.object(speed, "NUM_ROWS", 256):
        seconds = speed.measure(distca.init(), torch.device("cpu"))
    distca.close()
    return seconds


def test_ranks_agree_on_the_speed(ranks):
    first, second = ranks(2).run(speed_of)
    assert first == second and 0 < first < 10


def test_a_measured_speed_replaces_the_assumed_one():
    shape, options = AttentionShape(), distca.Options()
    num_tiles = (speed.NUM_ROWS // 128) * (speed.NUM_ROWS // 128 + 1) // 2
    seconds_per_tile = cost_tensor(options, shape, "cuda", 2e-3)[2].item()
    assert num_tiles * seconds_per_tile == pytest.approx(2e-3)
    half = AttentionShape(heads_q=16, heads_kv=4)
    assert cost_tensor(options, half, "cuda", 2e-3)[2].item() == pytest.approx(seconds_per_tile / 2)
    told = distca.Options(attention_tflops=100.0)
    assert cost_tensor(told, shape, "cuda", 2e-3).equal(cost_tensor(told, shape, "cuda"))
