"""The drop-ins are torch's functions outside a scope, and attend by document inside it."""

import inspect
import statistics
import time

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import varlen

import distca

HEAD_DIM = 8
LENGTHS = [[61, 0, 19], [1, 7, 72]]  # by rank; each has NUM_TOKENS
NUM_TOKENS = 80
MAX_OVERHEAD_US = 5.0


def qkv(batch: int, heads_q: int, heads_kv: int, num_tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, heads, num_tokens, HEAD_DIM, dtype=torch.float64, generator=generator)
        for heads in (heads_q, heads_kv, heads_kv)
    ]


SDPA_ARGUMENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.7},
    "gqa": {"enable_gqa": True},
    "bool_mask": {"attn_mask": torch.ones(12, 12).tril().bool()},
    "float_mask": {"attn_mask": torch.linspace(-1, 1, 144, dtype=torch.float64).view(12, 12)},
    "dropout": {"dropout_p": 0.4},
    "all": {
        "attn_mask": torch.ones(12, 12).tril().bool(),
        "dropout_p": 0.1,
        "scale": 0.3,
        "enable_gqa": True,
    },
}


def differing_calls(rank: int, world_size: int) -> list[str]:
    """Return the names of calls outside a scope whose results differ from torch's in any bit."""
    differing = []
    for name, arguments in SDPA_ARGUMENTS.items():
        heads_kv = 2 if arguments.get("enable_gqa") else 4
        results = []
        for attend in (F.scaled_dot_product_attention, distca.scaled_dot_product_attention):
            leaves = [tensor.requires_grad_() for tensor in qkv(2, 4, heads_kv, 12)]
            torch.manual_seed(1)
            out = attend(*leaves, **arguments)
            out.sum().backward()
            results.append([out, *(leaf.grad for leaf in leaves)])
        if not all(torch.equal(ours, torchs) for ours, torchs in zip(*results, strict=True)):
            differing.append(name)
    return differing


@pytest.mark.parametrize("world_size", [0, 1, 2])
def test_without_documents_results_have_torchs_bits(ranks, world_size):
    if world_size == 0:
        assert differing_calls(0, 1) == []
    else:
        assert ranks(world_size).run(differing_calls) == [[]] * world_size


def test_positional_arguments_are_torchs():
    q, k, v = qkv(1, 4, 4, 12)
    mask = SDPA_ARGUMENTS["bool_mask"]["attn_mask"]
    ours = distca.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, mask, 0.0, False))


def overhead_us(attend, reference) -> float:
    """Return how much longer a call of `attend` takes than one of `reference`.

    The result is the least of several differences of medians.
    """
    q, k, v = (torch.randn(1, 1, 2, 4) for _ in range(3))

    def median_us(function) -> float:
        times = []
        for _ in range(300):
            start = time.perf_counter_ns()
            function(q, k, v, is_causal=True)
            times.append(time.perf_counter_ns() - start)
        return statistics.median(times) / 1e3

    with torch.no_grad():
        return min(median_us(attend) - median_us(reference) for _ in range(15))


def test_costs_less_than_5_us_a_call_without_documents():
    torchs = F.scaled_dot_product_attention
    assert overhead_us(distca.scaled_dot_product_attention, torchs) < MAX_OVERHEAD_US


def test_the_overhead_of_a_slow_wrapper_is_noticed():
    def slow(*args, **kwargs):
        until = time.perf_counter_ns() + 20_000
        while time.perf_counter_ns() < until:
            pass
        return F.scaled_dot_product_attention(*args, **kwargs)

    assert overhead_us(slow, F.scaled_dot_product_attention) > MAX_OVERHEAD_US


def documents_of(lengths: list[int]) -> distca.Documents:
    return distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()])


def by_document(q, k, v, lengths: list[int], **kwargs):
    """Apply torch's attention to each document of the flattened rows; BHSD in and out."""
    flat = [tensor.transpose(1, 2).flatten(0, 1).split(lengths) for tensor in (q, k, v)]
    parts = []
    for document in zip(*flat, strict=True):
        rows = [tensor.transpose(0, 1).unsqueeze(0) for tensor in document]
        out = F.scaled_dot_product_attention(*rows, enable_gqa=True, **kwargs)
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts).unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def scoped_errors(rank: int, world_size: int, batch: int, is_causal: bool, ahead: bool):
    """Compare attention in a scope with torch's by document: errors of out, dq, dk, dv."""
    documents = documents_of(LENGTHS[rank])
    window_size = (-1, 0) if is_causal else (-1, -1)
    if ahead:
        distca.plan(documents, window_size=window_size, ahead=True)
    results = []
    for attend in ("distca", "torch"):
        leaves = [
            tensor.requires_grad_() for tensor in qkv(batch, 4, 2, NUM_TOKENS // batch, seed=rank)
        ]
        if attend == "torch":
            out = by_document(*leaves, LENGTHS[rank], is_causal=is_causal, scale=0.4)
        else:
            with distca.documents(documents, window_size=window_size):
                out = distca.scaled_dot_product_attention(
                    *leaves, is_causal=is_causal, scale=0.4, enable_gqa=True
                )
        (out * torch.arange(1, HEAD_DIM + 1)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return [oracle.relative_error(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("batch, ahead", [(1, False), (4, False), (1, True)])
def test_under_documents_it_equals_torchs_by_document(ranks, world_size, is_causal, batch, ahead):
    for errors in ranks(world_size).run(scoped_errors, batch, is_causal, ahead):
        assert max(errors) <= 1e-12


def test_documents_change_the_result():
    q, k, v = qkv(1, 4, 2, NUM_TOKENS)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    parts = by_document(q, k, v, LENGTHS[0], is_causal=True)
    assert oracle.relative_error(whole, parts) > 1e-2, "the reference must respect boundaries"


def varlen_errors(rank: int, world_size: int, window_size: tuple[int, int]) -> list[float]:
    lengths = LENGTHS[rank]
    documents = documents_of(lengths)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in qkv(1, 4, 2, NUM_TOKENS, seed=rank))
    truth_leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    parts = zip(*(leaf.split(lengths) for leaf in truth_leaves), strict=True)
    truth = torch.cat([oracle.attention(*document, window_size)[0] for document in parts])
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    cu_seqlens = documents.cu_seqlens
    with distca.documents(documents, window_size=window_size):
        out = distca.varlen_attention(
            *(*leaves, cu_seqlens, cu_seqlens, max(lengths), max(lengths)),
            window_size=window_size,
            enable_gqa=True,
        )
    truth.square().sum().backward()
    out.square().sum().backward()
    pairs = [(out, truth), *((a.grad, b.grad) for a, b in zip(leaves, truth_leaves, strict=True))]
    return [oracle.relative_error(a.detach(), b.detach()) for a, b in pairs]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (9, 0), (9, 4), (-1, 4)])
def test_varlen_attention_under_documents(ranks, world_size, window_size):
    for errors in ranks(world_size).run(varlen_errors, window_size):
        assert max(errors) <= 1e-12


def test_varlen_attention_without_documents_is_torchs(monkeypatch):
    seen = []
    assert distca.scope._torch_varlen_attn is varlen.varlen_attn
    monkeypatch.setattr(
        distca.scope, "_torch_varlen_attn", lambda *args, **kwargs: seen.append((args, kwargs))
    )
    rows = ("q", "k", "v", "cu_q", "cu_k", 5, 6)
    wanted = {"return_aux": None, "scale": 0.5, "window_size": (3, 0)}
    for asks, more in ((False, {}), (True, {"enable_gqa": True})):
        monkeypatch.setattr(distca.scope, "_asks_for_gqa", asks)
        how = {"scale": 0.5, "window_size": (3, 0), "enable_gqa": True}
        distca.varlen_attention(*rows, **how, num_splits=1)
        assert seen.pop() == (rows, {**wanted, **more, "num_splits": 1})


def test_varlen_attention_has_the_arguments_of_torchs():
    """Newer versions of torch have more arguments than 2.11; they go on to torch's function."""
    ours, torchs = (
        {name: (each.kind, each.default) for name, each in inspect.signature(f).parameters.items()}
        for f in (distca.varlen_attention, varlen.varlen_attn)
    )
    assert len(torchs) >= 10 and "others" in ours
    assert {name: ours[name] for name in torchs if name in ours} == {
        name: torchs[name] for name in torchs if name in ours
    }
    assert list(ours)[:10] == list(torchs)[:10]
    assert all(torchs[name][1] in (None, False) for name in torchs if name not in ours)


def evaluate_unevenly(rank: int, world_size: int) -> tuple[float, float]:
    """Evaluate a different number of batches on every rank, then train together."""
    q, k, v = qkv(1, 4, 2, NUM_TOKENS, seed=rank)
    worst = 0.0
    with torch.no_grad():
        for _ in range(3 * rank):
            with distca.documents(documents_of(LENGTHS[rank])):
                out = distca.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            truth = by_document(q, k, v, LENGTHS[rank], is_causal=True)
            worst = max(worst, oracle.relative_error(out, truth))
    trained = max(scoped_errors(rank, world_size, 1, True, False))
    dist.barrier()
    return worst, trained


def test_evaluation_does_not_communicate(ranks):
    for errors in ranks(2).run(evaluate_unevenly):
        assert max(errors) <= 1e-12


def test_scopes_nest_and_end():
    q, k, v = qkv(1, 4, 2, NUM_TOKENS)
    outer, inner = LENGTHS

    def matches(lengths) -> bool:
        out = distca.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        truth = by_document(q, k, v, lengths, is_causal=True)
        return oracle.relative_error(out, truth) <= 1e-12

    with distca.documents(documents_of(outer)):
        assert matches(outer)
        with pytest.raises(KeyError), distca.documents(documents_of(inner)):
            assert matches(inner) and not matches(outer)
            raise KeyError("an exception ends the scope too")
        assert matches(outer)
    assert matches([NUM_TOKENS])
