"""Layouts of tasks that a test or a benchmark chose: the planner would move and join them."""

import itertools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Shard = tuple[int, int, int]  # queries of a document: index of the document, begin, end
DIGEST_WORD = 3  # of a plan


def layout_of_server(
    lengths: Sequence[int],
    served: Sequence[Shard],
    home: int,
    window_size: tuple[int, int],
    device_type: str,
) -> tuple[Tensor, Tensor]:
    """Rank 0's layout and rows, of two ranks. Rank `home` holds documents of these lengths, none 0;
    rank 0 computes the queries `served`, each shard a task, and rank 1 the rest."""
    pieces = [(home, document, 0, length) for document, length in enumerate(lengths)]
    held = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 4)
    tasks = [(*shard, 0) for shard in sorted(served)]
    tasks += [(*shard, 1) for shard in _rest(lengths, served)]
    plan = torch.tensor([2, *window_size, 0, len(tasks), *itertools.chain(*tasks)])
    return torch.ops.distca.layout(held, _signed(plan, held), 0, 0, device_type)


def _rest(lengths: Sequence[int], served: Sequence[Shard]) -> Iterator[Shard]:
    """Queries of no shard."""
    ends = [(document, length, length) for document, length in enumerate(lengths)]
    last, served_to = -1, 0
    for document, begin, end in sorted([*served, *ends]):
        if document != last:
            last, served_to = document, 0
        if served_to < begin:
            yield document, served_to, begin
        served_to = end


def _signed(plan: Tensor, pieces: Tensor) -> Tensor:
    """`plan` with its digest, which the layout operator names when it refuses another."""
    try:
        torch.ops.distca.layout(pieces, plan, 0, 0, "cpu")
    except ValueError as refusal:
        named = re.search(r"tasks give (\d+)", str(refusal))
        if named is None:
            raise
        plan[DIGEST_WORD] = torch.tensor(int(named[1]), dtype=torch.uint64).view(torch.int64)
    return plan
