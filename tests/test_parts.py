"""Rows travel in parts, each with some of the heads, so that visiting tasks hide transfers."""

import oracle
import pytest
import torch
from layout_words import num_parts
from oracle import Case
from ranks import Ranks
from test_core_attention import MASKS, PACKS, WHOLE, place

import distca
from distca.planning import cluster, solver
from distca.planning.cost import AttentionShape

# heads_q, heads_kv, head_dim, head_dim_v, number of parts
HEADS = [
    (6, 6, 8, 16, 2),
    (8, 4, 33, 17, 4),
    (4, 2, 32, 32, 4),  # two parts share a key head
    (4, 1, 16, 16, 4),
    (8, 1, 33, 17, 4),
    (6, 1, 16, 8, 2),
]
CASES = {
    **{name: Case(lengths) for name, lengths in WHOLE.items()},
    **{name: Case([lengths, [], [], []], sharded=True) for name, lengths in PACKS.items()},
}
TWO_NODES = {"transport": "hybrid", "ranks_per_node": 2}
OPTIONS = {
    "plain": {},
    "kept inputs": {"keep_inputs_gb": 1.0},
    "rounds": {"memory_cap_gb": 2e-4, "rounds": 4},
    "deterministic": {"deterministic": True},
    "two nodes": TWO_NODES,
    "two nodes, kept inputs": {"keep_inputs_gb": 1.0, **TWO_NODES},
    "two nodes, rounds": {"memory_cap_gb": 2e-4, "rounds": 4, **TWO_NODES},
}


@pytest.fixture(scope="module")
def four():
    started = Ranks(4)
    yield started
    started.stop()


def attend(
    rank: int, world_size: int, case: Case, options: dict, are_short: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Return out, dq, dk, dv, and the number of parts, which are taken if transfers are not too
    short."""
    solver.DEVICES_OF_PARTS = ("cpu",)
    cluster.LEAST_SECONDS_OF_PART = 1e9 if are_short else 0.0
    distca.close()
    distca.init(options=distca.Options(**options))
    documents, leaves, grad_out = place(rank, world_size, case)
    made = distca.plan(documents, window_size=case.window_size, shape=case.shape).wait()
    out = distca.core_attention(*leaves, documents, window_size=case.window_size)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)], num_parts(made.layout)


def results_of(four, case: Case, options: dict, expected: int = 4, **more) -> list[torch.Tensor]:
    per_rank, parts = zip(*four.run(attend, case, options, *more.values()), strict=True)
    assert set(parts) == {expected}
    return [torch.cat(each) for each in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("options", [{}, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", CASES)
def test_equals_the_oracle_in_float64(four, mask, documents, options):
    case = Case(**{**vars(CASES[documents]), "window_size": MASKS[mask]})
    results = results_of(four, case, options)
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads_q, heads_kv, head_dim, head_dim_v, expected", HEADS)
def test_heads_in_float64(four, heads_q, heads_kv, head_dim, head_dim_v, expected, options):
    case = Case(WHOLE["skewed"], heads_q, heads_kv, head_dim, head_dim_v=head_dim_v)
    results = results_of(four, case, OPTIONS[options], expected)
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


@pytest.mark.parametrize("options", [{}, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("documents", ["skewed", "one_over_all"])
def test_the_bits_are_those_of_one_part(four, documents, options):
    heads = {"heads_q": 8, "heads_kv": 4}
    case = Case(**{**vars(CASES[documents]), "dtype": torch.bfloat16, "head_dim": 64, **heads})
    options = {"deterministic": True, **options}
    parts = results_of(four, case, options)
    whole = results_of(four, case, options, expected=1, are_short=True)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


@pytest.mark.parametrize("documents", ["skewed", "one_over_all"])
def test_shared_key_heads_in_bfloat16(four, documents):
    """The gradient of a shared key head is a sum of rounded gradients."""
    heads = {"heads_q": 8, "heads_kv": 1}
    case = Case(**{**vars(CASES[documents]), "dtype": torch.bfloat16, "head_dim": 64, **heads})
    oracle.assert_close(results_of(four, case, {}), *oracle.truths_and_limits(case))


def test_odd_heads_travel_at_once(four):
    case = Case(WHOLE["skewed"], 9, 3, 16)
    results = results_of(four, case, {}, expected=1)
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def test_bytes_during_which_no_visiting_task_runs():
    shape = AttentionShape(8, 2, 128, 2)
    query, key = shape.row_bytes()
    assert cluster.parts_of(shape)["num_parts"] == 4
    # The first of four parts has a quarter of q and half of k and v. The last has the same parts of
    # their results.
    exposed = (query / 4 + key / 2) / (query + key)
    assert cluster.parts_of(shape)["exposed_part"] == pytest.approx(exposed)
    assert cluster.parts_of(AttentionShape(8, 8))["exposed_part"] == pytest.approx(0.25)
    assert cluster.parts_of(AttentionShape(9, 3)) == {"num_parts": 1, "exposed_part": 1.0}


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("visiting", [0.1, 1.0, 4.0])
def test_visiting_tasks_after_early_ones_do_not_wait(num_parts, visiting):
    """Compare with a schedule by hand. `home`, `arrival` and `visiting` are seconds of the forward
    pass."""
    home, arrival = 10.0, 2.0
    loads = torch.zeros(2, 9, dtype=torch.float64)
    loads[0, 1], loads[0, 7] = 3.5 * (home + visiting), 3.5 * visiting  # of both passes
    loads[0, 3] = (arrival - 0.5) / cluster.FORWARD_DISPATCH * 1e9
    plans_for = cluster.Cluster(2, link_bytes_per_second=1e9, transfer_waits=(0.5, 9.0))

    def waits_after(early: float) -> float:
        now, waited = early, 0.0
        for part in range(num_parts):
            here = (part + 1) * arrival / num_parts
            waited += max(0.0, here - now)
            now = max(now, here) + visiting / num_parts
        return waited

    of_server, of_sender = cluster.early_parts(plans_for, loads, num_parts).tolist()
    assert waits_after(home * of_server) == pytest.approx(0, abs=1e-9)
    assert waits_after(home * of_server - 1e-3) > 5e-4, "no more tasks than needed are early"
    assert of_sender == 1.0, "without home tasks, all are early"


def test_all_home_tasks_are_early_if_rows_arrive_late():
    loads = torch.zeros(1, 9, dtype=torch.float64)
    loads[0, 1], loads[0, 3] = 1.0, 1e12
    late = cluster.Cluster(1, link_bytes_per_second=1e9)
    assert cluster.early_parts(late, loads, 4).tolist() == [1.0]
