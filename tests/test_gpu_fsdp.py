"""FSDP2 gathers parameters after attention, whose rows use the same links."""

import pytest
import torch
from pingpong_blocks import Block
from ranks import Ranks
from test_gpu_pingpong import SIZES, WINDOWS, block_of, place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import distca
from distca.integrations.fsdp import gather_after_attention

pytestmark = pytest.mark.gpu
GATHER, ROWS = "AllGather", "SendRecv"  # in the names of NCCL's kernels
NUM_BLOCKS = 3


@pytest.fixture(scope="module")
def two_ranks():
    started = Ranks(2, "nccl")
    yield started
    started.stop()


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [block_of(Block, WINDOWS, torch.bfloat16, **SIZES) for _ in range(NUM_BLOCKS)]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x, *arguments) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *arguments)
        return x


def train(rank: int, world_size: int, gathers_after: bool) -> tuple[list, list]:
    """Return results and gradients of a step, and its kernels (name, begin, end) in us."""
    distca.close()
    distca.init(options=distca.Options(transport="process_group", link_gb_per_s=1e5))
    torch.manual_seed(0)
    model = Stack().cuda()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (world_size,)))
    if gathers_after:
        gather_after_attention(model)
    for number in range(2):
        step = place(rank, number, world_size)
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            out = model(step.x, step.cos, step.sin, step.documents)
            torch.cuda.synchronize()
        (out * step.grad).mean().backward()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if GATHER in event.name or ROWS in event.name
    ]
    gradients = [each.grad.full_tensor() for each in model.parameters()]
    distca.close()
    return [each.detach().cpu() for each in (out, *gradients)], kernels


def gathers_beside_rows(kernels: list) -> int:
    """Return the number of gathers that begin before the rows of a call are home."""
    rows = [kernel for kernel in kernels if ROWS in kernel[0]]
    gathers = [kernel for kernel in kernels if GATHER in kernel[0]]
    assert len(rows) >= 2 * NUM_BLOCKS and len(gathers) >= NUM_BLOCKS
    return sum(
        any(begin < other_end and other_begin < end for _, other_begin, other_end in rows)
        for _, begin, end in gathers
    )


def test_gathers_follow_attention(two_ranks):
    for results, kernels in two_ranks.run(train, True):
        assert gathers_beside_rows(kernels) == 0
        assert all(bool(each.isfinite().all()) for each in results)


def test_results_do_not_change(two_ranks):
    after, beside = (two_ranks.run(train, gathers_after)[0][0] for gathers_after in (True, False))
    for one, other in zip(after, beside, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())
