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


def worst_error(loss: float | None, gradients: dict, truth: tuple) -> float:
    """Return the largest relative error of a loss and of gradients."""
    true_loss, true_gradients = truth
    errors = [0.0 if loss is None else abs(loss - true_loss) / true_loss]
    for name, gradient in gradients.items():
        expected = true_gradients[name]
        errors.append(((gradient - expected).norm() / expected.norm()).item())
    return max(errors)


@pytest.mark.parametrize("name", NAMES)
def test_within_twice_the_error_of_one_process(gpu_ranks, name):
    case = dataclasses.replace(CASES[name], device="cuda", attention_dtype=torch.bfloat16)
    sizes = (sum(case.layers), case.windows, case.num_micro_batches, gpu_ranks.world_size // 2)
    truth = pipelined.true_step(*sizes)
    limit = 2 * worst_error(*pipelined.true_step(*sizes, torch.bfloat16), truth)
    seen = set()
    for loss, gradients, bytes_moved in gpu_ranks.run(pipelined.train_step, case):
        assert bytes_moved > 0, "the case must move rows"
        assert worst_error(loss, gradients, truth) <= limit
        seen |= set(gradients)
    assert seen == set(truth[1])
