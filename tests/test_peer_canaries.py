"""The canaries on the CPU: the ranges that a call may touch, and bytes outside of them."""

import pytest
import torch
from peer_canaries import BACKWARD, CANARY, FORWARD, are_intact, used_ranges
from ranks import Ranks

import distca

ROW_BYTES = {"query": 512, "key": 256, "statistic": 16}
VISITING, RETURNED = ("visiting queries", "visiting keys"), ("returned queries", "returned keys")
OWN = dict(zip(VISITING + RETURNED, (3, 5, 1, 1), strict=True))
MOST = dict(zip(VISITING + RETURNED, (4, 5, 2, 6), strict=True))
FORWARD_BYTES = [
    *[(0, 1536), (2048, 3328), (4096, 5376)],
    *[(6144, 7680), (8192, 8704), (9216, 9264), (10240, 10256)],
]
BUFFER_BYTES = 40960


def touched_memory(first, second):
    memory = torch.full((2, BUFFER_BYTES), CANARY, dtype=torch.uint8)
    for buffer, ranges in zip(memory, (first, second), strict=True):
        for begin, end in ranges:
            buffer[begin:end] = 0
    return memory


def test_regions_have_room_for_the_busiest_rank():
    assert used_ranges(FORWARD, ROW_BYTES, OWN, MOST) == FORWARD_BYTES
    assert used_ranges(BACKWARD, ROW_BYTES, OWN, MOST)[-1] == (19456, 19712)


def test_writes_outside_the_ranges_are_noticed():
    backward = used_ranges(BACKWARD, ROW_BYTES, OWN, MOST)
    for calls in ((FORWARD_BYTES, backward), (backward, FORWARD_BYTES)):
        memory = touched_memory(*calls)
        assert are_intact(memory.flatten(), FORWARD_BYTES, backward)
        for buffer, ranges in zip(memory, calls, strict=True):
            for byte in [*(end for _, end in ranges), BUFFER_BYTES - 1]:
                buffer[byte] = 0
                assert not are_intact(memory.flatten(), FORWARD_BYTES, backward)
                buffer[byte] = CANARY


@pytest.mark.parametrize("missing", VISITING + RETURNED)
def test_an_expectation_one_row_short_fails(missing):
    backward = used_ranges(BACKWARD, ROW_BYTES, OWN, MOST)
    memory = touched_memory(FORWARD_BYTES, backward).flatten()
    few = OWN | {missing: OWN[missing] - 1}
    short = [used_ranges(regions, ROW_BYTES, few, MOST) for regions in (FORWARD, BACKWARD)]
    assert not are_intact(memory, *short)


def ask_for_peer_memory(rank, world_size):
    name = distca.init().group_name
    with pytest.raises(ValueError) as refused:
        torch.ops.distca.peer_memory(name)
    return str(refused.value), torch.ops.distca.peer_memory_bytes(name)


def test_there_is_no_peer_memory_by_process_group():
    ranks = Ranks(2)
    try:
        for error, num_bytes in ranks.run(ask_for_peer_memory):
            assert "set transport to peer" in error and num_bytes == 0
    finally:
        ranks.stop()
