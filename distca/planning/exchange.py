"""Exchange pieces and headers between ranks, and compare the headers, before ranks plan."""

import hashlib
import socket
from dataclasses import astuple

import torch
from torch import Tensor

from distca import ops
from distca.options import Options
from distca.planning.cost import AttentionShape
from distca.planning.pieces import check_counts, gather_pieces
from distca.ranks.session import Session

HEADER_NAMES = ("distca version", "step", "options", "window_left", "window_right")
HEADER_WORDS = len(HEADER_NAMES)
SHAPE_WORDS = 4  # heads_q, heads_kv, head_dim, bytes per element
NODE_WORD = HEADER_WORDS + SHAPE_WORDS  # the node, by its host name
# Times of an earlier step: attention, and its wait for other ranks, in us. -1: not measured.
TIMES_WORDS = slice(NODE_WORD + 1, NODE_WORD + 3)
NUM_WORDS = TIMES_WORDS.stop


def header_of(step: int, options: Options, window_size: tuple[int, int]) -> list[int]:
    return [ops.version(), step, options.digest(), *window_size]


def node() -> int:
    """Return 63 bits that differ between hosts."""
    return int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:8], "big") >> 1


def shape_words(session: Session, shape: AttentionShape | None) -> list[int]:
    if shape is not None:
        return list(astuple(shape))
    if session.num_ranks == 1:
        return [0] * SHAPE_WORDS
    shapes = (ops.attention_shape(each.group_name) for each in (session, *session.halves))
    return next((words for words in shapes if any(words)), [0] * SHAPE_WORDS)


def exchange(
    session: Session, pieces: Tensor, words: list[int]
) -> tuple[Tensor, AttentionShape, Tensor]:
    """Return the pieces of all ranks in rank order, their common attention shape, and every rank's
    words. Collective."""
    step = words[HEADER_NAMES.index("step")]

    def all_gather(tensor: Tensor) -> Tensor:
        return ops.all_gather(tensor, session.group_name, step)

    headers = all_gather(torch.tensor([*words, pieces.shape[0]]))
    check_headers(headers)  # raises on all ranks alike, even if only some plan halves
    counts = headers[:, -1].tolist()
    check_counts(counts)
    gathered = gather_pieces(pieces, counts, all_gather)
    shapes = headers[:, HEADER_WORDS : HEADER_WORDS + SHAPE_WORDS]
    agreed = shapes[0] if (shapes == shapes[0]).all() else torch.zeros(SHAPE_WORDS)
    shape = AttentionShape.from_words(agreed.to(torch.int64).tolist())
    return gathered, shape, headers


def check_headers(headers: Tensor) -> None:
    """Raise ValueError on every rank if ranks plan different steps."""
    differences = []
    for idx, name in enumerate(HEADER_NAMES):
        values = headers[:, idx].tolist()
        if len(set(values)) == 1:
            continue
        by_value = {
            value: [rank for rank, other in enumerate(values) if other == value]
            for value in dict.fromkeys(values)
        }
        differences.append(
            f"{name}: "
            + ", ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
        )
    if differences:
        raise ValueError(
            "distca: ranks disagree on the plan, nothing was sent: " + "; ".join(differences) + ". "
            "All ranks of a group must run the same version with the same options and windows."
        )
