"""Batches for documents that cross ranks: a global pack, cut into equal runs of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca.planning.documents import Documents, runs_of
from distca.ranks import groups
from distca.ranks import session as sessions

IGNORE_INDEX = -100  # cross_entropy's default


@dataclass(frozen=True)
class ShardedBatch:
    """One rank's part of a global pack. Tensors are [tokens] or [1, tokens], as in the pack."""

    tokens: Tensor
    labels: Tensor
    """The label that each token predicts, or ignore_index. Labels are already shifted: the last
    token of a run predicts the first token of the next run."""
    position_ids: Tensor
    """int64: position of each token in its document, which may begin on another rank."""
    documents: Documents
    """For distca.plan and distca.core_attention."""
    rows: slice | Tensor
    """Rows of the pack that this rank holds, to index other tensors of the batch. A slice, or with
    runs=2 an int64 tensor, [tokens]."""
    num_predicted: int
    """Number of labels of the whole pack that are not ignored."""
    loss_scale: float
    """Factor that makes the loss exact. Multiply the sum of this rank's token losses by it. The
    average over ranks, as data parallel wrappers take it, is then the mean over the pack's
    predicted tokens."""


def shard_batch(
    tokens: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    labels: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    ignore_index: int = IGNORE_INDEX,
    runs: int = 1,
) -> ShardedBatch:
    """Return this rank's part of a pack. Every rank of `group` passes the same pack.

    tokens [tokens] or [1, tokens] holds documents of `lengths`, one after the other. `labels` has
    the shape of tokens (default: the tokens) and is not shifted: each label stands at its own
    token. The labels are shifted inside each document before the pack is cut. A rank holds one run
    of tokens. With runs=2, which distca.PingPong needs, it holds one of the pack's first half and
    one of its second (see Documents.sharded). Runs have equal numbers of tokens, or differ by one
    token if the pack does not divide. `group` defaults as for distca.init, and its servers hold
    nothing. Without torch.distributed this rank holds the whole pack.

    Raises ValueError for other shapes, and as Documents.sharded does.
    """
    rank, world_size = 0, 1
    if dist.is_available() and dist.is_initialized():
        process_group = groups.resolve(group)
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        session = sessions.find(process_group)
        if session is not None and session.servers:
            rank, world_size = session.place()
    labels = tokens if labels is None else labels
    return cut(tokens, lengths, labels, rank, world_size, runs, ignore_index=ignore_index)


def cut(
    tokens: Tensor,
    lengths: Tensor | Sequence[int],
    labels: Tensor,
    rank: int,
    world_size: int,
    runs: int = 1,
    *,
    pack: int = 0,
    ignore_index: int = IGNORE_INDEX,
) -> ShardedBatch:
    """Cut a pack over `world_size` ranks as shard_batch does, and return the part of `rank`. For
    `pack` see Documents.sharded."""
    shape = list(tokens.shape)
    num_tokens = tokens.numel()
    if shape not in ([num_tokens], [1, num_tokens]):
        raise ValueError(
            f"tokens has shape {shape}; expected [tokens] or [1, tokens]: one pack a step"
        )
    if list(labels.shape) != shape:
        raise ValueError(f"labels has shape {list(labels.shape)}; expected {shape}")
    documents = Documents.sharded(lengths, rank, world_size, runs, pack)
    ends = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
    held = int(ends[-1]) if ends.numel() else 0
    if held != num_tokens:
        raise ValueError(f"lengths hold {held} tokens; expected {num_tokens}, as tokens has")
    shifted = labels.to(torch.int64).roll(-1, dims=-1)
    shifted[..., (ends[ends > 0] - 1).to(labels.device)] = ignore_index
    num_predicted = int((shifted != ignore_index).sum())
    slices = runs_of(num_tokens, rank, world_size, runs)
    rows = slices[0] if runs == 1 else torch.cat([torch.arange(num_tokens)[run] for run in slices])
    return ShardedBatch(
        tokens=tokens[..., rows],
        labels=shifted[..., rows],
        position_ids=documents.position_ids.to(tokens.device).view(*tokens.shape[:-1], -1),
        documents=documents,
        rows=rows,
        num_predicted=num_predicted,
        loss_scale=world_size / max(1, num_predicted),
    )
