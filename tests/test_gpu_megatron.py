"""Megatron-Core's small GPT in bfloat16 on CUDA devices, with packed sequences balanced.

Ranks share devices if there are too few.
"""

import dataclasses

import pytest
import torch
from ranks import Ranks

pytest.importorskip(
    "megatron.core",
    reason="needs megatron-core (make test-megatron), and this environment has none",
)

import megatron_model as mm  # noqa: E402
from megatron_model import Way  # noqa: E402

pytestmark = pytest.mark.gpu

WAYS = {
    "data parallel 2": (2, Way(device="cuda")),
    "windows, recomputed layers": (2, Way("windows", device="cuda", recomputed="full")),
    "sinks": (2, Way("sinks", device="cuda")),
    "documents across 2": (2, Way(crosses_ranks=True, device="cuda")),
    "pipeline 2": (4, Way(pipeline_parallel=2, num_rows=192, device="cuda")),
}


@pytest.fixture(scope="module")
def nccl_ranks():
    """Return nccl_ranks(world_size)."""
    started = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size, "nccl")
        return started[world_size]

    yield get
    for each in started.values():
        each.stop()


def _true_step(rank: int, world_size: int, way: Way, num_packs: int):
    return mm.true_step(way, num_packs)


@pytest.mark.parametrize("name", WAYS)
def test_within_twice_megatrons_own_error(nccl_ranks, name):
    world_size, way = WAYS[name]
    num_packs = world_size // way.pipeline_parallel
    (truth,) = nccl_ranks(1).run(_true_step, way, num_packs)
    in_bfloat16 = dataclasses.replace(way, dtype=torch.bfloat16)
    (own,) = nccl_ranks(1).run(_true_step, in_bfloat16, num_packs)
    limit = 2 * mm.worst_error(own, truth)
    for result in nccl_ranks(world_size).run(mm.balanced_error, in_bfloat16, truth):
        assert result.bytes_moved > 0, "the case must move rows"
        assert result.worst_error <= limit
