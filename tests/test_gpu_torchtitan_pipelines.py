"""Losses of torchtitan's trainer with pooled stages, on two CUDA devices."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan, and this environment has none")

import torch  # noqa: E402
from programs import run_ranks  # noqa: E402
from titan_losses import OURS, OWN, WRONG  # noqa: E402

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent / "titan_losses.py"
NUM_STEPS = 20


def test_losses_differ_by_at_most_twice_the_noise(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, one for each rank of the pipeline")
    out = tmp_path / "losses.json"
    command = [SCRIPT, "--steps", NUM_STEPS, "--out", out]
    result = run_ranks(command, 2, dict(os.environ), timeout_s=400)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    found = json.loads(out.read_text())
    losses, differences = found["losses"], found["differences"]
    assert all(len(each) == NUM_STEPS and each[-1] < each[0] for each in losses.values())
    limit = 2 * max(differences[name] for name in OWN if name in differences)
    assert differences[OURS] <= limit < differences[WRONG]
    assert found["moved_mb"][OURS] > 0, "plans must move rows"
