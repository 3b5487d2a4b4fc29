"""Measure the cost of log lines, records, scalars and timed phases, as a share of a step.

    torchrun --nproc-per-node 2 benchmarks/watching.py

Blocks of ten steps alternate between full monitoring (a line, ten records, one timed step) and
none. The cost is the difference of their processor time over all threads, on the slowest rank; both
times are the minimum over many blocks. The steps compute next to nothing, so that the difference
shows. It is compared with a training step of a small Llama with as many layers on this machine:
forward, backward and optimizer.
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import distca
from distca.options import make_writable
from distca.watching.figures import STEPS_FILE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from llama import Llama, LlamaConfig  # noqa: E402

STEPS_IN_BLOCK = 10
SIZES = {"vocab_size": 512, "hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="per rank, of the compared step")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/watching"), help="for the records")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 " + __file__)
    try:
        make_writable("--out", args.out, STEPS_FILE)
    except ValueError as error:
        parser.error(str(error))
    return args


def packed(num_tokens: int) -> distca.Documents:
    """Return one document on rank 0, and many on the others."""
    lengths = [num_tokens] if dist.get_rank() == 0 else [num_tokens // 8] * 8
    return distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()])


def nearly_empty_block(num_layers: int) -> float:
    """Run a block of steps and return its processor time in seconds."""
    start = time.process_time()
    for _ in range(STEPS_IN_BLOCK):
        documents = packed(64)
        q = torch.ones(documents.num_tokens, 1, 8, requires_grad=True)
        distca.plan(documents)
        for _ in range(num_layers):
            q = distca.core_attention(q, q, q, documents)
        q.sum().backward()
    return time.process_time() - start


def cost_of_watching(num_layers: int, num_blocks: int, folder: str) -> float:
    """Return the seconds per step on the slowest rank."""
    on = distca.Watching(log_every=STEPS_IN_BLOCK, run_dir=folder)
    groups = {on: dist.new_group(), distca.Watching(): dist.new_group()}
    blocks: list[list[float]] = [[], []]
    for _ in range(num_blocks):
        for seconds, (watching, group) in zip(blocks, groups.items(), strict=True):
            distca.init(group, watching=watching)
            seconds.append(nearly_empty_block(num_layers))
    with_all, without = (min(seconds) / STEPS_IN_BLOCK for seconds in blocks)
    slowest = torch.tensor(with_all - without)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def training_seconds(num_layers: int, num_tokens: int) -> float:
    """Return the wall time of one step in seconds, the minimum of three."""
    model = Llama(LlamaConfig(layers=num_layers, **SIZES), distca.core_attention)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(SIZES["vocab_size"], (num_tokens,))
    least = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        documents = packed(num_tokens)
        distca.plan(documents)
        F.cross_entropy(model(tokens, documents.position_ids, documents), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        least = min(least, time.perf_counter() - start)
    return least


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    logging.getLogger("distca").addHandler(logging.NullHandler())  # format but hide lines
    cost = cost_of_watching(args.layers, args.blocks, str(args.out))
    step = training_seconds(args.layers, args.tokens)
    if dist.get_rank() == 0:
        print(
            f"{1e6 * cost:.0f} us a step of {args.layers} layers, {100 * cost / step:.3f} % of a "
            f"training step of {1e3 * step:.0f} ms"
        )
    distca.close()
    dist.barrier()  # gloo's threads must release tensors before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
