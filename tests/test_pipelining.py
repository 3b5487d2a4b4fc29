"""Pipelines whose stages share attention."""

import inspect

import pipelined
import pytest
import torch
from pipelined import CAUSAL, WINDOW, Pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from distca import _torch_private
from distca.integrations.pipelining import SchedulePooled

TOLERANCE = 1e-5

CASES = {
    "4 micro-batches": Pipeline(),
    "7 micro-batches, DDP": Pipeline(num_micro_batches=7, wrapper="DDP"),
    "limited": Pipeline(num_micro_batches=7, options={"max_in_flight": 2}),
    "windows": Pipeline(windows=(WINDOW, CAUSAL)),
    "checkpointing": Pipeline(recompute=True),
    "checkpointing, windows, DDP": Pipeline(
        num_micro_batches=7, windows=(CAUSAL, WINDOW), wrapper="DDP", recompute=True
    ),
    "interleaved": Pipeline(layers=(2, 1, 1, 1), num_micro_batches=7, windows=(WINDOW, CAUSAL)),
    "interleaved, checkpointing": Pipeline(layers=(2, 1, 1, 1), recompute=True),
    "split": Pipeline(num_micro_batches=7, options={"split_backward": True}),
    "examples": Pipeline(examples={"requires_grad": True}),
    "interleaved, split": Pipeline(
        layers=(2, 1, 1, 1), windows=(WINDOW, CAUSAL), options={"split_backward": True}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(ranks, name):
    case = CASES[name]
    truth = pipelined.true_step(5, case.windows, case.num_micro_batches, 2)
    seen = set()
    for loss, gradients, bytes_moved in ranks(4).run(pipelined.train_step, case):
        assert bytes_moved > 0, "the case must move rows"
        seen |= set(gradients)
        for each, error in pipelined.errors_of(loss, gradients, truth).items():
            assert error <= TOLERANCE, (each, error)
    assert seen == set(truth[1])


def test_gradients_are_never_lost(own_ranks):
    """From torch 2.12 on, stages rely on the examples, and here no example needs gradients. On
    torch 2.12, the last stage notices this itself."""
    outcomes = own_ranks(4).outcomes(pipelined.train_step, Pipeline(examples={}), 1)
    errors = [outcome.error for outcome in outcomes]
    if any(errors):
        for error in errors:
            is_ours = "stage 0 gets 0 gradients" in error and "requires_grad=True" in error
            assert is_ours or "expecting to send gradients to stage 0" in error, outcomes
        return
    truth = pipelined.true_step(5, (CAUSAL,), 4, 2)
    for loss, gradients, _ in (each.result for each in outcomes):
        assert max(pipelined.errors_of(loss, gradients, truth).values()) <= TOLERANCE


@pytest.mark.skipif(
    "finalize_gradients" not in inspect.signature(PipelineScheduleMulti.step).parameters,
    reason="schedules of torch 2.15 and newer can leave gradients to a later step",
)
@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_gradients_of_two_steps_are_summed_once(ranks, wrapper):
    loss, gradients = pipelined.true_step(5, (CAUSAL,), 4, 2)
    truth = loss, {name: 2 * each for name, each in gradients.items()}
    for own in ranks(4).run(pipelined.accumulate, Pipeline(wrapper=wrapper)):
        assert max(pipelined.errors_of(None, own, truth).values()) <= TOLERANCE


def test_a_newer_torch_than_those_tested_is_refused(monkeypatch):
    newest = ".".join(map(str, _torch_private.NEWEST_WITH_STAGES))
    monkeypatch.setattr(torch, "__version__", f"{newest}.9+cu130")
    _torch_private.check_stages()
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git123")
    with pytest.raises(ValueError, match=f"torch is 2.99.0a0.* up to torch {newest}; expected a"):
        SchedulePooled([], 1)
