"""Four ranks as two nodes: peer memory inside a node, a process group between nodes.

Ranks share devices where there are fewer than four; one is enough.
"""

import os
import random
import socket
import time
from unittest import mock

import kill_at
import oracle
import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from test_gpu import LENGTHS, MASKS, assert_as_good_as_the_reference, attend, place
from test_gpu_peer import attend_deterministically

import distca
from distca.ranks import session

pytestmark = pytest.mark.gpu

OPTIONS = {"transport": "hybrid", "ranks_per_node": 2, **MOVE_ALWAYS}


@pytest.fixture(scope="module")
def nodes():
    """Return nodes(**options), four ranks with a session of these options."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started, current = Ranks(4, "nccl"), None

    def get(**options) -> Ranks:
        nonlocal current
        if current != options:
            started.run(open_session, {**OPTIONS, **options})
            current = options
        return started

    yield get
    os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    started.stop()


def open_session(rank, world_size, options):
    distca.close()
    opened = distca.init(options=distca.Options(**options))
    assert opened.way.ranks_per_node == (2 if options["transport"] == "hybrid" else 0)


def attend_by_peer_memory(rank, world_size, case):
    """Return results, and the bytes of peer memory that carried rows inside the node."""
    results = attend(rank, world_size, case)
    return results, torch.ops.distca.peer_memory_bytes(session.find().group_name)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_oracle(nodes, mask, sharded):
    lengths = [sum(LENGTHS, []), [], [], []] if sharded else LENGTHS
    case = Case(lengths, 8, 2, 128, MASKS[mask], sharded, torch.bfloat16)
    results, peer_bytes = zip(*nodes().run(attend_by_peer_memory, case), strict=True)
    assert_as_good_as_the_reference(results, case)
    assert min(peer_bytes) > 0


def attend_on_two_hosts(rank, world_size, case):
    distca.close()
    with mock.patch.object(socket, "gethostname", lambda: f"host {rank // 2}"):
        way = distca.init(options=distca.Options(**MOVE_ALWAYS)).way
        assert way.device is not None and way.ranks_per_node == 2
        return attend_by_peer_memory(rank, world_size, case)


def test_groups_over_hosts_use_it_by_default(nodes):
    if torch.cuda.device_count() < 4:
        pytest.skip("by default, ranks that share a GPU do not use peer memory")
    case = Case(LENGTHS, 8, 2, 128, dtype=torch.bfloat16)
    ranks = nodes()
    results, peer_bytes = zip(*ranks.run(attend_on_two_hosts, case), strict=True)
    ranks.run(open_session, OPTIONS)
    assert_as_good_as_the_reference(results, case)
    assert min(peer_bytes) > 0


@pytest.mark.parametrize("heads_q, heads_kv, head_dim", [(4, 4, 64), (6, 1, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads(nodes, heads_q, heads_kv, head_dim, dtype):
    case = Case(LENGTHS, heads_q, heads_kv, head_dim, dtype=dtype)
    assert_as_good_as_the_reference(nodes().run(attend, case), case)


@pytest.mark.parametrize(
    "memory", [{"keep_inputs_gb": 1.0}, {"memory_cap_gb": 0.04, "rounds": 2}], ids=str
)
def test_kept_inputs_and_rounds(nodes, memory):
    case = Case([sum(LENGTHS, []), [], [], []], 32, 8, 128, sharded=True, dtype=torch.bfloat16)
    ranks = nodes(**memory)
    assert_as_good_as_the_reference(ranks.run(attend, case), case)


def attend_with(rank, world_size, case, transport):
    open_session(rank, world_size, {**OPTIONS, "transport": transport})
    results = attend_deterministically(rank, world_size, case)
    open_session(rank, world_size, OPTIONS)
    return results


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("transport", ["process_group", "peer"])
def test_the_bits_are_those_of_one_transport(nodes, sharded, transport):
    """Gradients of keys that servers of both nodes read are summed in the order of the servers."""
    lengths = [sum(LENGTHS, []), [], [], []] if sharded else LENGTHS
    case = Case(lengths, 8, 2, 128, sharded=sharded, dtype=torch.bfloat16)
    ways = [nodes().run(attend_with, case, way) for way in ("hybrid", transport)]
    for hybrid, plain in zip(*ways, strict=True):
        for first, second, expected in zip(*hybrid, plain[0], strict=True):
            assert torch.equal(first, second) and torch.equal(first, expected)


def attend_many_times(rank, world_size, case, num_calls):
    """Make calls after random delays of the host and of the device, for which no host waits."""
    delays = random.Random(rank)
    documents, leaves, grad_out = place(case, rank, world_size)
    distca.plan(documents, device="cuda")
    results = []
    for _ in range(num_calls):
        time.sleep(delays.choice([0, 0, 0.005]))
        torch.cuda._sleep(delays.choice([0, 0, 3_000_000]))  # cycles
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        out = distca.core_attention(*inputs, documents)
        out.backward(grad_out)
        results.append([out.detach(), *(each.grad for each in inputs)])
    return [[tensor.cpu() for tensor in tensors] for tensors in results]


def test_calls_in_sequence_with_random_delays(nodes):
    case = Case([sum(LENGTHS, []), [], [], []], 8, 2, 128, sharded=True, dtype=torch.bfloat16)
    nodes().run(attend, case)  # the next plan has the sizes of this call
    truths_and_limits = oracle.truths_and_limits(case)
    for per_rank in zip(*nodes().run(attend_many_times, case, 20), strict=True):
        oracle.assert_close(list(map(torch.cat, zip(*per_rank, strict=True))), *truths_and_limits)


def die_in_a_layer(rank, world_size, case, victim):
    """Attend until a call raises. The victim dies before its third call."""
    open_session(rank, world_size, {**OPTIONS, "timeout_s": 60.0})
    documents, leaves, _ = place(case, rank, world_size)
    distca.plan(documents, device="cuda")
    for layer in range(10):
        if layer == 2 and rank == victim:
            torch.cuda.synchronize()
            kill_at.die()
        distca.core_attention(*leaves, documents)
        torch.cuda.synchronize()


@pytest.mark.parametrize("victim", [1, 3])  # with rank 0 in a node, and in the other node
def test_a_killed_rank_is_named(victim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    case = Case([sum(LENGTHS, []), [], [], []], 8, 2, 128, sharded=True, dtype=torch.bfloat16)
    group = Ranks(4, "nccl")
    try:
        outcomes = group.outcomes(die_in_a_layer, case, victim, timeout_s=100)
    finally:
        group.stop()
        os.environ.pop("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", None)
    del outcomes[victim]
    for outcome in outcomes:
        assert outcome.error_type == "DistBackendError", outcome
        assert f"rank {victim} is dead" in outcome.error, outcome
        assert "of attention layer " in outcome.error, outcome
