"""Core attention through peer memory on Hopper GPUs. Ranks may share devices."""

import itertools
import math
import os
import random

import oracle
import pytest
import torch
import torch.distributed as dist
from layout_words import num_rounds, numbers_of_rows
from oracle import Case
from peer_canaries import BACKWARD, FORWARD, Canaries, used_ranges
from ranks import MOVE_ALWAYS, Ranks
from test_gpu import LENGTHS, MASKS, assert_as_good_as_the_reference, attend, place
from test_hostile_tensors import with_last_sent_again
from torch.distributed import _symmetric_memory as symmetric_memory

import distca
from distca.planning import plan as planning
from distca.ranks import session

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def peer_ranks():
    started: dict[int, Ranks] = {}
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

    def get(world_size: int) -> Ranks:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("peer memory needs a Hopper GPU")
        if world_size not in started:
            started[world_size] = Ranks(world_size, "nccl")
            started[world_size].run(open_session)
        return started[world_size]

    yield get
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    for processes in started.values():
        processes.stop()


def open_session(rank, world_size):
    distca.init(options=distca.Options(transport="peer", **MOVE_ALWAYS))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_oracle(peer_ranks, world_size, mask, sharded):
    lengths = [sum(LENGTHS, []), *[[]] * (world_size - 1)] if sharded else LENGTHS[:world_size]
    case = Case(lengths, 8, 2, 128, MASKS[mask], sharded, torch.bfloat16)
    assert_as_good_as_the_reference(peer_ranks(world_size).run(attend, case), case)


@pytest.mark.parametrize("heads_q, heads_kv, head_dim", [(4, 4, 64), (6, 1, 40), (2, 2, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads(peer_ranks, heads_q, heads_kv, head_dim, dtype):
    case = Case(LENGTHS, heads_q, heads_kv, head_dim, dtype=dtype)
    assert_as_good_as_the_reference(peer_ranks(4).run(attend, case), case)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("head_dim, head_dim_v", [(192, 128), (128, 64), (64, 128)])
def test_another_head_dim_of_v(peer_ranks, head_dim, head_dim_v, sharded):
    lengths = [sum(LENGTHS, []), [], [], []] if sharded else LENGTHS
    dims = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    case = Case(lengths, 8, 2, **dims, sharded=sharded, dtype=torch.bfloat16)
    assert_as_good_as_the_reference(peer_ranks(4).run(attend, case), case)


def attend_deterministically(rank, world_size, case):
    attend(rank, world_size, case)  # plans use the shape of the latest call
    torch.use_deterministic_algorithms(True)
    try:
        return attend(rank, world_size, case), attend(rank, world_size, case)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_mode(peer_ranks):
    case = Case(LENGTHS, 8, 2, 128, dtype=torch.bfloat16)
    both = peer_ranks(4).run(attend_deterministically, case)
    for first, second in both:
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_as_good_as_the_reference([first for first, _ in both], case)


def attend_strided(rank, world_size, case):
    """Attend to views of one fused projection, as in models."""
    documents, leaves, grad_out = place(case, rank, world_size)
    fused = torch.cat([leaf.detach() for leaf in leaves], 1).requires_grad_()
    q, k, v = fused.split([leaf.shape[1] for leaf in leaves], 1)
    distca.plan(documents, device="cuda")
    out = distca.core_attention(q, k, v, documents)
    out.backward(grad_out)
    return [out.detach().cpu(), *fused.grad.cpu().split([leaf.shape[1] for leaf in leaves], 1)]


def test_views_of_a_fused_projection(peer_ranks):
    case = Case(LENGTHS, 8, 2, 128, dtype=torch.bfloat16)
    assert_as_good_as_the_reference(peer_ranks(4).run(attend_strided, case), case)


def random_plan(generator, world_size):
    """Return lengths of each rank's documents, pieces, and a random plan of all ranks.

    Cuts, servers and documents with kept inputs are random.
    """
    lengths = [
        [generator.choice((0, 1, 63, 128, 300, 777)) for _ in range(3)] for _ in range(world_size)
    ]
    held = [(rank, length) for rank in range(world_size) for length in lengths[rank] if length]
    pieces = [(rank, document, 0, length) for document, (rank, length) in enumerate(held)]
    tasks = []
    for home, document, _, length in pieces:
        cuts = sorted({0, length, *(generator.randint(0, length) for _ in range(3))})
        keepers = {server for server in range(world_size) if generator.random() < 0.4} - {home}
        for begin, end in itertools.pairwise(cuts):
            server = generator.randrange(world_size)
            tasks.append((server, document, begin, end, int(server in keepers)))
    pieces = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 4)
    return lengths, pieces, plan_by_server(pieces, tasks, world_size)


def share_of(pieces, plan, rank, *rounds):
    """Return (layout, rows) of this rank, for the next plan of the open session."""
    opened, ops = session.find(), torch.ops.distca
    layout, packed_rows = ops.layout(
        pieces, plan, rank, opened.num_plans, "cuda", False, *rounds, by_peer_memory=True
    )
    opened.num_plans += 1
    return layout, ops.unpack_rows(layout, packed_rows.to("cuda"))


def plan_by_server(pieces, tasks, world_size):
    """Encode tasks (server, document, first query, last query + 1, whether to keep inputs)."""
    order = torch.tensor(sorted(tasks), dtype=torch.int64).reshape(-1, 5)
    columns = order[:, [1, 2, 3, 0, 4]].contiguous()
    return torch.ops.distca.plan_of_tasks(pieces, columns, world_size, -1, 0)


def forward_backward(leaves, grad_out, share, group_name):
    scale = leaves[0].shape[-1] ** -0.5
    kept_rows = torch.ops.distca.kept_rows(share[0])
    out, *_ = torch.ops.distca.core_attention(*leaves, *share, scale, group_name, *kept_rows)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def attend_to_large_plan(rank, world_size, rows, share_moved, is_kept=0):
    """Return errors against attention on this rank alone.

    The next rank computes much of every document, so copy engines carry its rows. It keeps the
    inputs if `is_kept`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    opened = session.find()
    pieces = torch.tensor([(r, r, 0, rows) for r in range(world_size)])
    cut = int(rows * (1 - share_moved))
    tasks = [(r, r, 0, cut, 0) for r in range(world_size)]
    tasks += [((r + 1) % world_size, r, cut, rows, is_kept) for r in range(world_size)]
    plan = plan_by_server(pieces, tasks, world_size)
    local = planning.local_plan(distca.Documents([0, rows]), (-1, 0), device)
    errors = []
    for _ in range(5):
        balanced = share_of(pieces, plan, rank)
        leaves = [
            torch.randn(rows, heads, 128, device=device, dtype=torch.bfloat16).requires_grad_()
            for heads in (16, 4, 4)
        ]
        grad_out = torch.randn_like(leaves[0])
        results = forward_backward(leaves, grad_out, balanced, opened.group_name)
        expected = forward_backward(leaves, grad_out, (local.layout, local.rows), "")
        errors += map(oracle.relative_error, results, expected)
    return errors


@pytest.mark.parametrize("is_kept", [0, 1])
@pytest.mark.parametrize("world_size", [2, 4])
def test_copy_engines(peer_ranks, world_size, is_kept):
    for errors in peer_ranks(world_size).run(attend_to_large_plan, 12_001, 0.6, is_kept):
        assert max(errors) < 0.01 and not any(map(math.isnan, errors))


def attend_to_sharded_plans(rank, world_size, sizes):
    """Return errors of consecutive layers on a document over all ranks.

    Layers have `sizes` rows per rank, and each rank computes the rows of another. Copy engines
    carry many rows, and a kernel few.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    opened = session.find()
    layers = []
    for step, rows in enumerate(sizes):
        pieces = torch.tensor([(r, 0, r * rows, rows) for r in range(world_size)])
        tasks = [((r + 1) % world_size, 0, r * rows, (r + 1) * rows, 0) for r in range(world_size)]
        share = share_of(pieces, plan_by_server(pieces, tasks, world_size), rank)
        generator = torch.Generator(device).manual_seed(step)
        whole = [
            torch.randn(
                world_size * rows, heads, 128, device=device, dtype=torch.bfloat16,
                generator=generator,
            )
            for heads in (8, 2, 2, 8)
        ]  # fmt: skip
        own = slice(rank * rows, (rank + 1) * rows)
        *leaves, grad_out = (tensor[own].clone() for tensor in whole)
        layers.append((own, whole, [leaf.requires_grad_() for leaf in leaves], grad_out, share))
    torch.cuda.synchronize()
    by_layer = [
        forward_backward(leaves, grad_out, share, opened.group_name)
        for _, _, leaves, grad_out, share in layers
    ]
    errors = []
    for (own, (*whole, grad_out), *_), results in zip(layers, by_layer, strict=True):
        local = planning.local_plan(distca.Documents([0, len(grad_out)]), (-1, 0), device)
        leaves = [tensor.requires_grad_() for tensor in whole]
        expected = forward_backward(leaves, grad_out, (local.layout, local.rows), "")
        errors += [oracle.relative_error(a, b[own]) for a, b in zip(results, expected, strict=True)]
    return errors


def test_a_document_over_all_ranks_by_copies_and_stores(peer_ranks):
    """A home that sends only keys gets no results in the forward pass."""
    sizes = [6_001, 301, 6_001, 301, 301, 7_003]
    for errors in peer_ranks(4).run(attend_to_sharded_plans, sizes):
        assert max(errors) < 0.01 and not any(map(math.isnan, errors))


def ranges_of_calls(pieces, plan, rank, world_size):
    """Return the bytes that a forward and a backward call may touch in this rank's buffers.

    q has 4 heads, k and v have 2, all in bfloat16 of head_dim 64.
    """
    layouts = (torch.ops.distca.layout(pieces, plan, r, 0, "cpu")[0] for r in range(world_size))
    rows = [numbers_of_rows(layout)[1] for layout in layouts]
    most = {kind: max(own[kind] for own in rows) for kind in rows[0]}
    row_bytes = {"query": 4 * 64 * 2, "key": 2 * 64 * 2, "statistic": 4 * 4}
    return [used_ranges(regions, row_bytes, rows[rank], most) for regions in (FORWARD, BACKWARD)]


class RandomCall:
    """A layer under a random plan, forward and backward, and its reference on this rank alone."""

    def __init__(self, rank, world_size, shared, generator, round_rows):
        device = torch.device("cuda", torch.cuda.current_device())
        lengths, self.pieces, self.plan = random_plan(shared, world_size)
        self.share = share_of(self.pieces, self.plan, rank, [1, 1], round_rows)
        documents = distca.Documents([0, *itertools.accumulate(lengths[rank])])
        self.local = planning.local_plan(documents, (-1, 0), device)
        q, k, v, self.grad_out = (
            torch.randn(
                sum(lengths[rank]), heads, 64, device=device, dtype=torch.bfloat16,
                generator=generator,
            )
            for heads in (4, 2, 2, 4)
        )  # fmt: skip
        self.leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def attend(self, group_name):
        self.results = forward_backward(self.leaves, self.grad_out, self.share, group_name)

    def worst_error(self):
        local = (self.local.layout, self.local.rows)
        expected = forward_backward(self.leaves, self.grad_out, local, "")
        errors = map(oracle.relative_error, self.results, expected)
        return max(error if error == error else math.inf for error in errors)


def attend_to_random_plans(rank, world_size, num_plans, seed, round_rows=None):
    """Return the largest error against attention on this rank, and the number of canary checks.

    A rank has at most `round_rows` visiting rows in a round. Canaries make the ranks wait for each
    other, so half of the plans, at random, have none. Up to three of these run at a time on two
    streams, whose order nothing else fixes.
    """
    shared, own = random.Random(seed), random.Random(seed * world_size + rank)
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device()))
    generator.manual_seed(rank)
    group_name = session.find().group_name
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    worst, num_done, num_checked = 0.0, 0, 0
    while num_done < num_plans:
        has_buffers = torch.ops.distca.peer_memory_bytes(group_name) > 0
        has_canaries = has_buffers and round_rows is None and shared.random() < 0.5
        num_calls = 1 if has_canaries else shared.randint(1, 3)
        rows = [round_rows or shared.choice((None, 900.0)) for _ in range(num_calls)]
        calls = [
            RandomCall(rank, world_size, shared, generator, None if has_canaries else each)
            for each in rows
        ]
        torch.cuda.synchronize()
        canaries = Canaries(group_name) if has_canaries else None
        for call in calls:
            with torch.cuda.stream(own.choice(streams)):
                if own.random() < 0.3:
                    torch.cuda._sleep(own.randint(0, 3_000_000))  # cycles
                call.attend(group_name)
        if canaries is not None:
            ranges = ranges_of_calls(calls[0].pieces, calls[0].plan, rank, world_size)
            num_checked += canaries.check(*ranges)
        torch.cuda.synchronize()
        worst = max(worst, *(call.worst_error() for call in calls))
        num_done += num_calls
    return worst, num_checked


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_plans_with_random_delays(peer_ranks, world_size):
    num_plans = int(os.environ.get("DISTCA_NUM_RANDOM_PLANS", "100"))
    ranks, timeout_s = peer_ranks(world_size), 60 + num_plans // 10
    for worst, num_checked in ranks.run(attend_to_random_plans, num_plans, 7, timeout_s=timeout_s):
        assert worst < 0.02 and num_checked > num_plans // 6


def attend_while_another_is_ahead(rank, world_size, rows):
    """Return errors under two plans that ranks use at different times.

    In the first plan rank 0 computes the document of rank 1, which is late. Rank 2 sends nothing in
    the first plan and is already in the second.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    opened, ops = session.find(), torch.ops.distca
    pieces = torch.tensor([(r, r, 0, rows) for r in range(world_size)])
    local = planning.local_plan(distca.Documents([0, rows]), (-1, 0), device)
    shares = []
    for guest in (1, 2):
        servers = [0 if r == guest else r for r in range(world_size)]
        tasks = [(servers[r], r, 0, rows, 0) for r in range(world_size)]
        shares.append(share_of(pieces, plan_by_server(pieces, tasks, world_size), rank))

    def attend_twice():
        both = [
            [
                torch.randn(rows, heads, 64, device=device, dtype=torch.bfloat16)
                for heads in (4, 2, 2)
            ]
            for _ in shares
        ]
        torch.cuda.synchronize()
        torch.distributed.barrier()
        if rank == 1:
            torch.cuda._sleep(200_000_000)  # cycles
        outs = [
            ops.core_attention(*qkv, *share, 64**-0.5, opened.group_name)[0]
            for qkv, share in zip(both, shares, strict=True)
        ]
        expected = [
            ops.core_attention(*qkv, local.layout, local.rows, 64**-0.5, "")[0] for qkv in both
        ]
        return [*map(oracle.relative_error, outs, expected)]

    attend_twice()  # buffers grow, and all ranks wait for that
    return attend_twice()


def test_a_rank_is_a_call_ahead(peer_ranks):
    for errors in peer_ranks(4).run(attend_while_another_is_ahead, 500):
        assert max(errors) < 0.01 and not any(map(math.isnan, errors))


def test_rounds(peer_ranks):
    """A round has room for one query with 777 keys, the largest number."""
    for worst, _ in peer_ranks(2).run(attend_to_random_plans, 30, 8, 900.0):
        assert worst < 0.02


def plan_with_an_empty_round():
    """Return (pieces, plan, row bytes, bytes of a round) of a document on two ranks.

    The first queries of rank 0 need only its own keys. Its other queries belong to the second
    round.
    """
    pieces = torch.tensor([(0, 0, 0, 300), (1, 0, 300, 300)])
    tasks = torch.tensor([(0, 0, 300, 0), (0, 300, 600, 1)])
    return pieces, torch.ops.distca.plan_of_tasks(pieces, tasks, 2, 0, 50), [1, 1], 400.0


def attend_in_an_empty_round(rank, world_size):
    """Return the errors of a session's first calls, whose first round moves nothing."""
    distca.close()
    open_session(rank, world_size)
    pieces, plan, *rounds = plan_with_an_empty_round()
    share = share_of(pieces, plan, rank, *rounds)
    assert num_rounds(share[0]) == 2
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(600, heads, 64, device=device, dtype=torch.bfloat16, generator=generator)
        for heads in (4, 2, 2, 4)
    ]
    own = slice(300 * rank, 300 * rank + 300)
    *leaves, grad_out = (tensor[own].clone() for tensor in whole)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    results = forward_backward(leaves, grad_out, share, session.find().group_name)
    local = planning.local_plan(distca.Documents([0, 600]), (0, 50), device)
    *leaves, grad_out = whole
    leaves = [leaf.requires_grad_() for leaf in leaves]
    expected = forward_backward(leaves, grad_out, (local.layout, local.rows), "")
    return [oracle.relative_error(a, b[own]) for a, b in zip(results, expected, strict=True)]


def test_a_first_round_that_moves_nothing(peer_ranks):
    for errors in peer_ranks(2).run(attend_in_an_empty_round):
        assert max(errors) < 0.01 and not any(map(math.isnan, errors))


def attend_after_a_subgroup(rank, world_size, case):
    """Return results after ranks 0 and 1 have shared memory in a group of their own."""
    distca.close()
    pair = dist.new_group([0, 1])
    if rank < 2:
        distca.init(pair, distca.Options(transport="peer", **MOVE_ALWAYS))
        distca.close(pair)
    open_session(rank, world_size)
    return attend(rank, world_size, case)


def test_ranks_that_have_met_different_numbers_of_times(peer_ranks):
    case = Case(LENGTHS[:3], 8, 2, 128, dtype=torch.bfloat16)
    results = peer_ranks(3).run(attend_after_a_subgroup, case, timeout_s=60)
    assert_as_good_as_the_reference(results, case)


def attend_with_many_sources(rank, world_size):
    """Return the message for a layout of rank 0 that sends keys to more servers than exist."""
    distca.close()
    open_session(rank, world_size)
    pieces = torch.tensor([(0, 0, 0, 64), (1, 1, 0, 64)])
    tasks = torch.tensor([(1, 0, 64, 0), (0, 0, 64, 1)])  # each computes the other's
    share = share_of(pieces, torch.ops.distca.plan_of_tasks(pieces, tasks, 2, -1, 0), rank)
    if rank == 0:
        share = with_last_sent_again(share[0], 70_000), share[1]
    leaves = [
        torch.ones(64, heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    grad_out = torch.ones_like(leaves[0])
    with pytest.raises(ValueError) as raised:
        forward_backward(leaves, grad_out, share, session.find().group_name)
    distca.close()
    open_session(rank, world_size)
    return str(raised.value)


def test_more_sources_than_ranks(peer_ranks):
    error, other_error = peer_ranks(2).run(attend_with_many_sources)
    assert "twice; expected once" in error
    assert "refused on rank(s) 0; nothing was sent" in other_error


def attend_without_memory(rank, world_size, poor_rank):
    """Plan more than a rank has memory for, then less. Return the message, bytes and errors."""
    pad_bytes = symmetric_memory.get_signal_pad_size()
    if rank == poor_rank:  # every allocation then exceeds the memory of any device
        symmetric_memory.set_signal_pad_size(2**44)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            attend_to_large_plan(rank, world_size, 60_001, 0.6)
    finally:
        symmetric_memory.set_signal_pad_size(pad_bytes)
    num_bytes = torch.ops.distca.peer_memory_bytes(session.find().group_name)
    return str(raised.value), num_bytes, attend_to_large_plan(rank, world_size, 6_001, 0.6)


def attend_with_reserved_memory(rank, world_size, gb):
    """Return the bytes of peer memory after a small and a larger plan, and errors."""
    distca.close()
    distca.init(options=distca.Options(transport="peer", peer_memory_gb=gb, **MOVE_ALWAYS))
    group_name, sizes, errors = session.find().group_name, [], []
    for rows in (500, 2_001):
        errors += attend_to_large_plan(rank, world_size, rows, 0.6)
        sizes.append(torch.ops.distca.peer_memory_bytes(group_name))
    distca.close()
    open_session(rank, world_size)
    return sizes, errors


def test_reserved_memory_holds_larger_plans(peer_ranks):
    for sizes, errors in peer_ranks(2).run(attend_with_reserved_memory, 0.5):
        assert 0.5e9 <= sizes[0] == sizes[1] < 0.6e9
        assert max(errors) < 0.01 and not any(map(math.isnan, errors))
    for (small, large), _ in peer_ranks(2).run(attend_with_reserved_memory, 0.0):
        assert 0 < small < large < 0.5e9


def test_no_memory_for_larger_buffers_on_one_rank(peer_ranks):
    poor_rank = 1
    for message, num_bytes, errors in peer_ranks(2).run(attend_without_memory, poor_rank):
        assert f"out of memory on rank(s) {poor_rank}, where" in message
        assert "growth of peer memory of attention layer 0, forward pass" in message
        assert f"keeps the {num_bytes} bytes" in message
        assert max(errors) < 0.01 and not any(map(math.isnan, errors))
