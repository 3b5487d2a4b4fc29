"""Small transformer blocks over packed documents and training steps, for tests of ping-pong."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distca

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 8
LENGTHS = [[61, 0, 203, 19], [1, 7, 72], [3], [2, 2, 40, 300]]  # by rank, of unequal sums


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """A block with one attention per window; x [tokens, hidden], cos, sin [tokens, 1, dim / 2]."""

    def __init__(self, windows: list[tuple[int, int]], hidden: int = HIDDEN, head_dim=HEAD_DIM):
        super().__init__()
        self.windows, self.head_dim = windows, head_dim
        width = (HEADS + 2 * KV_HEADS) * head_dim
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.ModuleList(nn.Linear(hidden, width) for _ in windows)
        self.out = nn.ModuleList(nn.Linear(HEADS * head_dim, hidden) for _ in windows)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents=None) -> Tensor:
        for qkv, out, window in zip(self.qkv, self.out, self.windows, strict=True):
            heads = qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], -2)
            q, k = (rotate(each, cos, sin).to(v.dtype) for each in (q, k))
            x = x + out(self.attend(q, k, v, window, documents).flatten(-2))
        return x + self.down(F.silu(self.up(x * self.scale)))

    def attend(self, q, k, v, window, documents) -> Tensor:
        return distca.core_attention(q, k, v, documents, window_size=window)


class SdpaBlock(Block):
    """A block on x [1, tokens, hidden] that uses the documents in force."""

    def attend(self, q, k, v, window, documents) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = distca.scaled_dot_product_attention(
            q, k, v, is_causal=window == (-1, 0), enable_gqa=True
        )
        return out.transpose(1, 2)


class VarlenBlock(Block):
    """A block that gets cu_seqlens as `documents` and uses the documents in force."""

    def attend(self, q, k, v, window, documents) -> Tensor:
        longest = int(documents.diff().max())
        return distca.varlen_attention(
            q, k, v, documents, documents, longest, longest, window_size=window
        )


@dataclass
class Step:
    """A rank's rows of a step."""

    documents: distca.Documents
    x: Tensor
    cos: Tensor
    sin: Tensor
    grad: Tensor  # of the block's result

    def run(self, block: nn.Module, *arguments) -> list[Tensor]:
        """Return the result and the gradients of x and of all parameters on this rank."""
        x = self.x.clone().requires_grad_()
        block.zero_grad()
        out = block(x, self.cos, self.sin, *arguments)
        out.backward(self.grad)
        return [out.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def documents_of(lengths: list[int]) -> distca.Documents:
    return distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()])


def step_of(
    rank: int,
    lengths: list[int],
    dtype: torch.dtype = torch.float64,
    hidden: int = HIDDEN,
    head_dim: int = HEAD_DIM,
    device: str = "cpu",
) -> Step:
    documents = documents_of(lengths)
    generator = torch.Generator().manual_seed(rank)
    shape = (documents.num_tokens, hidden)
    x, grad = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(2))
    frequencies = 100.0 ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)
    angles = documents.position_ids[:, None, None] * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return Step(documents, *(tensor.to(device) for tensor in (x, cos, sin, grad)))


def crossing_step_of(rank: int, world_size: int, lengths: list[int], *arguments, **sizes) -> Step:
    """Return a rank's two runs of a pack of these documents. For further arguments see step_of."""
    documents = distca.Documents.sharded(lengths, rank, world_size, runs=2)
    pack = step_of(0, lengths, *arguments, **sizes)
    rows = rows_of_runs(rank, world_size, sum(lengths))
    return Step(documents, pack.x[rows], pack.cos[rows], pack.sin[rows], pack.grad[rows])


def rows_of_runs(rank: int, world_size: int, num_tokens: int) -> Tensor:
    """Return the rows of a pack that a rank holds in two runs."""
    borders = [num_tokens * run // (2 * world_size) for run in range(2 * world_size + 1)]
    runs = (torch.arange(borders[run], borders[run + 1]) for run in (rank, world_size + rank))
    return torch.cat(list(runs))


def block_of(kind=Block, windows=((-1, 0),), dtype: torch.dtype = torch.float64, **sizes) -> Block:
    torch.manual_seed(0)
    return kind(list(windows), **sizes).to(dtype)


def pair_of(*arguments, cut=distca.pingpong.third, split=None, **keywords):
    """Return a bare block, and a copy of it in ping-pong."""
    bare = block_of(*arguments, **keywords)
    return bare, distca.PingPong(copy.deepcopy(bare), cut=cut, split=split)
