"""Documents that share prefixes, as samples share their prompt."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import oracle
import pytest
import torch
from oracle import Case
from test_core_attention import gathered

import distca

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from prefix_trees import forms_of, predict  # noqa: E402

CAUSAL = (-1, 0)


@dataclass
class Tree(Case):
    """Documents with the parent of each, in one list over all ranks, or -1."""

    parents: tuple[int, ...] = ()


TREES = {  # lengths by rank, and parents, which are on the same rank
    "group": ([[160, 40, 41, 1], [90]], (-1, 0, 0, 0, -1)),
    "deep": ([[50, 30, 64, 9, 7], [3, 200]], (-1, 0, 1, 1, 0, -1, 5)),
    "empty": ([[0, 40, 0, 30], [64, 0, 100]], (-1, 0, 1, 2, -1, 4, 5)),
}


def documents_of(case: Tree, rank: int, world_size: int) -> distca.Documents:
    if case.sharded:
        return distca.Documents.sharded(case.all_lengths, rank, world_size, parents=case.parents)
    first = sum(map(len, case.lengths[:rank]))
    held = case.lengths[rank]
    parents = [max(-1, parent - first) for parent in case.parents[first : first + len(held)]]
    return distca.Documents([0, *torch.tensor(held).cumsum(0).tolist()], parents=parents)


def attend(rank: int, world_size: int, case: Tree) -> list[torch.Tensor]:
    """Return this rank's out, dq, dk, dv and lse under a plan. Gradients include one of lse."""
    documents = documents_of(case, rank, world_size)
    q, k, v, grad_out = (tensor[case.rows_of(rank)] for tensor in case.inputs())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    plan = distca.plan(documents, window_size=case.window_size)
    out, lse = distca.core_attention(
        *leaves, documents, window_size=case.window_size, return_lse=True
    )
    torch.autograd.backward([out, lse], [grad_out, torch.ones_like(lse)])
    assert world_size == 1 or sum(plan.report().bytes_out) > 0, "the case must move rows"
    return [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]


def chain_of(parents: tuple[int, ...], document: int) -> list[int]:
    """Return a document's ancestors, root first, and the document."""
    return [*(chain_of(parents, parents[document]) if parents[document] >= 0 else []), document]


def truth_of(case: Tree) -> list[torch.Tensor]:
    """Attend to each document with all of its ancestors before it, and drop their results."""
    q, k, v, grad_out = case.inputs()
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    parts = [tensor.split(case.all_lengths) for tensor in leaves]
    results = []
    for document, length in enumerate(case.all_lengths):
        chain = chain_of(case.parents, document)
        whole = [torch.cat([part[each] for each in chain]) for part in parts]
        begin = len(whole[0]) - length
        results.append([each[begin:] for each in oracle.attention(*whole, case.window_size)])
    out, lse = (torch.cat(each) for each in zip(*results, strict=True))
    torch.autograd.backward([out, lse], [grad_out, torch.ones_like(lse)])
    return [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]


def case_of(name: str, world_size: int, sharded: bool, **changes) -> Tree:
    lengths, parents = TREES[name]
    if sharded or world_size == 1:
        lengths = [[length for held in lengths for length in held]]
    lengths = [*lengths, *[[]] * (world_size - len(lengths))]
    return Tree(lengths, sharded=sharded, parents=parents, **changes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("window_size", [CAUSAL, (37, 0), (20, 11)])
@pytest.mark.parametrize("name", TREES)
def test_equals_the_oracle_in_float64(ranks, name, window_size, sharded, world_size):
    case = case_of(name, world_size, sharded, window_size=window_size)
    results = gathered(ranks(world_size).run(attend, case))
    oracle.assert_close(results, truth_of(case), [1e-12] * 5)


def test_the_comparison_notices_a_lost_prefix():
    case = case_of("group", 1, False)
    without = Tree(case.lengths, parents=(-1,) * len(case.parents))
    with pytest.raises(AssertionError):
        oracle.assert_close(truth_of(without), truth_of(case), [1e-12] * 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_prompt_are_summed_in_float32(dtype):
    """Each sample's gradient is rounded once, and so is their sum."""
    parents = (-1, *[0] * 16)
    case = Tree([[64, *[24] * 16]], dtype=dtype, parents=parents)
    rounded = [tensor.double() for tensor in case.inputs()]
    results = attend_here(case, [tensor.to(dtype) for tensor in rounded])
    truth = attend_here(case, rounded)
    for result, true in zip(results, truth, strict=True):
        assert oracle.relative_error(result, true) <= 3 * oracle.relative_error(
            true.to(dtype), true
        )


def attend_here(case: Tree, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
    out = distca.core_attention(*leaves, documents_of(case, 0, 1))
    out.backward(inputs[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_gradcheck():
    documents = distca.Documents([0, 5, 8, 10], parents=[-1, 0, 1])
    generator = torch.Generator().manual_seed(0)
    shape = (3, 10, 2, 4)
    leaves = torch.randn(shape, dtype=torch.float64, generator=generator).unbind()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda *x: distca.core_attention(*x, documents), leaves)


def test_documents_of_a_tree_against_counting():
    generator = random.Random(0)
    for _ in range(20):
        lengths = [generator.choice([0, 1, 2, 7, 30]) for _ in range(generator.randint(1, 6))]
        parents = [generator.randint(-1, idx - 1) for idx in range(len(lengths))]
        whole = distca.Documents([0, *torch.tensor(lengths).cumsum(0)], parents=parents)
        before = [
            sum(lengths[each] for each in chain_of(tuple(parents), document)[:-1])
            for document in range(len(lengths))
        ]
        expected = [
            begin + position
            for begin, length in zip(before, lengths, strict=True)
            for position in range(length)
        ]
        assert whole.position_ids.tolist() == expected
        assert whole.cu_seqlens.diff().tolist() == lengths
        assert whole.num_tokens == sum(lengths)
        parts = [
            distca.Documents.sharded(lengths, rank, 3, parents=parents).position_ids
            for rank in range(3)
        ]
        assert torch.cat(parts).tolist() == expected


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_group_of_samples_takes_half_the_work_of_whole_documents(num_ranks):
    forms = forms_of(prompt=16384, sample=4096, num_samples=8)
    (tree, tree_pairs), (whole, whole_pairs) = forms["tree"], forms["whole"]
    assert whole_pairs >= 2 * tree_pairs
    of_tree, of_whole = predict(tree, num_ranks), predict(whole, num_ranks)
    assert of_whole[0] >= 2.1 * of_tree[0] and of_whole[1] >= 1.5 * of_tree[1]


REFUSED = {
    "a later parent": (lambda: distca.Documents([0, 2, 3], parents=[1, -1]), "earlier one"),
    "itself": (lambda: distca.Documents([0, 2], parents=[0]), "earlier one"),
    "too few": (lambda: distca.Documents([0, 2, 3], parents=[-1]), "for 2 documents"),
    "fractions": (lambda: distca.Documents([0, 2], parents=[-1.0]), "parents is"),
    "context": (lambda: distca.Documents([0, 2], 1, parents=[-1]), "num_context_rows is 1"),
    "two runs": (lambda: distca.Documents.sharded([4], 0, 2, 2, parents=[-1]), "runs is 2"),
    "chunks": (lambda: distca.Documents([0, 2], parents=[-1]).chunked(1), "parents or spans"),
    "halves": (lambda: distca.Documents([0, 2], parents=[-1]).halves(1), "parents"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def refused_rows(rank: int, world_size: int) -> None:
    num_tokens = 50 if rank else 900
    documents = distca.Documents([0, 40, num_tokens], parents=[-1, 0])
    distca.plan(documents)
    q, k = torch.ones(num_tokens, 2, 4), torch.ones(num_tokens - rank, 2, 4)
    distca.core_attention(q, k, k, documents)


def test_rows_that_one_rank_lacks_are_refused_on_all(own_ranks):
    for outcome in own_ranks(2).outcomes(refused_rows, timeout_s=60):
        assert "k has 49 tokens, v 49; expected 50, as the Documents(" in outcome.error
