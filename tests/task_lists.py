"""Task lists that the planning operators build from documents and their cuts.

There are two ranks. Rank 0 serves the shards that a document names, and rank 1 the rest. The lists
are those of rank 0: "home" if rank 0 holds every document, and "visiting" if rank 1 does.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from distca.planning.chosen_tasks import layout_of_server
from distca.planning.plan import CAUSAL

Range = tuple[int, int]
BLOCK_ROWS = 64  # rows with one limit on errors; up to twice as many at a document's end


@dataclass(frozen=True)
class Document:
    length: int
    shards: tuple[Range, ...]
    """Query positions that rank 0 serves, as sorted, disjoint ranges; each range is a task."""


def whole(length: int) -> Document:
    return Document(length, ((0, length),) if length else ())


def cut(length: int, sizes: Sequence[int]) -> Document:
    """Return a document whose queries are all served, in shards that cycle through `sizes`."""
    shards, begin = [], 0
    for size in itertools.cycle(sizes):
        if begin == length:
            return Document(length, tuple(shards))
        shards.append((begin, min(begin + size, length)))
        begin = shards[-1][1]


@dataclass(frozen=True)
class Part:
    """Rows and positions of a document's served queries, and of the keys that they see."""

    q_rows: Tensor  # int64 [queries]
    q_positions: Tensor
    k_rows: Tensor  # int64 [keys]
    k_positions: Tensor

    def to(self, device: torch.device) -> "Part":
        return Part(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class TaskList:
    name: str  # home or visiting
    layout: Tensor
    rows: Tensor
    window_size: tuple[int, int]
    num_q_rows: int
    num_k_rows: int
    parts: list[Part | None]
    """One part per document, or None if no query is served."""
    q_block: Tensor  # int64 [num_q_rows]: block of BLOCK_ROWS rows of a document, -1 without task
    k_block: Tensor  # int64 [num_k_rows]: the same, -1 for keys that no task reads

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def served(self) -> list[Part]:
        return [part for part in self.parts if part is not None]


def task_list(
    documents: Sequence[Document],
    window_size: tuple[int, int] = CAUSAL,
    name: str = "home",
    device: torch.device | str = "cpu",
) -> TaskList:
    """Return rank 0's list `name` over packed documents, which may be empty."""
    device = torch.device(device)
    home = {"home": 0, "visiting": 1}[name]
    held = [document for document in documents if document.length > 0]
    lengths = [document.length for document in held]
    served = [(i, *shard) for i, document in enumerate(held) for shard in document.shards]
    layout, rows = layout_of_server(lengths, served, home, window_size, device.type)

    parts = _parts(documents, window_size, name)
    q_rows = [part.q_rows for part in parts if part is not None]
    k_rows = [part.k_rows for part in parts if part is not None]
    num_tokens = sum(document.length for document in documents)
    num_q_rows = num_tokens if name == "home" else sum(map(len, q_rows))
    num_k_rows = num_tokens if name == "home" else sum(map(len, k_rows))
    return TaskList(
        name,
        layout,
        rows.to(device),
        window_size,
        num_q_rows,
        num_k_rows,
        [None if part is None else part.to(device) for part in parts],
        _blocks(q_rows, num_q_rows).to(device),
        _blocks(k_rows, num_k_rows).to(device),
    )


def _keys_of(window_size: tuple[int, int], queries: Range, length: int) -> Range:
    """Return the range of key positions that the queries see."""
    left, right = window_size
    begin = 0 if left < 0 else max(0, queries[0] - left)
    end = length if right < 0 else min(length, queries[1] + right)
    return begin, end


def _union(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _positions(ranges: Iterable[Range]) -> Tensor:
    return torch.cat([torch.arange(*positions) for positions in ranges])


def _parts(
    documents: Sequence[Document], window_size: tuple[int, int], name: str
) -> list[Part | None]:
    """Return the parts of all documents.

    Home rows are all positions of all documents. Visiting rows are those that are served or read.
    """
    parts: list[Part | None] = []
    first_row = next_q_row = next_k_row = 0
    for document in documents:
        if not document.shards:
            parts.append(None)
            first_row += document.length
            continue
        queries = _positions(document.shards)
        keys = _positions(
            _union(_keys_of(window_size, shard, document.length) for shard in document.shards)
        )
        if name == "home":
            parts.append(Part(first_row + queries, queries, first_row + keys, keys))
        else:
            q_rows = next_q_row + torch.arange(queries.numel())
            k_rows = next_k_row + torch.arange(keys.numel())
            parts.append(Part(q_rows, queries, k_rows, keys))
        first_row += document.length
        next_q_row += queries.numel()
        next_k_row += keys.numel()
    return parts


def _blocks(rows_by_part: Sequence[Tensor], num_rows: int) -> Tensor:
    block = torch.full((num_rows,), -1, dtype=torch.int64)
    num_blocks = 0
    for rows in rows_by_part:
        num_in_part = max(1, rows.numel() // BLOCK_ROWS)
        index = (torch.arange(rows.numel()) // BLOCK_ROWS).clamp_max(num_in_part - 1)
        block[rows] = num_blocks + index
        num_blocks += num_in_part
    return block
