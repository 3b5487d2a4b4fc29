"""Trainer, SFTTrainer and FSDP2 through accelerate have equal losses with and without distca."""

import os
import re
import sys
from pathlib import Path

import pytest
from processes import run_command
from programs import run_ranks
from ranks import Ranks

for library in ("transformers", "accelerate", "datasets", "trl"):
    pytest.importorskip(library, reason=f"needs {library}, and this environment has none")

import trainer_runs as runs  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

import distca  # noqa: E402
from distca import run  # noqa: E402
from distca.ranks import session  # noqa: E402

LARGEST_DIFFERENCE = 1e-4  # of two losses in float32
LARGEST_BFLOAT16_DIFFERENCE = 2e-2
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def two_ranks():
    """Start ranks for this module alone, because accelerate leaves state in its processes."""
    started = Ranks(2)
    yield started
    started.stop()


def difference(results: list[tuple], truth: list[tuple], num_plans: int) -> float:
    """Return the largest difference of losses.

    Assert that distca's run has `num_plans` plans and the other run none.
    """
    for (losses, own_plans), (true_losses, true_plans) in zip(results, truth, strict=True):
        assert own_plans == num_plans and true_plans == 0
        assert len(losses) == len(true_losses) > 1
        assert max(losses) - min(losses) > 100 * LARGEST_DIFFERENCE, "nothing was learned"
    return max(
        abs(a - b)
        for ours, torchs in zip(results, truth, strict=True)
        for a, b in zip(ours[0], torchs[0], strict=True)
    )


TRAINERS = {  # model, arguments of collator and Trainer, plans per step
    "position_ids": ("llama", {}, {}, 1),
    "cu_seq_lens": ("mistral", {"return_flash_attn_kwargs": True}, {}, 1),
    "cu_seq_lens alone": (
        "gemma3",
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
        {},
        2,
    ),
    "accumulation and checkpointing": (
        "llama",
        {},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        2,
    ),
}


@pytest.mark.parametrize("case", TRAINERS)
def test_trainer(two_ranks, case):
    name, collator, options, plans_a_step = TRAINERS[case]
    results = two_ranks.run(runs.run_trainer, "distca", name, collator, options)
    truth = two_ranks.run(runs.run_trainer, "sdpa", name, {}, options)
    assert difference(results, truth, plans_a_step * runs.NUM_STEPS) <= LARGEST_DIFFERENCE


def test_the_comparison_notices_lost_boundaries(two_ranks):
    collator = {"return_position_ids": False}
    lost = two_ranks.run(runs.run_trainer, "sdpa", "llama", collator, {})
    truth = two_ranks.run(runs.run_trainer, "sdpa", "llama", {}, {})
    assert difference(lost, truth, 0) > LARGEST_DIFFERENCE


def test_trainer_in_bfloat16_autocast(two_ranks):
    results, truth = (
        two_ranks.run(runs.run_trainer, attention, "qwen3", {}, {"bf16": True})
        for attention in ("distca", "sdpa")
    )
    assert difference(results, truth, runs.NUM_STEPS) <= LARGEST_BFLOAT16_DIFFERENCE


def test_sft_trainer_with_packing(two_ranks):
    results, truth = (two_ranks.run(runs.run_sft, attention) for attention in ("distca", "sdpa"))
    assert difference(results, truth, runs.NUM_STEPS) <= LARGEST_DIFFERENCE


@pytest.mark.parametrize(
    "precision, recompute, limit",
    [
        ("fp32", False, LARGEST_DIFFERENCE),
        ("fp32", True, LARGEST_DIFFERENCE),
        ("bf16", True, LARGEST_BFLOAT16_DIFFERENCE),
    ],
)
def test_fsdp2_through_accelerate(two_ranks, precision, recompute, limit):
    results, truth = (
        two_ranks.run(runs.run_fsdp2, attention, precision, recompute)
        for attention in ("distca", "sdpa")
    )
    assert difference(results, truth, 6) <= limit


def test_the_launcher_registers_the_attention(tmp_path, monkeypatch):
    script, module = tmp_path / "script.py", "distca.integrations.transformers"
    script.write_text("import sys\nassert sys.argv[1:] == ['--its-own']\n")
    for kind in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setitem(kind._global_mapping, "distca", None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    run.main(["--transformers", str(script), "--its-own"])
    session.configure(distca.Options())
    registered = sys.modules[module]
    assert AttentionInterface()["distca"] is registered.attention_forward
    assert AttentionMaskInterface()["distca"] is registered.forward_mask


ACCELERATE = [
    # Without --multi_gpu it starts one process on a machine without GPUs.
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("-m", "distca.run", "--transformers"),
]


@pytest.mark.parametrize(
    "by_accelerate, name",
    [
        (False, "transformers_finetune.py"),
        (False, "trl_packing.py"),
        (True, "transformers_finetune.py"),
    ],
)
def test_the_example_trains(tmp_path, by_accelerate, name):
    command = [ROOT / "examples" / name, "--steps", "5", "--out", tmp_path]
    if by_accelerate:
        result = run_command([sys.executable, "-m", *ACCELERATE, *command], env=ENVIRONMENT)
    else:
        result = run_ranks(command, 2, ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", result.stdout).groups())
    before, after = map(float, re.search(r"imbalance (\S+) -> (\S+)", result.stdout).groups())
    assert last < first and after < before
