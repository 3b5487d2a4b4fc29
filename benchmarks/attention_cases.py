"""Task lists that benchmarks/attention.py times, and their FLOPs."""

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import distca
from distca.planning.chosen_tasks import layout_of_server
from distca.planning.plan import CAUSAL, local_plan

TOKENS = 32768  # of a dense case; a longer document is a case of its own
NUM_LAST_ROWS = 8192  # query rows of a "last" case
# Keys of a "last" case: with gradients that a library expands to all heads, they fit in 60 GB.
MAX_KEY_ROWS = 3 << 19
NUM_LENGTH_BUCKETS = 16
SHARINGS = {
    "every": "all shards of the documents",
    "half": "every second shard",
    "last": "only the last shard of each document",
}


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int  # of q and k
    dim_v: int

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5

    @property
    def dims(self) -> str:
        return str(self.dim) if self.dim == self.dim_v else f"{self.dim}:{self.dim_v}"


HEADS = {  # by head_dim
    heads.dims: heads
    for heads in (
        Heads(32, 8, 128, 128),
        Heads(32, 32, 64, 64),
        Heads(32, 8, 192, 192),
        Heads(32, 8, 256, 256),
        Heads(16, 16, 192, 128),
    )
}


@dataclass(frozen=True)
class Task:
    """Query rows that see the keys up to their own: the last query is at the last key."""

    q_row: int
    num_rows: int
    k_row: int
    num_keys: int

    @property
    def num_pairs(self) -> float:
        """Count visible (query, key) pairs, with half the diagonal: S * S / 2 if dense."""
        return self.num_rows * (self.num_keys - self.num_rows / 2)


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # "dense", "shards" or "documents"
    heads: Heads
    tasks: tuple[Task, ...]  # ordered by q_row; tasks of one document are neighbours
    task_list: str  # "home" or "visiting"
    layout: Tensor
    rows: Tensor
    key: tuple = ()  # identifies the case in ratios

    @property
    def num_q_rows(self) -> int:
        return sum(task.num_rows for task in self.tasks)

    @property
    def num_k_rows(self) -> int:
        return sum(document[-1].num_keys for document in self.documents)

    @property
    def num_copied_k_rows(self) -> int:
        """Count key rows if each task has its own copy."""
        return sum(task.num_keys for task in self.tasks)

    @property
    def shares_keys(self) -> bool:
        return self.num_copied_k_rows > self.num_k_rows

    @property
    def documents(self) -> list[list[Task]]:
        """Group tasks by the document whose keys they read."""
        groups = itertools.groupby(self.tasks, key=lambda task: task.k_row)
        return [list(tasks) for _, tasks in groups]

    @property
    def num_pairs(self) -> float:
        """Count (query, key) pairs of all query heads."""
        return self.heads.q * sum(task.num_pairs for task in self.tasks)

    @property
    def forward_flops(self) -> float:
        return 2 * (self.heads.dim + self.heads.dim_v) * self.num_pairs

    @property
    def backward_flops(self) -> float:
        return 2 * (3 * self.heads.dim + 2 * self.heads.dim_v) * self.num_pairs

    @property
    def dense_shape(self) -> tuple[int, int] | None:
        """Return (number of documents, length), or None unless all are whole and equally long."""
        lengths = {(task.num_rows, task.num_keys) for task in self.tasks}
        if len(lengths) > 1 or self.tasks[0].num_rows != self.tasks[0].num_keys:
            return None
        return len(self.tasks), self.tasks[0].num_rows

    def inputs(self, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw q, k, v, grad_out from N(0, 1) on the layout's device."""
        device = self.rows.device
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [
            (self.num_q_rows, self.heads.q, self.heads.dim),
            (self.num_k_rows, self.heads.kv, self.heads.dim),
            (self.num_k_rows, self.heads.kv, self.heads.dim_v),
            (self.num_q_rows, self.heads.q, self.heads.dim_v),
        ]
        return tuple(
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes
        )


def home_case(
    name: str, kind: str, heads: Heads, lengths: list[int], device: torch.device, key: tuple
) -> Case:
    """Return a case of whole documents at home: one task per document, no visiting rows."""
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    plan = local_plan(distca.Documents(cu_seqlens), CAUSAL, device)
    tasks = tuple(
        Task(row, length, row, length) for row, length in zip(cu_seqlens, lengths, strict=False)
    )
    return Case(name, kind, heads, tasks, "home", plan.layout, plan.rows, key)


def dense_case(heads: Heads, length: int, device: torch.device, tokens: int = TOKENS) -> Case:
    num_documents = max(1, tokens // length)
    name = f"d{heads.dims} {thousands(length)} x{num_documents}"
    key = ("dense", heads.dims, length)
    return home_case(name, "dense", heads, [length] * num_documents, device, key)


def documents_case(heads: Heads, path: Path, tokens: int, seed: int, device: torch.device) -> Case:
    lengths = draw_documents(json.loads(path.read_text()), tokens, seed)
    name = f"d{heads.dims} {path.stem} {thousands(tokens)} ({len(lengths)} documents)"
    key = ("documents", heads.dims, path.stem, tokens)
    return home_case(name, "documents", heads, lengths, device, key)


def draw_documents(lengths: list[int], tokens: int, seed: int) -> list[int]:
    """Draw lengths that sum to `tokens`; the last one is cut to fit.

    The sorted list is cut into buckets of equal counts, and every round draws one document from
    each bucket in shuffled order. So even a few draws have about the list's share of long
    documents.
    """
    generator = random.Random(seed)
    ordered = sorted(length for length in lengths if length > 0)
    if not ordered:
        raise ValueError("the list of lengths has no positive entry")
    num_buckets = min(NUM_LENGTH_BUCKETS, len(ordered))
    edges = [len(ordered) * bucket // num_buckets for bucket in range(num_buckets + 1)]
    buckets = [ordered[begin:end] for begin, end in itertools.pairwise(edges)]
    drawn, room = [], tokens
    while room > 0:
        generator.shuffle(buckets)
        for bucket in buckets:
            length = min(generator.choice(bucket), room)
            if length > 0:
                drawn.append(length)
                room -= length
    return drawn


@dataclass(frozen=True)
class Shards:
    """Shards of `rows` query rows of documents of `keys` tokens; `sharing` is one of SHARINGS."""

    rows: int
    keys: int
    sharing: str

    def of_document(self) -> list[tuple[int, int]]:
        """Return the query ranges [begin, end) of a document that the server computes."""
        begins = range(0, self.keys, self.rows)
        chosen = {"every": begins, "half": begins[1::2], "last": begins[-1:]}[self.sharing]
        return [(begin, begin + self.rows) for begin in chosen]

    def num_documents(self) -> int:
        """Return as many documents as a dense case has, or as "last" needs."""
        if self.sharing != "last":
            return max(1, TOKENS // self.keys)
        return min(NUM_LAST_ROWS // self.rows, MAX_KEY_ROWS // self.keys)


def shards_case(
    heads: Heads, shards: Shards, device: torch.device, num_documents: int | None = None
) -> Case:
    """Return a case in which rank 0 computes shards of rank 1's documents.

    All rows are visiting rows: those of each task, and the keys once per document.
    """
    num_documents = num_documents or shards.num_documents()
    ranges = shards.of_document()
    lengths = [shards.keys] * num_documents
    served = [(document, *range_) for document in range(num_documents) for range_ in ranges]
    layout, rows = layout_of_server(lengths, served, 1, CAUSAL, device.type)
    # Keys arrive up to the last query, which is always the document's last row.
    tasks = tuple(
        Task(idx * shards.rows, shards.rows, document * shards.keys, end)
        for idx, (document, _, end) in enumerate(served)
    )
    name = (
        f"d{heads.dims} {shards.rows} x {thousands(shards.keys)} {shards.sharing} "
        f"({num_documents} documents)"
    )
    key = ("shards", heads.dims, shards.rows, shards.keys, shards.sharing)
    return Case(name, "shards", heads, tasks, "visiting", layout, rows.to(device), key)


def thousands(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
