"""Pipelines whose stages share attention."""

import pipelined
import pytest
from pipelined import CAUSAL, WINDOW, Pipeline

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
