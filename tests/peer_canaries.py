"""Canaries in the bytes of peer memory that calls must not touch.

A buffer is a sequence of regions, for rows that visit this rank and for results that return to it.
Each region has room for the rank with the most rows; this rank's rows are at its beginning. Calls
alternate between a rank's two buffers.
"""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

CANARY = 0xFF  # a byte: NaN in every dtype
ALIGNMENT = 1024  # of regions, in bytes
# (rows, kind) of the regions in order. Forward: q, k, v, out and lse. Backward: q, grad_out, lse,
# delta, k, v, dq, dk and dv. Results have two regions, one visiting and one returned.
VISITING_QUERY, VISITING_KEY = ("visiting queries", "query"), ("visiting keys", "key")
VISITING_STATISTIC = ("visiting queries", "statistic")
RETURNED_QUERY, RETURNED_KEY = ("returned queries", "query"), ("returned keys", "key")
RETURNED_STATISTIC = ("returned queries", "statistic")
FORWARD = (
    VISITING_QUERY,
    *[VISITING_KEY] * 2,
    *(VISITING_QUERY, RETURNED_QUERY),
    *(VISITING_STATISTIC, RETURNED_STATISTIC),
)
BACKWARD = (
    *[VISITING_QUERY] * 2,
    *[VISITING_STATISTIC] * 2,
    *[VISITING_KEY] * 2,
    *(VISITING_QUERY, RETURNED_QUERY),
    *[VISITING_KEY, RETURNED_KEY] * 2,
)

Ranges = list[tuple[int, int]]
Rows = dict[str, int]  # of each kind


def used_ranges(
    regions: tuple[tuple[str, str], ...], row_bytes: dict[str, int], own: Rows, most: Rows
) -> Ranges:
    """Return the bytes [begin, end) of a buffer that a call may touch."""
    ranges, begin = [], 0
    for rows, kind in regions:
        ranges.append((begin, begin + own[rows] * row_bytes[kind]))
        region_bytes = most[rows] * row_bytes[kind]
        begin += -(-region_bytes // ALIGNMENT) * ALIGNMENT
    return ranges


def are_intact(memory: Tensor, forward: Ranges, backward: Ranges) -> bool:
    """Return whether a forward and a backward call touched only their ranges of two buffers.

    `memory` (uint8) holds both buffers. Either call may have used the first one.
    """
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
    """Fills the buffers of all ranks with canaries, and checks them after two calls. Collective."""

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._memory = torch.ops.distca.peer_memory(group_name)
        self._memory.fill_(CANARY)
        _meet()

    def check(self, forward: Ranges, backward: Ranges) -> bool:
        """Check one forward and one backward call. Collective.

        Return whether the check was possible, which it is not if the buffers have grown. Raise
        AssertionError on every rank unless all canaries are intact.
        """
        _meet()
        now = torch.ops.distca.peer_memory(self._group_name)
        has_grown = now.data_ptr() != self._memory.data_ptr()
        stand = has_grown or are_intact(self._memory, forward, backward)
        everywhere = torch.tensor(int(stand), device=now.device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)  # later calls of other ranks write here
        assert everywhere.item(), f"canaries of {forward}, {backward} stand on this rank: {stand}"
        return not has_grown


def _meet() -> None:
    """Wait until the devices of all ranks are idle."""
    torch.cuda.synchronize()
    dist.barrier()
