"""Pipelines whose stages share attention, on CUDA devices. Ranks may share devices."""

import dataclasses

import pipelined
import pytest
import torch
from ranks import Ranks
from test_pipelining import CASES

pytestmark = pytest.mark.gpu

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
