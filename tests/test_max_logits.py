"""The largest score of each head, under any plan."""

import oracle
import pytest
import torch
from oracle import Case
from test_core_attention import MASKS, place
from test_lse import DOCUMENTS, case_of
from torch import Tensor

import distca


def largest(rank: int, world_size: int, case: Case) -> Tensor:
    documents, (q, k, _), _ = place(rank, world_size, case)
    distca.plan(documents, window_size=case.window_size)
    result = distca.max_logits(q, k, documents, window_size=case.window_size)
    assert not result.requires_grad
    return result


def truth_of(case: Case, rank: int) -> Tensor:
    """Return the maxima of the whole matrices of scores, over the rows of `rank`."""
    q, k, _, _ = (tensor.double() for tensor in case.inputs())
    group = case.heads_q // case.heads_kv
    by_document = zip(q.split(case.all_lengths), k.split(case.all_lengths), strict=True)
    none = torch.full((case.heads_q, 1), float("-inf"), dtype=torch.float64)
    maxima = [
        oracle.scores_of(q_part, k_part.repeat_interleave(group, 1), case.window_size).amax(2)
        for q_part, k_part in by_document
        if len(q_part) > 0
    ]
    rows = torch.cat(maxima, 1)[:, case.rows_of(rank)]
    return torch.cat([rows, none], 1).amax(1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_equals_the_oracle_in_float64(ranks, world_size, mask, documents):
    case = case_of(documents, world_size, window_size=MASKS[mask])
    for rank, result in enumerate(ranks(world_size).run(largest, case)):
        assert result.dtype == torch.float64
        torch.testing.assert_close(result, truth_of(case, rank), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 100.0])
def test_is_exact_in_float32(ranks, dtype, size):
    """Ties and scores of any size lose nothing but the rounding of float32."""
    case = case_of("skewed", 2, dtype=dtype, qk_size=size)
    for rank, result in enumerate(ranks(2).run(largest, case)):
        assert result.dtype == torch.float32
        truth = truth_of(case, rank)
        torch.testing.assert_close(result.double(), truth, rtol=2e-6, atol=1e-12)
        if size > 0:
            wrong = truth_of(case_of("skewed", 2, dtype=dtype, qk_size=size, seed=1), rank)
            assert not torch.allclose(result.double(), wrong, rtol=1e-3)


def test_scale_and_rows_without_tokens():
    q, k = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    documents = distca.Documents([0, 9])
    result = distca.max_logits(q, k, documents, softmax_scale=0.5, window_size=(-1, -1))
    truth = 0.5 * torch.einsum("qhd,khd->hqk", q, k).amax((1, 2))
    torch.testing.assert_close(result, truth, rtol=1e-12, atol=0)
    nothing = distca.max_logits(q[:0], k[:0], distca.Documents([0]))
    assert nothing.tolist() == [float("-inf")] * 4
