"""Servers keep inputs by default on a CUDA device: two ranks on one device, by gloo."""

import oracle
import pytest
import torch
from oracle import Case
from ranks import Ranks
from test_gpu import place
from test_keeping_by_default import forget_memory

import distca
from distca import ops
from distca.ranks import memory

pytestmark = pytest.mark.gpu

CASE = Case([[5000, 2000, 1000], []], 8, 2, 128, sharded=True, dtype=torch.bfloat16)
SLOW_GB_PER_S, FAST_GB_PER_S = 5.0, 1e5
FIRST_UPDATE, NUM_STEPS, NUM_LAYERS = 2, 24, 3


def train(rank, world_size, link_gb_per_s, keep_inputs_gb=None):
    """Return for each step the limit of kept inputs, kept rows and reserved bytes; also the last
    step's results."""
    distca.close()
    forget_memory()
    links = {"link_gb_per_s": link_gb_per_s, "transport": "process_group"}
    distca.init(options=distca.Options(keep_inputs_gb=keep_inputs_gb, **links))
    weight = torch.nn.Parameter(torch.zeros((), device="cuda"))
    weight.grad, optimizer = torch.zeros_like(weight), torch.optim.Adam([weight])
    _, leaves, grad_out = place(CASE, rank, world_size)
    figures = []
    for step in range(NUM_STEPS):
        documents = distca.Documents.sharded(CASE.all_lengths, rank, world_size)
        for leaf in leaves:
            leaf.grad = None
        plan = distca.plan(documents, device="cuda", shape=distca.AttentionShape(8, 2, 128, 2))
        outs = [distca.core_attention(*leaves, documents) for _ in range(NUM_LAYERS)]
        torch.autograd.backward(outs, [grad_out / NUM_LAYERS] * NUM_LAYERS)
        if step >= FIRST_UPDATE:
            optimizer.step()
        kept_rows = ops.kept_rows(plan.layout)
        figures.append((plan.report().keeping, kept_rows, torch.cuda.memory_reserved()))
    results = [tensor.cpu() for tensor in (outs[0].detach(), *(leaf.grad for leaf in leaves))]
    distca.close()
    return figures, results


@pytest.fixture(scope="module")
def two_ranks():
    started = Ranks(2, "gloo")
    yield started
    started.stop()


def test_rows_are_kept_where_links_are_slow_and_memory_stays_flat(two_ranks):
    per_rank = two_ranks.run(train, SLOW_GB_PER_S)
    for figures, _ in per_rank:
        keeping, _, reserved = zip(*figures, strict=True)
        first = FIRST_UPDATE + 2  # updates
        assert set(keeping[:first]) == {"memory is not known yet"}
        assert all("by free memory" in each for each in keeping[first:]), keeping
        assert len(set(keeping[first + 2 :])) == 1, "the limit changes"
        assert len(set(reserved[first + 2 :])) == 1, "memory grows"
    assert any(any(rows) for figures, _ in per_rank for _, rows, _ in figures[-1:])
    plain = two_ranks.run(train, SLOW_GB_PER_S, 0.0)
    assert not any(any(rows) for figures, _ in plain for _, rows, _ in figures)
    for (_, kept), (_, sent) in zip(per_rank, plain, strict=True):
        for a, b in zip(kept, sent, strict=True):
            assert oracle.relative_error(a, b) < 1e-2


def test_nothing_is_kept_where_links_are_fast(two_ranks):
    for figures, _ in two_ranks.run(train, FAST_GB_PER_S):
        assert figures[-1][0] == "saves less than 1%" and not any(figures[-1][1])


@pytest.mark.whole_gpu
def test_spare_memory_is_what_is_free_beyond_the_margin():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # of earlier tests
    before, total = memory.spare_bytes(device), torch.cuda.mem_get_info(device)[1]
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    after = memory.spare_bytes(device)
    assert 0.9 * 2**30 <= before - after <= 1.1 * 2**30
    del held
    torch.cuda.empty_cache()
    emptied = memory.spare_bytes(device)
    assert abs(emptied - after) < 2**27, "peaks of the past count"
    assert before < (1 - memory.MARGIN) * total
