"""Train a small GPT in plain PyTorch, without a word about distca or documents.

The script packs documents one after the other, each with an end token, and calls torch's attention.

    torchrun --nproc-per-node 2 -m distca.run --patch-sdpa --document-end-id 0 --log-every 10 \
        examples/plain_sdpa.py

keeps attention inside documents and balances it, without an edit. The script runs on the CPU (gloo,
float32) and on CUDA devices (NCCL, bfloat16). The documents are parts of Python's standard library.
"""

import argparse

import stdlib_corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

END = 0  # a byte that never occurs in Python's sources
HIDDEN, HEADS, LAYERS, LONGEST = 64, 4, 2, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.ffn = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, HIDDEN // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [batch, heads, tokens, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(out.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norms[1](x))


class GPT(nn.Module):
    """A GPT without position embeddings: only causal attention depends on the order of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(stdlib_corpus.VOCAB_SIZE, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.output = nn.Linear(HIDDEN, stdlib_corpus.VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.blocks(self.embedding(tokens)))


def batches(rank: int, num_tokens: int):
    """Yield tokens int64 [1, num_tokens] forever."""
    corpus, rest = stdlib_corpus.Corpus(rank, LONGEST), b""
    while True:
        while len(rest) < num_tokens:
            rest += corpus.next_document() + bytes([END])
        yield torch.tensor([list(rest[:num_tokens])])
        rest = rest[num_tokens:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens-per-rank", type=int, default=4096)
    args = parser.parse_args()
    dist.init_process_group()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if on_cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = batches(dist.get_rank(), args.tokens_per_rank)
    losses = []
    for _ in range(args.steps):
        tokens = next(stream).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            logits = model(tokens)
        loss = F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
