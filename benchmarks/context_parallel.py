"""Context parallelism with distca's kernels: all ranks share every document.

Each document is cut into 2 x ranks shards. Rank r holds the r-th shard from the head and the r-th
from the tail, so that attention is balanced by construction. Queries stay. Keys and values of all
ranks are gathered before attention, and their gradients are scattered after it. The gathered keys
are kept for the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distca.planning.chosen_tasks import layout_of_server
from distca.planning.plan import CAUSAL


@dataclass(frozen=True)
class HeadTail:
    """One rank's shards of a step."""

    rows: Tensor  # int64: indices of this rank's rows among the step's rows, in order
    num_padded_rows: int  # per rank in the gathered keys
    seen: Tensor  # int64: indices, among the gathered rows, of keys that its queries see
    layout: Tensor
    layout_rows: Tensor
    group: dist.ProcessGroup

    @classmethod
    def of(
        cls, lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device
    ) -> "HeadTail":
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        lengths = np.asarray(lengths, dtype=np.int64)
        begins = lengths.cumsum() - lengths
        held = [rows_of(lengths, each, num_ranks) for each in range(num_ranks)]
        num_padded_rows = max(len(rows) for rows in held)
        place = np.empty(lengths.sum(), dtype=np.int64)  # of each row among the gathered rows
        for each, rows in enumerate(held):
            place[rows] = each * num_padded_rows + np.arange(len(rows))
        own = shards_of(lengths, rank, num_ranks)
        ends = np.where(own[:, 1] > own[:, 0], own[:, 1], 0).max(axis=0)  # of the last query
        seen = place[_ranges(begins, ends)]
        served = [
            (document, int(begin), int(end))
            for shard in own
            for document, (begin, end) in enumerate(shard.T)
            if begin < end
        ]
        layout, rows = layout_of_server(lengths.tolist(), served, 1, CAUSAL, device.type)
        return cls(
            torch.from_numpy(held[rank]).to(device),
            num_padded_rows,
            torch.from_numpy(seen).to(device),
            layout,
            rows.to(device),
            group,
        )


def shards_of(lengths: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """Return the rank's shards as int64 [2 (head, tail), 2 (begin, end), documents]."""
    num_shards = 2 * num_ranks
    return np.array(
        [
            (lengths * shard // num_shards, lengths * (shard + 1) // num_shards)
            for shard in (rank, num_shards - 1 - rank)
        ]
    )


def rows_of(lengths: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """Return the rows (int64) of a rank's shards, ordered by document."""
    shards = shards_of(lengths, rank, num_ranks)
    first = (lengths.cumsum() - lengths + shards[:, 0]).T.ravel()
    return _ranges(first, (shards[:, 1] - shards[:, 0]).T.ravel())


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate the ranges [first[i], first[i] + counts[i])."""
    shift = first - (counts.cumsum() - counts)
    return np.arange(counts.sum()) + np.repeat(shift, counts)


class _GatherKeys(torch.autograd.Function):
    """Maps this rank's k, v [rows, heads, head_dim] to those of all rows that its queries see."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, shards: HeadTail) -> tuple[Tensor, Tensor]:
        ctx.shards, num_ranks = shards, dist.get_world_size(shards.group)
        own = k.new_empty(shards.num_padded_rows, 2, *k.shape[1:])
        own[: k.shape[0], 0], own[: k.shape[0], 1] = k, v
        everyones = own.new_empty(num_ranks * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(everyones, own, group=shards.group)
        return tuple(everyones[:, idx].index_select(0, shards.seen) for idx in range(2))

    @staticmethod
    def backward(ctx, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor, None]:
        shards, num_rows = ctx.shards, ctx.shards.rows.numel()
        num_ranks = dist.get_world_size(shards.group)
        everyones = grad_k.new_zeros(num_ranks * shards.num_padded_rows, 2, *grad_k.shape[1:])
        for idx, grad in enumerate((grad_k, grad_v)):
            everyones[:, idx].index_copy_(0, shards.seen, grad)
        own = everyones.new_empty(shards.num_padded_rows, *everyones.shape[1:])
        dist.reduce_scatter_tensor(own, everyones, group=shards.group)
        return own[:num_rows, 0], own[:num_rows, 1], None


def context_attention(q: Tensor, k: Tensor, v: Tensor, documents: HeadTail) -> Tensor:
    """Return attention's out, shaped like q, for q, k, v [rows, heads, head_dim] of this rank."""
    seen_k, seen_v = _GatherKeys.apply(k, v, documents)
    scale = q.shape[-1] ** -0.5
    layout, rows = documents.layout, documents.layout_rows
    return torch.ops.distca.attend(q, seen_k, seen_v, layout, rows, scale, "visiting")[0]
