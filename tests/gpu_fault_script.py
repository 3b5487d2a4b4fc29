"""A step in which one rank fails: python gpu_fault_script.py FAULT PASS TRANSPORT, as a launcher's
process. It catches nothing, as users' scripts do not."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import distca

VICTIM = 1
ROWS = 6000
TIMEOUT_S = 5.0
TAKEN = []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise KeyError("layers.417.weight")


def sleep() -> None:
    time.sleep(4 * TIMEOUT_S)


def run_out_of_memory() -> None:
    """The operator itself cannot allocate its results: what is free is taken."""
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


def main() -> None:
    fault, failing_pass, transport = FAULTS[sys.argv[1]], sys.argv[2], sys.argv[3]
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    backend = "gloo" if transport == "peer" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distca.init(options=distca.Options(transport=transport, timeout_s=TIMEOUT_S))
    documents = distca.Documents.sharded([ROWS], rank, world_size)
    distca.plan(documents, device="cuda")
    q, k, v = (
        torch.randn(documents.num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
        .requires_grad_()
        for heads in (4, 2, 2)
    )  # fmt: skip
    for layer in range(4):
        is_last = rank == VICTIM and layer == 2
        if is_last and failing_pass == "forward":
            fault()
        out = distca.core_attention(q, k, v, documents)
        torch.cuda.synchronize()
        if is_last and failing_pass == "backward":
            fault()
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
    print("nothing was noticed", file=sys.stderr)


if __name__ == "__main__":
    main()
