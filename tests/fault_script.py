"""A training script in which one rank fails: python fault_script.py FAULT

A launcher sets its environment. Like users' scripts, it catches no exceptions.
"""

import resource
import sys
from datetime import timedelta
from pathlib import Path

import kill_at
import torch
import torch.distributed as dist
from small_step import SHARDED, small_step

import distca

HUGE_ROWS = 200_000
ROOM_BYTES = 128 * 2**20


def train_step(rank: int, world_size: int) -> torch.Tensor:
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    return step.attend()


def raise_in_the_model(rank: int, world_size: int) -> None:
    out = train_step(rank, world_size)
    if rank == kill_at.VICTIM:
        raise KeyError("layers.417.weight")
    out.sum().backward()


def raise_while_planning_ahead(rank: int, world_size: int) -> None:
    """Raise on the victim while it plans. The others wait for it in the layer before."""
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    if rank == kill_at.VICTIM:
        distca.plan(small_step(rank, world_size).documents, ahead=True)
        raise KeyError("layers.417.weight")
    step.attend()


def run_out_of_memory(rank: int, world_size: int) -> None:
    """Limit the memory, so that the operator cannot allocate visiting rows or results."""
    documents = distca.Documents.sharded([HUGE_ROWS], rank, world_size)
    rows = documents.num_tokens
    distca.plan(documents, window_size=(2, 0))
    q, k, v = (torch.ones(rows, 8, 64) for _ in range(3))
    if rank == kill_at.VICTIM:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit_bytes = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    distca.core_attention(q, k, v, documents, window_size=(2, 0))
    distca.core_attention(q, k, v, documents, window_size=(2, 0))


def pass_wrong_rows_in_a_later_layer(rank: int, world_size: int) -> None:
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    step.attend()
    if rank == kill_at.VICTIM:
        step.q = step.q[1:]
    step.attend()


def exit_early(rank: int, world_size: int) -> None:
    out = train_step(rank, world_size)
    if rank == kill_at.VICTIM:
        sys.exit(3)
    out.sum().backward()


def die_inside_combine(rank: int, world_size: int) -> None:
    kill_at.run(rank, world_size, "inside_combine")


FAULTS = {
    function.__name__: function
    for function in (
        raise_in_the_model,
        raise_while_planning_ahead,
        run_out_of_memory,
        pass_wrong_rows_in_a_later_layer,
        exit_early,
        die_inside_combine,
    )
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    FAULTS[sys.argv[1]](dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
