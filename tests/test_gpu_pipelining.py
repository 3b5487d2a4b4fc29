"""Pipelines whose stages share attention, on CUDA devices. Ranks may share devices."""

import dataclasses

import pipelined
import pytest
import torch
from ranks import Ranks
from test_pipelining import CASES

from distca.watching.trace import read_times

pytestmark = pytest.mark.gpu

SLOW_RANK, SLOW_S = 0, 0.03
NAMES = ["4 micro-batches", "windows", "checkpointing, windows, DDP", "interleaved", "split"]


@pytest.fixture(scope="module", params=[2, 4])
def gpu_ranks(request):
    started = Ranks(request.param, "nccl")
    yield started
    started.stop()


@pytest.mark.parametrize("name", NAMES)
def test_within_twice_the_error_of_one_process(gpu_ranks, name):
    case = dataclasses.replace(CASES[name], device="cuda", attention_dtype=torch.bfloat16)
    sizes = (sum(case.layers), case.windows, case.num_micro_batches, gpu_ranks.world_size // 2)
    truth = pipelined.true_step(*sizes)
    rounded = pipelined.errors_of(*pipelined.true_step(*sizes, torch.bfloat16), truth)
    limit = 2 * max(rounded.values())
    seen = set()
    for loss, gradients, bytes_moved in gpu_ranks.run(pipelined.train_step, case):
        assert bytes_moved > 0, "the case must move rows"
        assert max(pipelined.errors_of(loss, gradients, truth).values()) <= limit
        seen |= set(gradients)
    assert seen == set(truth[1])


def test_ticks_are_timed_on_devices(gpu_ranks, tmp_path):
    case = dataclasses.replace(
        CASES["4 micro-batches"], device="cuda", attention_dtype=torch.bfloat16
    )
    plans = gpu_ranks.run(pipelined.timed_step, case, str(tmp_path), SLOW_RANK, SLOW_S)
    names = list(dict.fromkeys(name for name, _ in plans[0]))
    saved = read_times(tmp_path / "ticks")
    assert [each["rank"] for each in saved] == list(range(gpu_ranks.world_size))
    for each in saved:
        assert [tick["name"] for tick in each["ticks"]] == names
        for tick in each["ticks"]:
            assert tick["planned_ms"] > 0 or not tick["own"], tick
            ends = [tick["begin"], *(time for call in tick["attention"] for time in call)]
            assert ends == sorted(ends) and ends[-1] <= tick["end"], tick
    first = saved[SLOW_RANK]["ticks"][0]  # 0F0, with three layers
    assert first["end"] - first["begin"] >= 2 * SLOW_S * 1e9, "times are in nanoseconds"
