"""A step in which one rank fails: python gpu_fault_script.py FAULT MOMENT PASS TRANSPORT

A launcher sets its environment. Like users' scripts, it catches no exceptions.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import kill_at
import torch
import torch.distributed as dist
from ranks import MOVE_ALWAYS, take_device

import distca

VICTIM = 1
ROWS = 6000
MORE_ROWS = 8 * ROWS  # needs megabytes of buffers, which grow from forward to backward pass
MOST_ROWS = 50 * ROWS  # travels by copy engines: 77 MB of keys and values
TIMEOUT_S = 5.0
FAULT_AFTER_S = 1.0  # after the start of a call
CYCLES_PER_S = 2e9  # of the fastest device
TAKEN = []

Faults = dict[str, Callable[[], None]]  # by the pass that follows the fault


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise KeyError("layers.417.weight")


def sleep() -> None:
    time.sleep(4 * TIMEOUT_S)


def run_out_of_memory() -> None:
    """Allocate all free memory, so that the operator cannot allocate its results."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    for num_bytes in (2**21, 2**16, 2**9):
        try:
            while True:
                TAKEN.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            continue


FAULTS = {
    function.__name__: function for function in (die, stop, raise_error, sleep, run_out_of_memory)
}


def make_step(rows: int) -> tuple[distca.Documents, list[torch.Tensor]]:
    documents = distca.Documents.sharded([rows], dist.get_rank(), dist.get_world_size())
    distca.plan(documents, device="cuda")
    leaves = [
        torch.randn(documents.num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]  # fmt: skip
    return documents, leaves


def attend(documents: distca.Documents, leaves: list[torch.Tensor], faults: Faults) -> None:
    """Run one layer, forward and backward."""
    if "forward" in faults:
        faults["forward"]()
    out = distca.core_attention(*leaves, documents)
    torch.cuda.synchronize()
    if "backward" in faults:
        faults["backward"]()
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()


def fail_between_calls(faults: Faults) -> None:
    step = make_step(ROWS)
    for layer in range(4):
        attend(*step, faults if layer == 2 else {})


def fail_beside_a_busy_store(faults: Faults) -> None:
    """Fail while another thread waits in the store, whose client serves one call at a time."""
    step = make_step(ROWS)
    attend(*step, {})
    kill_at.occupy_store(10 * TIMEOUT_S)
    attend(*step, faults)


def fail_between_copies(faults: Faults) -> None:
    """Fail in the middle layer of three, whose rows travel by copy engines."""
    documents, leaves = make_step(MOST_ROWS)
    outs = []
    for layer in range(3):
        if layer == 1:
            faults.get("forward", lambda: None)()
        outs.append(distca.core_attention(*leaves, documents))
        torch.cuda.synchronize()
    for layer in reversed(range(3)):
        if layer == 1:
            faults.get("backward", lambda: None)()
        outs[layer].backward(torch.ones_like(outs[layer]))
        torch.cuda.synchronize()


def fail_before_growth(faults: Faults) -> None:
    """Fail before a forward call. The host goes on to the backward call, whose buffers grow."""
    documents, leaves = make_step(MORE_ROWS)
    distca.core_attention(*leaves, documents)
    torch.cuda.synchronize()
    faults.get("forward", lambda: None)()
    out = distca.core_attention(*leaves, documents)
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()


def fail_in_growth(faults: Faults) -> None:
    """Fail in calls that need larger buffers, because the second step has a larger plan."""
    attend(*make_step(ROWS), {})
    attend(*make_step(MORE_ROWS), {name: lambda f=f: fail_soon(f) for name, f in faults.items()})


def fail_soon(fault: Callable[[], None]) -> None:
    """Start `fault` while this rank waits for its own device, before it meets the others."""
    busy_s = 4 * TIMEOUT_S if fault is sleep else 3 * FAULT_AFTER_S
    torch.cuda._sleep(int(busy_s * CYCLES_PER_S))
    threading.excepthook = end_process
    threading.Timer(FAULT_AFTER_S, fault).start()


def end_process(error: threading.ExceptHookArgs) -> None:
    """End the process after an exception in any thread, as after one in the main thread."""
    sys.excepthook(error.exc_type, error.exc_value, error.exc_traceback)
    os._exit(1)


MOMENTS = {
    function.__name__: function
    for function in (
        fail_between_calls,
        fail_beside_a_busy_store,
        fail_between_copies,
        fail_before_growth,
        fail_in_growth,
    )
}


def main() -> None:
    fault, moment, failing_pass, transport = sys.argv[1:]
    take_device(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    backend = "gloo" if transport == "peer" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    torch.zeros(1, device="cuda")
    dist.barrier()  # start-up does not count towards the timeout
    distca.init(options=distca.Options(transport=transport, timeout_s=TIMEOUT_S, **MOVE_ALWAYS))
    MOMENTS[moment]({failing_pass: FAULTS[fault]} if dist.get_rank() == VICTIM else {})
    print("nothing was noticed", file=sys.stderr)


if __name__ == "__main__":
    main()
