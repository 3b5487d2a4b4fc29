"""Models of transformers with recurrent or convolution layers.

They are refused on packed rows, unless these layers know the documents or an option lets documents
mix.
"""

import inspect
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import causal_families as families  # noqa: E402

import distca  # noqa: E402
from distca.integrations.models import TOLD_OF_DOCUMENTS  # noqa: E402

LENGTHS = [9, 1, 14]
TOLERANCE = 1e-4
NAMES = [
    *("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "zamba2"),
]
# Releases before 5.17: their layers ignore seq_idx, and Doge computes a mask in generation, too.
is_told = pytest.mark.skipif(not TOLD_OF_DOCUMENTS, reason="needs transformers 5.17 or later")
REFUSAL = "several documents in a row, and .* would carry a state .*documents_may_mix"
# Functions that are kernels of other libraries on GPUs: the keyword with their documents, and the
# dimension of tokens.
KERNELS = {
    "causal_conv1d_fn": ("seq_idx", 2),
    "mamba2_chunk_scan": ("seq_idx", 1),
    "torch_chunk_gated_delta_rule": ("cu_seqlens", 1),
}


def packed() -> dict:
    """Return keywords as DataCollatorWithFlattening does with flash kwargs and seq_idx."""
    lengths = torch.tensor(LENGTHS)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return {
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "seq_idx": torch.arange(len(LENGTHS), dtype=torch.int32).repeat_interleave(lengths)[None],
        **{"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets},
        **{"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)},
    }


def by_document(function, keyword: str, dim: int):
    """Wrap the reference implementation to compute document by document, like the kernels."""
    reference = inspect.unwrap(function)

    def stand_in(*args, **keywords):
        boundaries = keywords.pop(keyword)
        lengths = (
            boundaries.diff()
            if keyword == "cu_seqlens"
            else boundaries[0].unique(return_counts=True)[1]
        )

        def part(value, at: int):
            is_split = isinstance(value, torch.Tensor) and value.dim() > dim
            return value.split(lengths.tolist(), dim)[at] if is_split else value

        outs = [
            reference(
                *(part(value, at) for value in args),
                **{name: part(value, at) for name, value in keywords.items()},
            )
            for at in range(len(lengths))
        ]
        if isinstance(outs[0], tuple):
            return torch.cat([out[0] for out in outs], dim), None
        return torch.cat(outs, dim)

    return stand_in


def train(name: str, attn_implementation: str, keywords: dict):
    ids, labels = families.tokens(sum(LENGTHS), seed=0)
    model = families.model_of(name, attn_implementation).train()
    return families.step(model, [({"input_ids": ids, **keywords}, labels)])


def true_step(name: str):
    ids, labels = families.tokens(sum(LENGTHS), seed=0)
    model = families.model_of(name, "eager").train()
    parts = zip(ids.split(LENGTHS, dim=1), labels.split(LENGTHS, dim=1), strict=True)
    return families.step(model, [({"input_ids": part}, target) for part, target in parts])


@pytest.fixture
def kernels(monkeypatch):
    """Return kernels(name), which replaces a family's kernels by ones that separate documents."""

    def stand_in(name: str) -> None:
        module = sys.modules[type(families.model_of(name, "eager")).__module__]
        for function, (keyword, dim) in KERNELS.items():
            if hasattr(module, function):
                replacement = by_document(getattr(module, function), keyword, dim)
                monkeypatch.setattr(module, function, replacement)
        fused = "mamba2_split_conv1d_scan_combined"
        monkeypatch.setattr(module, fused, lambda *args, **keywords: None, raising=False)

    return stand_in


@is_told
@pytest.mark.parametrize("name", NAMES)
def test_layers_that_know_the_documents(kernels, name):
    truth = true_step(name)
    kernels(name)
    assert families.largest_error(train(name, "distca", packed()), truth) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_do_not_know_the_documents(name):
    # Layers of earlier releases do not know them with any keyword.
    keywords = {"position_ids": packed()["position_ids"]} if TOLD_OF_DOCUMENTS else packed()
    message = REFUSAL.replace("state .*", "state .*seq_idx .*") if TOLD_OF_DOCUMENTS else REFUSAL
    with pytest.raises(ValueError, match=message):
        train(name, "distca", keywords)
    model = families.model_of(name, "distca").eval()
    ids, _ = families.tokens(sum(LENGTHS), seed=0)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(input_ids=ids, **keywords)


@pytest.fixture
def configure():
    yield distca.configure
    distca.configure(distca.Options())


def test_documents_that_may_mix(configure):
    configure(distca.Options(documents_may_mix=True))
    keywords = {"position_ids": packed()["position_ids"]}
    mixed, truth = train("bamba", "distca", keywords), true_step("bamba")
    assert families.largest_error(mixed, truth) > 100 * TOLERANCE, "the comparison must notice it"
    same = train("bamba", "sdpa", keywords)  # transformers reads documents from positions
    assert families.largest_error(mixed, same) <= TOLERANCE


@is_told
def test_seq_idx_that_contradicts_the_boundaries():
    keywords = packed()
    keywords["seq_idx"] = torch.zeros_like(keywords["seq_idx"])
    with pytest.raises(ValueError, match="seq_idx numbers 1 documents .*contradicts"):
        train("bamba", "distca", keywords)


def test_one_document_in_a_row_needs_no_boundaries():
    ids, labels = families.tokens(12, seed=0)
    steps = []
    for attn_implementation in ("distca", "eager"):
        model = families.model_of("qwen3_next", attn_implementation).train()
        rows = {"input_ids": ids.view(2, 6)}
        steps.append(families.step(model, [(rows, labels)]))
    assert families.largest_error(*steps) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        *("bamba", "bigbird_pegasus", "gpt_bigcode", "zamba2"),
        pytest.param("doge", marks=is_told),
    ],
)
def test_generation_equals_eager(name):
    ids, _ = families.tokens(12, seed=0)
    padding = torch.ones(2, 6, dtype=torch.int64)
    padding[0, :3] = 0
    generated = []
    for attn_implementation in ("distca", "eager"):
        model = families.model_of(name, attn_implementation).eval()
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        model.config.use_cache = True
        for mask in (padding, torch.ones_like(padding)):
            generated.append(model.generate(ids.view(2, 6), attention_mask=mask, **options))
    pairs = zip(generated[:2], generated[2:], strict=True)
    assert all(torch.equal(ours, eagers) for ours, eagers in pairs)
