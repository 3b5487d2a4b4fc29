"""Visiting rows beyond the memory cap of a rank arrive in rounds."""

import oracle
import pytest
import torch
from layout_words import num_rounds
from oracle import Case
from test_core_attention import gathered, place
from test_lse import grad_lse_of

import distca
from distca.planning.cluster import held_row_bytes

CASES = {  # a case, and the key rows that a round may hold
    "whole": (Case([[900, 1, 0, 55], [37, 64, 64], [12, 80, 80]]), 1100),
    "window": (Case([[900, 1, 0, 55], [37, 64, 64], [12]], window_size=(90, 0)), 260),
    "crossing": (Case([[700, 33, 129], [], []], sharded=True), 800),
    "full": (Case([[600, 7], [64], [1]], window_size=(-1, -1)), 800),
    "narrow v": (Case([[700, 33, 129], [], []], head_dim_v=8, sharded=True), 800),
    "wide v": (Case([[900, 1, 0, 55], [37, 64, 64], [12, 80, 80]], head_dim_v=40), 1000),
}


def attend_in_rounds(rank, world_size, case: Case, rows: int):
    """Attend in rounds of `rows` keys, and use out and lse.

    Return out, dq, dk, dv, lse, the number of rounds, an error.
    """
    cap_gb = 1e-9 * rows * held_row_bytes(case.shape)[1]
    distca.close()
    distca.init(options=distca.Options(memory_cap_gb=cap_gb, rounds=4))
    documents, leaves, grad_out = place(rank, world_size, case)
    plan = distca.plan(documents, window_size=case.window_size, shape=case.shape)
    settings = {"window_size": case.window_size, "return_lse": True}
    out, lse = distca.core_attention(*leaves, documents, **settings)
    torch.autograd.backward([out, lse], [grad_out, grad_lse_of(case)[case.rows_of(rank)]])
    error = None
    if num_rounds(plan.layout) > 1:
        with pytest.raises(ValueError, match="rounds; attend takes one") as e:
            ops = torch.ops.distca
            ops.attend(*leaves, plan.layout, plan.rows, 1.0, "home")
        error = str(e.value)
    distca.close()
    results = [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]
    return results, num_rounds(plan.layout), error


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_oracle(ranks, name):
    case, rows = CASES[name]
    per_rank = ranks(3).run(attend_in_rounds, case, rows)
    numbers = {number for _, number, _ in per_rank}
    assert len(numbers) == 1 and numbers.pop() > 1
    results = gathered([results for results, _, _ in per_rank])
    truths = oracle.forward_backward(case, grad_lse=grad_lse_of(case))
    oracle.assert_close(results, truths, [1e-12] * 5)
