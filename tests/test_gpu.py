"""Core attention on CUDA devices. Ranks may share devices."""

import time

import oracle
import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks

import distca
from distca.planning.solver import Problem, solve

pytestmark = pytest.mark.gpu

LENGTHS = [[1500, 1, 0, 333], [129, 127], [4096], [64, 7, 1000]]
MASKS = {"causal": (-1, 0), "full": (-1, -1), "window": (200, 0)}


@pytest.fixture(scope="module")
def gpu_ranks():
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size, "nccl")
        return started[world_size]

    yield get
    for processes in started.values():
        processes.stop()


def place(case: Case, rank: int, world_size: int):
    """Return this rank's documents, q, k, v (leaves) and grad_out on its device.

    Free memory holds NaN afterwards, so that rows that an operator never wrote show.
    """
    rows = case.rows_of(rank)
    device = torch.device("cuda", torch.cuda.current_device())
    for num_bytes in (2**20, 2**28):
        torch.full((num_bytes // 4,), float("nan"), device=device)
    q, k, v, grad_out = (tensor[rows].to(device) for tensor in case.inputs())
    documents = (
        distca.Documents.sharded(case.all_lengths, rank, world_size)
        if case.sharded
        else distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    )
    return documents, [tensor.clone().requires_grad_() for tensor in (q, k, v)], grad_out


def attend(rank, world_size, case):
    documents, leaves, grad_out = place(case, rank, world_size)
    distca.plan(documents, window_size=case.window_size, device="cuda")
    out = distca.core_attention(*leaves, documents, window_size=case.window_size)
    out.backward(grad_out)
    return [tensor.cpu() for tensor in (out.detach(), *(leaf.grad for leaf in leaves))]


def assert_as_good_as_the_reference(per_rank, case):
    """Assert that errors are at most twice those of plain attention in the case's dtype."""
    results = [torch.cat(parts) for parts in zip(*per_rank, strict=True)]
    oracle.assert_close(results, *oracle.truths_and_limits(case))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_oracle(gpu_ranks, world_size, mask, sharded):
    lengths = [sum(LENGTHS, []), *[[]] * (world_size - 1)] if sharded else LENGTHS[:world_size]
    case = Case(lengths, 8, 2, 128, MASKS[mask], sharded, torch.bfloat16)
    assert_as_good_as_the_reference(gpu_ranks(world_size).run(attend, case), case)


@pytest.mark.parametrize("heads_q, heads_kv, head_dim", [(4, 4, 64), (6, 1, 40), (2, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads(gpu_ranks, heads_q, heads_kv, head_dim, dtype):
    case = Case(LENGTHS, heads_q, heads_kv, head_dim, dtype=dtype)
    assert_as_good_as_the_reference(gpu_ranks(4).run(attend, case), case)


def attend_keeping(rank, world_size, case):
    distca.close()
    distca.init(options=distca.Options(keep_inputs_gb=1.0, **MOVE_ALWAYS))
    documents, leaves, grad_out = place(case, rank, world_size)
    plan = distca.plan(documents, device="cuda")
    out = distca.core_attention(*leaves, documents)
    out.backward(grad_out)
    kept = torch.ops.distca.kept_rows(plan.layout)
    distca.close()
    return [tensor.cpu() for tensor in (out.detach(), *(leaf.grad for leaf in leaves))], kept


@pytest.mark.parametrize("sharded", [False, True])
def test_kept_inputs_equal_the_oracle(gpu_ranks, sharded):
    case = Case(LENGTHS, 8, 2, 128, sharded=sharded, dtype=torch.bfloat16)
    results, kept = zip(*gpu_ranks(4).run(attend_keeping, case), strict=True)
    assert any(map(any, kept))
    assert_as_good_as_the_reference(results, case)


def forward_bits(rank, world_size, case):
    documents, leaves, _ = place(case, rank, world_size)
    distca.plan(documents, device="cuda")
    first, second = (distca.core_attention(*leaves, documents) for _ in range(2))
    return torch.equal(first, second)


def test_forward_gives_the_same_bits_twice(gpu_ranks):
    assert all(gpu_ranks(4).run(forward_bits, Case(LENGTHS, 8, 2, 128, dtype=torch.bfloat16)))


def attend_beside_nan(rank, world_size, case):
    """Attend while rank 2's only document is NaN, and other ranks compute a part of it."""
    documents, leaves, grad_out = place(case, rank, world_size)
    if rank == 2:
        with torch.no_grad():
            for leaf in leaves:
                leaf.fill_(float("nan"))
    distca.plan(documents, device="cuda")
    out = distca.core_attention(*leaves, documents)
    out.backward(grad_out)
    tensors = (out.detach(), *(leaf.grad for leaf in leaves))
    return [bool(tensor.isfinite().all()) for tensor in tensors]


def test_nan_stays_in_its_document(gpu_ranks):
    finite = gpu_ranks(4).run(attend_beside_nan, Case(LENGTHS, 8, 2, 128, dtype=torch.bfloat16))
    assert not any(finite[2])
    assert all(all(finite[rank]) for rank in (0, 1, 3))


def timed(rank, world_size, case):
    """Return times and spans of the first of two steps."""
    session = distca.init()
    torch.ops.distca.watch_step(session.group_name, session.num_plans)
    for _ in range(2):
        attend(rank, world_size, case)  # ends with copies to the host
    times = torch.ops.distca.attention_times(session.group_name)
    return times, *torch.ops.distca.spans(session.group_name)


def test_phases_are_timed_on_the_device(gpu_ranks):
    case = Case(LENGTHS[:2], 8, 2, 128, dtype=torch.bfloat16)
    for (attention_us, waiting_us), phases, times in gpu_ranks(2).run(timed, case):
        assert 0 < waiting_us < attention_us < 60e6
        begins, ends = times[:, 1], times[:, 2]
        assert (ends >= begins).all()
        for direction in ("forward", "backward"):
            spans = [idx for idx, phase in enumerate(phases) if phase.startswith(direction)]
            *inner, whole = spans
            assert phases[whole] == f"{direction} attention" and len(inner) == 7
            rounding = 1000  # ns
            assert (begins[inner] >= begins[whole] - rounding).all()
            assert (ends[inner] <= ends[whole] + rounding).all()
        assert abs(ends.max().item() / 1e9 - time.time()) < 600, "since 1970"


def refusals(rank, world_size):
    messages = []
    documents = distca.Documents([0, 16])
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 60), (torch.bfloat16, 264)):
        q = torch.zeros(16, 2, head_dim, dtype=dtype, device="cuda")
        try:
            distca.core_attention(q, q, q, documents)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_unsupported_dtypes_and_head_dims_are_refused(gpu_ranks):
    messages = gpu_ranks(1).run(refusals)[0]
    assert [message.split(" is ")[0] for message in messages] == ["q", "head_dim", "head_dim"]


def test_rows_are_unpacked_alike_on_device_and_host():
    pieces = torch.cat(
        [distca.Documents.sharded([40, 3000, 1, 9000, 59], r, 4).pieces(r) for r in range(4)]
    )
    problem = Problem(1, 4, (-1, 0), "cuda", 0)
    plan = solve(problem, pieces, distca.Options(), distca.AttentionShape())
    unpack = torch.ops.distca.unpack_rows
    on_host = unpack(plan.layout, plan.packed_rows.cpu())
    assert on_host.numel() > plan.packed_rows.numel(), "nothing was packed"
    assert torch.equal(unpack(plan.layout, plan.packed_rows.cuda()).cpu(), on_host)
