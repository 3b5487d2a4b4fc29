"""Keys without queries: attention in two calls, the second with keys of the first as context."""

import random

import oracle
import pytest
import torch
from layout_words import numbers_of_rows
from oracle import Case
from torch.library import opcheck

import distca
from distca.planning.plan import local_plan

ops = torch.ops.distca
LENGTHS = [[61, 0, 240, 19], [1, 7, 72], [333], [2, 2, 64]]  # by rank
MASKS = {"causal": (-1, 0), "window": (37, 0), "narrow": (0, 0), "full": (-1, -1)}


def documents_of(lengths: list[int], num_context_rows: int = 0) -> distca.Documents:
    return distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()], num_context_rows)


def document_of_row(lengths: list[int], row: int) -> tuple[int, int]:
    """Return (document, position) of a row."""
    for document, length in enumerate(lengths):
        if row < length:
            return document, row
        row -= length
    raise AssertionError("no such row")


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (0, 0)])
def test_halves_against_counting(window):
    generator = random.Random(0)
    for _ in range(40):
        lengths = [generator.choice([0, 1, 2, 9]) for _ in range(generator.randint(0, 5))]
        whole = documents_of(lengths)
        for row in range(whole.num_tokens + 1):
            first, second = whole.halves(row, window)
            assert (first.num_tokens, second.num_tokens) == (row, whole.num_tokens - row)
            assert first.num_context_rows == 0
            num_context = 0  # positions before the first query of the second half that it sees
            if second.num_tokens > 0:
                _, position = document_of_row(lengths, row)
                num_context = position if window[0] < 0 else min(position, window[0])
            assert second.num_context_rows == num_context
            ends = [end for end in whole.cu_seqlens.tolist() if end > row]
            assert second.cu_seqlens.tolist()[1:] == [end - row + num_context for end in ends]
            begins = [end for end in whole.cu_seqlens.tolist() if end < row]
            assert first.cu_seqlens.tolist() == ([*begins, row] if row else [0])
            positions = second.position_ids.tolist()
            assert positions[:1] == [num_context] * bool(positions)


def attend_in_halves(rank: int, world_size: int, case: Case, cut: float) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of attention in two calls. The second half is planned first."""
    documents = documents_of(case.lengths[rank])
    q, k, v, grad_out = (tensor[case.rows_of(rank)] for tensor in case.inputs())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    row = int(cut * documents.num_tokens)
    if case.window_size == (-1, -1):
        row = int(documents.cu_seqlens[len(documents.cu_seqlens) // 2])
    first, second = documents.halves(row, case.window_size)
    begin = row - second.num_context_rows
    outs = []
    for half, keys in ((second, slice(begin, None)), (first, slice(0, row))):
        queries = slice(row, None) if half is second else keys
        distca.plan(half, window_size=case.window_size)
        q, k, v = (leaf[rows] for leaf, rows in zip(leaves, (queries, keys, keys), strict=True))
        outs.insert(0, distca.core_attention(q, k, v, half, window_size=case.window_size))
    out = torch.cat(outs)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cut", [0.0, 0.31, 0.5, 0.99, 1.0])
def test_two_calls_equal_the_oracle(ranks, world_size, mask, cut):
    case = Case(LENGTHS[:world_size], heads_q=4, heads_kv=2, head_dim=8, window_size=MASKS[mask])
    per_rank = ranks(world_size).run(attend_in_halves, case, cut)
    results = [torch.cat(parts) for parts in zip(*per_rank, strict=True)]
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def check_operators(rank: int, world_size: int) -> list[int]:
    """Run opcheck with context rows. Return the query and key rows that this rank serves."""
    documents = documents_of([200, 9] if rank == 0 else [8], 40 if rank == 0 else 0)
    plan = distca.plan(documents) if world_size > 1 else local_plan(documents, (-1, 0), CPU)
    share, scale, name = (plan.layout, plan.rows), 0.3, plan.group_name
    num_keys = documents.num_tokens + documents.num_context_rows
    q = torch.randn(documents.num_tokens, 2, 4, dtype=torch.float64)
    k, v = torch.randn(2, num_keys, 1, 4, dtype=torch.float64).unbind()
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, lse, _ = ops.core_attention(q, k, v, *share, scale, name)
    opcheck(ops.core_attention, (*leaves, *share, scale, name))
    opcheck(ops.core_attention_backward, (out, q, k, v, out, lse, *share, scale, name))
    opcheck(ops.attend, (*leaves, *share, scale, "home"))
    _, served = numbers_of_rows(plan.layout)
    return [served["visiting queries"], served["visiting keys"]]


CPU = torch.device("cpu")


@pytest.mark.parametrize("world_size", [1, 2])
def test_operators_take_context(ranks, world_size):
    served = ranks(world_size).run(check_operators)
    assert world_size == 1 or served[1][1] > served[1][0] > 0, "rank 1 serves queries with context"


def test_a_key_of_the_context_counts():
    documents = documents_of([5, 3], 4)
    q = torch.randn(4, 2, 8)
    k, v = torch.randn(2, 8, 2, 8).unbind()
    out = distca.core_attention(q, k, v, documents)
    without = distca.core_attention(q, k[4:], v[4:], documents_of([1, 3]))
    assert torch.equal(out[1:], without[1:]) and not torch.allclose(out[0], without[0])


@pytest.mark.parametrize(
    "lengths, num_context_rows", [([3, 5], 3), ([0, 3], 3), ([0], 1), ([], 1), ([3], -1)]
)
def test_bad_context_is_refused(lengths, num_context_rows):
    with pytest.raises(ValueError, match=f"num_context_rows is {num_context_rows}; expected 0 to"):
        documents_of(lengths, num_context_rows)


def test_context_behind_empty_documents():
    assert documents_of([0, 0, 3], 2).num_tokens == 1
    assert documents_of([0, 0, 3], 2).pieces(0)[:, 4].tolist() == [0, 0, 2]


BAD_HALVES = {
    "row": (documents_of([8]), 9, (-1, 0), r"row is 9; expected 0 to 8"),
    "negative": (documents_of([8]), -1, (-1, 0), r"row is -1; expected 0 to 8"),
    "full": (documents_of([8]), 4, (-1, -1), r"row is 4, inside a document.*see keys of its sec"),
    "right": (documents_of([8]), 4, (2, 1), r"window_size \(2, 1\) lets"),
    "runs": (
        distca.Documents.sharded([8], 0, 2, runs=2),
        1,
        (-1, 0),
        "row is 1; expected 2, at wh",
    ),
    "right of runs": (
        distca.Documents.sharded([8], 0, 2, runs=2),
        2,
        (2, 1),
        "between two runs, an",
    ),
    "sharded": (distca.Documents.sharded([8], 0, 2), 2, (-1, 0), "sharded.*cannot be halved"),
    "context": (documents_of([8], 3), 2, (-1, 0), "3 context rows.*cannot be halved"),
}


@pytest.mark.parametrize("case", BAD_HALVES)
def test_bad_halves_are_refused(case):
    documents, row, window_size, message = BAD_HALVES[case]
    with pytest.raises(ValueError, match=message):
        documents.halves(row, window_size)


def test_rows_that_do_not_fit_the_context_are_refused():
    q, k = torch.ones(5, 1, 4), torch.ones(8, 1, 4)
    distca.core_attention(q, k, k, documents_of([8], 3))
    with pytest.raises(ValueError, match="q has 8 tokens, but the documents of this rank have 5"):
        distca.core_attention(k, k, k, documents_of([8], 3))
    with pytest.raises(ValueError, match="q has 5 tokens, k 5; expected k to have.* 3 context"):
        distca.core_attention(q, q, q, documents_of([8], 3))
