"""The gradient of lse, and attention sinks, on CUDA devices."""

import oracle
import pytest
import torch
from oracle import Case
from plain_attention import deterministic_mode
from test_gpu import LENGTHS, gpu_ranks, place  # noqa: F401  a fixture
from test_gpu_peer import peer_ranks  # noqa: F401  a fixture
from test_lse import grad_lse_of, plain_sinks, sinks_of
from torch import Tensor

import distca

pytestmark = pytest.mark.gpu

HEADS = [(8, 2, 128), (4, 4, 64), (8, 4, 256)]
# Standard deviations of the gradients of out and lse; "lse alone" leaves dq to lse.
SIZES = {"both": (1.0, 1.0), "mostly lse": (1e-3, 30.0), "lse alone": (0.0, 30.0)}


def attend(rank: int, world_size: int, case: Case, grad_lse: Tensor, deterministic: bool):
    """Return out, dq, dk, dv, lse of this rank."""
    documents, leaves, grad_out = place(case, rank, world_size)
    if torch.distributed.is_initialized():
        distca.plan(documents, window_size=case.window_size, device="cuda")
    with deterministic_mode(deterministic):
        settings = {"window_size": case.window_size, "softcap": case.softcap, "return_lse": True}
        out, lse = distca.core_attention(*leaves, documents, **settings)
        grads = [grad_out, grad_lse[case.rows_of(rank)].to(lse)]
        torch.autograd.backward([out, lse], grads)
    results = [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]
    return [result.cpu() for result in results]


def check(per_rank: list[list[Tensor]], case: Case, grad_lse: Tensor) -> None:
    """Assert that errors are at most twice those of plain attention in the case's dtype."""
    results = [torch.cat(parts) for parts in zip(*per_rank, strict=True)]
    truths, reference = (
        oracle.forward_backward(case, dtype, grad_lse) for dtype in (torch.float64, case.dtype)
    )
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    if case.grad_out_size == 0:  # then dv is 0, up to what stands in for a missing grad_out
        assert oracle.max_error(results[3], truths[3]) <= 2.0**-15 * grad_lse.abs().max()
        limits[3] = float("inf")
    oracle.assert_close(results, truths, limits)
    assert oracle.max_error(results[4], truths[4]) <= 1e-3


def case_and_grad(lengths, heads, dtype, sizes: str, window_size=(-1, 0)) -> tuple[Case, Tensor]:
    grad_out_size, grad_lse_size = SIZES[sizes]
    case = Case(lengths, *heads, window_size, dtype=dtype, grad_out_size=grad_out_size)
    return case, grad_lse_size * grad_lse_of(case)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_one_device(dtype, heads, sizes, deterministic):
    for window_size in ((-1, 0), (200, 0)):
        case, grad_lse = case_and_grad([sum(LENGTHS, [])], heads, dtype, sizes, window_size)
        check([attend(0, 1, case, grad_lse, deterministic)], case, grad_lse)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("transport", ["peer_ranks", "gpu_ranks"])
def test_on_two_ranks(request, transport, heads, sizes, deterministic):
    two_ranks = request.getfixturevalue(transport)(2)
    case, grad_lse = case_and_grad(LENGTHS[:2], heads, torch.bfloat16, sizes)
    check(two_ranks.run(attend, case, grad_lse, deterministic), case, grad_lse)


def attend_with_sinks(rank: int, world_size: int, case: Case) -> list[Tensor]:
    documents, leaves, grad_out = place(case, rank, world_size)
    distca.plan(documents, device="cuda")
    sinks = sinks_of(case).cuda().requires_grad_()
    out = distca.core_attention(*leaves, documents, sinks=sinks)
    out.backward(grad_out)
    results = [out.detach(), *(leaf.grad for leaf in leaves), sinks.grad[None]]
    return [result.cpu() for result in results]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sinks(peer_ranks, dtype, heads):  # noqa: F811
    case = Case(LENGTHS[:2], *heads, dtype=dtype)
    per_rank = peer_ranks(2).run(attend_with_sinks, case)
    *results, grad_sinks = (torch.cat(parts) for parts in zip(*per_rank, strict=True))
    truths, reference = plain_sinks(case), plain_sinks(case, dtype)
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(results, truths[:4], limits[:4])
    assert oracle.relative_error(grad_sinks.double().sum(0), truths[4]) <= limits[4]


def test_a_gradient_of_lse_that_is_left_out_is_noticed():
    case, grad_lse = case_and_grad([LENGTHS[0]], HEADS[0], torch.bfloat16, "both")
    results = attend(0, 1, case, 0 * grad_lse, False)
    with pytest.raises(AssertionError, match="dq"):
        check([results], case, grad_lse)
