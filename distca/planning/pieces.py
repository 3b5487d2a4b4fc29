"""Gather the pieces of all ranks without padding each rank to the one with most pieces."""

from collections.abc import Callable

import torch
from torch import Tensor

from distca.planning.documents import INT32_MAX

MAX_PIECES = INT32_MAX  # of all ranks
MEAN_COUNTS = 4  # pieces per rank and exchange, over the mean: one exchange in most steps
LEAST_PIECES = 65536  # of all ranks in one exchange: 2.6 MB


def check_counts(counts: list[int]) -> None:
    """Raises ValueError unless each rank announces a possible number of pieces."""
    for rank, count in enumerate(counts):
        if not 0 <= count <= MAX_PIECES:
            raise ValueError(
                f"distca: rank {rank} announces {count} pieces of documents; expected 0 to "
                f"{MAX_PIECES}. What it sent was damaged, or it runs another build: install the "
                "same one on all ranks"
            )
    if sum(counts) > MAX_PIECES:
        most = max(range(len(counts)), key=counts.__getitem__)
        raise ValueError(
            f"distca: all ranks announce {sum(counts)} pieces of documents, rank {most} alone "
            f"{counts[most]}; expected at most {MAX_PIECES}. Plan fewer documents in one step"
        )


def pieces_at_a_time(counts: list[int]) -> int:
    """Returns how many pieces each rank sends in one exchange, equal on all ranks."""
    num_ranks, total = len(counts), sum(counts)
    most = max(LEAST_PIECES, MEAN_COUNTS * total) // num_ranks
    return max(1, min(most, max(counts)))


def gather_pieces(
    pieces: Tensor, counts: list[int], all_gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the pieces of all ranks in rank order: int64 [sum(counts), words].

    Collective: each rank passes its own pieces, [count, words], and the counts of all ranks. All
    ranks call all_gather(tensor) -> [num_ranks, *tensor.shape] equally often. The size of one
    exchange is at most MEAN_COUNTS times the number of all pieces, or LEAST_PIECES if that is more.
    """
    size = pieces_at_a_time(counts)
    held: list[list[Tensor]] = [[] for _ in counts]
    for first in range(0, max(1, *counts), size):
        part = pieces[first : first + size]
        padded = pieces.new_zeros(size, pieces.shape[1])
        padded[: part.shape[0]] = part
        gathered = all_gather(padded)
        for rank, count in enumerate(counts):
            if count > first:
                held[rank].append(gathered[rank, : count - first].clone())
    return torch.cat([pieces[:0], *(part for parts in held for part in parts)])
