"""Batches for documents that cross ranks: a global pack, cut into equal runs of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca import groups
from distca.documents import Documents

IGNORE_INDEX = -100  # cross_entropy's default


@dataclass(frozen=True)
class ShardedBatch:
    """One rank's run of a global pack, its tensors [tokens] or [1, tokens] as the pack's are."""

    tokens: Tensor
    labels: Tensor
    """What each token predicts, ignore_index where that is nothing. Already shifted: the last token
    of a run predicts the first one of the next rank's."""
    position_ids: Tensor
    """int64: position of each token in its document, which may begin on another rank."""
    documents: Documents
    """For distca.plan and distca.core_attention."""
    rows: slice
    """The run in the pack, to cut other tensors of the batch."""
    num_predicted: int
    """Labels of the whole pack that are not ignored."""
    loss_scale: float
    """Makes losses exact: the sum of this rank's token losses times it, averaged over ranks as data
    parallel wrappers average gradients, is the mean over the pack's predicted tokens."""


def shard_batch(
    tokens: Tensor,
    lengths: Tensor | Sequence[int],
    *,
    labels: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> ShardedBatch:
    """This rank's run of a pack that every rank of `group` holds, equal on all of them.

    tokens [tokens] or [1, tokens]: documents of `lengths`, one after the other. `labels`, like
    tokens, are not shifted: each stands at its own token (default: the tokens). They are shifted
    inside each document before the pack is cut. Runs are equal, or differ by one token where
    the pack does not divide. `group` defaults as for distca.init; without torch.distributed the run
    is the pack.

    Raises ValueError for shapes that differ from these, and as Documents.sharded does.
    """
    _check_shape("tokens", tokens, list(tokens.shape))
    num_tokens = tokens.numel()
    labels = tokens if labels is None else labels
    _check_shape("labels", labels, list(tokens.shape))
    rank, world_size = 0, 1
    if dist.is_available() and dist.is_initialized():
        found = groups.resolve(group)
        rank, world_size = dist.get_rank(found), dist.get_world_size(found)
    documents = Documents.sharded(lengths, rank, world_size)
    ends = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
    held = int(ends[-1]) if ends.numel() else 0
    if held != num_tokens:
        raise ValueError(f"lengths hold {held} tokens; expected {num_tokens}, as tokens has")
    shifted = labels.to(torch.int64).roll(-1, dims=-1)
    shifted[..., (ends[ends > 0] - 1).to(labels.device)] = ignore_index
    num_predicted = int((shifted != ignore_index).sum())
    first = num_tokens * rank // world_size
    rows = slice(first, first + documents.num_tokens)
    return ShardedBatch(
        tokens=tokens[..., rows],
        labels=shifted[..., rows],
        position_ids=documents.position_ids.to(tokens.device).view(*tokens.shape[:-1], -1),
        documents=documents,
        rows=rows,
        num_predicted=num_predicted,
        loss_scale=world_size / max(1, num_predicted),
    )


def _check_shape(name: str, tensor: Tensor, wanted: list[int]) -> None:
    shape = list(tensor.shape)
    if shape != wanted or len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1):
        expected = wanted if shape != wanted else "[tokens] or [1, tokens]: one pack a step"
        raise ValueError(f"{name} has shape {shape}; expected {expected}")
