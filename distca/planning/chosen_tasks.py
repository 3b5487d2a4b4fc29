"""Layouts of tasks that a test or a benchmark chose. The planner would choose other tasks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distca import ops

Shard = tuple[int, int, int]  # queries of a document: index of the document, begin, end


def layout_of_server(
    lengths: Sequence[int],
    served: Sequence[Shard],
    home: int,
    window_size: tuple[int, int],
    device_type: str,
) -> tuple[Tensor, Tensor]:
    """Return the layout and rows of rank 0 in a group of two. Rank `home` holds documents of these
    lengths, none of them 0. Rank 0 computes the queries `served`, each shard as a task, and rank 1
    computes the rest."""
    pieces = [(home, document, 0, length) for document, length in enumerate(lengths)]
    held = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 4)
    tasks = [(*shard, 0) for shard in sorted(served)]
    tasks += [(*shard, 1) for shard in _rest(lengths, served)]
    chosen = torch.tensor(tasks, dtype=torch.int64).reshape(-1, 4)
    plan = ops.plan_of_tasks(held, chosen, 2, *window_size)
    layout, packed_rows = ops.layout(held, plan, 0, 0, device_type)
    return layout, ops.unpack_rows(layout, packed_rows)


def _rest(lengths: Sequence[int], served: Sequence[Shard]) -> Iterator[Shard]:
    """Yield the queries that no shard has."""
    ends = [(document, length, length) for document, length in enumerate(lengths)]
    last, served_to = -1, 0
    for document, begin, end in sorted([*served, *ends]):
        if document != last:
            last, served_to = document, 0
        if served_to < begin:
            yield document, served_to, begin
        served_to = end
