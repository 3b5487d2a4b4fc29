"""Servers without a model on GPUs. Ranks share devices where there are fewer than four."""

import os
from dataclasses import replace

import oracle
import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from test_servers import CAUSAL, SLIDING, Run, train

import distca

pytestmark = pytest.mark.gpu

WHOLE = Case([[3000, 110], [50], [70, 2]], 8, 2, 64, dtype=torch.bfloat16)
ACROSS = Case([[10, 500], [1000, 4000], [30]], 8, 2, 64, sharded=True, dtype=torch.bfloat16)
EMPTY = Case([[], [4110, 3], [7]], 8, 2, 64, dtype=torch.bfloat16, seed=1)
WINDOWS = (CAUSAL, SLIDING)
OPTIONS = distca.Options(**MOVE_ALWAYS, timeout_s=60)
KEEPING = replace(OPTIONS, keep_inputs_gb=1.0)
RUNS = {
    "whole": Run((3,), (WHOLE,), WINDOWS, OPTIONS),
    "across": Run((3,), (ACROSS,), WINDOWS, OPTIONS),
    "checkpointed": Run((3,), (WHOLE,), WINDOWS, OPTIONS, is_checkpointed=True),
    "accumulated, ahead": Run((3,), (EMPTY, WHOLE, ACROSS), WINDOWS, OPTIONS, ahead=True),
    "kept": Run((3,), (WHOLE, ACROSS), WINDOWS, KEEPING),
    "kept, compiled": Run((3,), (ACROSS, WHOLE), WINDOWS, KEEPING, is_compiled=True),
    "dedicated": Run((3,), (ACROSS,), WINDOWS, replace(KEEPING, server_speeds="0*3,1")),
}


@pytest.fixture(scope="module")
def four():
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started = Ranks(4, "nccl")
    yield started
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    started.stop()


def sums_over_windows(case: Case, windows: tuple, dtype: torch.dtype) -> list:
    cases = [replace(case, window_size=window) for window in windows]
    results = [oracle.forward_backward(each, dtype) for each in cases]
    return [sum(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("transport", ["process_group", "peer"])
@pytest.mark.parametrize("name", RUNS)
def test_results_are_as_good_as_the_reference(four, name, transport):
    if transport == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    options = replace(RUNS[name].options, transport=transport)
    run = replace(RUNS[name], options=options, device="cuda")
    trained = four.run(train, run)[:3]
    for idx, case in enumerate(run.cases):
        truths = sums_over_windows(case, run.windows, torch.float64)
        reference = sums_over_windows(case, run.windows, case.dtype)
        limits = [2 * oracle.relative_error(*each) for each in zip(reference, truths, strict=True)]
        parts = zip(*(result[0][idx] for result in trained), strict=True)
        oracle.assert_close([torch.cat(each) for each in parts], truths, limits)
