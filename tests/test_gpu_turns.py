"""A stream of a CUDA device waits until rows that another stream sends are on their way."""

import pytest
import torch
import torch.distributed as dist
from ranks import MOVE_ALWAYS, Ranks

import distca
from distca import ops
from distca.ranks.session import find

pytestmark = pytest.mark.gpu

CYCLES = 60_000_000  # of a delay: about 30 ms
LENGTHS = [[8192], [1024] * 8]


@pytest.fixture(scope="module")
def two_ranks():
    started = Ranks(2, "nccl")
    yield started
    started.stop()


def ms_of_waits(rank: int, world_size: int, late_rank: int) -> tuple[float, float, float]:
    """Return three times in milliseconds: until the other stream's rows are on their way, until its
    attention ends, and until the end of a delay before attention on `late_rank`."""
    distca.close()
    distca.init(options=distca.Options(transport="process_group", **MOVE_ALWAYS))
    name = find().group_name
    offsets = torch.tensor([0, *LENGTHS[rank]]).cumsum(0)
    q, k, v = (
        torch.randn(8192, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    ops.await_dispatch(name)  # from now on, it waits for calls
    follower, sender = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(2):  # the first step connects ranks
        documents = distca.Documents(offsets)
        assert any(distca.plan(documents, device="cuda").report().bytes_out)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, delayed, followed, ended = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        with torch.cuda.stream(sender):
            begin.record()
            if rank == late_rank:
                torch.cuda._sleep(CYCLES)
            delayed.record()
            distca.core_attention(q, k, v, documents)
            ended.record()
        with torch.cuda.stream(follower):
            ops.await_dispatch(name)
            followed.record()
        torch.cuda.synchronize()
    distca.close()
    return tuple(begin.elapsed_time(each) for each in (followed, ended, delayed))


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_stream_waits_for_rows_to_leave_but_not_to_arrive(two_ranks, late_rank):
    waits = two_ranks.run(ms_of_waits, late_rank)
    followed, ended, delay = waits[late_rank]
    assert delay > 10 and delay <= followed <= ended
    followed, ended, _ = waits[1 - late_rank]
    assert ended > 0.8 * delay, "this rank's attention waits for the late rank's rows"
    assert followed < 0.5 * delay
