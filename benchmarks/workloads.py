"""Documents of the steps that benchmarks run."""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distca.simulate.packing import karmarkar_karp

IGNORE_INDEX = -100  # cross_entropy's default
TOKENS = 65536  # default per rank
LARGEST_STRIDE = 8  # between consecutive tokens
Packs = list[list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """Documents of all steps."""

    packs: Packs
    """Document lengths [steps][ranks][documents], with one entry for all ranks if they cross."""
    tokens: int  # per rank; after sorting, the mean
    crosses_ranks: bool = False
    """Whether each step is one pack, cut into equal runs for the ranks."""

    def lengths(self, step: int) -> list[int]:
        """Return the lengths of all documents of the step, in the order of its rows."""
        return list(itertools.chain(*self.packs[step]))

    def rows_of(self, step: int, rank: int) -> range:
        """Return the rank's rows among those of the step."""
        if self.crosses_ranks:
            return range(self.tokens * rank, self.tokens * (rank + 1))
        ends = list(itertools.accumulate(map(sum, self.packs[step]), initial=0))
        return range(ends[rank], ends[rank + 1])

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that hold the documents."""
        return self.num_tokens // self.tokens if self.crosses_ranks else len(self.packs[0])

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of a step, on all ranks."""
        return sum(self.lengths(0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=Path, help="JSON list of document lengths to draw from")
    parser.add_argument(
        "--equal", type=int, metavar="LENGTH", help="equal documents, whole on their ranks"
    )
    parser.add_argument(
        "--document", type=int, metavar="TOKENS", help="one document over all ranks"
    )
    parser.add_argument(
        "--mixed",
        type=int,
        metavar="TOKENS",
        help="one document of this length among those of --lengths; documents cross ranks",
    )
    parser.add_argument(
        "--longest-last",
        action="store_true",
        help="order each rank's documents of --lengths by length, for ping-pong",
    )
    parser.add_argument("--tokens", type=int, help=f"per rank; {TOKENS} unless --document says it")
    parser.add_argument("--seed", type=int, default=0)


def make_workload(args: argparse.Namespace, world_size: int, num_steps: int) -> Workload:
    """Build the workload. Raises ValueError for arguments that do not fit together."""
    tokens = args.tokens if args.tokens is not None else TOKENS
    others = (args.document, args.equal, args.mixed)
    if args.longest_last and any(each is not None for each in others):
        raise ValueError("--longest-last is set; expected no --document, --equal or --mixed")
    if args.document is not None:
        if args.tokens is not None or args.document % world_size or args.document < world_size:
            raise ValueError(
                f"--document is {args.document} with {world_size} ranks and --tokens "
                f"{args.tokens}; expected a multiple of the ranks, and no --tokens"
            )
        return Workload([[[args.document]]] * num_steps, args.document // world_size, True)
    if args.equal is not None:
        if args.equal < 1 or tokens % args.equal:
            raise ValueError(f"--equal is {args.equal}; expected a divisor of --tokens, {tokens}")
        return Workload([[[args.equal] * (tokens // args.equal)] * world_size] * num_steps, tokens)
    if args.lengths is None:
        raise ValueError("no documents; pass --lengths, --equal or --document")
    stream = Stream(json.loads(args.lengths.read_text()), args.seed)
    if args.mixed is None:
        packs = [[stream.take(tokens) for _ in range(world_size)] for _ in range(num_steps)]
        if args.longest_last:
            packs = [[sorted(lengths) for lengths in step] for step in packs]
        return Workload(packs, tokens)
    room = tokens * world_size - args.mixed
    if args.mixed < 1 or room < 0:
        raise ValueError(
            f"--mixed is {args.mixed}; expected 1 to {tokens * world_size}, the tokens of a step"
        )
    return Workload([[stream.mixed(args.mixed, room)] for _ in range(num_steps)], tokens, True)


def sorted_workload(workload: Workload, windows: list[range], linear_length: float) -> Workload:
    """Return the workload as a loader deals it that sorts by the Karmarkar-Karp method: documents
    of the steps of a window may go to any of these steps and to any rank.

    Sums of work are alike, and numbers of tokens are not. The work of a document is its squared
    length for attention, and `linear_length` times its length for linear layers.
    """
    packs: Packs = []
    for window in windows:
        lengths = [length for step in window for length in workload.lengths(step)]
        num_ranks = len(workload.packs[window[0]])
        work = [length * (length + linear_length) for length in lengths]
        held: list[list[int]] = [[] for _ in range(num_ranks * len(window))]
        for length, bin_ in zip(lengths, karmarkar_karp(work, len(held)), strict=True):
            held[bin_].append(length)
        packs += [held[first : first + num_ranks] for first in range(0, len(held), num_ranks)]
    return Workload(packs, workload.tokens)


class Stream:
    """An endless stream of shuffled documents. The rest of a document that was cut comes next."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        lengths = [length for length in lengths if length > 0]
        self._generator = random.Random(seed)
        self._generator.shuffle(lengths)
        self._lengths: Iterator[int] = itertools.cycle(lengths)
        self._rest = 0

    def take(self, tokens: int) -> list[int]:
        """Take documents of `tokens` tokens in total; the last one is cut to fit."""
        documents, room = [], tokens
        while room > 0:
            length = self._rest or next(self._lengths)
            documents.append(min(length, room))
            self._rest = length - documents[-1]
            room -= documents[-1]
        return documents

    def mixed(self, long: int, room: int) -> list[int]:
        """Insert one document of `long` tokens among others of `room` tokens in total."""
        documents = self.take(room)
        documents.insert(self._generator.randint(0, len(documents)), long)
        return documents


@dataclass(frozen=True)
class Rows:
    """All rows of a step, or those that a rank holds; int64 [rows]."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_scale: float
    """Factor for the sum of losses over a rank's rows; the average over ranks is the loss."""

    def chosen(self, rows: Tensor) -> "Rows":
        return Rows(self.tokens[rows], self.labels[rows], self.position_ids[rows], self.loss_scale)


def make_rows(workload: Workload, step: int, vocab: int, seed: int, device: torch.device) -> Rows:
    """Return the rows of the whole step, on every rank.

    Tokens walk in random strides, so that a model learns the next token, except for its stride, in
    few steps.
    """
    lengths = torch.tensor(workload.lengths(step))
    ends = lengths.cumsum(0)
    num_tokens = int(lengths.sum())
    generator = torch.Generator(device).manual_seed(seed * len(workload.packs) + step)
    strides = torch.randint(
        1, LARGEST_STRIDE + 1, (num_tokens,), generator=generator, device=device
    )
    tokens = strides.cumsum(0) % vocab
    labels = tokens.roll(-1)
    labels[(ends - 1).to(device)] = IGNORE_INDEX
    begins = (ends - lengths).repeat_interleave(lengths)
    position_ids = (torch.arange(num_tokens) - begins).to(device)
    num_labels = num_tokens - lengths.numel()
    return Rows(tokens, labels, position_ids, workload.num_ranks / max(1, num_labels))
