"""examples/rl_lengths.py: its samples and micro-batches, and its table."""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import run_command
from programs import run_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import rl_lengths  # noqa: E402
from rl_lengths import WAYS, Outcome, lengths_of_step, show  # noqa: E402

SCRIPT = ROOT / "examples" / "rl_lengths.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def test_lengths_have_a_long_tail_and_depend_on_the_seed():
    lengths = lengths_of_step(1000, 1200, seed=3)
    assert lengths == lengths_of_step(1000, 1200, seed=3) != lengths_of_step(1000, 1200, seed=4)
    assert min(lengths) >= 2 and max(lengths) == 1200
    assert 80 <= sorted(lengths)[500] <= 125 and 5 <= lengths.count(1200) <= 50


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_micro_batches_hold_every_sample_once(way, num_ranks):
    lengths = lengths_of_step(50, 600, seed=0)
    held = WAYS[way][0](lengths, num_ranks, 700)
    assert {len(each) for each in held} == {num_ranks}
    assert sorted(itertools.chain(*itertools.chain(*held))) == list(range(50))
    assert all(sum(lengths[i] for i in each) <= 700 for each in itertools.chain(*held))


def test_the_example_trains_every_way_alike(tmp_path):
    flags = ["--steps", "2", "--samples", "16", "--longest", "128"]
    result = run_ranks([SCRIPT, *flags], 2, ENVIRONMENT, tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(any(line.startswith(way) for line in result.stdout.splitlines()) for way in WAYS)
    assert "largest difference of log-probabilities" in result.stdout


def test_a_way_that_trains_something_else_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(rl_lengths.torch.cuda, "is_available", lambda: False)
    outcome = Outcome(2.0, 100, 1.5, 10.0, 2.0, -6.0)
    assert show({"one": outcome, "other": replace(outcome, log_prob=-6.00001)}) is None
    assert "differ by 1.0e-03" in show({"one": outcome, "other": replace(outcome, log_prob=-6.001)})


def test_lengths_are_written_without_ranks(tmp_path):
    flags = ["--steps", "3", "--samples", "5", "--longest", "100", "--write", tmp_path / "a.json"]
    command = [sys.executable, SCRIPT, *flags]
    assert (
        run_command([str(each) for each in command], cwd=tmp_path, env=ENVIRONMENT).returncode == 0
    )
    drawn = [lengths_of_step(5, 100, seed) for seed in range(3)]
    assert json.loads((tmp_path / "a.json").read_text()) == sum(drawn, [])


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    command = [sys.executable, str(SCRIPT), "--write", str(tmp_path)]
    result = run_command(command, cwd=tmp_path, env=ENVIRONMENT)
    assert result.returncode == 2
    assert f"--write {tmp_path} cannot be written: Is a directory" in result.stderr
