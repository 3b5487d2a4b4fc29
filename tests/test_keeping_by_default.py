"""Servers keep inputs by default where memory is free and links are slow. Memory is injected."""

import unittest.mock

import oracle
import pytest
import torch
from oracle import Case
from test_core_attention import gathered, place

import distca
from distca import ops
from distca.ranks import memory

CASE = Case([[900, 400, 100], [], []], sharded=True)
SLOW, FAST = {"link_gb_per_s": 0.5}, {"link_gb_per_s": 1e5}
SPARE_BYTES = [3_000_000, 2_000_000, 4_000_000]  # by rank
FIRST_UPDATE, NUM_STEPS = 2, 8
NUM_LAYERS = 2


def forget_memory() -> None:
    """Forget the optimizers' steps and the kept inputs of earlier tests."""
    memory._has_peaked = False
    memory._have_stepped.clear()
    memory._peaks.clear()
    ops.take_kept_peak()


def train(rank, world_size, options, spare_bytes=SPARE_BYTES, updates=True):
    """Train with updates from step FIRST_UPDATE on. Return the reports of the plans, the kept rows
    by step, and results of the last step."""
    distca.close()
    forget_memory()
    distca.init(options=distca.Options(**options))
    weight = torch.nn.Parameter(torch.zeros(()))
    weight.grad, optimizer = torch.zeros(()), torch.optim.Adam([weight])
    reports, kept_rows = [], []
    peak = 0  # of kept inputs, which take from the spare memory

    def spare(_) -> int:
        return spare_bytes[rank] - peak

    with unittest.mock.patch.object(memory, "spare_bytes", spare):
        for step in range(NUM_STEPS):
            documents, leaves, grad_out = place(rank, world_size, CASE)
            plan = distca.plan(documents, shape=CASE.shape)
            outs = [distca.core_attention(*leaves, documents) for _ in range(NUM_LAYERS)]
            torch.autograd.backward(outs, [grad_out / NUM_LAYERS] * NUM_LAYERS)
            if updates and step >= FIRST_UPDATE:
                optimizer.step()
            reports.append(plan.report())
            peak = max(peak, NUM_LAYERS * reports[-1].kept_bytes[rank])
            kept_rows.append(ops.kept_rows(plan.layout))
    distca.close()
    return reports, kept_rows, [outs[0].detach(), *(leaf.grad for leaf in leaves)]


def test_kept_rows_fit_the_least_memory_of_all_ranks(ranks):
    per_rank = ranks(3).run(train, SLOW)
    by_step = list(zip(*(reports for reports, _, _ in per_rank), strict=True))
    for reports in by_step:
        assert len({(each.keeping, tuple(each.kept_bytes)) for each in reports}) == 1, "unequal"
    keeping = [reports[0].keeping for reports in by_step]
    first = FIRST_UPDATE + 2  # updates
    assert not any(keeping[:first]) and all("by free memory" in each for each in keeping[first:])
    for reports in by_step[:first]:
        assert not any(reports[0].kept_bytes)
    for idx, reports in enumerate(by_step[first:], first):
        assert 0 < max(reports[0].kept_bytes) <= min(SPARE_BYTES) // NUM_LAYERS
        assert any(any(kept_rows[idx]) for _, kept_rows, _ in per_rank)
    results = gathered([results for *_, results in per_rank])
    oracle.assert_close(results, oracle.forward_backward(CASE), [1e-12] * 4)


def test_little_memory_keeps_little(ranks):
    (much, *_), (little, *_), (none, *_) = (
        ranks(3).run(train, SLOW, [10**9, spare, 10**9]) for spare in (10**9, 1_200_000, -1)
    )
    much, little, none = (reports[-1] for reports, *_ in (much, little, none))
    assert 0 < max(little.kept_bytes) <= 600_000 < max(much.kept_bytes)
    assert not any(none.kept_bytes) and none.keeping == "memory is full"


@pytest.mark.parametrize(
    "options, keeping",
    [
        (FAST, "saves less than 1%"),
        ({**SLOW, "keep_inputs_gb": 0}, ""),
        ({**SLOW, "deterministic": True}, ""),
        ({**SLOW, "enabled": False}, ""),
    ],
)
def test_nothing_is_kept(ranks, options, keeping):
    for reports, kept_rows, _ in ranks(3).run(train, options):
        assert reports[-1].keeping == keeping
        assert not any(map(any, kept_rows)) and not any(reports[-1].kept_bytes)


def test_nothing_is_kept_without_an_optimizer(ranks):
    for reports, kept_rows, _ in ranks(3).run(train, SLOW, SPARE_BYTES, False):
        assert reports[-1].keeping == "" and not any(map(any, kept_rows))


def test_a_number_is_a_limit(ranks):
    for reports, *_ in ranks(3).run(train, {**FAST, "keep_inputs_gb": 7e-4}):
        for report in reports:
            assert report.keeping == "limit 0.0007 GB a rank"
            assert 0 < max(report.kept_bytes) <= 700_000


def test_ranks_share_the_memory_of_a_device():
    words = [[5, 100, 10, 2], [5, 90, 30, 3], [7, 500, 0, 1]]
    assert memory.common_limit(torch.tensor(words)) == 24  # 130 / 5, rounded down to three bits
    assert memory.common_limit(torch.tensor(words[2:])) == 448
    words[2][1] = memory.NOT_YET
    assert memory.common_limit(torch.tensor(words)) is None
    assert memory.common_limit(torch.tensor([[5, -100, 10, 2]])) == 0


def live_calls() -> tuple[list[int], ...]:
    """Return the peaks of kept inputs during two forward passes, and after their backward pass."""
    documents = distca.Documents([0, 20])
    q = torch.randn(20, 2, 8, requires_grad=True)
    ops.take_kept_peak()
    outs = [distca.core_attention(q, q, q, documents) for _ in range(2)]
    during = ops.take_kept_peak()
    sum(outs).sum().backward()
    del outs
    ops.take_kept_peak()
    with torch.no_grad():
        for _ in range(3):
            distca.core_attention(q, q, q, documents)
    return during, ops.take_kept_peak()


def test_calls_count_until_their_backward_pass():
    during, after = live_calls()
    assert during == [0, 2]
    assert after == [0, 1], "calls without gradients end at once"


def test_the_hook_lets_optimizers_compile():
    memory._watch_optimizers()
    forget_memory()
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    steps = [
        torch.compile(torch.optim.SGD([weight], lr=0.1).step, backend="eager") for weight in weights
    ]
    have_peaked = []
    for _ in range(3):
        for weight, step in zip(weights, steps, strict=True):
            weight.grad = torch.ones(3)
            step()
            have_peaked.append(memory._has_peaked)
    assert have_peaked == [False] * 2 + [True] * 4, "one of two optimizers has stepped twice"
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full((3,), 0.7))
