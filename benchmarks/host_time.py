"""Host time of attention calls, which must stay below the time that the device needs.

    python benchmarks/host_time.py --ranks 1 8 64 --documents 4 32 256
    torchrun --nproc-per-node 2 benchmarks/host_time.py

One process times rank 0's calls under plans of many ranks, without communication (the operator
attend: visiting tasks, then home tasks). Several processes time core_attention itself. Documents
have 16 tokens of one head: on a device the host returns before the device is done, and on a CPU
there is next to nothing to compute. Under the plans of many ranks, each rank's neighbours compute
every other document of it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import distca

LENGTH = 16  # tokens of a document
HEAD_DIM = 64
BURST = 20  # calls whose work fits in a device's queue
NUM_BURSTS = 25
ops = torch.ops.distca


def host_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in bursts that start on an idle device."""
    times = []
    for _ in range(NUM_BURSTS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - begin) / BURST * 1e6)
    return statistics.median(times[1:])


def passes(attend: Callable[..., torch.Tensor], rows: list[int], device: torch.device) -> list:
    """Return calls of a forward pass, and of a forward and a backward pass, for so many q, k, v."""
    q, k, v = (
        torch.randn(num, 1, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for num in rows
    )
    grad_out = torch.randn_like(q)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad_out)

    return [forward, both]


def share_of_rank_0(
    num_ranks: int, num_documents: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return layout, rows and the number of visiting rows; neighbours serve odd documents."""
    documents = torch.arange(num_ranks * num_documents)
    homes = documents // num_documents
    zeros, lengths = torch.zeros_like(documents), torch.full_like(documents, LENGTH)
    pieces = torch.stack([homes, documents, zeros, lengths], 1)
    away = documents % 2 * (1 + documents // 2 % max(1, num_ranks - 1))
    servers = (homes + away) % num_ranks
    tasks = torch.stack([documents, zeros, lengths, servers], 1)[servers.argsort(stable=True)]
    plan = ops.plan_of_tasks(pieces, tasks, num_ranks, -1, 0)
    layout, packed = ops.layout(pieces, plan, 0, 0, device.type)
    visiting = ((servers == 0) & (homes != 0)).sum().item() * LENGTH
    return layout, ops.unpack_rows(layout, packed.to(device)), visiting


def one_process(args: argparse.Namespace, device: torch.device) -> None:
    print(f"{'ranks':>6}{'documents':>11}{'forward, us':>13}{'with backward, us':>19}")
    for num_ranks in args.ranks:
        for num_documents in args.documents:
            layout, rows, visiting = share_of_rank_0(num_ranks, num_documents, device)
            totals = [0.0, 0.0]
            for tasks, num in (("visiting", visiting), ("home", num_documents * LENGTH)):

                def attend(q, k, v, layout=layout, rows=rows, tasks=tasks):
                    return ops.attend(q, k, v, layout, rows, 0.125, tasks)[0]

                for i, call in enumerate(passes(attend, [num] * 3, device)):
                    totals[i] += host_us(call, device)
            print(f"{num_ranks:6}{num_documents:11}{totals[0]:13.1f}{totals[1]:19.1f}", flush=True)


def group_of_processes(args: argparse.Namespace, device: torch.device) -> None:
    distca.init()
    rank = dist.get_rank()
    if rank == 0:
        print(f"{'documents':>11}{'forward, us':>13}{'with backward, us':>19}")
    for num_documents in args.documents:
        # Rank 0 has the long documents, so that others serve it.
        length = LENGTH if rank else 8 * LENGTH
        starts = torch.arange(num_documents + 1, dtype=torch.int32) * length
        documents = distca.Documents(starts.to(device))

        def attend(q, k, v, documents=documents):
            return distca.core_attention(q, k, v, documents)

        distca.plan(documents)
        calls = passes(attend, [num_documents * length] * 3, device)
        times = [host_us(call, device) for call in calls]
        if rank == 0:
            print(f"{num_documents:11}{times[0]:13.1f}{times[1]:19.1f}", flush=True)
    distca.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--documents", type=int, nargs="+", default=[4, 32, 256], help="of a rank")
    args = parser.parse_args()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return one_process(args, device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group_of_processes(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
