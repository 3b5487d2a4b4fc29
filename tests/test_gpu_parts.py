"""On CUDA devices: rows travel in parts, each with some of the heads."""

import oracle
import pytest
import torch
from layout_words import num_parts
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from test_gpu import LENGTHS, MASKS, place

import distca
from distca.planning import plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def four():
    started = Ranks(4, "nccl")
    yield started
    started.stop()


def attend(rank: int, world_size: int, case: Case, are_short: bool, options: dict):
    """Return out, dq, dk, dv of the second of two layers, and the number of parts."""
    plan.LEAST_SECONDS_OF_PARTS = 1e9 if are_short else 0.0
    distca.close()
    distca.init(options=distca.Options(transport="process_group", **MOVE_ALWAYS, **options))
    documents, leaves, grad_out = place(case, rank, world_size)
    laid_out = distca.plan(documents, window_size=case.window_size, device="cuda").wait().layout
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        out = distca.core_attention(*leaves, documents, window_size=case.window_size)
        out.backward(grad_out)
    results = [tensor.cpu() for tensor in (out.detach(), *(leaf.grad for leaf in leaves))]
    return results, num_parts(laid_out)


def results_of(four, case: Case, are_short: bool = False, **options) -> list[torch.Tensor]:
    per_rank, parts = zip(*four.run(attend, case, are_short, options), strict=True)
    assert set(parts) == {1 if are_short else 2}
    return [torch.cat(each) for each in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("options", [{}, {"keep_inputs_gb": 1.0}], ids=["sent again", "kept"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_oracle(four, mask, sharded, options):
    lengths = [sum(LENGTHS, []), [], [], []] if sharded else LENGTHS
    case = Case(lengths, 8, 2, 64, MASKS[mask], sharded, torch.bfloat16)
    oracle.assert_close(results_of(four, case, **options), *oracle.truths_and_limits(case))


def test_the_bits_are_those_of_one_part(four):
    case = Case(LENGTHS, 8, 4, 128, dtype=torch.bfloat16)
    parts, whole = (results_of(four, case, short, deterministic=True) for short in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
