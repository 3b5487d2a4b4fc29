"""A back end from outside the library computes the calls that it supports."""

from dataclasses import replace

import extension
import oracle
import pytest
import torch
from oracle import Case
from ranks import Ranks
from test_core_attention import attend, gathered

# Documents that cross ranks and tasks that share keys, under a window on both sides.
CASE = Case([[200, 1, 0, 131], []], head_dim=24, window_size=(37, 5), sharded=True)


def attend_with(rank: int, world_size: int, case: Case):
    """Return results by the back end, and the number of its calls."""
    extension.load()
    before = torch.ops.distca_tests.num_reference_calls()
    if before == 0:
        torch.ops.distca_tests.add_reference_backend()
    return attend(rank, world_size, case), torch.ops.distca_tests.num_reference_calls() - before


@pytest.mark.usefixtures("test_extension")
def test_a_back_end_of_other_files_computes_what_it_takes():
    two = Ranks(2)
    try:
        for case, is_taken in [
            (CASE, True),
            (replace(CASE, head_dim_v=16), True),
            (replace(CASE, head_dim_v=40), False),
            (replace(CASE, head_dim=16), False),
        ]:
            results, num_calls = zip(*two.run(attend_with, case), strict=True)
            oracle.assert_close(gathered(results), oracle.forward_backward(case), [1e-12] * 4)
            assert [num > 0 for num in num_calls] == [is_taken] * 2
    finally:
        two.stop()
