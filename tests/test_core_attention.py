"""The results and gradients of any plan equal those of attention on one device."""

import oracle
import pytest
import torch
from oracle import Case

import distca

MASKS = {"causal": (-1, 0), "full": (-1, -1), "window": (37, 0), "two_sided": (20, 11)}
WHOLE = {  # document lengths by rank, for 4 ranks; fewer ranks take the first ones
    "skewed": [[300, 1, 0, 55], [37], [512], [3, 3, 3, 140]],
    "one_document": [[], [], [777], []],
    "empty_rank": [[129, 64], [], [1], [400, 0, 0]],
    "balanced": [[128], [128], [128], [128]],
}
PACKS = {  # one global pack, cut into equal runs
    "mixed": [700, 0, 1, 33, 57, 129],
    "one_over_all": [911],
    "tiny": [1, 1, 1],
}


def place(rank: int, world_size: int, case: Case):
    """Return this rank's documents, q, k, v (leaves) and grad_out."""
    documents = (
        distca.Documents.sharded(case.all_lengths, rank, world_size)
        if case.sharded
        else distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    )
    q, k, v, grad_out = (tensor[case.rows_of(rank)] for tensor in case.inputs())
    return documents, [tensor.clone().requires_grad_() for tensor in (q, k, v)], grad_out


def attend(rank: int, world_size: int, case: Case) -> list[torch.Tensor]:
    """Return this rank's out, dq, dk, dv under a plan."""
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents, window_size=case.window_size)
    out = distca.core_attention(*leaves, documents, window_size=case.window_size)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def gathered(per_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", [*WHOLE, *PACKS])
def test_equals_the_oracle_in_float64(ranks, world_size, mask, documents):
    sharded = documents in PACKS
    lengths = (
        [PACKS[documents], *[[]] * (world_size - 1)] if sharded else WHOLE[documents][:world_size]
    )
    case = Case(lengths, window_size=MASKS[mask], sharded=sharded)
    if case.num_tokens == 0:
        lengths[0] = [50]
    results = gathered(ranks(world_size).run(attend, case))
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


@pytest.mark.parametrize(
    "heads_q, heads_kv, head_dim", [(6, 6, 8), (6, 2, 33), (5, 1, 64), (1, 1, 1)]
)
def test_heads_in_float64(ranks, heads_q, heads_kv, head_dim):
    case = Case(WHOLE["skewed"], heads_q, heads_kv, head_dim)
    results = gathered(ranks(4).run(attend, case))
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_within_twice_the_reference(ranks, dtype, sharded):
    lengths = [PACKS["mixed"], [], [], []] if sharded else WHOLE["skewed"]
    case = Case(lengths, heads_q=4, heads_kv=1, head_dim=64, dtype=dtype, sharded=sharded)
    results = gathered(ranks(4).run(attend, case))
    oracle.assert_close(results, *oracle.truths_and_limits(case))


@pytest.mark.parametrize("size", [1e3, 1e4])
@pytest.mark.parametrize(
    "dtype, limit",
    [
        (torch.bfloat16, 4e-3),
        (torch.float16, 5e-4),
        (torch.float32, 1e-6),
        (torch.float64, 1e-14),
    ],
)
def test_scores_so_large_that_one_key_takes_all(ranks, dtype, limit, size):
    """Scores up to 1e9 differ by more than their rounding.

    So probabilities are 0 or 1, also if the backward pass recomputes them.
    """
    case = Case(WHOLE["skewed"][:2], head_dim=64, dtype=dtype, qk_size=size)
    out, dq, dk, dv = gathered(ranks(2).run(attend, case))
    truths = oracle.forward_backward(case)
    assert oracle.relative_error(out, truths[0]) <= limit
    assert oracle.relative_error(dv, truths[3]) <= limit
    for gradient, truth in ((dq, truths[1]), (dk, truths[2])):
        assert oracle.max_error(gradient, truth) <= 1e-5 * size


def test_a_planted_wrong_value_is_rejected(ranks):
    case = Case(WHOLE["skewed"])
    results = gathered(ranks(4).run(attend, case))
    truths = oracle.forward_backward(case)
    for idx in range(4):
        planted = [tensor.clone() for tensor in results]
        planted[idx][-1, 0, 0] += 1e-9
        with pytest.raises(AssertionError):
            oracle.assert_close(planted, truths, [1e-12] * 4)


def attend_twice(rank, world_size, case):
    attend(rank, world_size, case)  # plans go by the shape of the last call
    return [
        torch.equal(a, b)
        for a, b in zip(attend(rank, world_size, case), attend(rank, world_size, case), strict=True)
    ]


def test_same_inputs_same_bits(ranks):
    case = Case(WHOLE["skewed"], dtype=torch.float32)
    assert all(all(equal) for equal in ranks(4).run(attend_twice, case))


def attend_with_nan(rank, world_size, case, poisoned_rank, poisoned_rows):
    """Return results with NaN in q, k, v of some rows of one rank."""
    rows = case.rows_of(rank)
    q, k, v, grad_out = (tensor[rows].clone() for tensor in case.inputs())
    if rank == poisoned_rank:
        for tensor in (q, k, v):
            tensor[poisoned_rows] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    documents = distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    distca.plan(documents)
    out = distca.core_attention(*leaves, documents)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_nan_in_one_document_leaves_all_others_bit_identical(ranks):
    case = Case(WHOLE["skewed"], dtype=torch.float32)
    ranks(4).run(attend, case)  # plans go by the shape of the last call
    clean = ranks(4).run(attend, case)
    poisoned_rows = slice(0, 300)  # rank 0's first document; other ranks compute a part of it
    poisoned = ranks(4).run(attend_with_nan, case, 0, poisoned_rows)
    for tensor, truth in zip(poisoned[0], clean[0], strict=True):
        assert tensor[poisoned_rows].isnan().all()
        assert torch.equal(tensor[300:], truth[300:])
    for rank in range(1, 4):
        assert all(torch.equal(a, b) for a, b in zip(poisoned[rank], clean[rank], strict=True))


def attend_strided(rank, world_size, case):
    """Attend to slices of one fused projection, whose rows and heads are not contiguous."""
    rows = case.rows_of(rank)
    q, k, v, grad_out = (tensor[rows] for tensor in case.inputs())
    fused = torch.cat([q, k, v], dim=1).transpose(0, 1).contiguous().requires_grad_()
    documents = distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    distca.plan(documents)
    split = fused.transpose(0, 1).split([case.heads_q, case.heads_kv, case.heads_kv], dim=1)
    out = distca.core_attention(*split, documents)
    out.backward(grad_out.transpose(0, 1).contiguous().transpose(0, 1))
    grads = fused.grad.transpose(0, 1).split([case.heads_q, case.heads_kv, case.heads_kv], dim=1)
    return [out.detach(), *grads]


def test_inputs_of_any_strides(ranks):
    case = Case(WHOLE["skewed"])
    results = gathered(ranks(4).run(attend_strided, case))
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def attend_with_the_layout_of_another(rank, world_size):
    opened = distca.init()
    pieces = torch.tensor([[0, 0, 0, 10], [1, 1, 0, 10]])
    tasks = torch.tensor([[1, 0, 10, 0], [0, 0, 10, 1]])
    plan = torch.ops.distca.plan_of_tasks(pieces, tasks, world_size, -1, 0)
    layout, packed = torch.ops.distca.layout(pieces, plan, 1 - rank, opened.num_plans, "cpu")
    q = torch.ones(10, 2, 8, dtype=torch.float64)
    share = layout, torch.ops.distca.unpack_rows(layout, packed)
    with pytest.raises(ValueError) as refused:
        torch.ops.distca.core_attention(q, q, q, *share, 1.0, opened.group_name)
    distca.close()
    return str(refused.value)


def test_the_layout_of_another_rank_is_refused(ranks):
    for rank, message in enumerate(ranks(2).run(attend_with_the_layout_of_another)):
        assert f"the layout is that of rank {1 - rank}, but this is rank {rank} of" in message
