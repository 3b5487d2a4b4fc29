"""Documents of one step drawn from a list of lengths, and the ranks that hold them."""

import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distca.options import check

MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True)
class Pack:
    """A step of all ranks, whose numbers of tokens differ by at most one."""

    num_ranks: int
    num_documents: int
    pieces: np.ndarray
    """int64 [num_pieces, 4]: rank, document, start, length, in row order; documents are counted
    from 0 in that order."""

    def as_tensor(self) -> Tensor:
        """Return `pieces` as torch.ops.distca.plan takes them."""
        return torch.from_numpy(self.pieces)

    @property
    def lengths(self) -> np.ndarray:
        """[num_documents] tokens."""
        return np.bincount(self.pieces[:, 1], self.pieces[:, 3], self.num_documents).astype(int)

    @property
    def tokens(self) -> np.ndarray:
        """[num_ranks] tokens."""
        return np.bincount(self.pieces[:, 0], self.pieces[:, 3], self.num_ranks).astype(int)


def check_lengths(lengths: object, name: str) -> list[int]:
    """Return `lengths` without zeros. Raises ValueError naming `name` and the value that is
    wrong."""
    if not isinstance(lengths, list):
        raise ValueError(f"{name}: holds {lengths!r:.80}; expected a list of document lengths")
    for idx, length in enumerate(lengths):
        is_length = type(length) is int and 0 <= length <= MAX_LENGTH
        expected = f"an integer from 0 to {MAX_LENGTH} tokens"
        check(f"{name}: length {idx}", length, is_length, expected)
    if not any(lengths):
        raise ValueError(f"{name}: no document has a token; expected at least one length above 0")
    return [length for length in lengths if length > 0]


def read_lengths(path: str | Path) -> list[int]:
    """Return the document lengths in a file, a JSON list, without zeros. Raises ValueError naming
    the file and what is wrong."""
    try:
        lengths = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file: {error}") from error
    return check_lengths(lengths, str(path))


def listed_lengths(text: str) -> list[int] | None:
    """Return the document lengths that the flag --lengths lists, such as 9000,400, without zeros.
    None: it names a file. Raises ValueError for a list with something else."""
    parts = [part.strip() for part in text.split(",")]
    if all(part.isdecimal() for part in parts):
        return check_lengths([int(part) for part in parts], "--lengths")
    expected = "lengths separated by commas, such as 9000,400, or a JSON file"
    check("--lengths", text, len(parts) == 1 or os.path.exists(text), expected)
    return None


def draw_pack(
    lengths: Sequence[int], num_ranks: int, tokens: int, seed: int, crossing: bool = False
) -> Pack:
    """Return a pack of `tokens` tokens for each rank. It has the documents in shuffled order, over
    and over, cut into equal runs. The rest of a document that is cut begins the next run as a
    document of its own or, with `crossing`, as the same document."""
    shuffled = list(lengths)
    random.Random(seed).shuffle(shuffled)
    total = num_ranks * tokens
    rounds = math.ceil(total / sum(shuffled))
    return cut_pack(np.tile(shuffled, rounds), num_ranks, total, crossing)


def cut_pack(lengths: Sequence[int], num_ranks: int, total: int, crossing: bool = False) -> Pack:
    """Return a pack of the first `total` tokens of documents in the order of `lengths`, cut as
    draw_pack does."""
    ends = np.cumsum(lengths, dtype=np.int64)
    edges = np.arange(num_ranks + 1, dtype=np.int64) * total // num_ranks
    cuts = np.union1d(ends[ends < total], edges)
    begins, held = cuts[:-1], np.diff(cuts)
    rank = np.searchsorted(edges, begins, side="right") - 1
    document, start = np.arange(held.size), np.zeros_like(held)
    if crossing:
        document = np.searchsorted(ends, begins, side="right")
        start = begins - (ends - lengths)[document]
    num_documents = int(document[-1]) + 1 if document.size else 0
    return Pack(num_ranks, num_documents, np.stack([rank, document, start, held], axis=1))
