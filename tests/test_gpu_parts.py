"""On CUDA devices: rows travel in parts, each with some of the heads."""

import os

import oracle
import pytest
import torch
from layout_words import num_parts
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from test_gpu import LENGTHS, MASKS, place

import distca
from distca.planning import cluster

pytestmark = pytest.mark.gpu

LONG = Case([[65536], [64]], 16, 8, 128, dtype=torch.bfloat16)  # rank 0 sends, rank 1 serves
TWO_NODES = {"transport": "hybrid", "ranks_per_node": 2}
WAYS = pytest.mark.parametrize("way", [{}, TWO_NODES], ids=["one node", "two nodes"])
CYCLES = 2_000_000  # of a delay: about a millisecond


@pytest.fixture(scope="module")
def four():
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started = Ranks(4, "nccl")
    yield started
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    started.stop()


def attend(rank: int, world_size: int, case: Case, are_short: bool, options: dict):
    """Return out, dq, dk, dv of the second of two layers, and the number of parts."""
    cluster.LEAST_SECONDS_OF_PART = 1e9 if are_short else 0.0
    distca.close()
    options = {"transport": "process_group", **MOVE_ALWAYS, **options}
    distca.init(options=distca.Options(**options))
    documents, leaves, grad_out = place(case, rank, world_size)
    how = {"window_size": case.window_size, "device": "cuda", "shape": case.shape}
    laid_out = distca.plan(documents, **how).wait().layout
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        out = distca.core_attention(*leaves, documents, window_size=case.window_size)
        out.backward(grad_out)
    results = [tensor.cpu() for tensor in (out.detach(), *(leaf.grad for leaf in leaves))]
    return results, num_parts(laid_out)


def results_of(four, case: Case, are_short: bool = False, **options) -> list[torch.Tensor]:
    if "ranks_per_node" in options and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    per_rank, parts = zip(*four.run(attend, case, are_short, options), strict=True)
    assert set(parts) == {1 if are_short else 4}
    return [torch.cat(each) for each in zip(*per_rank, strict=True)]


@WAYS
@pytest.mark.parametrize("options", [{}, {"keep_inputs_gb": 1.0}], ids=["sent again", "kept"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_oracle(four, mask, sharded, options, way):
    lengths = [sum(LENGTHS, []), [], [], []] if sharded else LENGTHS
    case = Case(lengths, 8, 2, 64, MASKS[mask], sharded, torch.bfloat16)
    oracle.assert_close(results_of(four, case, **options, **way), *oracle.truths_and_limits(case))


@WAYS
@pytest.mark.parametrize("heads_q, heads_kv, head_dim", [(8, 8, 40), (12, 4, 128), (4, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads(four, heads_q, heads_kv, head_dim, dtype, way):
    case = Case(LENGTHS, heads_q, heads_kv, head_dim, dtype=dtype)
    oracle.assert_close(results_of(four, case, **way), *oracle.truths_and_limits(case))


@WAYS
def test_the_bits_are_those_of_one_part(four, way):
    case, options = Case(LENGTHS, 8, 4, 128, dtype=torch.bfloat16), {"deterministic": True, **way}
    parts, whole = (results_of(four, case, short, **options) for short in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def opened(rank: int, world_size: int):
    """Return documents, their plan, and q, k, v without gradients, after a first call."""
    distca.close()
    distca.init(options=distca.Options(transport="process_group", **MOVE_ALWAYS))
    documents, leaves, _ = place(LONG, rank, world_size)
    inputs = [leaf.detach() for leaf in leaves]
    plan = distca.plan(documents, device="cuda", shape=LONG.shape).wait()
    distca.core_attention(*inputs, documents)
    torch.cuda.synchronize()
    return documents, plan, inputs


def times_of_a_product(rank: int, world_size: int) -> tuple[float, float]:
    """Return the milliseconds until a matrix product ends, and until attention ends. The product
    starts on another stream while attention runs."""
    documents, _, inputs = opened(rank, world_size)
    stream, factor = torch.cuda.Stream(priority=-1), torch.randn(2048, 2048, device="cuda")
    begin, end, other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for _ in range(2):  # the first loads kernels
        torch.cuda.synchronize()
        begin.record()
        distca.core_attention(*inputs, documents)
        end.record()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            factor @ factor
            other.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(other), begin.elapsed_time(end)


def test_kernels_of_higher_priority_begin_while_attention_runs(two_devices):
    for other, attention in two_devices.run(times_of_a_product):
        assert attention > 5 and 0.5 < other < attention / 2


def ms_of_sending(rank: int, world_size: int) -> float:
    """Return the milliseconds of an exchange on a rank's stream. Rank 1 starts it late."""
    _, plan, inputs = opened(rank, world_size)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if rank == 1:
        torch.cuda._sleep(100 * CYCLES)
    begin.record()
    torch.ops.distca.exchange(*inputs, plan.layout, plan.rows, plan.group_name)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def test_a_rank_that_only_sends_does_not_wait(two_devices):
    assert two_devices.run(ms_of_sending)[0] < 20
