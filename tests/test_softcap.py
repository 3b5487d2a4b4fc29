"""Capped scores equal the oracle's under any plan, and are refused where no back end has them."""

import oracle
import pytest
import torch
from oracle import Case
from pingpong_blocks import LENGTHS, Block, pair_of, step_of
from test_core_attention import MASKS, gathered, place
from test_lse import attend, case_of, grad_lse_of
from torch import Tensor

import distca

SOFTCAP = 1.5  # about as large as the scores


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", ["skewed", "mixed"])
def test_equals_the_oracle_in_float64(ranks, world_size, mask, documents):
    case = case_of(documents, world_size, window_size=MASKS[mask], softcap=SOFTCAP)
    results = gathered(ranks(world_size).run(attend, case))
    truths = oracle.forward_backward(case, grad_lse=grad_lse_of(case))
    oracle.assert_close(results, truths, [1e-12] * 5)
    case.softcap *= 1.001
    with pytest.raises(AssertionError):
        oracle.assert_close(
            results, oracle.forward_backward(case, grad_lse=grad_lse_of(case)), [1e-12] * 5
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_within_twice_the_reference(ranks, dtype):
    case = case_of("skewed", 2, heads_kv=1, head_dim=64, dtype=dtype, softcap=SOFTCAP)
    results = gathered(ranks(2).run(attend, case))
    truths, reference = (
        oracle.forward_backward(case, each, grad_lse_of(case)) for each in (torch.float64, dtype)
    )
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(results, truths, limits)


@pytest.mark.parametrize("window_size", [(-1, 0), (1, 1)])
def test_gradcheck(window_size):
    case = Case([[5, 0, 3]], 4, 2, 3, window_size)
    documents, leaves, _ = place(0, 1, case)

    def capped(*rows: Tensor) -> Tensor:
        return distca.core_attention(*rows, documents, window_size=window_size, softcap=0.7)

    assert torch.autograd.gradcheck(capped, leaves)


class CappedBlock(Block):
    def attend(self, q, k, v, window, documents) -> Tensor:
        settings = {"window_size": window, "softcap": 0.5}
        return distca.core_attention(q, k, v, documents, **settings)


def block_errors(rank: int, world_size: int) -> list[float]:
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    bare, halves = pair_of(CappedBlock)
    truth, results = (step.run(each, step.documents) for each in (bare, halves))
    return [oracle.relative_error(*pair) for pair in zip(results, truth, strict=True)]


def test_ping_pong(ranks):
    for errors in ranks(2).run(block_errors):
        assert max(errors) <= 1e-12


def cap_one_rank(rank: int, world_size: int, softcap: float) -> str:
    documents, leaves, _ = place(rank, world_size, Case([[300], [3]]))
    distca.plan(documents)
    with pytest.raises(ValueError) as error:
        distca.core_attention(*leaves, documents, softcap=softcap if rank == 1 else None)
    distca.close()
    return str(error.value)


def test_ranks_that_disagree_are_told(own_ranks):
    for text in own_ranks(2).run(cap_one_rank, 2.5):
        assert "nothing was sent: softcap: 0 on rank 0, 2.5 on rank 1" in text


def test_a_wrong_cap_is_refused_on_all_ranks(own_ranks):
    other, own = own_ranks(2).run(cap_one_rank, -1.0)
    assert "softcap is -1; expected a positive number" in own
    assert "the arguments of core attention were refused on rank(s) 1" in other
