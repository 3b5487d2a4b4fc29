"""Decoder layers of transformers have the same results in ping-pong, on gloo ranks."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import packed_models as pm  # noqa: E402
import transformers  # noqa: E402
from packed_models import LENGTHS, Packed  # noqa: E402

import distca  # noqa: E402
from distca.integrations import transformers as integration  # noqa: E402
from distca.ranks import session as sessions  # noqa: E402

TOLERANCE = 1e-5


def checkpoint(model, use_reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()


def model_errors(rank: int, world_size: int, name: str) -> dict[str, float]:
    """Return, for each way to train, the worst error against eager by document."""
    packed = Packed.of(LENGTHS[rank], seed=rank)
    changes = {"attn_temperature_tuning": False} if name == "llama4" else {}
    model = integration.ping_pong(pm.model_of(name, **changes))
    truth = pm.true_step(pm.model_of(name, **changes), packed)
    by_way = {}
    for way in ("position_ids", "cu_seq_lens", "both", "checkpoint", "reentrant"):
        if way in ("checkpoint", "reentrant"):
            checkpoint(model, way == "reentrant")
        before = [half.num_plans for half in sessions.init().halves] or [0, 0]
        by_way[way] = pm.worst_error(pm.step(model, packed, way), truth)
        after = [half.num_plans for half in sessions.find().halves]
        assert all(a > b for a, b in zip(after, before, strict=True)), f"{way}: whole"
    return by_way


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_loss_and_gradients_equal_eager_by_document(ranks, name):
    for by_way in ranks(2).run(model_errors, name):
        assert max(by_way.values()) <= TOLERANCE, by_way


def trained_error(rank: int, world_size: int, folder: str) -> float:
    """Save a model, load it as with the launcher's flag, and return the error of a step."""
    bare, packed = pm.model_of("llama"), Packed.of(LENGTHS[rank], seed=rank)
    bare.save_pretrained(folder)  # by rank 0 alone
    torch.distributed.barrier()
    stock = transformers.PreTrainedModel.post_init
    integration.ping_pong_built_models()
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, attn_implementation="distca").train()
        plain = load(folder, attn_implementation="eager")
    finally:
        transformers.PreTrainedModel.post_init = stock
    assert not any(isinstance(layer, distca.PingPong) for layer in plain.model.layers)
    assert all(isinstance(layer, distca.PingPong) for layer in model.model.layers)
    return pm.worst_error(pm.step(model, packed), pm.true_step(bare, packed))


def test_models_are_built_in_ping_pong(ranks, tmp_path):
    assert max(ranks(2).run(trained_error, str(tmp_path))) <= TOLERANCE


def test_accelerate_finds_the_layers_to_shard():
    utilities = pytest.importorskip("accelerate.utils.dataclasses")
    model = integration.ping_pong(pm.model_of("llama"))
    for name in model._no_split_modules:
        assert utilities.get_module_class_from_name(model, name) is type(model.model.layers[0])


def evaluates_here(rank: int, world_size: int) -> float:
    """Evaluate on rank 0 only, before a session is open, and return the error."""
    distca.close()
    model, packed = integration.ping_pong(pm.model_of("llama")), Packed.of(LENGTHS[rank])
    if rank == 0:
        model.eval()
        with torch.no_grad():
            logits = model(**packed.keywords()).logits
        return pm.relative_error(logits, pm.true_logits(pm.model_of("llama").eval(), packed))
    return 0.0


def test_evaluation_stays_on_its_rank(ranks):
    assert max(ranks(2).run(evaluates_here, timeout_s=60)) <= TOLERANCE


def test_layers_keep_their_names_and_class():
    bare, model = pm.model_of("llama"), integration.ping_pong(pm.model_of("llama"))
    assert list(model.state_dict()) == list(bare.state_dict())
    layers = model.model.layers
    assert all(isinstance(layer, distca.PingPong) for layer in layers) and len(layers) == 3
    assert all(isinstance(layer, type(bare.model.layers[0])) for layer in layers)


def refused_batch(rank: int, world_size: int) -> str:
    model = integration.ping_pong(pm.model_of("llama"))
    with pytest.raises(ValueError) as refused:
        model(torch.ones(2, 5, dtype=torch.int64))
    return str(refused.value)


def test_a_batch_of_rows_is_refused(ranks):
    for message in ranks(2).run(refused_batch, timeout_s=60):
        assert "hidden_states has shape [2, 5, 32] in ping-pong; expected one row" in message
    ranks(2).run(start_again)


def tuned_by_position(rank: int, world_size: int) -> None:
    model, packed = integration.ping_pong(pm.model_of("llama4")), Packed.of(LENGTHS[rank])
    model(**packed.keywords())


def test_queries_that_depend_on_positions_are_refused(ranks):
    for outcome in ranks(2).outcomes(tuned_by_position, timeout_s=60):
        assert "attn_temperature_tuning is True in Llama4TextAttention in ping" in outcome.error
    ranks(2).run(start_again)


def start_again(rank: int, world_size: int) -> None:
    distca.close()


def test_other_models_are_refused():
    model = pm.model_of("llama")
    del model.model.layers[:]
    with pytest.raises(ValueError, match="LlamaForCausalLM has no decoder layers that distca"):
        integration.ping_pong(model)
