"""torchtitan's Llama with our overrides has the results of its own varlen attention."""

import argparse
import dataclasses
import re
import shlex
import sys
import types
import unittest.mock
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from ranks import Ranks

pytest.importorskip("torchtitan", reason="needs torchtitan, and this environment has none")

import titan_model as tm  # noqa: E402
import torchtitan  # noqa: E402
from titan_model import titan  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.config.override import derive  # noqa: E402
from torchtitan.hf_datasets.text_datasets import (  # noqa: E402
    HuggingFaceTextDataLoader,
    HuggingFaceTextDataset,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import torchtitan_train  # noqa: E402

import distca  # noqa: E402
import distca.integrations.torchtitan as integration  # noqa: E402
import distca.integrations.torchtitan_batches as titan_batches  # noqa: E402
from distca.ranks.hints import hint  # noqa: E402

TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "world_size, tensor_parallel, backend",
    [
        (1, 1, "spmd_types"),
        (2, 1, "spmd_types"),
        (2, 1, "partial_dtensor"),
        (4, 1, "partial_dtensor"),
        (4, 2, "partial_dtensor"),
    ],
)
def test_llama_equals_its_own_varlen_attention(own_ranks, world_size, tensor_parallel, backend):
    results = own_ranks(world_size).run(tm.overridden_error, tensor_parallel, backend)
    for error, moved_mb in results:
        assert error <= TOLERANCE
        assert (moved_mb > 0) == (world_size > 1), "the case must move rows"


@pytest.mark.parametrize("ping_pong", [False, True])
def test_llama_equals_its_own_flex_attention(own_ranks, ping_pong):
    for error, moved_mb in own_ranks(2).run(tm.flex_error, ping_pong):
        assert error <= TOLERANCE and moved_mb > 0


@pytest.mark.parametrize("attn_backend", ["varlen", "flex"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_attention_sinks_and_windows_of_gpt_oss(own_ranks, world_size, attn_backend):
    assert max(own_ranks(world_size).run(tm.gpt_oss_error, attn_backend)) <= TOLERANCE


def test_the_comparison_notices_a_lost_boundary():
    batch = tm.Batch.of(tm.LENGTHS[0], seed=0)
    truth = tm.own_step(batch)
    batch.positions[1] = torch.arange(tm.SEQ_LEN)
    assert tm.worst_error(tm.own_step(batch), truth) > 100 * TOLERANCE


def test_selective_checkpointing_sends_no_row_twice(own_ranks):
    with_save, without = (
        own_ranks(2).run(tm.exchanges_with_checkpointing, overrides)
        for overrides in (tm.OVERRIDES, tm.OVERRIDES[:1])
    )
    for (saving, error), (sending_again, error_again) in zip(with_save, without, strict=True):
        assert 0 < saving < sending_again
        assert max(error, error_again) <= TOLERANCE


@pytest.mark.parametrize(
    "backend, checkpoint", [("spmd_types", False), ("partial_dtensor", False), ("spmd_types", True)]
)
def test_blocks_in_ping_pong_equal_torchtitans(own_ranks, backend, checkpoint):
    for error, num_plans in own_ranks(2).run(tm.ping_pong_error, backend, checkpoint):
        assert error <= TOLERANCE
        assert num_plans == [2, 2], "blocks ran whole"


def test_overrides_keep_the_fields_of_their_targets():
    config = tm.trainer_config([])
    attention = config.model_spec.model.layers[0].attention.inner_attention
    attention.window_size = (31, 0)
    config.metrics.log_freq = 7
    config.activation_checkpoint.preserve_rng_state = False
    tm.apply_overrides(tm.OverrideConfig(imports=tm.OVERRIDES), config)
    balanced = config.model_spec.model.layers[0].attention.inner_attention
    assert isinstance(balanced, integration.BalancedAttention.Config)
    assert balanced.sharding_config is attention.sharding_config is not None
    assert balanced.build().window_size == (31, 0)
    assert isinstance(config.metrics, integration.BalanceMetrics.Config)
    assert config.metrics.log_freq == 7
    saving = config.activation_checkpoint.build(dump_folder="")
    assert torch.ops.distca.core_attention.default in saving.get_save_ops()
    assert not config.activation_checkpoint.preserve_rng_state


def evaluate_unevenly(rank: int, world_size: int) -> tuple[float, int]:
    session = distca.init()
    model = tm.build(tm.OVERRIDES)[0].eval()
    num_plans, worst = session.num_plans, 0.0
    for seed in range(1 + rank):
        batch = tm.Batch.of(tm.LENGTHS[rank], seed)
        truth = tm.own_step(batch)[0]
        with torch.no_grad():
            worst = max(worst, abs(batch.loss(model).item() - truth) / truth)
    return worst, session.num_plans - num_plans


def evaluate_together(rank: int, world_size: int) -> tuple[float, int]:
    distca.close()
    distca.init(options=distca.Options(balance_no_grad=True))
    results = evaluate_unevenly(0, world_size)  # one batch on every rank
    distca.close()
    return results


def test_evaluation_is_balanced_on_request(own_ranks):
    for error, num_plans in own_ranks(2).run(evaluate_together):
        assert error <= TOLERANCE and num_plans == 1


def test_evaluation_stays_on_its_rank(own_ranks):
    for error, num_plans in own_ranks(2).run(evaluate_unevenly):
        assert error <= TOLERANCE and num_plans == 0


def layer_config(attn_backend: str):
    return tm.model_registry("debugmodel", attn_backend=attn_backend).model.layers[0].attention


def test_the_override_keeps_all_but_the_inner_attention():
    for attn_backend in ("flex", "varlen"):
        config = layer_config(attn_backend)
        balanced = integration.attention(config)
        assert type(balanced) is type(config)
        assert balanced.inner_attention.window_size == (127, 0)
        assert dataclasses.replace(balanced, inner_attention=config.inner_attention) == config


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("inner_attention", titan.ScaledDotProductAttention.Config(), "ScaledDotProductAttention"),
        ("window_pattern", [128, 0], r"window_pattern is \[128, 0\] in "),
    ],
)
def test_attention_that_the_override_cannot_replace_is_refused(field, value, message):
    config = layer_config("flex")

    @dataclasses.dataclass(kw_only=True)
    class Config(type(config)):
        window_pattern: list[int] | None = None

    with pytest.raises(ValueError, match=message):
        integration.attention(derive(config, Config, **{field: value}))


def test_a_model_that_is_not_balanced_is_named(caplog, monkeypatch):
    hint.cache_clear()
    monkeypatch.setattr(MetricsProcessor, "log", lambda self, *args: None)
    for is_in_use in (True, False):
        monkeypatch.setattr(integration.BalancedAttention, "is_in_use", is_in_use)
        caplog.clear()
        object.__new__(integration.BalanceMetrics).log(3, 2.0, 2.5, 0.1)
        assert ("so nothing is balanced" in caplog.text) == (not is_in_use)


def attention(**arguments) -> torch.Tensor:
    module = integration.BalancedAttention(integration.BalancedAttention.Config())
    q, k = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16)
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    defaults = {"attention_masks": titan.VarlenMetadata(bounds, bounds, 8, 8)}
    return module(q, k, k, **{**defaults, **arguments})


@pytest.mark.parametrize("missing, message", [("torch", "PyTorch 2"), ("os", "'Missing' from")])
def test_the_example_names_the_pytorch_it_needs(missing, message, monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text(f"from {missing} import Missing\n")
    monkeypatch.setattr(torchtitan, "__path__", [str(tmp_path)])
    monkeypatch.delattr(torchtitan, "train", raising=False)
    monkeypatch.delitem(sys.modules, "torchtitan.train", raising=False)
    with pytest.raises(ImportError, match=message) as raised:
        torchtitan_train.trainer()
    assert ("it needs one newer than 2.11" in str(raised.value)) == (missing == "torch")


def test_metadata_has_two_names():
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    metadata = titan.VarlenMetadata(bounds, bounds, 8, 8)
    out = attention(attention_masks=None, attention_metadata=metadata, enable_gqa=True)
    assert out.shape == (1, 8, 4, 16)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"attention_masks": None}, "attention metadata is a NoneType; expected VarlenMetadata"),
        ({"sinks": torch.ones(4)}, "sinks is given to BalancedAttention"),
        (
            {"attention_masks": titan.VarlenMetadata(*[torch.tensor([0, 7])] * 2, 7, 7)},
            "cu_seq_lens_q ends at 7",
        ),
    ],
)
def test_unsupported_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


def test_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attention()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    with pytest.raises(ValueError, match="--training.disable_cuda_graphs"):
        attention()


@pytest.mark.parametrize(
    "world_size, ranks_per_batch, num_rows, backend, ping_pong",
    [
        (2, 2, 1, "spmd_types", False),
        (2, 2, 1, "spmd_types", True),
        (4, 4, 2, "partial_dtensor", False),
        (4, 2, 1, "spmd_types", False),
        (2, 1, 2, "partial_dtensor", False),
    ],
)
def test_batches_cut_over_ranks_train_as_in_one_process(
    own_ranks, world_size, ranks_per_batch, num_rows, backend, ping_pong
):
    case = (ranks_per_batch, num_rows, backend, ping_pong)
    results = own_ranks(world_size).run(tm.shared_steps, *case)
    for error, are_ahead, moved_mb in results:
        assert error <= TOLERANCE and moved_mb > 0
        assert len(are_ahead) == 3 and all(are_ahead[1:])


@pytest.fixture
def own_masks():
    with tm.own_masks():
        yield


@pytest.fixture
def model():
    return tm.build(tm.OVERRIDES)[0]


def test_runs_make_up_the_batch(own_masks, model):
    whole = tm.RowLoader.batch(0, 0)
    runs = (next(iter(tm.loader_of(rank, 4, 4))) for rank in range(4))
    inputs, labels = zip(*runs, strict=True)

    def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.flatten() for part in parts]).view(2, tm.SEQ_LEN)

    assert torch.equal(joined(each["input"] for each in inputs), whole.tokens)
    assert torch.equal(joined(each["positions"] for each in inputs), whole.positions)
    assert torch.equal(joined(labels), whole.labels)


def test_a_loader_keeps_the_state_of_its_own(own_masks, model):
    loader = tm.loader_of(1, 2, 2)
    loader.load_state_dict({"dp_rank": 7})
    assert loader.state_dict() == {"dp_rank": 7}


def test_a_batch_that_was_not_loaded_next_is_refused(own_masks, model):
    batches = [tm.RowLoader.batch(0, rank) for rank in range(2)]
    for _ in tm.loader_of(0, 1, 1, num_batches=2):
        pass
    batches[0].loss(model)
    with pytest.raises(ValueError, match="expected batches in the order of loading"):
        batches[1].loss(model)


def test_all_ranks_learn_of_a_batch_that_one_cannot_load():
    lost = Ranks(2)
    try:
        for outcome in lost.outcomes(tm.step_on_a_bad_batch):
            assert "position_ids is 99 at token 5 of row 0" in outcome.error
    finally:
        lost.stop()


def test_copies_of_metadata_are_refused(own_masks, model):
    ((inputs, _),) = tm.loader_of(0, 2, 2, num_rows=1)
    packing = model.get_attention_masks(inputs["positions"])
    copied = packing._replace(cu_seq_q=packing.cu_seq_q.clone())
    with pytest.raises(ValueError, match="cu_seq_lens_k has 0 boundaries and differs"):
        model(inputs["input"], inputs["positions"], copied)


def test_models_whose_layers_look_across_runs_are_refused(own_masks, model):
    ((inputs, _),) = tm.loader_of(0, 2, 2)
    model.mtp_layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="has layers other than attention that need tokens"):
        model.get_attention_masks(inputs["positions"])


def test_models_without_balanced_attention_are_refused(own_masks, monkeypatch):
    monkeypatch.setattr(integration.BalancedAttention, "is_in_use", False)
    with pytest.raises(ValueError, match="no layer of the model has balanced attention"):
        tm.loader_of(0, 2, 2)


@pytest.mark.parametrize("num_ranks", [0, 3, 1.0])
def test_batches_that_cannot_be_cut_are_refused(own_masks, num_ranks):
    with pytest.raises(ValueError, match=f"ranks_per_batch is {num_ranks}; expected a divisor"):
        tm.loader_of(0, 4, num_ranks)


def test_context_parallel_is_refused():
    module = integration.BalancedAttention(integration.BalancedAttention.Config())
    remedy = 'context_parallel_degree is 2; expected 1 .*batches={"ranks_per_batch": 2}'
    with pytest.raises(ValueError, match=remedy):
        module.parallelize(types.SimpleNamespace(cp_enabled=True, cp=2))


def test_ping_pong_refuses_tensor_parallelism_and_several_rows():
    module = integration.BalancedAttention(integration.BalancedAttention.Config(ping_pong=True))
    dims = types.SimpleNamespace(cp_enabled=False, tp_enabled=True, tp=2)
    with pytest.raises(ValueError, match="ping_pong is True and tensor_parallel_degree is 2"):
        module.parallelize(dims)
    session = unittest.mock.MagicMock()
    with (
        unittest.mock.patch.object(module, "_session", lambda: session),
        pytest.raises(ValueError, match="shape \\[2, 8, 4\\] and positions of type NoneType"),
    ):
        module.documents_of_block((torch.zeros(2, 8, 4), None, None), {})
    session.announce.assert_called_once()


def test_compiled_blocks_are_refused_with_the_flag_to_change():
    model, _ = tm.build(tm.OVERRIDES)
    for layer in model.layers.values():
        layer.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="--compile.components"):
        tm.Batch.of(tm.LENGTHS[0], seed=0).loss(model)


def train_without_parallelize(rank: int, world_size: int) -> str:
    distca.close()
    try:
        tm.Batch.of(tm.LENGTHS[rank], seed=0).loss(tm.build(tm.OVERRIDES)[0])
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_without_a_group_raises_an_error(own_ranks):
    for message in own_ranks(2).run(train_without_parallelize):
        assert "was not parallelized" in message and "distca.init(group)" in message


def figures(rank: int, world_size: int) -> dict[str, float]:
    distca.init()
    model, _ = tm.build(tm.OVERRIDES)
    integration.recent_figures()
    for seed in range(2):
        tm.step(model, tm.Batch.of(tm.LENGTHS[rank], seed))
    recent = integration.recent_figures()
    assert integration.recent_figures() == {}
    return recent


def test_metrics_show_the_balance(own_ranks, monkeypatch):
    ours = own_ranks(2).run(figures)[0]
    assert ours["imbalance_before"] > ours["imbalance_after"] >= 1 and ours["moved_mb"] > 0
    logged = []
    monkeypatch.setattr(MetricsProcessor, "log", lambda self, *args: logged.append(args))
    monkeypatch.setattr(integration, "recent_figures", lambda: ours)
    processor = object.__new__(integration.BalanceMetrics)
    processor.log(3, 2.0, 2.5, 0.1, extra_metrics={"lr": 1e-3})
    assert logged[0][:4] == (3, 2.0, 2.5, 0.1)
    assert logged[0][4] == {"lr": 1e-3} | {f"distca/{name}": ours[name] for name in ours}


def test_the_metrics_open_the_group_if_no_module_is_parallelized(monkeypatch):
    opened = []
    monkeypatch.setattr(integration.sessions, "init", opened.append)
    monkeypatch.setattr(MetricsProcessor, "__init__", lambda self, config, **kwargs: None)
    dims = types.SimpleNamespace(get_activated_mesh=lambda axes: f"the mesh {axes}")
    integration.BalanceMetrics(None, parallel_dims=dims)
    assert opened == ["the mesh ['batch']"]


def test_the_documented_command_configures_torchtitan():
    page = (Path(__file__).parent.parent / "docs" / "torchtitan.md").read_text()
    command, _ = re.findall(r"-m torchtitan\.train (.*?)^```", page, re.DOTALL | re.MULTILINE)
    config = ConfigManager().parse_args(shlex.split(command.replace("\\\n", " ")))
    assert config.override.imports == [tm.PREFIX + "attention", *tm.OVERRIDES[1:]]
    assert config.training.disable_cuda_graphs
    layer = config.model_spec.model.layers[0]
    assert type(layer.attention.inner_attention) is integration.FlexAttention.Config


def test_the_example_configures_torchtitan(tmp_path, monkeypatch):
    texts = [b"def f(x):\n    return x\n", b"class A:\n    pass\n"]
    monkeypatch.setattr(torchtitan_train.stdlib_corpus, "all_documents", lambda: texts)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["x", "--steps", "7", "--training.seq_len", "64"])
    args, others = torchtitan_train.arguments()
    torchtitan_train.prepare(tmp_path)
    config = ConfigManager().parse_args([*torchtitan_train.titan_flags(args, tmp_path), *others])
    assert (config.training.steps, config.training.seq_len) == (7, 64)
    assert config.override.imports == tm.OVERRIDES
    tokenizer = HuggingFaceTokenizer(tokenizer_path=config.hf_assets_path)
    dataset = HuggingFaceTextDataset(
        "c4_test", config.dataloader.dataset_path, tokenizer, seq_len=24
    )
    inputs, labels = next(iter(dataset))
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    tokens = [*inputs["input"].tolist(), labels[-1].item()]
    assert tokens[0] == begin and end not in tokens[:17] and max(tokens) < 2048
    assert tokenizer.decode(tokens[1:17]) in texts[1].decode() + texts[0].decode()
    own = argparse.Namespace(attention="own", steps=1, out=tmp_path)
    assert "--override.imports" not in torchtitan_train.titan_flags(own, tmp_path)


def test_the_command_line_cuts_batches():
    page = (Path(__file__).parent.parent / "docs" / "torchtitan.md").read_text()
    (token,) = re.findall(r"'(distca\.integrations\.\w+\.batches=.*?)'$", page, re.MULTILINE)
    model = ["--module", "llama3", "--config", "llama3_debugmodel_varlen_attn"]
    config = ConfigManager().parse_args([*model, "--override.imports", token])
    tm.apply_overrides(config.override, config)
    assert config.dataloader.ranks_per_batch == 8
    assert isinstance(config.dataloader.loader, HuggingFaceTextDataLoader.Config)
    assert not isinstance(config.validator.dataloader, titan_batches.SharedBatches.Config)
