"""distca under the name of another attention implementation, for frameworks that insist on it."""

import importlib.util
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import causal_families as families  # noqa: E402
import packed_models as pm  # noqa: E402
from packed_models import LENGTHS, Packed  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

import distca  # noqa: E402
from distca import run  # noqa: E402
from distca.integrations import transformers as integration  # noqa: E402
from distca.ranks import session as sessions  # noqa: E402

TOLERANCE = 1e-5
NAME = "flash_attention_2"
# Llama, windows, and a model that transformers allows certain flash kernels only.
MODELS = ["llama", "gemma3", "gpt_oss"]
WAYS = ["position_ids", "cu_seq_lens", "both"]


@pytest.fixture
def replaced():
    undo = integration.replace(NAME)
    yield
    undo()


def steps(rank: int, attention: str, name: str) -> tuple[list, float, int]:
    """Return the loss and gradients for each way to pass boundaries, the worst error against eager
    by document, and the number of plans."""
    packed = Packed.of(LENGTHS[rank], seed=rank)
    model = pm.model_of(name, attn_implementation=attention)
    truth, first_plan = pm.true_step(model, packed), distca.init().num_plans
    results = [pm.step(model, packed, way) for way in WAYS]
    assert model.config._attn_implementation == attention
    worst = max(pm.worst_error(result, truth) for result in results)
    return results, worst, distca.init().num_plans - first_plan


def train_under_both_names(rank: int, world_size: int, name: str) -> tuple[bool, float, int, int]:
    """Return whether all bits are equal, the worst error and both numbers of plans."""
    ours, _, own_plans = steps(rank, "distca", name)
    undo = integration.replace(NAME)
    theirs, worst, num_plans = steps(rank, NAME, name)
    undo()
    is_equal = all(
        torch.equal(a[0], b[0]) and all(torch.equal(a[1][each], b[1][each]) for each in a[1])
        for a, b in zip(ours, theirs, strict=True)
    )
    return is_equal, worst, own_plans, num_plans


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_that_under_our_own_name(ranks, name):
    for is_equal, worst, own_plans, num_plans in ranks(2).run(train_under_both_names, name):
        assert is_equal and worst <= TOLERANCE and num_plans == own_plans > 0


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_generation(replaced, name):
    packed = Packed.of([9, 1, 14])
    model = pm.model_of(name, attn_implementation=NAME, pad_token_id=0).eval()
    eager = pm.with_attention(model, "eager")
    logits = model(**packed.keywords()).logits
    assert pm.relative_error(logits, pm.true_logits(model, packed)) <= TOLERANCE
    ids = packed.ids.view(2, 12) % (pm.VOCAB_SIZE - 1) + 1
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    for how in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        results = [
            each.generate(ids, attention_mask=padding, disable_compile=True, **options, **how)
            for each in (model, eager)
        ]
        assert torch.equal(*results), how


def test_padding_is_refused_in_training(replaced):
    model, ids = pm.model_of("llama", attn_implementation=NAME), torch.ones(1, 11).long()
    with pytest.raises(ValueError, match="attention_mask has .*3 of 11 tokens are padding"):
        model(ids, attention_mask=torch.tensor([[1] * 8 + [0] * 3]))


def test_a_sharded_row_is_refused(replaced):
    model, ids = pm.model_of("llama", attn_implementation=NAME), torch.ones(1, 11).long()
    with pytest.raises(ValueError, match="position_ids is 512 at token 0"):
        model(ids, position_ids=torch.arange(512, 523)[None])


def test_models_with_their_own_attention_are_not_built(replaced):
    with pytest.raises(ValueError, match=f"attn_implementation is '{NAME}', but .* of its own"):
        families.model_of("falcon", NAME)


def test_a_model_switched_to_the_name_is_checked(replaced):
    model = families.model_of("mamba", "eager").train()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=f"attn_implementation is '{NAME}', but no layer of Mamba"):
        model(input_ids=torch.arange(5)[None])


def test_undo_restores_what_was_there():
    kinds = (AttentionInterface, AttentionMaskInterface)
    before = [kind()[NAME] for kind in kinds]
    undo = integration.replace(NAME)
    assert AttentionInterface()[NAME] is integration.attention_forward
    assert AttentionMaskInterface()[NAME] is integration.forward_mask
    model = pm.model_of("llama", attn_implementation=NAME)
    undo()
    assert [kind()[NAME] for kind in kinds] == before
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ImportError, match="(?i)flash"):
            pm.model_of("llama", attn_implementation=NAME)
    model.set_attn_implementation("eager")
    assert model(**Packed.of([5, 3]).keywords()).logits.isfinite().all()


@pytest.mark.parametrize("name", ["distca", "flash_attention", "eager", None])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"name is .*; expected one of \[.*'flash_attention_2'"):
        integration.replace(name)


def test_a_name_is_replaced_once(replaced):
    with pytest.raises(ValueError, match=f"name is '{NAME}'; expected one of"):
        integration.replace(NAME)


def test_the_launcher_replaces_a_name(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, transformers\n"
        "from distca.integrations.transformers import attention_forward\n"
        f"assert transformers.AttentionInterface()['{NAME}'] is attention_forward\n"
        "assert sys.argv[1:] == ['--its-own']\n"
    )
    undone = []
    replace = integration.replace
    monkeypatch.setattr(integration, "replace", lambda name: undone.append(replace(name)))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    run.main(["--transformers", "--replace-attention", NAME, str(script), "--its-own"])
    undone.pop()()
    sessions.configure(distca.Options())


def test_the_launcher_needs_transformers_to_replace_a_name():
    with pytest.raises(ValueError, match="replace_attention is 'sdpa', transformers False"):
        run.Launch(replace_attention="sdpa")
