"""The check of results in benchmarks/attention.py, on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from attention_cases import Heads, dense_case  # noqa: E402
from attention_check import NAMES, Checker  # noqa: E402
from attention_peers import distca_runner  # noqa: E402


def checked(heads: Heads):
    """Return a checker of two documents of 48 tokens, and distca's results by name."""
    case = dense_case(heads, 48, torch.device("cpu"), tokens=96)
    inputs = case.inputs(0, torch.bfloat16)
    calls = distca_runner(case, inputs).calls
    results = dict(zip(NAMES, (calls["forward"](), *calls["backward"]()), strict=True))
    return Checker(case, inputs), results


HEADS = [Heads(4, 2, 32, 32), Heads(4, 4, 48, 32)]


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.dims)
def test_right_results_have_no_errors(heads):
    checker, results = checked(heads)
    assert checker.errors(**results) == []


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.dims)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", [0.5, float("nan")])
def test_a_wrong_row_is_found(heads, name, fault):
    checker, results = checked(heads)
    results[name][-1, -1] += fault  # of the last document and the last key head
    (line,) = checker.errors(**results)
    assert line.startswith(f"{name}: error") and "document at key row 48" in line
