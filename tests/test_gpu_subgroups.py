"""A group of some ranks shares attention on CUDA devices. Its groups are not torch's."""

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from test_gpu import LENGTHS, place

import distca

pytestmark = pytest.mark.gpu

CASE = Case(LENGTHS[:2], 8, 2, 64, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def three():
    started = Ranks(3, "nccl")
    yield started
    started.stop()


def train_twice(rank: int, world_size: int, transport: str) -> tuple[list[torch.Tensor], float]:
    """Return out, dq, dk, dv in a second session of ranks 0 and 1, and what all ranks add up in a
    later group."""
    group, results = dist.new_group([0, 1]), []
    for _ in range(2 * (rank < 2)):
        distca.init(group, distca.Options(transport=transport, **MOVE_ALWAYS))
        documents, leaves, grad_out = place(CASE, rank, 2)
        distca.plan(documents, group=group, device="cuda", shape=CASE.shape)
        out = distca.core_attention(*leaves, documents)
        out.backward(grad_out)
        results = [tensor.cpu() for tensor in (out.detach(), *(leaf.grad for leaf in leaves))]
        distca.close(group)
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    return results, total.item()


@pytest.mark.parametrize("transport", ["process_group", "peer"])
def test_equals_the_oracle_and_leaves_no_trace(three, transport):
    if transport == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    results, totals = zip(*three.run(train_twice, transport), strict=True)
    assert totals == (3.0, 3.0, 3.0)
    gathered = [torch.cat(each) for each in zip(*results[:2], strict=True)]
    oracle.assert_close(gathered, *oracle.truths_and_limits(CASE))
