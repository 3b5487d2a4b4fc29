"""v, out and grad_out may be narrower or wider than q and k."""

from dataclasses import astuple

import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import Case
from pingpong_blocks import LENGTHS, Block, pair_of, step_of
from ranks import MOVE_ALWAYS
from test_core_attention import MASKS, gathered, place
from test_lse import attend, case_of, grad_lse_of
from torch import Tensor

import distca

WIDTHS = [(16, 8), (8, 16), (192, 128)]  # head_dim of q and k, and of v


def case_with(widths: tuple[int, int], documents: str, world_size: int, **keywords) -> Case:
    head_dim, head_dim_v = widths
    return case_of(documents, world_size, head_dim=head_dim, head_dim_v=head_dim_v, **keywords)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("documents", ["skewed", "one_document", "mixed", "tiny"])
def test_equals_the_oracle_in_float64(ranks, world_size, documents, widths):
    for mask in MASKS.values() if widths != WIDTHS[-1] else [(-1, 0)]:
        case = case_with(widths, documents, world_size, window_size=mask)
        results = gathered(ranks(world_size).run(attend, case))
        truths = oracle.forward_backward(case, grad_lse=grad_lse_of(case))
        assert truths[0].shape[2] == widths[1] != widths[0]
        oracle.assert_close(results, truths, [1e-12] * 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_within_twice_the_reference(ranks, dtype):
    case = case_with((96, 64), "mixed", 4, dtype=dtype)
    truths, reference = (
        oracle.forward_backward(case, each, grad_lse_of(case)) for each in (torch.float64, dtype)
    )
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(gathered(ranks(4).run(attend, case)), truths, limits)


def learned_shape(rank: int, world_size: int, case: Case) -> tuple:
    """Return the shapes that the first and the second plan assume."""
    distca.close()
    shapes = []
    for _ in range(2):
        documents, leaves, grad_out = place(rank, world_size, case)
        plan = distca.plan(documents)
        distca.core_attention(*leaves, documents).backward(grad_out)
        shapes.append(astuple(plan.solution().shape))
    return tuple(shapes)


def test_a_plan_assumes_the_shape_of_the_last_call(ranks):
    case = case_with((16, 8), "skewed", 2)
    default, wanted = astuple(distca.AttentionShape()), (4, 2, 16, 8, 8)
    assert ranks(2).run(learned_shape, case) == [(default, wanted)] * 2


def attend_by_sdpa(rank: int, world_size: int, is_causal: bool) -> list[float]:
    """Return the differences of out, dq, dk and dv from torch's, document by document."""
    lengths = [[61, 0, 19], [1, 7, 72]][rank]
    generator = torch.Generator().manual_seed(rank)
    shapes = ((4, 16), (2, 16), (2, 8))
    leaves = [
        torch.randn(1, heads, 80, dim, dtype=torch.float64, generator=generator)
        for heads, dim in shapes
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    how = {"is_causal": is_causal, "enable_gqa": True}
    parts = zip(*(leaf.split(lengths, dim=2) for leaf in leaves), strict=True)
    truth = torch.cat([F.scaled_dot_product_attention(*part, **how) for part in parts], dim=2)
    window_size = (-1, 0) if is_causal else (-1, -1)
    packed = distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()])
    with distca.documents(packed, window_size=window_size):
        out = distca.scaled_dot_product_attention(*leaves, **how)
    results = [
        [each, *torch.autograd.grad(each, leaves, torch.ones_like(truth))] for each in (out, truth)
    ]
    return [oracle.max_error(ours, theirs) for ours, theirs in zip(*results, strict=True)]


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_drop_in_for_sdpa(ranks, is_causal):
    assert max(map(max, ranks(2).run(attend_by_sdpa, is_causal))) < 1e-12


class NarrowBlock(Block):
    """A block whose attention uses half of v, on both sides of its result."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window, documents) -> Tensor:
        half = v[..., : v.shape[-1] // 2]
        out = distca.core_attention(q, k, half, documents, window_size=window)
        return torch.cat([out, out], dim=-1)


def run_in_halves(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS))
    bare, halved = pair_of(NarrowBlock)
    results = []
    for block in (bare, halved):
        step = step_of(rank, LENGTHS[rank])
        distca.plan(step.documents)
        results.append(step.run(block, step.documents))
    distca.close()
    return tuple(results)


def test_ping_pong(ranks):
    for bare, halved in ranks(4).run(run_in_halves):
        for ours, truth in zip(halved, bare, strict=True):
            assert oracle.relative_error(ours, truth) < 1e-12


def test_shapes_count_rows_of_each_width():
    shape = distca.AttentionShape(32, 8, 192, 2, 128)
    q, out, kv = 32 * 192 * 2, 32 * 128 * 2, 8 * (192 + 128) * 2
    # q, grad_out and dq travel for a query, and out; lse twice and delta. k, v twice, dk, dv.
    assert shape.row_bytes() == (q + out + 3 * 4 * 32 + q + out + q, 3 * kv)
    assert shape.tile_flops(128) == 2 * 128 * 128 * 32 * ((192 + 128) + (3 * 192 + 2 * 128))
    assert distca.AttentionShape() == distca.AttentionShape(32, 8, 128, 2, 128)
