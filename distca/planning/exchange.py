"""Exchange headers and pieces between ranks, and compare the headers, before ranks plan."""

from collections.abc import Callable, Iterable
from dataclasses import astuple, fields
from typing import TypeVar

import torch
from torch import Tensor

from distca import ops
from distca.options import Options
from distca.planning.cost import AttentionShape
from distca.planning.documents import INT32_MAX, NO_PACK
from distca.ranks import fsdp_traffic, hiding, memory, pace, waits
from distca.ranks.links import node
from distca.ranks.session import Session

T = TypeVar("T")

HEADER_NAMES = (
    *("distca version", "step", "options"),
    *("window_left", "window_right", "chunk_size (0: none)"),
)
HEADER_WORDS = len(HEADER_NAMES)
SHAPE_WORDS = len(fields(AttentionShape))
NODE_WORD = HEADER_WORDS + SHAPE_WORDS  # the node, by its host name
# Times of an earlier step: attention, and its wait for other ranks, in us. -1: not measured.
TIMES_WORDS = slice(NODE_WORD + 1, NODE_WORD + 3)
MEMORY_WORDS = slice(TIMES_WORDS.stop, TIMES_WORDS.stop + memory.NUM_WORDS)  # see memory.words
WAITS_WORDS = slice(MEMORY_WORDS.stop, MEMORY_WORDS.stop + waits.NUM_WORDS)  # see Waits
HIDING_WORD = WAITS_WORDS.stop  # see WorkBeforeAttention
PACE_WORDS = slice(HIDING_WORD + hiding.NUM_WORDS, HIDING_WORD + hiding.NUM_WORDS + pace.NUM_WORDS)
TRAFFIC_WORDS = slice(PACE_WORDS.stop, PACE_WORDS.stop + fsdp_traffic.NUM_WORDS)
PACK_WORDS = slice(TRAFFIC_WORDS.stop, TRAFFIC_WORDS.stop + 3)  # see Documents.pack_words
NUM_WORDS = PACK_WORDS.stop

MAX_PIECES = INT32_MAX  # of all ranks
MEAN_COUNTS = 4  # most pieces of a rank in one exchange, over the mean: most steps need only one
LEAST_PIECES = 65536  # of all ranks, that fit in any exchange: 2.6 MB


def header_of(
    step: int, options: Options, window_size: tuple[int, int], chunk_size: int | None = None
) -> list[int]:
    return [ops.version(), step, options.digest(), *window_size, chunk_size or 0]


def words_of(session: Session, step: int, key: tuple, shape: AttentionShape | None) -> list[int]:
    """Return the words about the plan and this rank that travel before MEMORY_WORDS. `key` is the
    plan's. `shape` defaults to that of the last attention, or to 0 before any attention."""
    words = [0] * SHAPE_WORDS
    if shape is not None:
        words = astuple(shape)
    elif session.num_ranks > 1:
        shapes = (ops.attention_shape(each.group_name) for each in (session, *session.halves))
        words = next((each for each in shapes if any(each)), words)
    left, right, chunk_size = key
    header = header_of(step, session.options, (left, right), chunk_size)
    return [*header, *words, node(), *session.times_us]


def has_attended(session: Session) -> bool:
    """Return whether the group's attention has run on this rank."""
    names = [each.group_name for each in (session, *session.halves)]
    return any(any(ops.attention_shape(name)) for name in names)


def shape_of(headers: Tensor) -> AttentionShape:
    """Return the shape that all ranks name, else the default."""
    shapes = headers[:, HEADER_WORDS:NODE_WORD]
    return AttentionShape.from_words((shapes[0] * (shapes == shapes[0]).all()).tolist())


def exchange(session: Session, pieces: Tensor, words: list[int]) -> tuple[Tensor, Tensor]:
    """Return the pieces of all ranks in rank order, and every rank's words. Collective.

    If there are few pieces, they travel with the words in one exchange.
    """
    step = words[HEADER_NAMES.index("step")]
    count, width = pieces.shape

    def gather(tensor: Tensor) -> list[Tensor]:
        return ops.gather(tensor.flatten(), session.group_name, step)

    few = max(1, LEAST_PIECES // session.num_ranks)
    own = torch.tensor([*words, count])
    gathered = gather(torch.cat([own, pieces.flatten()]) if count <= few else own)
    headers = torch.stack([each[: own.numel()] for each in gathered])
    check_headers(headers)  # raises on all ranks alike, even if only some plan halves
    counts = headers[:, -1].tolist()
    check_counts(counts)
    if max(counts) <= few:
        parts = [each[own.numel() :].view(-1, width) for each in gathered]
        return torch.cat(parts), headers
    return gather_pieces(pieces, counts, gather), headers


def ranks_by_value(values: Iterable[T]) -> dict[T, list[int]]:
    """Return which ranks have each value, from the values of all ranks."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def check_headers(headers: Tensor) -> None:
    """Raise ValueError on every rank if ranks plan different steps."""
    differences = []
    for name, values in zip(HEADER_NAMES, headers.T.tolist(), strict=False):
        ranks_of = ranks_by_value(values)
        if len(ranks_of) > 1:
            on_ranks = (f"{value} on ranks {ranks}" for value, ranks in ranks_of.items())
            differences.append(f"{name}: " + ", ".join(on_ranks))
    if differences:
        raise ValueError(
            "distca: ranks disagree on the plan, nothing was sent: " + "; ".join(differences) + ". "
            "All ranks of a group must run the same version with the same options, windows and "
            "chunks."
        )


def check_packs(words: Tensor) -> None:
    """Raise ValueError if ranks of a pack did not pass the same to Documents.sharded, or if some
    ranks are missing. `words` are the pack_words of all ranks."""
    ranks_by_words = ranks_by_value(map(tuple, words.tolist()))
    ranks_by_words.pop(NO_PACK, None)
    shares_by_pack: dict[int, list] = {}
    for (pack, world_size, _), ranks in ranks_by_words.items():
        shares_by_pack.setdefault(pack, []).append((world_size, ranks))
    for pack, shares in shares_by_pack.items():
        if len(shares) > 1:
            which = " and ".join(f"ranks {ranks}" for _, ranks in shares)
            raise ValueError(
                f"distca: ranks disagree on pack {pack}, nothing was sent: lengths, world_size, "
                f"runs, parents or spans of {which} differ. All ranks of a pack must pass the same "
                "to Documents.sharded"
            )
        [(world_size, ranks)] = shares
        if len(ranks) != world_size:
            raise ValueError(
                f"distca: world_size is {world_size} in Documents.sharded, but ranks {ranks} of "
                f"the group share pack {pack}; expected their number, {len(ranks)}"
            )


def check_counts(counts: list[int]) -> None:
    """Raise ValueError unless each rank announces a possible number of pieces."""
    for rank, count in enumerate(counts):
        if not 0 <= count <= MAX_PIECES:
            raise ValueError(
                f"distca: rank {rank} announces {count} pieces of documents; expected 0 to "
                f"{MAX_PIECES}. What it sent was damaged, or it runs another build: install the "
                "same one on all ranks"
            )
    if sum(counts) > MAX_PIECES:
        most = counts.index(max(counts))
        raise ValueError(
            f"distca: all ranks announce {sum(counts)} pieces of documents, rank {most} alone "
            f"{counts[most]}; expected at most {MAX_PIECES}. Plan fewer documents in one step"
        )


def pieces_at_a_time(counts: list[int]) -> int:
    """Return how many pieces each rank sends in one exchange, equal on all ranks. Together, ranks
    send at most MEAN_COUNTS times the number of all pieces, or LEAST_PIECES if that is more."""
    most = max(LEAST_PIECES, MEAN_COUNTS * sum(counts)) // len(counts)
    return max(1, min(most, max(counts)))


def gather_pieces(
    pieces: Tensor, counts: list[int], gather: Callable[[Tensor], list[Tensor]]
) -> Tensor:
    """Return the pieces of all ranks in rank order: int64 [sum(counts), words].

    Collective: each rank passes its own pieces, [count, words], and the counts of all ranks. All
    ranks call gather(tensor) equally often. It returns the words of each rank's tensor.
    """
    size = pieces_at_a_time(counts)
    parts_by_rank: list[list[Tensor]] = [[] for _ in counts]
    for first in range(0, max(1, *counts), size):
        gathered = gather(pieces[first : first + size])
        for parts, part in zip(parts_by_rank, gathered, strict=True):
            parts.append(part.view(-1, pieces.shape[1]))
    return torch.cat([part for parts in parts_by_rank for part in parts])
