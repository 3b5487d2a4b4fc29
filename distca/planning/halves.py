"""The part of the attention in each half of ping-pong, and the work that hides its transfers."""

import torch
from torch import Tensor

from distca import ops
from distca.planning.cluster import Cluster

# The part of a rank's tokens in the first half. Rows of the first half travel beside the second
# half's work before attention, and rows of the second half beside the first half's work after it.
# Only a quarter of a block's linear work comes before attention. So with short documents, the
# second half needs more tokens to hide the first half's rows. Documents that cross ranks have two
# runs of equal length.
FIRST_PART, FIRST_PART_OF_RUNS = 1 / 3, 1 / 2
AFTER_OVER_BEFORE = 3.0  # of a block's linear work, after and before attention
# Two halves take longer than a whole block by this part of its linear work, because matrix products
# are smaller, and there are twice as many launches. Measured on two H100 with 65,536 tokens each.
COST = 0.01


def first_part_of(pieces: Tensor) -> float:
    """Return the part of the tokens in the first half. `pieces`, int64 [num_pieces, 4 or more], are
    those of all ranks: (rank, document, first row in the document, number of rows)."""
    return FIRST_PART_OF_RUNS if (pieces[:, 2] > 0).any() else FIRST_PART


def rows_of_first_half(pieces: Tensor, rows: Tensor) -> Tensor:
    """Return how many rows of each piece are in the first half of its rank, int64 [num_pieces]. The
    first half of a rank has rows[rank] rows. `pieces` are in row order."""
    rank, length = pieces[:, 0], pieces[:, 3]
    ends = length.cumsum(0)
    rows_by_rank = torch.zeros_like(rows).index_add_(0, rank, length)
    first_row = ends - length - (rows_by_rank.cumsum(0) - rows_by_rank)[rank]
    return torch.minimum((rows[rank] - first_row).clamp(min=0), length)


def attention_of_first_half(pieces: Tensor, num_ranks: int, window_size: tuple[int, int]) -> float:
    """Return the part of all attention that the first half has."""
    rank, start, length = pieces[:, 0], pieces[:, 2], pieces[:, 3]
    rows_by_rank = torch.zeros(num_ranks, dtype=torch.int64).index_add_(0, rank, length)
    first = rows_of_first_half(pieces, (rows_by_rank * first_part_of(pieces)).long())
    left = window_size[0] if window_size[0] >= 0 else int(length.sum())

    def num_pairs(end: Tensor) -> Tensor:
        """Return the (query, key) pairs of each document's first `end` rows, float64."""
        rising = end.clamp(max=left + 1).double()
        return rising * (rising + 1) / 2 + (end - rising) * (left + 1)

    before, cut, after = (num_pairs(each) for each in (start, start + first, start + length))
    return ((cut - before).sum() / (after - before).sum().clamp(min=1)).item()


def pay(
    in_halves: Cluster, loads: Tensor, whole: Cluster, whole_loads: Tensor, seconds_before: float
) -> bool:
    """Return whether a block is predicted to be faster in halves than whole. Each way has a cluster
    and a plan of its own, and `loads` are those of its plan. hidden_by_halves describes
    `seconds_before`."""
    cost = COST * (1 + AFTER_OVER_BEFORE) * seconds_before
    seconds, whole_seconds = (
        ops.layer_seconds(each_loads, each.servers(), each.links())
        for each, each_loads in ((in_halves, loads), (whole, whole_loads))
    )
    return seconds + cost < whole_seconds


def hidden_by_halves(
    pieces: Tensor, num_ranks: int, window_size: tuple[int, int], seconds_before: float
) -> dict[str, float]:
    """Return the fields of a Cluster that differ if its ranks use halves.

    `seconds_before` is a block's linear work before attention, forward and backward. Attention and
    linear work of one half hide the transfers of the other. A half is assumed to have the same part
    of all transfers as of all attention. For attention, and separately for linear work, the half
    that hides the smaller part of the other half's transfers counts. Rows of halves travel in one
    part, because each exchange may wait for kernels of the other half.
    """
    part = first_part_of(pieces)
    first = attention_of_first_half(pieces, num_ranks, window_size)
    second = 1 - first
    tiny = 1e-6  # of all attention
    after = part * AFTER_OVER_BEFORE * seconds_before / max(second, tiny)
    before = (1 - part) * seconds_before / max(first, tiny)
    ratio = first / max(second, tiny)
    return {
        "hidden_part": min(ratio, 1 / max(ratio, tiny)),
        "hidden_seconds": min(after, before),
        "num_parts": 1,
        "exposed_part": 1.0,
    }
