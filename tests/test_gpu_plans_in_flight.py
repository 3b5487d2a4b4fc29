"""Test the same as test_plans_in_flight where devices wait for rows and the host runs ahead."""

import os

import oracle
import pytest
import test_plans_in_flight as on_cpu
import torch
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from small_step import Step, small_step

import distca

pytestmark = pytest.mark.gpu

CASE = Case([[100, 500, 1000, 3000, 30], []], 4, 2, 64, dtype=torch.bfloat16, sharded=True)
MAX_ERROR = 1e-2  # of gradients in bfloat16, which accumulate in another order


@pytest.fixture(params=["peer", "process_group"])
def pair(request, monkeypatch):
    if request.param == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    monkeypatch.setitem(os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    started = Ranks(2, "nccl")
    started.run(open_session, request.param)
    yield started
    started.stop()


def open_session(rank: int, world_size: int, transport: str) -> None:
    distca.init(options=distca.Options(transport=transport, **MOVE_ALWAYS))


def step_on_device(rank: int, world_size: int) -> Step:
    step = small_step(rank, world_size, CASE)
    step.q, step.k, step.v = (
        tensor.detach().cuda().requires_grad_() for tensor in (step.q, step.k, step.v)
    )
    return step


def alternate(rank: int, world_size: int) -> tuple[dict[str, int], list[float], float]:
    """Return the profiler's ranges, and the errors of each layer's output and of the gradient
    against runs of one plan at a time."""
    step, windows = step_on_device(rank, world_size), on_cpu.windows_by_layer()
    alone, gradient = [], torch.zeros_like(step.q, dtype=torch.float32)
    for window in on_cpu.WINDOWS:
        own = step_on_device(rank, world_size)
        distca.plan(own.documents, window_size=window, device="cuda")
        alone.append(own.attend(window_size=window))
        alone[-1].sum().backward()
        gradient += own.q.grad.float() * windows.count(window)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for window in on_cpu.WINDOWS:
            distca.plan(step.documents, window_size=window, device="cuda")
        outs = [step.attend(window_size=window) for window in windows]
        sum(outs).sum().backward()
    errors = [oracle.relative_error(out, alone[i % 2]) for i, out in enumerate(outs)]
    return on_cpu.ranges_of(profile), errors, oracle.relative_error(step.q.grad, gradient)


def test_layers_of_two_windows_do_not_wait_to_agree(pair):
    for ranges, errors, error_of_gradient in pair.run(alternate):
        assert "distca agreement" not in ranges
        for each in ("forward", "backward"):
            for layer in range(on_cpu.NUM_LAYERS):
                assert ranges[f"distca {each} layer {layer} dispatch"] == 1, (each, layer)
        assert max(errors) == 0
        assert error_of_gradient < MAX_ERROR


def run_a_stage(rank: int, world_size: int) -> tuple[dict[str, int], float]:
    """Run the first of two stages in 1F1B order. Return its ranges, and the largest error of its
    gradients against a run of one micro-batch after another."""
    alone = step_on_device(rank, world_size)
    distca.plan(alone.documents, device="cuda")
    sum(alone.attend() for _ in range(3)).sum().backward()
    steps = [step_on_device(rank, world_size) for _ in range(on_cpu.NUM_MICRO_BATCHES)]
    outs: dict[int, torch.Tensor] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for each, i in on_cpu.one_forward_one_backward(2):
            if each == "forward":
                distca.plan(steps[i].documents, device="cuda")
                outs[i] = sum(steps[i].attend() for _ in range(3))
            else:
                outs[i].sum().backward()
    errors = [oracle.relative_error(step.q.grad, alone.q.grad) for step in steps]
    return on_cpu.ranges_of(profile), max(errors)


def test_micro_batches_of_a_stage_do_not_wait_to_agree(pair):
    for ranges, error in pair.run(run_a_stage):
        assert "distca agreement" not in ranges
        for each in ("forward", "backward"):
            for layer in range(3):
                name = f"distca {each} layer {layer} dispatch"
                assert ranges[name] == on_cpu.NUM_MICRO_BATCHES, name
        assert error < MAX_ERROR
