"""Measure the bandwidth of rows between ranks, alone and beside attention.

    torchrun --nproc-per-node 4 benchmarks/transport.py --out runs/transport

Alone: every rank sends equally to all others, in the shape of a plan (several documents; queries
and the keys that they see), through the operator torch.ops.distca.exchange. "peer" is the transport
through peer memory. "process_group" is NCCL with packing and unpacking. "all_to_all" is NCCL's raw
all_to_all_single of as many bytes.

Beside attention: every rank has the same documents and runs one layer, forward and backward. "home"
computes them where they are. "moved" computes a share of them on the next rank, so that every rank
computes as much as before. "still" computes the tasks of "moved" on rows that are already there. So
"moved" minus "still" is communication. "still" minus "home" is the cost of computing documents in
pieces, and 0.2 to 0.7 % for clearing rows that are computed elsewhere. "awake" is "still" after one
MiB has gone to the next rank. Idle links sleep and leave their power to the multiprocessors, up to
4 % of the clock on H200. Every training step on several GPUs uses its links for gradients, so there
rows cost "moved" minus "awake".

Times are medians over batches of calls between CUDA events, on the slowest rank. Device time is the
mean over more calls under the profiler (device_time.py), on the rank with the largest value.
"""

import argparse
import csv
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from device_time import FIGURES, profiled, step_profile
from torch import Tensor

import distca
from distca.options import make_writable
from distca.planning.plan import local_plan
from distca.ranks.session import Session

MIB = 2**20
HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
ROW_BYTES = 2 * HEAD_DIM * (HEADS_Q + 2 * HEADS_KV)  # a query with its own key and value
CALLS = 10  # in a batch
NUM_PROFILED = 4
CSV_FILE = "transport.csv"
WAKING_ROWS = round(MIB / ROW_BYTES)
Task = tuple[int, int, int, int]  # document, first query, last query + 1, server


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[1, 8, 64, 256], help="out per rank"
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[32768, 131072], help="per rank")
    parser.add_argument("--share", type=float, default=0.25, help="share of documents to move")
    parser.add_argument("--documents", type=int, default=4, help="per rank")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for transport.csv")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    if not torch.cuda.is_available():
        parser.error("it measures links of CUDA devices, and torch finds none")
    try:
        make_writable("--out", args.out, CSV_FILE)
    except ValueError as error:
        parser.error(str(error))
    return args


def slowest_ms(call: Callable[[], None], batches: int, calls: int = CALLS) -> float:
    """Return the time of one call on the slowest rank, measured in batches of `calls`."""
    for _ in range(3):
        call()
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # 2 ms, in which the host enqueues the batch
        call()  # aligns the devices, because hosts leave the barrier one after the other
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


class Steps:
    """Lays out hand-written plans in the open session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def share_of(self, lengths: list[int], tasks: list[Task], window: tuple[int, int]) -> tuple:
        """Return layout and rows if every rank has documents of these lengths.

        Documents are numbered over all ranks.
        """
        ranks, ops = self.session.num_ranks, torch.ops.distca
        held = [(rank, length) for rank in range(ranks) for length in lengths]
        pieces = torch.tensor([(rank, i, 0, length) for i, (rank, length) in enumerate(held)])
        in_order = torch.tensor(sorted(tasks, key=lambda task: (task[3], *task[:2])))
        plan = ops.plan_of_tasks(pieces, in_order, ranks, *window)
        layout, packed = ops.layout(
            pieces,
            plan,
            self.session.rank,
            self.session.num_plans,
            "cuda",
            by_peer_memory=self.session.way.is_peer,
            ranks_per_node=self.session.way.ranks_per_node,
        )
        self.session.num_plans += 1
        return layout, ops.unpack_rows(layout, packed.cuda())


def inputs(rows: int) -> list[Tensor]:
    return [
        torch.randn(rows, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    ]


def exchange_ms(mib: float, documents: int, transport: str, batches: int) -> tuple[float, float]:
    """Send equal parts of every document to every other rank. Return (ms, MiB out per rank)."""
    session = distca.init(options=distca.Options(transport=transport))
    ranks = session.num_ranks
    part = max(1, round(mib * MIB / ROW_BYTES / (ranks - 1) / documents))
    tasks = [
        (document, part * i, part * (i + 1), (document // documents + i) % ranks)
        for document in range(ranks * documents)
        for i in range(ranks)
    ]
    share = Steps(session).share_of([part * ranks] * documents, tasks, (0, 0))
    q, k, v = inputs(part * ranks * documents)
    ms = slowest_ms(lambda: torch.ops.distca.exchange(q, k, v, *share, session.group_name), batches)
    distca.close()
    return ms, part * documents * (ranks - 1) * ROW_BYTES / MIB


def all_to_all_ms(mib: float, batches: int) -> tuple[float, float]:
    """Time NCCL's all_to_all_single. Return (ms, MiB out per rank)."""
    own, ranks = dist.get_rank(), dist.get_world_size()
    row = HEADS_Q * HEAD_DIM  # NCCL is slower where parts begin at odd addresses
    part = max(1, round(mib * MIB / 2 / (ranks - 1) / row)) * row
    sent = torch.randn(part * ranks, device="cuda").bfloat16()
    received = torch.empty_like(sent)
    splits = [0 if rank == own else part for rank in range(ranks)]
    rows = part * (ranks - 1)
    return slowest_ms(
        lambda: dist.all_to_all_single(received[:rows], sent[:rows], splits, splits), batches
    ), rows * 2 / MIB


class BesideAttention:
    """A forward and backward pass of one layer; the next rank computes a share of it."""

    def __init__(self, session: Session, tokens: int, documents: int, share_moved: float) -> None:
        ranks, length = session.num_ranks, tokens // documents
        kept = int(length * (1 - share_moved)) // 128 * 128
        tasks = []
        for document in range(ranks * documents):
            home = document // documents
            tasks += [(document, 0, kept, home), (document, kept, length, (home + 1) % ranks)]
        self.group_name = session.group_name
        self.share = Steps(session).share_of([length] * documents, tasks, (-1, 0))
        starts = range(0, tokens + 1, length)
        self.own = local_plan(
            distca.Documents([*starts]), (-1, 0), torch.device("cuda", session.rank)
        )
        waking = [(rank, 0, WAKING_ROWS, (rank + 1) % ranks) for rank in range(ranks)]
        self.waking = Steps(session).share_of([WAKING_ROWS], waking, (0, 0))
        self.waking_rows = inputs(WAKING_ROWS)
        self.q, self.k, self.v = (x.requires_grad_() for x in inputs(length * documents))
        self.grad_out = torch.randn_like(self.q)
        visiting_q, *_ = inputs(documents * (length - kept))
        _, visiting_k, visiting_v = inputs(documents * length)
        self.lists = {
            "home": (self.q.detach(), self.k.detach(), self.v.detach(), self.grad_out),
            "visiting": (visiting_q, visiting_k, visiting_v, torch.randn_like(visiting_q)),
        }

    def home(self) -> None:
        """Compute all documents at home."""
        self._pass_through((self.own.layout, self.own.rows), "")

    def still(self) -> None:
        """Compute the tasks of `moved` without moving rows or results."""
        for tasks, (q, k, v, grad_out) in self.lists.items():
            ops, share = torch.ops.distca, (*self.share, SCALE, tasks)
            out, lse = ops.attend(q, k, v, *share)
            ops.attend_backward(grad_out, q, k, v, out, lse, *share)

    def awake(self) -> None:
        """Compute `still` while links are awake."""
        torch.ops.distca.exchange(*self.waking_rows, *self.waking, self.group_name)
        self.still()

    def moved(self) -> None:
        self._pass_through(self.share, self.group_name)

    def _pass_through(self, share: tuple, group_name: str) -> None:
        leaves = self.q, self.k, self.v
        out, *_ = torch.ops.distca.core_attention(*leaves, *share, SCALE, group_name)
        torch.autograd.grad(out, leaves, self.grad_out)


def beside_attention_ms(
    tokens: int, documents: int, share_moved: float, transport: str, batches: int
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the ms of "home", "still", "awake" and "moved", and FIGURES of each."""
    session = distca.init(options=distca.Options(transport=transport))
    layer = BesideAttention(session, tokens, documents, share_moved)
    ways = layer.home, layer.still, layer.awake, layer.moved
    calls = {call.__name__: call for call in ways}
    ms = {name: slowest_ms(call, batches, 1) for name, call in calls.items()}
    device = torch.device("cuda", torch.cuda.current_device())
    profiles = {
        name: step_profile(profiled(repeated(call), device)) for name, call in calls.items()
    }
    distca.close()
    return ms, {
        name: {figure: max(each[figure]) / NUM_PROFILED for figure in FIGURES}
        for name, each in profiles.items()
    }


def repeated(call: Callable[[], None]) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(NUM_PROFILED):
            call()

    return calls


def main() -> None:
    args = arguments()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    is_first, table = dist.get_rank() == 0, []

    def add(name: str, figure: str, value: float) -> None:
        table.append((name, figure, value))
        if is_first:
            print(f"{name:44} {figure:24} {value:10.4g}", flush=True)

    for mib in args.mib:
        for transport in ("peer", "process_group"):
            ms, sent_mib = exchange_ms(mib, args.documents, transport, args.batches)
            add(f"{mib:g} MiB out per rank, {transport}", "GB/s", sent_mib * MIB / ms / 1e6)
            add(f"{mib:g} MiB out per rank, {transport}", "us", 1e3 * ms)
        ms, sent_mib = all_to_all_ms(mib, args.batches)
        add(f"{mib:g} MiB out per rank, all_to_all", "GB/s", sent_mib * MIB / ms / 1e6)
    for tokens in args.tokens:
        for transport in ("peer", "process_group"):
            ms, profiles = beside_attention_ms(
                tokens, args.documents, args.share, transport, args.batches
            )
            name = f"{tokens} tokens, {args.share:g} moved, {transport}"
            for way, each in ms.items():
                add(name, f"{way}, ms", each)
                for figure, most in profiles[way].items():
                    add(name, f"{way}, {figure}", most)
            for way in ("home", "still", "awake"):
                add(name, f"longer than {way}, %", 100 * (ms["moved"] / ms[way] - 1))
    if is_first and args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / CSV_FILE).open("w", newline="") as file:
            csv.writer(file).writerows([("what", "figure", "value"), *table])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
