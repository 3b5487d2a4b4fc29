"""Run ranks that end in many ways: python exit_script.py FOLDER WAY...

Each rank of each way is a fork of this process and ends as a script does. For each way the script
writes (exit code, standard error, seconds until the end) of each rank to FOLDER/WAY.json.
"""

import functools
import gc
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from programs import free_port
from small_step import SHARDED, Step, small_step

import distca

NUM_RANKS = 3
ODD = 1  # the rank that behaves differently from the others
TIMEOUT_S = 40  # no way may take this long
LIMIT_S = 30
WAYS_AT_A_TIME = 4  # the processes mostly wait
SIGNALLED = 2  # the rank that gets a SIGINT while it waits for ODD


def opened_step(rank: int) -> Step:
    """Open a session, plan a step and run it once."""
    distca.init(options=distca.Options(timeout_s=TIMEOUT_S))
    step = small_step(rank, NUM_RANKS, SHARDED)
    distca.plan(step.documents)
    step.attend().sum().backward()
    return step


def plan_ahead(rank: int) -> None:
    distca.plan(small_step(rank, NUM_RANKS).documents, ahead=True)


def end_early(rank: int, *, closes: bool, destroys: bool, late_s: float) -> None:
    opened_step(rank)
    if rank == ODD:
        time.sleep(late_s)
    plan_ahead(rank)
    if closes:
        distca.close()
    if destroys:
        dist.destroy_process_group()


def skip_backward_pass(rank: int) -> None:
    step = opened_step(rank)
    out = step.attend()
    plan_ahead(rank)
    if rank != ODD:
        out.sum().backward()


def close_in_finally(rank: int) -> None:
    step = opened_step(rank)
    try:
        if rank == ODD:
            plan_ahead(rank)
            raise KeyError("layers.417.weight")
        step.attend()
    finally:
        distca.close()


def raise_with_a_plan(rank: int) -> None:
    """Raise on rank ODD while it plans. No rank closes its session."""
    step = opened_step(rank)
    if rank == ODD:
        plan_ahead(rank)
        raise KeyError("layers.417.weight")
    step.attend()


def close_while_others_plan(rank: int) -> None:
    opened_step(rank)
    if rank == ODD:
        distca.close()
        return time.sleep(3)
    distca.plan(small_step(rank, NUM_RANKS).documents)


def end_while_others_plan(rank: int) -> None:
    opened_step(rank)
    if rank != ODD:
        distca.plan(small_step(rank, NUM_RANKS).documents)


def close_while_others_attend(rank: int) -> None:
    step = opened_step(rank)
    if rank == ODD:
        plan_ahead(rank)
        distca.close()
        return time.sleep(3)
    step.attend()


def close_before_another_attends(rank: int) -> None:
    """Close on rank ODD. Rank 0, which hosts the store, notices it before rank 2 attends."""
    step = opened_step(rank)
    if rank == ODD:
        distca.close()
        return time.sleep(4)
    if rank != 0:
        time.sleep(1.5)
    step.attend()


def interrupt(rank: int, others_sleep_s: float) -> None:
    """Send SIGINT to rank SIGNALLED while it waits for rank ODD."""
    if rank == ODD:
        time.sleep(others_sleep_s)
    if rank == SIGNALLED:
        threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()


def interrupt_forward(rank: int) -> None:
    step = opened_step(rank)
    interrupt(rank, 4)
    measured(rank, step.attend)


def interrupt_agreement(rank: int) -> None:
    """Interrupt the agreement before a step's first layer, which every transport has."""
    opened_step(rank)
    step = small_step(rank, NUM_RANKS)
    distca.plan(step.documents)
    interrupt(rank, 4)
    measured(rank, step.attend)


def interrupt_backward(rank: int) -> None:
    out = opened_step(rank).attend()
    interrupt(rank, 4)
    measured(rank, out.sum().backward)


def measured(rank: int, wait: Callable[[], object]) -> None:
    start = time.monotonic()
    try:
        wait()
    except KeyboardInterrupt:
        print(f"interrupted after {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        raise


def handle_a_signal(rank: int) -> None:
    """Check that the wait continues if the program's own handler does not raise."""
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(time.monotonic()))
    step = opened_step(rank)
    interrupt(rank, 2)
    step.attend()
    ended = time.monotonic()
    if rank == SIGNALLED and not (seen and ended - seen[0] > 0.5):
        raise AssertionError("the handler did not run in the wait")


def fail_to_open(rank: int) -> None:
    try:
        distca.init(options=distca.Options(tolerance=0.1 + 0.1 * (rank == ODD)))
    except ValueError as error:
        if "ranks disagree on the options" not in str(error):
            raise
    names = [thread.name for thread in threading.enumerate()]
    if "distca-planner" in names:
        raise AssertionError(names)


WAYS: dict[str, Callable[[int], None]] = {
    function.__name__: function
    for function in (
        skip_backward_pass,
        close_in_finally,
        raise_with_a_plan,
        close_while_others_plan,
        end_while_others_plan,
        close_while_others_attend,
        close_before_another_attends,
        interrupt_agreement,
        interrupt_forward,
        interrupt_backward,
        handle_a_signal,
        fail_to_open,
    )
}
for closes, destroys, late_s in itertools.product((False, True), (False, True), (0.0, 0.2)):
    WAYS[f"end_early-{closes:d}{destroys:d}{late_s > 0:d}"] = functools.partial(
        end_early, closes=closes, destroys=destroys, late_s=late_s
    )


def be_rank(rank: int, port: int, way: str, error_file: Path) -> None:
    os.dup2(os.open(error_file, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    WAYS[way](rank)


def start(way: str, folder: Path) -> list[int]:
    """Fork the ranks of a way and return their process ids. Does not return in the ranks."""
    port, processes = free_port(), []
    for rank in range(NUM_RANKS):
        error_file = folder / f"{way}.{rank}"
        error_file.touch()
        process = os.fork()
        if process == 0:
            raise BecomeRank(rank, port, way, error_file)
        processes.append(process)
    return processes


class BecomeRank(Exception):  # noqa: N818
    """Raised in a forked rank to leave the loops of its parent."""


def watch(ways: dict[str, list[int]], folder: Path) -> None:
    """Wait for all ranks of concurrent ways, and write their outcomes."""
    begin = time.monotonic()
    outcomes: dict[str, list] = {way: [None] * NUM_RANKS for way in ways}
    while any(None in of_ranks for of_ranks in outcomes.values()):
        passed = time.monotonic() - begin
        for way, processes in ways.items():
            for rank, process in enumerate(processes):
                if outcomes[way][rank] is not None:
                    continue
                if passed > LIMIT_S:
                    os.kill(process, signal.SIGKILL)
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    error = (folder / f"{way}.{rank}").read_text()
                    outcomes[way][rank] = (os.waitstatus_to_exitcode(status), error, passed)
        time.sleep(0.01)
    for way, of_ranks in outcomes.items():
        (folder / f"{way}.json").write_text(json.dumps(of_ranks))


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # otherwise each fork copies all modules at its exit, in 0.6 s
    folder, ways = Path(sys.argv[1]), sys.argv[2:]
    try:
        for first in range(0, len(ways), WAYS_AT_A_TIME):
            chosen = ways[first : first + WAYS_AT_A_TIME]
            watch({way: start(way, folder) for way in chosen}, folder)
    except BecomeRank as rank:
        role = rank.args
    else:
        return
    be_rank(*role)


if __name__ == "__main__":
    main()
