"""Train on ranks that others serve, until one of them fails: python server_fault_script.py FAULT

The launcher runs it with attention servers. The file that STARTED names appears with the last step
before a fault.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from oracle import Case
from torch import nn

import distca

NUM_STEPS = 400  # minutes: a signal comes first
FAULT_STEP, VICTIM = 3, 1
LAYERS = 3


class Layer(nn.Module):
    def forward(self, rows, documents: distca.Documents):
        return distca.core_attention(*rows, documents)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = Case([[1200, 30]] + [[]] * (world_size - 1), dtype=torch.float32, sharded=True)
    rows = [tensor[case.rows_of(rank)].requires_grad_() for tensor in case.inputs()[:3]]
    layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for step in range(NUM_STEPS):
        is_victim = step == FAULT_STEP and rank == VICTIM
        documents = distca.Documents.sharded(case.all_lengths, rank, world_size)
        distca.plan(documents)
        if step == FAULT_STEP and rank == 0:
            Path(os.environ["STARTED"]).touch()
        if is_victim and sys.argv[1] == "raise":
            raise KeyError("layers.417.weight")
        skipped = 1 if is_victim and sys.argv[1] == "skip" else None
        outs = [layer(rows, documents) for idx, layer in enumerate(layers) if idx != skipped]
        sum(out.sum() for out in outs).backward()


if __name__ == "__main__":
    main()
