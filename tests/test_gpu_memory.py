"""Balanced attention and the device's memory, by peer memory and by process group.

The tests cover other streams, reuse of memory, tensors of 2**31 elements and long runs.
"""

import itertools
import os
import random

import oracle
import pytest
import torch
from ranks import MOVE_ALWAYS, Ranks

import distca
from distca.planning import plan as planning

pytestmark = pytest.mark.gpu

NUM_STEPS = int(os.environ.get("DISTCA_NUM_MEMORY_STEPS", "200"))
LARGEST = 300  # tokens of a document
MAX_CYCLES = 3_000_000  # of a delay: about 2 ms
SLEEP_CYCLES = 300_000_000  # about 150 ms, in which the host makes all calls
NUM_LAYERS_AHEAD = 16
# The least that PyTorch's allocator reserves. How many small tensors exist at once depends on how
# far the planner's thread is ahead.
SMALL_SEGMENT = 2**21


@pytest.fixture(scope="module", params=["peer", "process_group"])
def two_ranks(request):
    if request.param == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started = Ranks(2, "nccl")
    started.run(open_session, request.param)
    yield started
    started.stop()
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]


def open_session(rank, world_size, transport):
    distca.init(options=distca.Options(transport=transport, **MOVE_ALWAYS))


def leaves_of(rows: int, heads: tuple[int, int] = (4, 2), head_dim: int = 64):
    q, k, v, grad_out = (
        torch.randn(rows, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for num_heads in (heads[0], heads[1], heads[1], heads[0])
    )
    return [tensor.requires_grad_() for tensor in (q, k, v)], grad_out


def results_of(leaves, grad_out, documents):
    """Return out, dq, dk, dv of balanced attention."""
    distca.plan(documents, device="cuda")
    out = distca.core_attention(*leaves, documents)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def errors_of(results, leaves, grad_out, documents):
    """Return the errors of `results` against attention on this rank alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    local = planning.local_plan(documents, (-1, 0), device)
    scale = leaves[0].shape[-1] ** -0.5
    out, *_ = torch.ops.distca.core_attention(*leaves, local.layout, local.rows, scale, "")
    expected = (out, *torch.autograd.grad(out, leaves, grad_out))
    return [oracle.relative_error(a, b) for a, b in zip(results, expected, strict=True)]


def skewed_documents(shared: random.Random, rank: int) -> distca.Documents:
    """Return documents of `rank`. One rank has long documents, the other short ones."""
    long_rank, count = shared.randrange(2), shared.randint(8, 16)
    lengths = [
        [shared.randint(1, LARGEST // (1 if r == long_rank else 8)) for _ in range(count)]
        for r in range(2)
    ]
    return distca.Documents([0, *itertools.accumulate(lengths[rank])])


def attend_on_streams(rank, world_size):
    """Call attention on random streams after random delays, and fill freed memory with NaN."""
    shared, own = random.Random(3), random.Random(rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    worst = 0.0
    for _ in range(30):
        documents = skewed_documents(shared, rank)
        stream = own.choice(streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            leaves, grad_out = leaves_of(documents.num_tokens)
            torch.cuda._sleep(own.choice([0, 1000, MAX_CYCLES]))
            results = results_of(leaves, grad_out, documents)
            for _ in range(8):  # memory that the call has freed
                torch.full((2**18,), float("nan"), device="cuda")
            errors = errors_of(results, leaves, grad_out, documents)
        torch.cuda.current_stream().wait_stream(stream)
        worst = max(worst, *(error if error == error else float("inf") for error in errors))
    return worst


def test_other_streams(two_ranks):
    assert max(two_ranks.run(attend_on_streams)) < 0.02


def run_steps(rank, world_size, num_steps):
    """Return the bytes (allocated, reserved) of the device after each quarter of the steps."""
    shared = random.Random(5)
    used = []
    for step in range(1, num_steps + 1):
        documents = skewed_documents(shared, rank)
        leaves, grad_out = leaves_of(documents.num_tokens)
        for _ in range(2):
            results_of(leaves, grad_out, documents)
        torch.cuda.synchronize()  # what the next step reuses must not depend on the device's lag
        if step % (num_steps // 4) == 0:
            torch.distributed.barrier()
            used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    return used


def test_memory_is_flat(two_ranks):
    for used in two_ranks.run(run_steps, NUM_STEPS):
        allocated, reserved = zip(*used, strict=True)
        assert max(allocated) < 2**23  # a step's own tensors at most
        assert reserved[-1] <= reserved[1] + SMALL_SEGMENT


def run_ahead(rank, world_size):
    """Run a step of many layers while the device is busy. Return by how many bytes the reserved
    memory grew, and the bytes of rows that this rank sends and receives in a layer."""
    lengths = [8192] if rank == 0 else [1024] * 8
    documents = distca.Documents([0, *itertools.accumulate(lengths)])
    leaves, grad_out = leaves_of(documents.num_tokens, (8, 2), 128)
    report = distca.plan(documents, device="cuda").report()

    def run_step(end_layer) -> None:
        outs = []
        for _ in range(NUM_LAYERS_AHEAD):
            outs.append(distca.core_attention(*leaves, documents))
            end_layer()
        while outs:
            torch.autograd.grad(outs.pop(), leaves, grad_out)
            end_layer()

    for _ in range(2):  # connects ranks, and gets the memory of a step
        run_step(end_layer=torch.cuda.synchronize)
    before = torch.cuda.memory_reserved()
    torch.cuda._sleep(SLEEP_CYCLES)
    run_step(end_layer=lambda: None)
    grown = torch.cuda.memory_reserved() - before
    torch.cuda.synchronize()
    return grown, report.bytes_out[rank] + report.bytes_in[rank]


def test_a_host_that_runs_ahead_takes_no_more_memory(two_ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices: on one, the host waits for rows")
    for grown, row_bytes in two_ranks.run(run_ahead):
        assert row_bytes > 0 and grown <= 2 * row_bytes


def attend_to_2_31_elements(rank, world_size):
    """Attend to 2**31 elements of q on rank 0. Rank 1 computes about half of the documents."""
    length, heads, head_dim = 2048, (32, 8), 128
    rows = 2**31 // (heads[0] * head_dim) if rank == 0 else 0
    documents = distca.Documents([*range(0, rows + 1, length)])
    leaves, grad_out = leaves_of(rows, heads, head_dim)
    results = results_of(leaves, grad_out, documents)
    if rank != 0:
        return None
    last = slice(rows - 64 * length, None)  # compared in parts: all at once would not fit
    part = distca.Documents([*range(0, 64 * length + 1, length)])
    few = [leaf[last].detach().requires_grad_() for leaf in leaves]
    worst = errors_of([result[last] for result in results], few, grad_out[last], part)
    return worst, bool(torch.stack([result.isfinite().all() for result in results]).all())


@pytest.mark.whole_gpu
def test_2_31_elements(two_ranks):
    if torch.cuda.device_count() < 2 or torch.cuda.mem_get_info()[1] < 130e9:
        pytest.skip("needs two devices of 140 GB")
    worst, is_finite = two_ranks.run(attend_to_2_31_elements)[0]
    assert is_finite and max(worst) < 0.01
