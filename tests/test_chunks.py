"""Documents cut into chunks: queries see keys of their own chunk, counted from the document's
start."""

import random

import oracle
import pytest
import torch
from oracle import Case
from test_core_attention import PACKS, WHOLE, gathered, place

import distca

SIZE = 48
PLANNED = [["chunks"], ["whole", "chunks"], ["chunks", "whole"], ["whole"], []]


def chunk_lengths(lengths: list[int], size: int) -> list[int]:
    """Cut documents one by one; an empty document stays one."""
    chunks = []
    for length in lengths:
        while length > size:
            chunks.append(size)
            length -= size
        chunks.append(length)
    return chunks


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_chunks_against_counting(size):
    generator = random.Random(size)
    for _ in range(20):
        lengths = [generator.choice([0, 1, 2, 7, 30]) for _ in range(generator.randint(0, 6))]
        whole = distca.Documents([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)])
        chunks = whole.chunked(size)
        assert chunks.cu_seqlens.diff().tolist() == chunk_lengths(lengths, size)
        assert torch.equal(chunks.position_ids, whole.position_ids)
        for rank in range(3):
            sharded = distca.Documents.sharded(lengths, rank, 3)
            chunks = sharded.chunked(size)
            pieces = distca.Documents.sharded(chunk_lengths(lengths, size), rank, 3).pieces(rank)
            assert torch.equal(chunks.pieces(rank), pieces)
            assert torch.equal(chunks.position_ids, sharded.position_ids)
            assert chunks.crosses_ranks and chunks is sharded.chunked(size)


def alternate(rank: int, world_size: int, case: Case, planned: list[str]) -> list[torch.Tensor]:
    """Attend to chunks and to whole documents in turn. Return the results of the chunks."""
    documents, leaves, grad_out = place(rank, world_size, case)
    chunks = documents.chunked(SIZE)
    for name in planned or (["whole"] if case.sharded else []):
        distca.plan(documents if name == "whole" else chunks, window_size=case.window_size)
    how = {"window_size": case.window_size}
    whole = distca.core_attention(*leaves, documents, **how)
    out = distca.core_attention(*leaves, chunks, **how)
    again = distca.core_attention(*leaves, documents, **how)
    assert torch.equal(whole, again)
    num_plans = len(documents._plans)
    assert num_plans == (2 if planned or case.sharded else 0)
    batches = {plan.batch for plan in documents._plans.values()}
    assert len(batches) == min(1, num_plans), "layers of one batch"
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def truth_of(case: Case) -> list[torch.Tensor]:
    chunks = Case([chunk_lengths(case.all_lengths, SIZE)], window_size=case.window_size)
    return oracle.forward_backward(chunks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window_size", [(-1, 0), (20, 11)])
@pytest.mark.parametrize("documents", [*WHOLE, *PACKS])
def test_equals_the_oracle_in_float64(ranks, world_size, window_size, documents):
    sharded = documents in PACKS
    lengths = [PACKS[documents], [], [], []] if sharded else WHOLE[documents]
    case = Case(lengths[:world_size], window_size=window_size, sharded=sharded)
    if case.num_tokens == 0:
        case.lengths[0] = [50]
    results = gathered(ranks(world_size).run(alternate, case, ["whole", "chunks"]))
    oracle.assert_close(results, truth_of(case), [1e-12] * 4)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("planned", PLANNED, ids=str)
def test_a_layer_plans_what_is_not_planned(ranks, planned, sharded):
    lengths = [PACKS["mixed"], []] if sharded else WHOLE["skewed"][:2]
    case = Case(lengths, sharded=sharded)
    results = gathered(ranks(2).run(alternate, case, planned))
    oracle.assert_close(results, truth_of(case), [1e-12] * 4)


def test_the_comparison_notices_a_lost_border():
    case = Case([PACKS["mixed"]])
    with pytest.raises(AssertionError):
        oracle.assert_close(oracle.forward_backward(case), truth_of(case), [1e-12] * 4)


def plan_other_chunks(rank: int, world_size: int) -> None:
    distca.plan(distca.Documents([0, 90]).chunked(8 * (rank + 1)))


def test_ranks_with_other_chunks_are_named(ranks):
    for outcome in ranks(2).outcomes(plan_other_chunks):
        assert r"chunk_size (0: none): 8 on ranks [0], 16 on ranks [1]" in outcome.error


REFUSED = {
    "no tokens": (lambda documents: documents.chunked(0), "size is 0; expected 1 to"),
    "fraction": (lambda documents: documents.chunked(2.5), "size is 2.5; expected 1 to"),
    "chunks": (lambda documents: documents.chunked(4).chunked(2), "cannot be cut into chunks"),
    "context": (lambda _: distca.Documents([0, 9], 3).chunked(2), "cannot be cut into chunks"),
    "a half": (lambda documents: documents.halves(5)[0].chunked(2), "cannot be cut into chunks"),
    "halves of chunks": (lambda documents: documents.chunked(4).halves(5), "cannot be halved"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make(distca.Documents([0, 9, 12]))
