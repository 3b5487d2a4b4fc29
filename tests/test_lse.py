"""lse is a result with a gradient under any plan, and attention sinks follow from it."""

import oracle
import pytest
import torch
from oracle import Case
from pingpong_blocks import LENGTHS, Block, documents_of, pair_of, step_of
from test_core_attention import MASKS, PACKS, WHOLE, gathered, place
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.varlen import AuxRequest
from torch.utils.checkpoint import checkpoint

import distca

ops = torch.ops.distca
DOCUMENTS = {**{name: WHOLE[name] for name in ("skewed", "one_document", "balanced")}, **PACKS}


def case_of(documents: str, world_size: int, **keywords) -> Case:
    lengths = DOCUMENTS[documents]
    if documents in PACKS:
        return Case([lengths, *[[]] * (world_size - 1)], sharded=True, **keywords)
    held = lengths[:world_size]
    return Case(held if any(map(sum, held)) else [[50], *held[1:]], **keywords)


def grad_lse_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (case.num_tokens, case.heads_q)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def attend(rank: int, world_size: int, case: Case, is_checkpointed: bool = False) -> list[Tensor]:
    """Return this rank's out, dq, dk, dv, lse under a plan, with gradients of out and lse."""
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents, window_size=case.window_size)

    def both(*rows: Tensor) -> tuple[Tensor, Tensor]:
        settings = {"window_size": case.window_size, "softcap": case.softcap, "return_lse": True}
        return distca.core_attention(*rows, documents, **settings)

    out, lse = checkpoint(both, *leaves, use_reentrant=False) if is_checkpointed else both(*leaves)
    grad_lse = grad_lse_of(case)[case.rows_of(rank)].to(lse.dtype)
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    return [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_equals_the_oracle_in_float64(ranks, world_size, mask, documents):
    case = case_of(documents, world_size, window_size=MASKS[mask])
    results = gathered(ranks(world_size).run(attend, case))
    truths = oracle.forward_backward(case, grad_lse=grad_lse_of(case))
    oracle.assert_close(results, truths, [1e-12] * 5)
    without = oracle.forward_backward(case)
    with pytest.raises(AssertionError, match="dq"):
        oracle.assert_close(results[:4], without, [1e-12] * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_within_twice_the_reference(ranks, dtype):
    case = case_of("skewed", 4, heads_kv=1, head_dim=64, dtype=dtype)
    results = gathered(ranks(4).run(attend, case))
    assert results[-1].dtype == torch.float32
    truths, reference = (
        oracle.forward_backward(case, each, grad_lse_of(case)) for each in (torch.float64, dtype)
    )
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(results, truths, limits)


@pytest.mark.parametrize("documents", ["skewed", "mixed"])
def test_activation_checkpointing(ranks, documents):
    case = case_of(documents, 2)
    results = gathered(ranks(2).run(attend, case, True))
    truths = oracle.forward_backward(case, grad_lse=grad_lse_of(case))
    oracle.assert_close(results, truths, [1e-12] * 5)


def attend_deterministically(rank: int, world_size: int, case: Case) -> list[list[Tensor]]:
    distca.close()
    distca.init(options=distca.Options(deterministic=True))
    attend(rank, world_size, case)  # later plans use its shape
    results = [attend(rank, world_size, case) for _ in range(2)]
    distca.close()
    return results


def test_deterministic_mode(ranks):
    case = case_of("mixed", 2, dtype=torch.float32)
    for first, second in ranks(2).run(attend_deterministically, case):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gradcheck(rank: int, world_size: int, window_size: tuple[int, int]) -> bool:
    """Check both results, on ranks that call attention equally often."""
    case = Case([[5, 0, 3]] * world_size, 4, 2, 3, window_size, head_dim_v=2)
    documents, leaves, _ = place(rank, world_size, case)
    distca.plan(documents, window_size=window_size)

    def both(*rows: Tensor) -> tuple[Tensor, Tensor]:
        return distca.core_attention(*rows, documents, window_size=window_size, return_lse=True)

    return torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mask", [(-1, 0), (-1, -1), (2, 0), (1, 1)])
def test_gradcheck(ranks, world_size, mask):
    assert all(ranks(world_size).run(gradcheck, mask))


def opcheck_backward(rank: int, world_size: int, case: Case) -> None:
    documents, (q, k, v), grad_out = place(rank, world_size, case)
    plan = distca.plan(documents)
    rows = [tensor.detach() for tensor in (q, k, v)]
    share = (plan.layout, plan.rows, 0.3, plan.group_name)
    out, lse, _ = ops.core_attention(*rows, *share)
    arguments = (grad_out, *rows, out, lse, *share)
    backward = ops.core_attention_backward
    torch.library.opcheck(backward, arguments, {"grad_lse": torch.ones_like(lse)})
    for wrong in (lse[1:], lse.float(), lse[..., None]):
        with pytest.raises(ValueError, match="grad_lse is .*expected .*like lse"):
            backward(*arguments, grad_lse=wrong)


def test_opcheck_and_refusals_of_the_backward_operator(ranks):
    ranks(1).run(opcheck_backward, case_of("skewed", 1))


def gradients_of(rank: int, world_size: int, case: Case, used: str) -> list[Tensor]:
    """Return dq, dk, dv where only one of out and lse is used."""
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents)
    out, lse = distca.core_attention(*leaves, documents, return_lse=True)
    grad_lse = grad_lse_of(case)[case.rows_of(rank)]
    result, grad = (out, grad_out) if used == "out" else (lse, grad_lse)
    result.backward(grad)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_result_may_be_unused(ranks, used):
    case = case_of("mixed", 3, grad_out_size=float(used == "out"))
    results = gathered(ranks(3).run(gradients_of, case, used))
    grad_lse = None if used == "out" else grad_lse_of(case)
    truths = oracle.forward_backward(case, grad_lse=grad_lse)[1:4]
    for result, truth in zip(results, truths, strict=True):
        assert oracle.max_error(result, truth) <= 1e-12


class LseBlock(Block):
    """A block in which lse changes the results of attention."""

    def attend(self, q, k, v, window, documents) -> Tensor:
        settings = {"window_size": window, "return_lse": True}
        out, lse = distca.core_attention(q, k, v, documents, **settings)
        return out * (0.1 * lse)[..., None].tanh()


class VarlenLseBlock(Block):
    """The same through torch's varlen attention, with cu_seqlens as `documents`."""

    def attend(self, q, k, v, window, documents) -> Tensor:
        longest = int(documents.diff().max())
        bounds = (documents, documents, longest, longest)
        settings = {"return_aux": AuxRequest(lse=True), "window_size": window}
        out, lse = distca.varlen_attention(q, k, v, *bounds, **settings)
        return out * (0.1 * lse.t())[..., None].tanh()


def block_errors(rank: int, world_size: int) -> list[float]:
    """Compare a block in ping-pong, and one through the drop-in, with the bare block."""
    windows = [(-1, 0), (9, 0)]
    step = step_of(rank, LENGTHS[rank])
    for window in windows:
        distca.plan(step.documents, window_size=window)
    bare, halves = pair_of(LseBlock, windows)
    truth = step.run(bare, step.documents)
    with distca.documents(step.documents):
        through_varlen = step.run(pair_of(VarlenLseBlock, windows)[0], step.documents.cu_seqlens)
    all_results = (step.run(halves, step.documents), through_varlen)
    return [
        oracle.relative_error(result, wanted)
        for results in all_results
        for result, wanted in zip(results, truth, strict=True)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ping_pong_and_varlen_attention(ranks, world_size):
    for errors in ranks(world_size).run(block_errors):
        assert max(errors) <= 1e-12


def test_without_a_plan_and_without_tokens():
    q = torch.randn(5, 2, 4, dtype=torch.float64)
    for num_tokens in (0, 5):
        rows = q[:num_tokens]
        out, lse = distca.core_attention(
            rows, rows, rows, documents_of([num_tokens]), return_lse=True
        )
        truth = oracle.attention(rows, rows, rows, (-1, 0))
        assert oracle.max_error(out, truth[0]) <= 1e-12
        assert oracle.max_error(lse, truth[1]) <= 1e-12


def sinks_of(case: Case) -> Tensor:
    return torch.linspace(-2, 3, case.heads_q, dtype=torch.float64).to(case.dtype)


def attend_with_sinks(rank: int, world_size: int, case: Case) -> list[Tensor]:
    """Return out, dq, dk, dv of this rank, and the gradient of the sinks, summed over ranks."""
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents, window_size=case.window_size)
    sinks = sinks_of(case).requires_grad_()
    settings = {"window_size": case.window_size, "sinks": sinks}
    out = distca.core_attention(*leaves, documents, **settings)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves), sinks.grad[None]]


def plain_sinks(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Compute the same from a softmax over the scores and one more column, by document."""
    q, k, v, grad_out = (tensor.to(dtype) for tensor in case.inputs())
    leaves = [*(tensor.requires_grad_() for tensor in (q, k, v)), sinks_of(case).to(dtype)]
    sinks = leaves[3].requires_grad_()
    outs = []
    for q_part, k_part, v_part in zip(*(x.split(case.all_lengths) for x in (q, k, v)), strict=True):
        group = case.heads_q // case.heads_kv
        scores = oracle.scores_of(q_part, k_part.repeat_interleave(group, 1), case.window_size)
        column = sinks[:, None, None].expand(-1, len(q_part), 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v_part.repeat_interleave(group, 1)))
    out = torch.cat(outs)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", ["skewed", "mixed"])
def test_sinks_equal_a_further_column_of_scores(ranks, world_size, mask, documents):
    case = case_of(documents, world_size, window_size=MASKS[mask])
    *results, grad_sinks = gathered(ranks(world_size).run(attend_with_sinks, case))
    *truths, true_grad_sinks = plain_sinks(case)
    oracle.assert_close(results, truths, [1e-12] * 4)
    assert oracle.relative_error(grad_sinks.sum(0), true_grad_sinks) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sinks_in_low_precision_within_twice_the_reference(ranks, dtype):
    # Sixteen sinks, so that the reference's error does not hang on the rounding of a few numbers.
    case = case_of("skewed", 2, heads_q=16, heads_kv=1, head_dim=64, dtype=dtype)
    *results, grad_sinks = gathered(ranks(2).run(attend_with_sinks, case))
    truths, reference = plain_sinks(case), plain_sinks(case, dtype)
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(results, truths[:4], limits[:4])
    assert oracle.relative_error(grad_sinks.double().sum(0), truths[4]) <= limits[4]


def dtensor_errors(rank: int, world_size: int) -> list[float]:
    """Return the errors of out, lse and gradients of DTensors sharded on heads."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    case = Case([[40, 3, 21]])
    documents = documents_of(case.all_lengths)
    distca.init(torch.distributed.new_group([rank], use_local_synchronization=True))

    def run(leaves: list[Tensor]) -> list[Tensor]:
        settings = {"sinks": leaves[3], "return_lse": True}
        out, lse = distca.core_attention(*leaves[:3], documents, **settings)
        (out.square().sum() + lse.square().sum()).backward()
        return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]

    whole = [*case.inputs()[:3], sinks_of(case)]
    placements = [[Shard(1)]] * 3 + [[Shard(0)]]
    parts = zip(whole, placements, strict=True)
    leaves = [distribute_tensor(each, mesh, where).requires_grad_() for each, where in parts]
    try:
        results = run(leaves)
        truths = run([each.requires_grad_() for each in whole])
        with pytest.raises(ValueError, match="sinks is a Tensor .*a DTensor if q is one"):
            distca.core_attention(*leaves[:3], documents, sinks=whole[3])
    finally:
        distca.close()
    assert [each.placements for each in results[:2]] == [(Shard(1),)] * 2
    pairs = zip(results, truths, strict=True)
    return [oracle.relative_error(got.full_tensor(), truth) for got, truth in pairs]


def test_dtensors(own_ranks):
    for errors in own_ranks(2).run(dtensor_errors):
        assert max(errors) <= 1e-12
