"""A small Llama-style decoder over packed documents, in plain PyTorch.

Activations are packed rows [tokens, hidden] without batch dimension or padding. Core attention is
an argument: a function (q, k, v, documents) -> out with q [tokens, heads, head_dim] and k, v
[tokens, kv_heads, head_dim]. The model passes `documents` to it unchanged.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CoreAttention = Callable[[Tensor, Tensor, Tensor, object], Tensor]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10000.0
    recompute: bool = False  # activation checkpointing of every block

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}; expected a divisor of heads ({self.heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE rotates pairs, use an even one")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [tokens, heads, head_dim]; cos and sin are [tokens, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, core_attention: CoreAttention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.core_attention = core_attention
        self.wq = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: object) -> Tensor:
        q, k, v = (w(x).unflatten(1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        out = self.core_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, documents)
        return self.wo(out.flatten(1))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, core_attention: CoreAttention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config, core_attention)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: object) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, documents)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig, core_attention: CoreAttention) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config, core_attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.output = nn.Linear(config.hidden, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, position_ids: Tensor, documents: object) -> Tensor:
        """Return logits [tokens, vocab_size]; position_ids restart at 0 in every document."""
        x = run_blocks(self.config, self.blocks, self.embedding(tokens), position_ids, documents)
        return self.output(self.norm(x))


def run_blocks(
    config: LlamaConfig,
    blocks: Iterable[nn.Module],
    x: Tensor,
    position_ids: Tensor,
    documents: object,
) -> Tensor:
    """Return what the blocks make of x [tokens, hidden]."""
    pairs = torch.arange(0, config.head_dim, 2, device=x.device)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    angles = position_ids[:, None, None] * frequencies  # [tokens, 1, head_dim / 2]
    # FSDP casts a block's arguments, but not when a checkpoint recomputes the block.
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    for block in blocks:
        if config.recompute:
            x = checkpoint(block, x, cos, sin, documents, use_reentrant=False)
        else:
            x = block(x, cos, sin, documents)
    return x


class LlamaStage(nn.Module):
    """Blocks [first, last) of a Llama, as a stage of a pipeline. The first stage has the embedding,
    the last one the output. Parameters keep their names."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        self.config = model.config
        is_last = last == model.config.layers
        self.embedding = model.embedding if first == 0 else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm = model.norm if is_last else None
        self.output = model.output if is_last else None

    def forward(self, x: Tensor, documents: object) -> Tensor:
        """x is tokens [tokens], or [tokens, hidden] of the previous stage. Return [tokens, hidden],
        or logits [tokens, vocab_size]."""
        if self.embedding is not None:
            x = self.embedding(x)
        positions = documents.position_ids.to(x.device)
        x = run_blocks(self.config, self.blocks.values(), x, positions, documents)
        return x if self.output is None else self.output(self.norm(x))


@dataclass(frozen=True)
class WholeDocuments:
    """Packed documents for torch's attention, the reference without distca."""

    lengths: list[int]
    cu_seqlens: Tensor  # int32 [documents + 1], on the device
    position_ids: Tensor  # int64 [tokens]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "WholeDocuments":
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        position_ids = torch.cat([torch.arange(length) for length in lengths]).to(device)
        return cls(lengths, cu_seqlens, position_ids)


@torch.compiler.disable
def torch_attention(q: Tensor, k: Tensor, v: Tensor, documents: WholeDocuments) -> Tensor:
    """Compute causal attention inside each document with torch alone."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        cu_seqlens, longest = documents.cu_seqlens, max(documents.lengths)
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))
    outs = []
    for rows in zip(*(x.split(documents.lengths) for x in (q, k, v)), strict=True):
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in rows)
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)
