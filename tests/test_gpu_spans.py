"""Spans whose queries see the whole span, on CUDA devices."""

import oracle
import pytest
import torch
from plain_attention import deterministic_mode
from test_gpu import gpu_ranks  # noqa: F401  a fixture
from test_gpu_peer import peer_ranks  # noqa: F401  a fixture
from test_lse import grad_lse_of
from test_spans import MASKS, SpanCase, case_of, place, truths_of
from torch import Tensor

import distca

pytestmark = pytest.mark.gpu

HEADS = [(8, 2, 128), (4, 4, 64), (8, 4, 256)]


def attend(rank: int, world_size: int, case: SpanCase, deterministic: bool) -> list[Tensor]:
    documents, leaves, grad_out = place(rank, world_size, case)
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    if torch.distributed.is_initialized():
        distca.plan(documents, window_size=case.window_size, device="cuda")
    with deterministic_mode(deterministic):
        settings = {"window_size": case.window_size, "return_lse": True}
        out, lse = distca.core_attention(*leaves, documents, **settings)
        grads = [grad_out.cuda(), grad_lse_of(case)[case.rows_of(rank)].to(lse)]
        torch.autograd.backward([out, lse], grads)
    results = [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]
    return [result.cpu() for result in results]


def check(per_rank: list[list[Tensor]], case: SpanCase) -> None:
    """Assert that errors are at most twice those of plain attention in the case's dtype."""
    results = [torch.cat(parts) for parts in zip(*per_rank, strict=True)]
    truths, reference = truths_of(case), truths_of(case, case.dtype)
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(results, truths, limits)
    assert oracle.max_error(results[4], truths[4]) <= 1e-3


def with_heads(case: SpanCase, heads: tuple[int, int, int]) -> SpanCase:
    case.heads_q, case.heads_kv, case.head_dim = heads
    return case


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_one_device(dtype, heads, mask, deterministic):
    case = with_heads(case_of(1, False, window_size=MASKS[mask], dtype=dtype), heads)
    check([attend(0, 1, case, deterministic)], case)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("transport", ["peer_ranks", "gpu_ranks"])
def test_on_two_ranks(request, transport, heads, sharded):
    two_ranks = request.getfixturevalue(transport)(2)
    case = with_heads(case_of(2, sharded, dtype=torch.bfloat16), heads)
    check(two_ranks.run(attend, case, False), case)
