"""Steps of torchtitan's trainer with pipelines, balanced over all stages and in each stage."""

import json
import os
import re
import shlex
import types
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan, and this environment has none")

import titan_model as tm  # noqa: E402
import titan_pipelines  # noqa: E402
import torch  # noqa: E402
from programs import run_ranks  # noqa: E402
from titan_losses import OURS, OWN, WRONG  # noqa: E402
from titan_pipelines import Case  # noqa: E402
from torchtitan.config import ConfigManager, ParallelismConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402

import distca.integrations.torchtitan as integration  # noqa: E402
from distca.integrations import torchtitan_pipelines as pipelines  # noqa: E402

TOLERANCE = 1e-5

CASES = {
    "pooled": Case(),
    "pooled, interleaved": Case("Interleaved1F1B", options={"max_in_flight": 2}),
    "pooled, full checkpointing": Case(checkpointing="full"),
    "pooled, split": Case(checkpointing="none", options={"split_backward": True}),
    "1F1B": Case("1F1B", is_pooled=False),
    "Interleaved1F1B": Case("Interleaved1F1B", is_pooled=False),
    # In ZBVZeroBubble and DualPipeV a rank sends to itself, and gloo cannot do that.
    "InterleavedZeroBubble": Case("InterleavedZeroBubble", is_pooled=False, checkpointing="none"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_equals_one_process(own_ranks, name):
    for error, moved_mb in own_ranks(4).run(titan_pipelines.train, CASES[name]):
        assert error <= TOLERANCE
        assert moved_mb > 0, "the case must move rows"


def test_stages_share_attention_without_data_parallel_ranks(own_ranks):
    for error, moved_mb in own_ranks(2).run(titan_pipelines.train, Case(backend="spmd_types")):
        assert error <= TOLERANCE and moved_mb > 0


def test_the_trainer_has_the_losses_of_its_own_schedule(tmp_path):
    out = tmp_path / "losses.json"
    command = [Path(__file__).parent / "titan_losses.py", "--device", "cpu", "--dtype", "float32"]
    result = run_ranks([*command, "--steps", 2, "--out", out], 2, dict(os.environ))
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert all(last < first for first, last in found["losses"].values())
    differences = found["differences"]
    for name in (OURS, *OWN):
        assert differences.get(name, 0) <= TOLERANCE, name
    assert differences[WRONG] > TOLERANCE
    assert found["moved_mb"][OURS] > 0, "plans must move rows"


@pytest.fixture
def balanced(monkeypatch):
    monkeypatch.setattr(integration.BalancedAttention, "axes", ["batch"])
    monkeypatch.setattr(integration.BalancedAttention, "is_in_use", True)
    monkeypatch.setattr(integration.BalancedAttention, "runs", 1)


def build(ac_config=None, options: dict | None = None, **parallelism) -> None:
    options = {"max_in_flight": None, "split_backward": False, **(options or {})}
    arguments = {"parallelism": ParallelismConfig(**parallelism), "ac_config": ac_config}
    pipelines.pipeline(None, options, None, **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2; expected 1 with distca's"),
        ({"context_parallel_degree": 4}, "context_parallel_degree is 4; expected 1"),
        ({"spmd_backend": "full_dtensor"}, "spmd_backend is 'full_dtensor'; expected spmd_types"),
        ({"pipeline_parallel_schedule": "ZBVZeroBubble"}, "'ZBVZeroBubble'; expected 1F1B for one"),
        ({"pipeline_parallel_schedule_csv": "a.csv"}, "schedule_csv is 'a.csv'; expected none"),
        ({"ac_config": SelectiveAC.Config()}, "expected the override .*selective_checkpoint"),
        (
            {"ac_config": FullAC.Config(), "options": {"split_backward": True}},
            "split_backward is True with activation_checkpoint",
        ),
    ],
)
def test_what_the_schedule_does_not_support_is_refused(balanced, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


@pytest.mark.parametrize(
    "name, value, message",
    [("is_in_use", False, "no layer of the model has balanced"), ("runs", 2, "ping_pong is True")],
)
def test_attention_that_stages_cannot_share_is_refused(balanced, monkeypatch, name, value, message):
    monkeypatch.setattr(integration.BalancedAttention, name, value)
    with pytest.raises(ValueError, match=message):
        build()


def test_models_without_pipelines_are_refused(balanced):
    config = tm.trainer_config([])
    config.model_spec.pipelining_fn = None
    with pytest.raises(ValueError, match="pipelining_fn is None for llama3"):
        pipelines.pooled(config)


def test_micro_batches_without_documents_of_this_rank_are_refused(balanced, monkeypatch):
    schedule = object.__new__(pipelines.TrainerSchedule)
    schedule._pool = types.SimpleNamespace(session=types.SimpleNamespace(announce=lambda *_: None))
    with pytest.raises(ValueError, match=r"a micro-batch has \['attention_masks'\]; expected pos"):
        schedule.step(kwarg_mbs=[{"attention_masks": None}])
    crossing = types.SimpleNamespace(here=types.SimpleNamespace(crosses_ranks=True))
    monkeypatch.setattr(pipelines, "boundaries_of_metadata", lambda *_: crossing)
    with pytest.raises(ValueError, match="documents cross ranks; expected ranks_per_batch 1"):
        schedule.step(kwarg_mbs=[{"attention_masks": None, "positions": torch.zeros(1, 8)}])


def test_the_documented_configuration_pools_stages(balanced, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "torchtitan.md").read_text()
    (module,) = re.findall(r"^```python\n(# my_configs.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_configs.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    _, command = re.findall(r"-m torchtitan\.train (.*?)^```", page, re.DOTALL | re.MULTILINE)
    config = ConfigManager().parse_args(shlex.split(command.replace("\\\n", " ")))
    assert config.model_spec.pipelining_fn.func is pipelines.pipeline
    assert integration.BalancedAttention.axes == ["pp", "batch"]
    tm.apply_overrides(config.override, config)
    pipelines._check(config.parallelism, config.activation_checkpoint, False)
