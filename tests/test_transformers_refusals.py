"""Calls of transformers' models that would lose document boundaries or change attention.

Each raises an error on every rank that names argument, value and remedy.
"""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import causal_families as families  # noqa: E402
import packed_models as pm  # noqa: E402
import transformers  # noqa: E402
from packed_models import Packed  # noqa: E402

import distca  # noqa: E402
from distca.integrations import boundaries, models, transformers_calls  # noqa: E402
from distca.integrations import transformers as integration  # noqa: E402

LENGTHS = [4, 7]
NUM_TOKENS = sum(LENGTHS)
LIMIT_S = 10.0
HANG_S = 40


@pytest.fixture
def model():
    return pm.model_of("llama")


@pytest.fixture
def packed():
    return Packed.of(LENGTHS)


def refused(pattern: str):
    return pytest.raises(ValueError, match=pattern)


# Batches of a collator: keywords of the model, and the message in training.
BATCHES = {
    "padding": (
        {"attention_mask": torch.tensor([[1] * 8 + [0] * 3])},
        r"attention_mask has shape \[1, 1, 11, 11\].*3 of 11 tokens are padding.*expected None.*"
        "DataCollatorWithFlattening",
    ),
    "4-D mask": (
        {"attention_mask": torch.ones(1, 1, 11, 11).tril().bool()},
        r"attention_mask has shape \[1, 1, 11, 11\].*given by the caller.*expected None",
    ),
    "padding beside boundaries": (
        {
            "attention_mask": torch.tensor([[1] * 8 + [0] * 3]),
            "cu_seq_lens_q": torch.tensor([0, 4, 11]),
        },
        "3 of 11 tokens are padding",
    ),
    "sharded sequence": (
        {"position_ids": torch.arange(512, 523)[None]},
        "position_ids is 512 at token 0 of row 0; expected 0.*keys before it would be lost",
    ),
    "positions of a sharded row that restart": (
        {"position_ids": torch.tensor([[5, 6, 7, *range(8)]])},
        "position_ids is 5 at token 0 of row 0; expected 0",
    ),
    "positions that jump": (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 7, 8, 9, 10]])},
        "position_ids is 7 at token 7 of row 0; expected 0.*or one more",
    ),
    "positions numbered from 2": (
        {"position_ids": torch.tensor([[2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8]])},
        "position_ids is 2 at token 0 of row 0.*Pass cu_seq_lens_q",
    ),
    "cu_seq_lens of another batch": (
        {"cu_seq_lens_q": torch.tensor([0, 4, 9])},
        r"cu_seq_lens_q ends at 9, but the batch of shape \[1, 11\] has 11 tokens",
    ),
    "cu_seq_lens that decrease": (
        {"cu_seq_lens_q": torch.tensor([0, 9, 4, 11])},
        "cu_seq_lens_q: .*never to decrease",
    ),
    "cu_seq_lens with a batch dimension": (
        {"cu_seq_lens_q": torch.tensor([[0, 4, 11]])},
        r"cu_seq_lens_q: .*shape \[1, 3\].*one-dimensional",
    ),
    "cu_seq_lens of fractions": (
        {"cu_seq_lens_q": torch.tensor([0.0, 4.0, 11.0])},
        "cu_seq_lens_q: .*integers",
    ),
    "cu_seq_lens in a list": (
        {"cu_seq_lens_q": [0, 4, 11]},
        r"cu_seq_lens_q \[0, 4, 11\].*expected a tensor",
    ),
    "keys with boundaries of their own": (
        {"cu_seq_lens_q": torch.tensor([0, 4, 11]), "cu_seq_lens_k": torch.tensor([0, 5, 11])},
        "cu_seq_lens_k has 3 boundaries and differs from cu_seq_lens_q",
    ),
    "positions against cu_seq_lens": (
        {
            "cu_seq_lens_q": torch.tensor([0, 11]),
            "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]),
        },
        "position_ids restart at token 4, inside a document of cu_seq_lens_q",
    ),
    "attention weights": (
        {"position_ids": torch.arange(11)[None], "output_attentions": True},
        "output_attentions is True.*never formed",
    ),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_that_lose_boundaries_in_training(model, packed, case):
    keywords, message = BATCHES[case]
    with refused(f"(?s){message}"):
        model(packed.ids, **keywords)


def test_keys_of_a_cache_in_training(model, packed):
    cache = model(packed.ids, use_cache=True).past_key_values
    positions = torch.arange(NUM_TOKENS, 2 * NUM_TOKENS)[None]
    with refused(r"attention_mask has shape.*11 queries see 22 keys: a key-value cache"):
        model(packed.ids, past_key_values=cache, position_ids=positions)


def test_the_cache_of_a_first_pass_is_allowed(model, packed):
    logits = model(packed.ids, position_ids=packed.position_ids, use_cache=True).logits
    assert pm.relative_error(logits, pm.true_logits(model, packed)) < 1e-5


def test_dropout_is_named_as_in_the_config():
    layer = torch.nn.Identity()
    layer.config = transformers.GPT2Config(attn_pdrop=0.1)
    with refused(r"dropout is 0\.1 in Identity.*set config\.attn_pdrop = 0\.0"):
        transformers_calls.check_keywords(layer, 0.1, {})


MODELS = {  # configurations that ask for unsupported attention
    "dropout": ("llama", {"attention_dropout": 0.1}, "dropout is 0.1 .*attention_dropout = 0.0"),
    "window without a keyword": ("phimoe", {}, "config.sliding_window is 7, but PhimoeAttention"),
    "bidirectional": (
        "gemma3",
        {"use_bidirectional_attention": True},
        "attention_mask has shape.*bidirectional|is_causal is False",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_configurations_of_unsupported_attention(packed, case):
    name, changes, message = MODELS[case]
    with refused(message):
        pm.model_of(name, **changes)(**packed.keywords())


def test_chunks_of_layers_without_types():
    """No layer would know that the mask, which distca leaves out, has chunks."""
    config = transformers.LlamaConfig(attention_chunk_size=4, attn_implementation="distca")
    mask = transformers.masking_utils.create_chunked_causal_mask(
        config, torch.ones(1, NUM_TOKENS, 8), None, past_key_values=None
    )
    with refused("attention_mask has shape.*chunked_overlay"):
        Layer()(mask=mask)


class Layer(nn.Module):
    """An attention layer that calls distca's attention function as transformers' models do."""

    def __init__(self, **config) -> None:
        super().__init__()
        self.config, self.layer_idx = transformers.LlamaConfig(**config), 0

    def forward(self, num_keys: int = NUM_TOKENS, mask: torch.Tensor | None = None, **keywords):
        query = torch.ones(1, 4, NUM_TOKENS, 8)
        key = torch.ones(1, 2, num_keys, 8)
        if keywords.pop("as_dtensor", False):
            query = DTensor.from_local(query, init_device_mesh("cpu", (1,)))
        keywords.setdefault("position_ids", torch.arange(NUM_TOKENS)[None])
        return integration.attention_forward(self, query, key, key, mask, **keywords)[0]


CALLS = {
    "missing boundaries": (
        {"position_ids": None},
        "position_ids is None and cu_seq_lens_q None in Layer: document boundaries are missing",
    ),
    "3-D positions": (
        {"position_ids": torch.zeros(3, 1, NUM_TOKENS, dtype=torch.int64)},
        r"position_ids has shape \[3, 1, 11\]; expected \[1, 11\]",
    ),
    "positions of fewer tokens": (
        {"position_ids": torch.arange(5)[None]},
        r"position_ids has shape \[1, 5\]; expected \[1, 11\]",
    ),
    "2-D mask": ({"mask": torch.ones(1, NUM_TOKENS)}, r"attention_mask has shape \[1, 11\]"),
    "encoder states": ({"num_keys": 5}, "key has 5 tokens, query 11, in training"),
    "bidirectional": ({"is_causal": False}, "is_causal is False in Layer.*vision_config"),
    "window of nothing": ({"sliding_window": 0}, "sliding_window is 0; expected at least 1"),
    **{
        name: ({name: torch.ones(2)}, f"{name} is of shape \\[2\\] in Layer")
        for name in transformers_calls.UNSUPPORTED
    },
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_the_attention_function(case):
    arguments, message = CALLS[case]
    with refused(f"(?s){message}"):
        Layer()(**arguments)


@pytest.mark.parametrize("name", ["missing boundaries", "3-D positions", "2-D mask", "sinks"])
def test_calls_refused_outside_training_too(name):
    arguments, message = CALLS[name]
    with torch.no_grad(), refused(message):
        Layer()(**arguments)


def test_a_layer_of_another_type():
    with refused(r"layer_types\[0\] is 'linear_attention' in Layer"):
        Layer(layer_types=["linear_attention"], num_hidden_layers=1)()


def test_other_masks_are_exact_outside_training():
    """Models of images and text have a bidirectional part inside a causal mask."""
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1]])
    layer, embeds = Layer(attn_implementation="distca"), torch.ones(1, NUM_TOKENS, 8)
    arguments = {
        "inputs_embeds": embeds,
        "attention_mask": None,
        "past_key_values": None,
        "block_sequence_ids": blocks,
    }
    create_mask = transformers.masking_utils.create_causal_mask
    if "block_sequence_ids" not in inspect.signature(create_mask).parameters:
        pytest.skip("needs masks with bidirectional blocks, and this transformers has none")
    mask = create_mask(layer.config, **arguments)
    wanted = torch.ones(NUM_TOKENS, NUM_TOKENS).tril().bool()
    wanted |= (blocks == blocks.T) & (blocks >= 0)
    assert torch.equal(mask[0, 0], wanted)
    with refused("blockwise_overlay.*expected None"):
        layer(mask=mask)


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "mpt", "xglm"])
def test_models_with_their_own_attention_are_not_built(name):
    with refused("attn_implementation is 'distca', but .* has attention of its own .*another"):
        families.model_of(name, "distca")


def test_a_model_whose_layers_never_call_the_attention():
    model = families.model_of("mamba", "distca").eval()
    for _ in range(2):
        with refused("no layer of MambaForCausalLM called it in this forward pass"):
            model(input_ids=torch.arange(5)[None])


def test_an_interrupted_pass_leaves_no_state(model, packed, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(boundaries, "plan", interrupt)
        patched.setattr(transformers_calls, "core_attention", interrupt)
        model(**packed.keywords())
    logits = model(**packed.keywords()).logits
    assert pm.relative_error(logits, pm.true_logits(model, packed)) < 1e-5
    assert not models._under_way()


PACKED = {"position_ids": torch.cat([torch.arange(4), torch.arange(7)])[None]}
CU_SEQLENS = {"cu_seq_lens_q": torch.tensor([0, 4, 11])}
POSITIONS = {  # family, keywords of its call, message
    "counted by the model": ("bart", PACKED, "BartForCausalLM .*takes no position_ids"),
    "missing": ("gpt2", CU_SEQLENS, "position_ids is None, but GPT2LMHeadModel .*restart"),
    "from 0": ("roberta", PACKED, "position_ids begin at 0, but RobertaForCausalLM counts from 1"),
    "recomputed": ("gpt_bigcode", PACKED, "hands it no document boundaries.*checkpointing"),
    "with a mask of the layer's": ("doge", PACKED, "was made by DogeAttention itself"),
}


@pytest.mark.parametrize("case", POSITIONS)
def test_positions_of_packed_rows(case):
    name, keywords, message = POSITIONS[case]
    model = families.model_of(name, "distca").train()
    if case == "recomputed":
        model.gradient_checkpointing_enable()
    with refused(message):
        model(input_ids=torch.arange(3, 14)[None], **keywords)


def test_positions_that_begin_at_the_models_offset():
    lengths, (ids, labels) = [4, 7], families.tokens(11, seed=0)
    parts = zip(ids.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True)
    eager = families.model_of("roberta", "eager").train()
    truth = families.step(eager, [({"input_ids": part}, target) for part, target in parts])
    keywords = {"input_ids": ids, "position_ids": PACKED["position_ids"] + 1, **CU_SEQLENS}
    model = families.model_of("roberta", "distca").train()
    assert families.largest_error(families.step(model, [(keywords, labels)]), truth) < 1e-4


@pytest.mark.parametrize("query_dim, value_dim", [(12, 8), (8, 12)])
def test_values_of_another_size_than_keys(query_dim, value_dim):
    """Multi-head latent attention has values of another head_dim than keys."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, NUM_TOKENS, query_dim).unbind()
    value = torch.randn(1, 4, NUM_TOKENS, value_dim)
    rows = [each.clone().requires_grad_() for each in (query, key, value)]
    others = [each.clone().requires_grad_() for each in (query, key, value)]
    out, _ = integration.attention_forward(Layer(), *rows, None, **PACKED)
    ids = torch.arange(NUM_TOKENS) >= LENGTHS[0]
    mask = torch.ones(NUM_TOKENS, NUM_TOKENS).tril().bool() & (ids == ids[:, None])
    truth = torch.nn.functional.scaled_dot_product_attention(*others, mask).transpose(1, 2)
    torch.testing.assert_close(out, truth)
    out.square().sum().backward()
    truth.square().sum().backward()
    for row, other in zip(rows, others, strict=True):
        torch.testing.assert_close(row.grad, other.grad)


def test_shared_layers_have_no_type():
    """Zamba 2 numbers shared layers -1, and its last layer may be a recurrent one."""
    layer = Layer(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2)
    layer.layer_idx = -1
    assert layer().shape == (1, NUM_TOKENS, 4, 8)


def test_autocast_decides_the_dtype_of_attention():
    """Rotary embeddings and norms may leave float32 under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        assert Layer()().dtype == torch.bfloat16
    assert Layer()().dtype == torch.float32


def as_dtensor(rank: int, world_size: int) -> None:
    with refused("query is a DTensor in Layer; expected this rank's own heads"):
        Layer()(as_dtensor=True)


def test_dtensors(ranks):
    ranks(1).run(as_dtensor)


def test_a_capture(monkeypatch):
    """The layer checks for a capture by itself, here without a device."""
    query = torch.ones(1, 4, NUM_TOKENS, 8)
    call = transformers_calls.Call(Layer(), query, query, query, None, {})
    transformers_calls.check_model(call, is_causal=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    with refused("Layer is captured into a CUDA graph; expected a call outside"):
        transformers_calls.check_model(call, is_causal=True)


@pytest.mark.gpu
def test_a_capture_on_a_device():
    query = torch.ones(1, 4, 8, 64, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(8, device="cuda")[None]
    with torch.cuda.graph(torch.cuda.CUDAGraph()), refused("captured into a CUDA graph"):
        integration.attention_forward(Layer(), query, query, query, None, position_ids=positions)


def train(model, seed: int, **changes) -> None:
    packed = Packed.of([40, 3], seed)
    model(**{**packed.keywords(), **changes}).logits.sum().backward()


def fail_on_one_rank(rank: int, world_size: int) -> None:
    """Train a step on both ranks, then a bad batch on rank 1."""
    model = pm.model_of("llama")
    train(model, 0)
    changes = {"attention_mask": torch.tensor([[1] * 40 + [0] * 3])} if rank == 1 else {}
    train(model, 1, **changes)


def test_a_bad_batch_on_one_rank_is_an_error_on_all(fresh_pair):
    outcomes = fresh_pair.outcomes(fail_on_one_rank, timeout_s=HANG_S)
    assert outcomes[1].error_type == "ValueError", outcomes
    for outcome in outcomes:
        assert "attention_mask has shape [1, 1, 43, 43]" in outcome.error, outcomes
        assert outcome.seconds < LIMIT_S, outcomes
    assert "rank 1" in outcomes[0].error, outcomes


def skip_a_batch(rank: int, world_size: int) -> None:
    """Skip a training batch on rank 1, and evaluate next."""
    distca.init(options=distca.Options(timeout_s=2))
    model = pm.model_of("llama")
    train(model, 0)
    if rank == 0:
        train(model, 1)
    with torch.no_grad():
        model.eval()(**Packed.of([5]).keywords())


def test_a_rank_that_skips_a_batch_is_an_error_not_a_hang(fresh_pair):
    outcomes = fresh_pair.outcomes(skip_a_batch, timeout_s=HANG_S)
    assert outcomes[1].error is None, outcomes
    assert "rank 1" in outcomes[0].error and "plan" in outcomes[0].error, outcomes
    assert outcomes[0].seconds < LIMIT_S, outcomes
