"""Pace of ranks on CUDA devices: a rank whose device runs other work is measured to be slow, and a
rank that reaches attention late gets less attention."""

import sys
from pathlib import Path

import pytest
import torch
from ranks import MOVE_ALWAYS

import distca

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from other_work import OtherWork  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]

LENGTHS = [[32768], [8192] * 4]
NUM_STEPS = 24
OTHER_PART = 0.4  # of the slow device's time


def speeds_of(rank: int, world_size: int, slow_rank: int | None) -> list[list[float]]:
    """Return the measured speeds of all steps, with another process on one rank's device."""
    distca.close()
    # Unlike deterministic options, these measure speeds.
    distca.init(options=distca.Options(transport="process_group", **MOVE_ALWAYS))
    offsets = torch.tensor([0, *LENGTHS[rank]]).cumsum(0)
    q, k, v = (
        torch.randn(32768, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (32, 8, 8)
    )
    other, speeds = None, []
    if rank == slow_rank:
        other = OtherWork(torch.device("cuda", rank), OTHER_PART)
        other.begin()
    for _ in range(NUM_STEPS):
        documents = distca.Documents(offsets)
        speeds.append(distca.plan(documents, device="cuda").report().measured_speeds)
        distca.core_attention(q, k, v, documents).float().square().sum().backward()
        torch.cuda.synchronize()
    if other is not None:
        other.end()
        other.close()
    distca.close()
    return speeds


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_busy_device_is_slow(two_devices, slow_rank):
    for speeds in two_devices.run(speeds_of, slow_rank):
        assert speeds[0] == []
        assert speeds[-1][1 - slow_rank] == 1 and speeds[-1][slow_rank] < 0.8


def test_idle_devices_are_alike(two_devices):
    for speeds in two_devices.run(speeds_of, None):
        assert speeds[-1] == []


def reports_of(rank: int, world_size: int, late_rank: int | None) -> list[distca.PlanReport]:
    """Return the reports of all steps of two layers. `late_rank` has more work between these."""
    distca.close()
    links = {"link_gb_per_s": 1e5, "node_link_gb_per_s": 1e5}  # attention is measured
    distca.init(options=distca.Options(transport="process_group", **links))
    q, k, v = (
        torch.randn(16384, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (32, 8, 8)
    )
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
    reports = []
    for _ in range(NUM_STEPS):
        documents = distca.Documents([0, 8192, 16384])
        reports.append(distca.plan(documents, device="cuda").report())
        out = distca.core_attention(q, k, v, documents).flatten(1)
        for _ in range(3 if rank == late_rank else 2):
            out = out @ weight
        distca.core_attention(out.view_as(q), k, v, documents).float().square().sum().backward()
        torch.cuda.synchronize()
    distca.close()
    return reports


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_rank_that_lags_gets_less(two_devices, late_rank):
    for first, *_, last in two_devices.run(reports_of, late_rank):
        assert first.lags_ms == [] and first.imbalance_after < 1.01
        lag_ms = last.lags_ms[late_rank]
        # A product takes 0.55 TFLOP in each pass.
        assert 1 < lag_ms < 20 and last.lags_ms[1 - late_rank] == 0
        less, more = last.seconds_after[late_rank], last.seconds_after[1 - late_rank]
        assert more - less == pytest.approx(1e-3 * lag_ms, rel=0.2)
        assert last.imbalance_after < 1.02
