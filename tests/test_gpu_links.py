"""Links of groups on CUDA devices are measured when they open, through peer memory and NCCL."""

import os
import time

import pytest
import torch
from oracle import Case
from ranks import Ranks
from small_step import small_step

import distca
from distca import ops
from distca.planning.cost import AttentionShape, cost_tensor
from distca.ranks.links import Links

pytestmark = pytest.mark.gpu
OPENING_S = 1.0
CROSSING = Case([[10, 50, 100, 1200, 30], []], dtype=torch.float32, sharded=True)


@pytest.fixture(scope="module", params=["peer", "process_group"])
def two_ranks(request):
    if request.param == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    if request.param == "process_group" and torch.cuda.device_count() < 2:
        pytest.skip("the link between two CUDA devices is measured, and this machine has one")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started = Ranks(2, "nccl" if torch.cuda.device_count() >= 2 else "gloo")
    yield started, request.param
    started.stop()
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]


def open_group(rank, world_size, options):
    """Return links, seconds of the opening, bytes of peer memory and the report of a plan."""
    distca.close()
    start = time.perf_counter()
    opened = distca.init(options=distca.Options(**options))
    opening_s = time.perf_counter() - start
    peer_bytes = torch.ops.distca.peer_memory_bytes(opened.group_name)
    step = small_step(rank, world_size, CROSSING)
    report = distca.plan(step.documents, device="cuda").report()
    q, k, v = (
        each.detach().cuda().bfloat16().requires_grad_() for each in (step.q, step.k, step.v)
    )
    distca.core_attention(q, k, v, step.documents).sum().backward()
    finite = all(bool(each.grad.isfinite().all()) for each in (q, k, v))
    distca.close()
    return opened.links, opening_s, peer_bytes, report, finite


@pytest.mark.parametrize("per_node", [2, 1])
def test_links_are_measured(two_ranks, per_node):
    started, transport = two_ranks
    options = {"transport": transport, "ranks_per_node": per_node}
    started.run(open_group, {**options, "enabled": False})  # loads libraries
    started.run(open_group, options)
    unmeasured = min(each[1] for each in started.run(open_group, {**options, "enabled": False}))
    first, second = started.run(open_group, options)
    links = first[0]
    assert second[0] == links
    link, missing = (links.inside, links.between)[:: 1 if per_node == 2 else -1]
    assert missing is None and link.latency_s < 0.01
    assert 5e8 < link.bytes_per_second < 2e12
    for _, opening_s, peer_bytes, report, finite in (first, second):
        # A new group of NCCL also connects its ranks, which attention would do in the first step.
        assert opening_s - unmeasured < OPENING_S + 5 * (transport == "process_group")
        assert peer_bytes == 0 and finite
        planned = report.link_gb_per_s if per_node == 2 else report.node_link_gb_per_s
        assert 1e9 * planned == pytest.approx(link.bytes_per_second)


def waits_of(rank, world_size, transport):
    """Return the session's seconds of attention, exchange times of a call, and a plan's report."""
    distca.close()
    options = distca.Options(transport=transport, link_gb_per_s=1e5, keep_inputs_gb=0.0)
    opened = distca.init(options=options)
    for _ in range(5):
        step = small_step(rank, world_size, CROSSING)
        plan = distca.plan(step.documents, device="cuda")
        q, k, v = (
            each.detach().cuda().bfloat16().requires_grad_() for each in (step.q, step.k, step.v)
        )
        layers = [distca.core_attention(q, k, v, step.documents) for _ in range(4)]  # one is timed
        torch.stack(layers).sum().backward()
        torch.cuda.synchronize()
    times, report = ops.take_exchange_times(opened.group_name).tolist(), plan.report()
    distca.close()
    return opened.attention_seconds, times, report


def test_speed_and_waits_are_measured(two_ranks):
    started, transport = two_ranks
    first, second = started.run(waits_of, transport)
    assert first[0] == second[0]
    flops = cost_tensor(distca.Options(attention_tflops=1.0), AttentionShape(), "cuda")[2].item()
    tflops = flops / cost_tensor(distca.Options(), AttentionShape(), "cuda", first[0])[2].item()
    assert 10 < tflops < 2000
    for _, times, report in (first, second):
        assert report.transfer_waits_ms == first[2].transfer_waits_ms
        if transport == "peer":
            assert times == [] and report.transfer_waits_ms == [0, 0]
            continue
        kinds = [tuple(each[:2]) for each in times]
        assert set(kinds) == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert all(num_bytes >= 0 and 0 < ns < 1e9 for _, _, num_bytes, ns in times), times
        # If only keys travel, no results come back in the forward pass.
        assert all(num_bytes > 0 for _, is_combine, num_bytes, _ in times if not is_combine), times
        assert all(0 < ms < 100 for ms in report.transfer_waits_ms)


def test_deterministic_groups_measure_nothing(two_ranks):
    started, transport = two_ranks
    options = {"transport": transport, "ranks_per_node": 2, "deterministic": True}
    for links, _, _, report, finite in started.run(open_group, options):
        assert links == Links() and report.link_gb_per_s == 200 and finite
