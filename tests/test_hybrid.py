"""Four ranks as two nodes: rows travel one way inside a node, and another between nodes."""

import contextlib
import os
import signal
from unittest import mock

import kill_at
import oracle
import pytest
import torch
from extension import at_phase, delay_phases
from layout_words import num_rounds
from oracle import Case
from ranks import Ranks
from small_step import SHARDED, small_step
from test_core_attention import MASKS, PACKS, WHOLE, attend, gathered, place

import distca
from distca.planning.cluster import cluster_of
from distca.planning.cost import cost_tensor
from distca.planning.solver import balance
from distca.ranks import peers, session
from distca.ranks.peers import Way

NODE = 2  # ranks
OPTIONS = {"transport": "hybrid", "ranks_per_node": NODE}
HANG_S = 20
SLOW_S = 3.0  # longer than ranks wait before they compare what they wait for
CASES = {
    **{name: Case(lengths) for name, lengths in WHOLE.items()},
    **{name: Case([lengths, [], [], []], sharded=True) for name, lengths in PACKS.items()},
}


def open_session(rank: int, world_size: int, options: dict) -> None:
    distca.close()
    nodes = distca.init(options=distca.Options(**options)).way.ranks_per_node
    assert nodes == (NODE if options["transport"] == "hybrid" else 0)


@pytest.fixture(scope="module")
def nodes():
    """Return nodes(**options), four ranks with a session of these options."""
    started, current = Ranks(4), None

    def get(**options) -> Ranks:
        nonlocal current
        if current != options:
            started.run(open_session, {**OPTIONS, **options})
            current = options
        return started

    yield get
    started.stop()


@pytest.fixture
def fresh_nodes():
    """Start three ranks, a node of two and one of one. The test may break their group."""
    started = Ranks(3)
    yield started
    started.stop()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", CASES)
def test_equals_the_oracle_in_float64(nodes, mask, documents):
    case = Case(**{**vars(CASES[documents]), "window_size": MASKS[mask]})
    results = gathered(nodes().run(attend, case))
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


@pytest.mark.parametrize(
    "heads_q, heads_kv, head_dim, head_dim_v",
    [(6, 6, 8, 8), (6, 2, 33, 16), (1, 1, 1, 3), (2, 2, 192, 128)],
)
def test_heads_in_float64(nodes, heads_q, heads_kv, head_dim, head_dim_v):
    case = Case(WHOLE["skewed"], heads_q, heads_kv, head_dim, head_dim_v=head_dim_v)
    results = gathered(nodes().run(attend, case))
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_within_twice_the_reference(nodes, dtype):
    case = Case([PACKS["mixed"], [], [], []], 4, 1, 64, dtype=dtype, sharded=True)
    results = gathered(nodes().run(attend, case))
    oracle.assert_close(results, *oracle.truths_and_limits(case))


MEMORY = {  # options, for a document whose keys and values, with gradients, take 1e9 * `gb` bytes
    "kept inputs": lambda gb: {"keep_inputs_gb": 1.0},
    "some kept inputs": lambda gb: {"keep_inputs_gb": 0.7 * gb},
    "rounds": lambda gb: {"memory_cap_gb": 1.1 * gb, "rounds": 4},
}


def attend_to_shape(rank: int, world_size: int, case: Case) -> tuple[list[torch.Tensor], bool]:
    """Return results, and whether this rank keeps inputs or has several rounds."""
    documents, leaves, grad_out = place(rank, world_size, case)
    plan = distca.plan(documents, shape=case.shape).wait()
    out = distca.core_attention(*leaves, documents)
    out.backward(grad_out)
    uses_memory = sum(torch.ops.distca.kept_rows(plan.layout)) > 0 or num_rounds(plan.layout) > 1
    return [out.detach(), *(leaf.grad for leaf in leaves)], uses_memory


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("documents", ["skewed", "one_document", "mixed", "one_over_all"])
def test_kept_inputs_and_rounds(nodes, memory, documents):
    case = CASES[documents]
    key_bytes = 4 * case.heads_kv * case.head_dim * 8
    options = MEMORY[memory](1e-9 * max(case.all_lengths) * key_bytes)
    results, kept = zip(*nodes(**options).run(attend_to_shape, case), strict=True)
    oracle.assert_close(gathered(results), oracle.forward_backward(case), [1e-12] * 4)
    assert any(kept), "inputs were kept, or rows came in rounds"


def attend_twice(rank: int, world_size: int, case: Case, transport: str) -> list[torch.Tensor]:
    """Return the results of the second call, whose plan has the sizes of the first."""
    options = {**OPTIONS, "transport": transport, "deterministic": True}
    open_session(rank, world_size, options)
    attend(rank, world_size, case)
    results = attend(rank, world_size, case)
    open_session(rank, world_size, OPTIONS)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", ["skewed", "one_over_all"])
def test_the_bits_are_those_of_one_transport(nodes, documents, dtype):
    """Gradients of keys that servers of both nodes read are summed in the order of the servers."""
    case = Case(**{**vars(CASES[documents]), "dtype": dtype, "head_dim": 64})
    ways = [nodes().run(attend_twice, case, way) for way in ("hybrid", "process_group")]
    for hybrid, plain in zip(*ways, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(hybrid, plain, strict=True))


def attend_many_times(rank: int, world_size: int, case: Case) -> list[list[torch.Tensor]]:
    """Return the results of layers whose phases begin after random delays on each rank."""
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents)
    results = []
    delay_phases(0.01, seed=rank)
    for _ in range(10):
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        out = distca.core_attention(*inputs, documents)
        out.backward(grad_out)
        results.append([out.detach(), *(each.grad for each in inputs)])
    delay_phases(0, seed=0)
    return results


@pytest.mark.usefixtures("test_extension")
@pytest.mark.parametrize("documents", ["skewed", "one_over_all"])
def test_delays_change_nothing(nodes, documents):
    case = CASES[documents]
    started = nodes(deterministic=True)
    started.run(attend, case)  # the next plan has the sizes of this call
    expected = gathered(started.run(attend, case))
    for per_rank in zip(*started.run(attend_many_times, case, timeout_s=HANG_S), strict=True):
        assert all(map(torch.equal, gathered(per_rank), expected))


def attend_with_a_slow_rank(rank: int, world_size: int, case: Case) -> list[torch.Tensor]:
    """Return the results of a call in which home tasks of rank 0 take seconds longer."""
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents)
    if rank == 0:
        at_phase("distca forward layer 0 early home tasks", SLOW_S)
    out = distca.core_attention(*leaves, documents)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.usefixtures("test_extension")
def test_a_slow_rank_is_no_deadlock(nodes):
    case = CASES["skewed"]
    results = nodes().run(attend_with_a_slow_rank, case, timeout_s=HANG_S)
    oracle.assert_close(gathered(results), oracle.forward_backward(case), [1e-12] * 4)


def exchanged_bytes(profile: torch.profiler.profile, num_ranks: int) -> int:
    """Return the bytes that this rank sent and received in all-to-alls of `num_ranks` ranks."""
    num_bytes = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() != "c10d::alltoall_base_":
            continue
        if len(event.concrete_inputs()[4]) == num_ranks:
            num_bytes += sum(rows * row_bytes for rows, row_bytes in event.shapes()[:2])
    return num_bytes


def count_bytes(rank: int, world_size: int, case: Case) -> tuple[int, int]:
    """Return the counted and the planned bytes of a layer between this rank and other nodes."""
    attend(rank, world_size, case)
    opened = session.find()
    documents, leaves, grad_out = place(rank, world_size, case)
    solution = distca.plan(documents).solution()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        distca.core_attention(*leaves, documents).backward(grad_out)
    encoded, loads = balance(
        solution.pieces,
        (-1, 0),
        cost_tensor(opened.options, solution.shape, "cpu"),
        solution.shape,
        cluster_of(opened.options, world_size, "cpu"),
        opened.options.tolerance,
    )
    assert torch.equal(encoded, solution.encoded)
    return exchanged_bytes(profile, world_size), int(loads[rank, 4:6].sum())


@pytest.mark.parametrize("documents", ["skewed", "one_over_all"])
def test_bytes_between_nodes_are_the_planned_ones(nodes, documents):
    # Without padding: parts of a record are multiples of 16 bytes.
    case = Case(**{**vars(CASES[documents]), "dtype": torch.float32, "head_dim": 32})
    counted, planned = zip(*nodes().run(count_bytes, case), strict=True)
    assert counted == planned and sum(counted) > 0


def attend_without_nodes(rank: int, world_size: int) -> str:
    documents, leaves, _ = place(rank, world_size, Case(WHOLE["skewed"]))
    opened, plan = session.find(), distca.plan(documents)
    solution = plan.solution()
    layout, packed_rows = torch.ops.distca.layout(
        solution.pieces, solution.encoded, rank, opened.num_plans - 1, "cpu"
    )
    share = layout, torch.ops.distca.unpack_rows(layout, packed_rows)
    with pytest.raises(ValueError) as refused:
        torch.ops.distca.core_attention(*leaves, *share, 1.0, opened.group_name)
    distca.close()
    return str(refused.value)


def test_a_layout_without_nodes_is_refused(fresh_nodes):
    fresh_nodes.run(open_session, OPTIONS)
    for error in fresh_nodes.run(attend_without_nodes, timeout_s=HANG_S):
        assert "routes for 0 ranks per node" in error and "was opened with 2" in error


def attend_uneven(rank: int, world_size: int, case: Case) -> list[torch.Tensor]:
    open_session(rank, world_size, OPTIONS)
    return attend(rank, world_size, case)


def test_the_last_node_may_hold_fewer_ranks(fresh_nodes):
    case = Case([[700, 0, 1, 33], [], []], sharded=True)
    results = gathered(fresh_nodes.run(attend_uneven, case))
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def hybrid_nodes(rank: int, world_size: int, ranks_per_node: int | None) -> int:
    distca.close()
    options = distca.Options(transport="hybrid", ranks_per_node=ranks_per_node)
    return distca.init(options=options).way.ranks_per_node


@pytest.mark.parametrize("ranks_per_node, expected", [(None, 0), (1, 0), (2, 2), (3, 0), (9, 0)])
def test_rows_take_two_ways_where_a_node_holds_some_ranks(fresh_nodes, ranks_per_node, expected):
    assert fresh_nodes.run(hybrid_nodes, ranks_per_node) == 3 * [expected]


def way_of(rank: int, world_size: int, hosts: str, transport: str, apart: set[int]) -> Way:
    """Return how rows travel if ranks are on these hosts, each with a GPU of its own. The ranks of
    `apart` cannot access the GPUs of others."""

    def problem(members: list[dict], rank: int, others: range) -> str:
        if any(hosts[other] != hosts[rank] for other in others):
            return "other nodes"
        return "apart" if rank in apart else ""

    member = {"transport": transport, "ranks_per_node": None, "host": hosts[rank]}
    with (
        mock.patch.object(peers, "_describe_self", lambda *_: member),
        mock.patch.object(peers, "_problem", problem),
        mock.patch.object(torch.cuda, "current_device", lambda: 7),
    ):
        return peers.choose_way(distca.Options(), "nccl", torch.distributed.group.WORLD)


@pytest.mark.parametrize(
    "hosts, transport, apart, expected",
    [
        ("aaaa", "auto", (), Way(device=7)),
        ("aaab", "auto", (), Way()),
        ("aabb", "auto", (), Way(7, ranks_per_node=2)),
        ("aabb", "auto", (3,), Way()),
        ("aabb", "process_group", (), Way()),
        ("abcd", "auto", (), Way()),
    ],
)
def test_by_default_rows_inside_nodes_use_peer_memory(nodes, hosts, transport, apart, expected):
    assert nodes().run(way_of, hosts, transport, set(apart)) == 4 * [expected]


def die_in_hybrid(rank: int, world_size: int, scenario: str, victim: int) -> None:
    open_session(rank, world_size, OPTIONS)
    kill_at.run(rank, world_size, scenario, victim)


@pytest.mark.usefixtures("test_extension")
@pytest.mark.parametrize("victim", [1, 2])  # with rank 0 in a node, and in the other node
@pytest.mark.parametrize(
    "scenario", ["inside_dispatch", "inside_attend", "inside_combine", "inside_backward_combine"]
)
def test_a_killed_rank_is_named(fresh_nodes, scenario, victim):
    outcomes = fresh_nodes.outcomes(die_in_hybrid, scenario, victim, timeout_s=HANG_S)
    del outcomes[victim]
    for outcome in outcomes:
        assert outcome.error_type == "DistBackendError", outcome
        assert f"rank {victim} is dead" in outcome.error, outcome
        assert "attention layer 2" in outcome.error, outcome


def leave(rank: int, world_size: int, fails: bool) -> None:
    """Leave the group on rank 2, which is alone on its node, while the others attend."""
    open_session(rank, world_size, OPTIONS)
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    step.attend()
    if rank == 2:
        with contextlib.suppress(KeyError):
            try:
                if fails:
                    raise KeyError("layers.417.weight")
            finally:
                distca.close()
        return
    step.attend()


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_of_another_node_that_leaves_is_named(fresh_nodes, fails):
    how = "failed: KeyError: 'layers.417.weight'" if fails else "has closed its session"
    for outcome in fresh_nodes.outcomes(leave, fails, timeout_s=HANG_S)[:2]:
        assert outcome.error_type == "DistBackendError", outcome
        assert f"rank 2 {how}" in outcome.error, outcome


def make_another_call(rank: int, world_size: int) -> None:
    """Make the calls of two layers in another order on rank 2."""
    open_session(rank, world_size, OPTIONS)
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    out = step.attend()
    if rank == 2:
        out.sum().backward()
    step.attend()


def test_ranks_of_two_nodes_in_different_calls_are_named(fresh_nodes):
    for outcome in fresh_nodes.outcomes(make_another_call, timeout_s=HANG_S):
        assert outcome.error_type == "DistBackendError", outcome
        assert "rank 2 is in dispatch of attention layer 0, backward pass" in outcome.error, outcome


def stop_in_a_layer(rank: int, world_size: int, victim: int) -> None:
    open_session(rank, world_size, {**OPTIONS, "timeout_s": 3.0})
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    step.attend()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    step.attend()


@pytest.mark.parametrize("victim", [1, 2])  # with rank 0 in a node, and in the other node
def test_a_stopped_rank_is_named_after_the_timeout(fresh_nodes, victim):
    outcomes = fresh_nodes.outcomes(stop_in_a_layer, victim, timeout_s=HANG_S, stopped=[victim])
    del outcomes[victim]
    for outcome in outcomes:
        assert outcome.error_type == "DistBackendError" and outcome.seconds < 10, outcome
        assert "dispatch of attention layer 1, forward pass, step 0" in outcome.error, outcome
        assert f"rank {victim} is stopped" in outcome.error, outcome
