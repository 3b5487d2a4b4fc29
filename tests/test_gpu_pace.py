"""On CUDA devices: a rank is measured to be slow if its device runs other work."""

import pytest
import torch
from ranks import MOVE_ALWAYS

import distca

pytestmark = pytest.mark.gpu

LENGTHS = [[16384], [4096] * 4]
NUM_STEPS = 24


def speeds_of(rank: int, world_size: int, slow_rank: int | None) -> list[list[float]]:
    """Return the measured speeds of all steps, with work on another stream of one rank's device."""
    distca.close()
    # Unlike deterministic options, these measure speeds.
    distca.init(options=distca.Options(transport="process_group", **MOVE_ALWAYS))
    offsets = torch.tensor([0, *LENGTHS[rank]]).cumsum(0)
    q, k, v = (
        torch.randn(16384, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (32, 8, 8)
    )
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stream, speeds = torch.cuda.Stream(), []
    for _ in range(NUM_STEPS):
        documents = distca.Documents(offsets)
        speeds.append(distca.plan(documents, device="cuda").report().measured_speeds)
        if rank == slow_rank:
            with torch.cuda.stream(stream):
                for _ in range(12):
                    factor @ factor
        distca.core_attention(q, k, v, documents).float().square().sum().backward()
        torch.cuda.synchronize()
    distca.close()
    return speeds


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_busy_device_is_slow(two_devices, slow_rank):
    for speeds in two_devices.run(speeds_of, slow_rank):
        assert speeds[0] == []
        assert speeds[-1][1 - slow_rank] == 1 and speeds[-1][slow_rank] < 0.9


def test_idle_devices_are_alike(two_devices):
    for speeds in two_devices.run(speeds_of, None):
        assert speeds[-1] == []
