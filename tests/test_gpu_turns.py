"""Streams of a CUDA device take turns: one waits for the other, but not for long."""

import pytest
import torch

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # of a delay: about 10 ms
MS = 1_000_000  # ns


def ms_of_wait(max_ns: int, cycles: int) -> tuple[float, float, int]:
    """Return the milliseconds of a stream's wait, those of the other stream's delay, and the number
    of waits that timed out."""
    word = torch.zeros((), dtype=torch.int32, device="cuda")
    num_late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    begin, reached, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        begin.record()
        torch.ops.distca.await_turn(word, 3, max_ns, num_late)
        end.record()
    with torch.cuda.stream(second):
        torch.cuda._sleep(cycles)
        torch.ops.distca.reach_turn(word, 3)
        reached.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), begin.elapsed_time(reached), num_late.item()


def test_a_stream_waits_for_the_other():
    ms_of_wait(MS, 1000)  # loads kernels
    waited, delay, num_late = ms_of_wait(1000 * MS, CYCLES)
    assert delay > 2 and delay - 0.1 <= waited <= delay + 2
    assert num_late == 0


def test_a_stream_does_not_wait_for_long():
    ms_of_wait(MS, 1000)
    waited, delay, num_late = ms_of_wait(2 * MS, 10 * CYCLES)
    assert 2 <= waited < delay and num_late == 1


def test_earlier_turns_count():
    word = torch.full((), 7, dtype=torch.int32, device="cuda")
    num_late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    torch.ops.distca.await_turn(word, 7, 1000 * MS, num_late)
    torch.cuda.synchronize()
    assert num_late.item() == 0


def test_words_elsewhere_are_refused():
    late = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_late: expected int32 in pinned memory"):
        torch.ops.distca.await_turn(torch.zeros(1, dtype=torch.int32, device="cuda"), 1, 1, late)
    with pytest.raises(ValueError, match="expected one int32 on a CUDA device"):
        torch.ops.distca.reach_turn(torch.zeros(2, dtype=torch.int32, device="cuda"), 1)
