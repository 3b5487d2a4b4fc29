"""Visiting rows beyond the memory cap of a rank arrive in rounds."""

import oracle
import pytest
import torch
from layout_words import num_rounds
from oracle import Case
from test_core_attention import gathered, place

import distca
from distca.planning.cost import AttentionShape

CASES = {  # a case, and the key rows that a round may hold
    "whole": (Case([[900, 1, 0, 55], [37, 64, 64], [12, 80, 80]]), 1100),
    "window": (Case([[900, 1, 0, 55], [37, 64, 64], [12]], window_size=(90, 0)), 260),
    "crossing": (Case([[700, 33, 129], [], []], sharded=True), 800),
    "full": (Case([[600, 7], [64], [1]], window_size=(-1, -1)), 800),
}


def attend_in_rounds(rank, world_size, case: Case, rows: int):
    """Attend in rounds of `rows` keys. Return out, dq, dk, dv, the number of rounds, an error."""
    shape = AttentionShape(case.heads_q, case.heads_kv, case.head_dim, 8)
    cap_gb = 1e-9 * rows * 4 * case.heads_kv * case.head_dim * 8
    distca.close()
    distca.init(options=distca.Options(memory_cap_gb=cap_gb, rounds=4))
    documents, leaves, grad_out = place(rank, world_size, case)
    plan = distca.plan(documents, window_size=case.window_size, shape=shape)
    out = distca.core_attention(*leaves, documents, window_size=case.window_size)
    out.backward(grad_out)
    error = None
    if num_rounds(plan.layout) > 1:
        with pytest.raises(ValueError, match="rounds; attend takes one") as e:
            ops = torch.ops.distca
            ops.attend(*leaves, plan.layout, plan.rows, 1.0, "home")
        error = str(e.value)
    distca.close()
    return [out.detach(), *(leaf.grad for leaf in leaves)], num_rounds(plan.layout), error


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_the_oracle(ranks, name):
    case, rows = CASES[name]
    per_rank = ranks(3).run(attend_in_rounds, case, rows)
    numbers = {number for _, number, _ in per_rank}
    assert len(numbers) == 1 and numbers.pop() > 1
    results = gathered([results for results, _, _ in per_rank])
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)
