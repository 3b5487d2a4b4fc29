"""Spans of causal documents whose queries see the whole span, under any plan."""

from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case
from test_core_attention import gathered
from test_lse import grad_lse_of, sinks_of
from torch import Tensor

import distca

LENGTHS = [[300, 1, 0, 55], [37], [512], [3, 3, 3, 140]]
SPANS = [(0, 5), (40, 41), (100, 161), (280, 300), (301, 356), (360, 370), (500, 600), (603, 700)]
MASKS = {"causal": (-1, 0), "window": (99, 0)}


@dataclass
class SpanCase(Case):
    """`spans` are tokens [begin, end) of the pack of all ranks."""

    spans: tuple[tuple[int, int], ...] = ()


def case_of(world_size: int, sharded: bool, **keywords) -> SpanCase:
    lengths = LENGTHS[:world_size]
    num_tokens = sum(map(sum, lengths))
    spans = tuple(span for span in SPANS if span[1] <= num_tokens)
    if sharded:
        lengths = [sum(lengths, []), *[[]] * (world_size - 1)]
    return SpanCase(lengths, sharded=sharded, spans=spans, **keywords)


def place(rank: int, world_size: int, case: SpanCase):
    """Return this rank's documents, q, k, v (leaves) and grad_out."""
    rows = case.rows_of(rank)
    if case.sharded:
        documents = distca.Documents.sharded(
            case.all_lengths, rank, world_size, spans=torch.tensor(case.spans)
        )
    else:
        held = [span for span in case.spans if rows.start <= span[0] < rows.stop]
        spans = [(begin - rows.start, end - rows.start) for begin, end in held]
        offsets = [0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()]
        documents = distca.Documents(offsets, spans=spans)
    q, k, v, grad_out = (tensor[rows] for tensor in case.inputs())
    return documents, [tensor.clone().requires_grad_() for tensor in (q, k, v)], grad_out


def visible_keys(case: SpanCase) -> Tensor:
    """Return which tokens of the pack see which, bool [tokens, tokens]."""
    document = torch.arange(len(case.all_lengths)).repeat_interleave(torch.tensor(case.all_lengths))
    token = torch.arange(case.num_tokens)
    behind = token[:, None] - token[None, :]
    left = case.window_size[0] if case.window_size[0] >= 0 else case.num_tokens
    visible = (document[:, None] == document[None, :]) & (behind >= 0) & (behind <= left)
    for begin, end in case.spans:
        visible[begin:end, begin:end] = True
    return visible


def truths_of(case: SpanCase, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return out, dq, dk, dv, lse from one masked matrix of scores in `dtype`."""
    q, k, v, grad_out = (tensor.to(dtype) for tensor in case.inputs())
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    k, v = (x.repeat_interleave(case.heads_q // case.heads_kv, 1) for x in leaves[1:])
    scores = oracle.scores_of(q, k, (-1, -1), case.softcap)
    scores = scores.masked_fill(~visible_keys(case), float("-inf"))
    out, lse = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).t()
    torch.autograd.backward([out, lse], [grad_out, grad_lse_of(case).to(dtype)])
    return [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]


def attend(rank: int, world_size: int, case: SpanCase, is_planned: bool = True) -> list[Tensor]:
    documents, leaves, grad_out = place(rank, world_size, case)
    if is_planned:
        distca.plan(documents, window_size=case.window_size)
    settings = {"window_size": case.window_size, "softcap": case.softcap, "return_lse": True}
    out, lse = distca.core_attention(*leaves, documents, **settings)
    grad_lse = grad_lse_of(case)[case.rows_of(rank)].to(lse.dtype)
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    return [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_equals_the_oracle_in_float64(ranks, world_size, mask, sharded, softcap):
    case = case_of(world_size, sharded, window_size=MASKS[mask], softcap=softcap)
    results = gathered(ranks(world_size).run(attend, case))
    oracle.assert_close(results, truths_of(case), [1e-12] * 5)
    begin, end = case.spans[2]
    case.spans = (*case.spans[:2], (begin, end - 1), *case.spans[3:])
    with pytest.raises(AssertionError):
        oracle.assert_close(results, truths_of(case), [1e-12] * 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_within_twice_the_reference(ranks, dtype):
    case = case_of(2, True, heads_kv=1, head_dim=64, dtype=dtype)
    results = gathered(ranks(2).run(attend, case))
    truths, reference = truths_of(case), truths_of(case, dtype)
    limits = [2 * oracle.relative_error(r, t) for r, t in zip(reference, truths, strict=True)]
    oracle.assert_close(results, truths, limits)


@pytest.mark.parametrize("size", [0.0, 30.0])
def test_scores_of_any_size(size):
    """With scores of 1e3, nearly all rows see one key, which may be their own."""
    case = case_of(1, False, qk_size=size)
    oracle.assert_close(attend(0, 1, case, is_planned=False), truths_of(case), [1e-11] * 5)


def test_gradcheck():
    documents = distca.Documents([0, 6, 9], spans=[(1, 4), (7, 9)])
    leaves = [torch.randn(9, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]

    def both(*rows: Tensor) -> tuple[Tensor, Tensor]:
        return distca.core_attention(*rows, documents, return_lse=True)

    assert torch.autograd.gradcheck(both, leaves)


def attend_without(rank: int, world_size: int) -> list[Tensor]:
    """Return results with an empty list of spans, and with none."""
    case = Case([[40, 7], [9]])
    results = []
    for spans in ([], None):
        documents = distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0)], spans=spans)
        rows = [tensor[case.rows_of(rank)] for tensor in case.inputs()[:3]]
        distca.plan(documents)
        results.append(distca.core_attention(*rows, documents))
    return results


def test_no_spans_anywhere(ranks):
    for with_list, without in ranks(2).run(attend_without):
        assert torch.equal(with_list, without)


def layers_of_a_step(rank: int, world_size: int, case: SpanCase) -> list[float]:
    """Attend in layers of two masks, as Gemma 3 does, and with sinks and maxima."""
    documents, leaves, _ = place(rank, world_size, case)
    distca.plan(documents)
    rows = case.rows_of(rank)
    errors = []
    for window_size in (*MASKS.values(), *MASKS.values()):
        case.window_size = window_size
        out, lse = distca.core_attention(
            *leaves, documents, window_size=window_size, return_lse=True
        )
        truth = truths_of(case)
        sinks = sinks_of(case)
        with_sinks = distca.core_attention(*leaves, documents, window_size=window_size, sinks=sinks)
        share = torch.sigmoid(truth[4] - sinks).unsqueeze(-1)
        errors.append(oracle.relative_error(out, truth[0][rows]))
        errors.append(oracle.relative_error(with_sinks, (truth[0] * share)[rows]))
        largest = distca.max_logits(*leaves[:2], documents, window_size=window_size)
        q, k, _, _ = case.inputs()
        scores = oracle.scores_of(q, k.repeat_interleave(2, 1), (-1, -1))
        scores = scores.masked_fill(~visible_keys(case), float("-inf"))[:, rows]
        errors.append(oracle.relative_error(largest, scores.amax((1, 2))))
    return errors


@pytest.mark.parametrize("sharded", [False, True])
def test_layers_of_two_masks(ranks, sharded):
    for errors in ranks(2).run(layers_of_a_step, case_of(2, sharded)):
        assert max(errors) <= 1e-12


@pytest.mark.parametrize(
    "spans",
    [[(0, 3), (2, 5)], [(3, 5), (0, 2)], [(2, 2)], [(-1, 3)], [(4, 9)], [(8, 7)], [(0, 11)], [5, 6]]
    + [[(0.5, 2.0)], [(1, 2, 3)], [(1, 2), (3,)]],
)
def test_wrong_spans_are_refused(spans):
    with pytest.raises(ValueError, match="spans is .*expected"):
        distca.Documents([0, 6, 10], spans=spans)
    with pytest.raises(ValueError, match="spans is .*expected"):
        distca.Documents.sharded([6, 4], 0, 2, spans=spans)


def test_what_spans_exclude():
    spans = [(0, 4)]
    documents = distca.Documents([0, 6, 10], spans=spans)
    assert "with spans" in repr(documents)
    assert documents.position_ids.tolist() == distca.Documents([0, 6, 10]).position_ids.tolist()
    with pytest.raises(ValueError, match="cannot be cut into chunks"):
        documents.chunked(4)
    with pytest.raises(ValueError, match="cannot be halved"):
        documents.halves(6)
    for keywords in ({"parents": [-1, 0]}, {"num_context_rows": 2}):
        with pytest.raises(ValueError, match="spans are given with"):
            distca.Documents([0, 6, 10], spans=spans, **keywords)
    for keywords in ({"runs": 2}, {"parents": [-1, 0]}):
        with pytest.raises(ValueError, match="1 with spans"):
            distca.Documents.sharded([6, 4], 0, 2, spans=spans, **keywords)
    q = torch.randn(10, 2, 4)
    for window_size in ((-1, -1), (2, 0), (-1, 3)):
        with pytest.raises(ValueError, match=r"expected \(-1, 0\), or \(W, 0\) with W at least 3"):
            distca.core_attention(q, q, q, documents, window_size=window_size)
    distca.core_attention(q, q, q, documents, window_size=(3, 0))


def refuse_on_one_rank(rank: int, world_size: int) -> str:
    documents = distca.Documents([0, 20], spans=[(2, 15)] if rank == 1 else [])
    distca.plan(documents, window_size=(5, 0))
    q = torch.randn(20, 2, 4)
    with pytest.raises((ValueError, dist.DistBackendError)) as error:
        distca.core_attention(q, q, q, documents, window_size=(5, 0))
    distca.close()
    return str(error.value)


def test_a_narrow_window_is_refused_on_all_ranks(own_ranks):
    other, own = own_ranks(2).run(refuse_on_one_rank)
    refusal = "window_size is (5, 0) for documents with spans of up to 13 tokens"
    assert own.startswith(refusal)
    assert f"rank 1 failed: ValueError: {refusal}" in other
