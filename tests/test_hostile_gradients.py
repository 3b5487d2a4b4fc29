"""Bad inputs of the backward pass, on ranks that exchange rows.

The rank with the bad inputs raises an error that names them, and the others raise an error that
names this rank.
"""

import pytest
import torch
from ranks import Ranks
from small_step import SHARDED, Step, small_step

import distca

LIMIT_S = 5.0
HANG_S = 60
BAD_RANK = 1


def _backward(step: Step, plan: distca.Plan, change) -> None:
    """Run a forward pass, and a backward pass on tensors that `change` returns."""
    q, k, v = (tensor.detach() for tensor in (step.q, step.k, step.v))
    ops, share = torch.ops.distca, (plan.layout, plan.rows)
    out, lse, kept = ops.core_attention(q, k, v, *share, 1.0, plan.group_name)
    tensors = change({"grad_out": torch.ones_like(out), "out": out, "lse": lse, "kept": kept})
    ops.core_attention_backward(
        tensors["grad_out"], q, k, v, tensors["out"], tensors["lse"], *share, 1.0, plan.group_name,
        tensors["kept"],
    )  # fmt: skip


def changed(name: str, how):
    return lambda tensors: tensors | {name: how(tensors[name])} if name in tensors else tensors


def unchanged(tensors: dict) -> dict:
    return tensors


CASES = {  # a pass, its change on BAD_RANK, and a part of the message there
    "grad_out 2-D": (
        _backward,
        changed("grad_out", lambda t: t[..., 0]),
        "grad_out is Float of shape [463, 4] on cpu; expected Float of shape [463, 4, 24] on cpu",
    ),
    "grad_out of another dtype": (
        _backward,
        changed("grad_out", lambda t: t.double()),
        "grad_out is Double of shape",
    ),
    "grad_out of fewer heads": (
        _backward,
        changed("grad_out", lambda t: t[:, 1:]),
        "grad_out is Float of shape [463, 3, 24]",
    ),
    "out of another dtype": (
        _backward,
        changed("out", lambda t: t.half()),
        "out is Half of shape",
    ),
    "lse 3-D": (
        _backward,
        changed("lse", lambda t: t[..., None]),
        "lse is Float of shape [463, 4, 1]",
    ),
    "lse of another dtype": (
        _backward,
        changed("lse", lambda t: t.double()),
        "lse is Double",
    ),
    "kept 2-D": (
        _backward,
        changed("kept", lambda t: t[None]),
        "kept is torch.FloatTensor of [1, 0] elements",
    ),
}


def run_case(rank: int, world_size: int, case: str) -> None:
    """Run a case in a separate session, because a group with a recorded failure is lost."""
    run, change, _ = CASES[case]
    step = small_step(rank, world_size, SHARDED)
    try:
        run(step, distca.plan(step.documents), change if rank == BAD_RANK else unchanged)
    finally:
        distca.close()


@pytest.fixture(scope="module")
def hostile_ranks():
    started = Ranks(3)
    yield started
    started.stop()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_refused_before_they_are_sent(hostile_ranks, case):
    outcomes = hostile_ranks.outcomes(run_case, case, timeout_s=HANG_S)
    assert all(outcome.error and outcome.seconds < LIMIT_S for outcome in outcomes), outcomes
    assert outcomes[BAD_RANK].error_type == "ValueError"
    assert CASES[case][2] in outcomes[BAD_RANK].error
    for rank in {0, 1, 2} - {BAD_RANK}:
        assert f"rank {BAD_RANK}" in outcomes[rank].error, outcomes[rank].error
