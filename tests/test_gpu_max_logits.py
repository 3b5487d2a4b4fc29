"""The largest score of each head, on CUDA devices."""

import math

import pytest
import torch
from oracle import Case
from test_gpu import LENGTHS, gpu_ranks, place  # noqa: F401  a fixture
from test_gpu_peer import peer_ranks  # noqa: F401  a fixture
from test_max_logits import truth_of
from torch import Tensor

import distca

pytestmark = pytest.mark.gpu

HEADS = [(8, 2, 128), (4, 4, 64), (8, 4, 256)]
MASKS = [(-1, 0), (200, 0), (-1, -1)]


def largest(rank: int, world_size: int, case: Case) -> Tensor:
    documents, (q, k, _), _ = place(case, rank, world_size)
    if torch.distributed.is_initialized():
        distca.plan(documents, window_size=case.window_size, device="cuda")
    return distca.max_logits(q, k, documents, window_size=case.window_size).cpu()


def check(results: list[Tensor], case: Case) -> None:
    """Assert that results are at most log(keys) / 2^14 too large, but for rounding in float32."""
    most = math.log(max(case.all_lengths)) / 2**14
    for rank, result in enumerate(results):
        truth = truth_of(case, rank)
        rounding = 2.0**-20 * truth.abs() + 1e-6
        assert result.dtype == torch.float32
        assert (result >= truth - rounding).all() and (result <= truth + most + rounding).all()


@pytest.mark.parametrize("size", [0.0, 1e-2, 1.0, 10.0, 50.0])  # scores of 1e4 at 50
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_one_device(dtype, heads, size):
    for window_size in MASKS:
        case = Case([sum(LENGTHS, [])], *heads, window_size, dtype=dtype, qk_size=size)
        check([largest(0, 1, case)], case)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("transport", ["peer_ranks", "gpu_ranks"])
def test_on_two_ranks(request, transport, heads):
    two_ranks = request.getfixturevalue(transport)(2)
    case = Case(LENGTHS[:2], *heads, dtype=torch.bfloat16, qk_size=5.0)
    check(two_ranks.run(largest, case), case)
