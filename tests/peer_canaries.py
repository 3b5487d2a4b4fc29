"""Bytes of the buffers in peer memory that no call has business with: canaries stand there.

A buffer holds one region after the other, each with room for the rows of the server that has most;
this rank's own rows are at the beginning of each. Calls use a rank's two buffers by turns.
"""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

CANARY = 0xFF  # a byte: NaN in every dtype
ALIGNMENT = 1024  # of regions, in bytes
# What a row of each region belongs to, in their order. Forward: q, k, v, out, lse; backward: q,
# grad_out, lse, delta, k, v, dq, dk, dv.
FORWARD = ("query", "key", "key", "query", "statistic")
BACKWARD = ("query", "query", "statistic", "statistic", "key", "key", "query", "key", "key")

Ranges = list[tuple[int, int]]


def used_ranges(
    regions: tuple[str, ...],
    row_bytes: dict[str, int],
    own_rows: tuple[int, int],
    most_rows: tuple[int, int],
) -> Ranges:
    """Bytes [begin, end) of a buffer that a call may touch. Rows are (queries, keys)."""
    ranges, begin = [], 0
    for kind in regions:
        is_key = kind == "key"
        ranges.append((begin, begin + own_rows[is_key] * row_bytes[kind]))
        region_bytes = most_rows[is_key] * row_bytes[kind]
        begin += -(-region_bytes // ALIGNMENT) * ALIGNMENT
    return ranges


def are_intact(memory: Tensor, forward: Ranges, backward: Ranges) -> bool:
    """Whether a forward and a backward call touched no byte of two buffers, `memory` (uint8), but
    their ranges. Either of them may have had the first buffer."""
    buffers = memory.view(torch.int32).chunk(2)  # rows are multiples of 4 bytes
    return any(
        all(_are_canaries_outside(*pair) for pair in zip(buffers, calls, strict=True))
        for calls in itertools.permutations((forward, backward))
    )


def _are_canaries_outside(buffer: Tensor, ranges: Ranges) -> bool:
    ends = [0, *(end // 4 for _, end in ranges)]
    begins = [*(begin // 4 for begin, _ in ranges), buffer.numel()]
    gaps = [buffer[end:begin] for end, begin in zip(ends, begins, strict=True)]
    return bool(torch.stack([(gap == -1).all() for gap in gaps]).all())


class Canaries:
    """Fills the buffers of all ranks; collective. Then for one forward and one backward call."""

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._memory = torch.ops.distca.peer_memory(group_name)
        self._memory.fill_(CANARY)
        _meet()

    def check(self, forward: Ranges, backward: Ranges) -> bool:
        """Whether it could be checked: not where the buffers have been replaced by larger ones.
        Raises AssertionError, on every rank, unless all canaries stand. Collective."""
        _meet()
        now = torch.ops.distca.peer_memory(self._group_name)
        has_grown = now.data_ptr() != self._memory.data_ptr()
        stand = has_grown or are_intact(self._memory, forward, backward)
        everywhere = torch.tensor(int(stand), device=now.device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)  # later calls of other ranks write here
        assert everywhere.item(), f"canaries of {forward}, {backward} stand on this rank: {stand}"
        return not has_grown


def _meet() -> None:
    """Waits until the devices of all ranks are idle."""
    torch.cuda.synchronize()
    dist.barrier()
