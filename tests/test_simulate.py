"""distca.simulate: small cases by hand, conserved quantities, and bounds between systems."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.planning import halves
from distca.planning.cost import TILE, AttentionShape, Calibration, Link
from distca.planning.halves import hidden_by_halves
from distca.planning.packs import Pack
from distca.simulate import pipeline, systems
from distca.simulate.disaggregated import (
    Share,
    Work,
    cluster_of,
    held_bytes,
    in_turn,
    moved_bytes,
    pack_on,
    ping_pong,
    plan,
    shares_of_parts,
    work_of,
)
from distca.simulate.layers import (
    ATTENTION,
    EXCHANGE,
    GATHER_ONCE,
    GATHER_TWICE,
    KINDS,
    LINEAR,
    PARAMETERS,
    RING,
    WAITING,
    Layers,
    add_parameters,
    context_parallel,
    layers_of,
)
from distca.simulate.machine import BACKWARD, FORWARD, Machine, num_tiles
from distca.simulate.packing import (
    Documents,
    balanced_packs,
    distribution,
    draw,
    karmarkar_karp,
    sorted_micro_batches,
)
from distca.simulate.results import fitted, run, run_system
from distca.simulate.scenario import PRESETS, ModelShape, Scenario
from distca.simulate.systems import SYSTEMS, Step, fixed

ROWS = TILE["cuda"]
INSTANT = Link(0.0, 1e30)
TINY = ModelShape(
    name="tiny", layers=1, hidden=128, heads=1, kv_heads=1, head_dim=128, ffn=128, vocab=1
)
TILE_FLOPS = 4 * ROWS * ROWS * 128
# A tile takes 1 s forward and 2 s backward, and so does the linear work of a tile's rows.
UNIT_MACHINE = Machine(
    inside=INSTANT,
    between=INSTANT,
    attention_tflops=(TILE_FLOPS / 1e12, 1.25 * TILE_FLOPS / 1e12),
    linear_seconds_per_token=3 / ROWS,
)
UNIT = Scenario(model=TINY, machine=UNIT_MACHINE, ranks=2, tokens=2 * ROWS, context=2 * ROWS)
SYSTEM = {system.name: system for system in SYSTEMS}


def documents(*packs: list[int]) -> Documents:
    pack = [idx for idx, lengths in enumerate(packs) for _ in lengths]
    return Documents(np.array(list(itertools.chain(*packs))), np.array(pack))


def seconds_of(name: str, scenario: Scenario, step: Documents, cp: int = 1) -> float:
    return SYSTEM[name].ways[0](Step(scenario, step), cp).schedule.seconds


UNEVEN = documents([2 * ROWS], [ROWS, ROWS])  # 3 tiles and 2


# Models and machines.


@pytest.mark.parametrize("name, billions", [("8B", 8.03), ("34B", 33.74), ("70B", 70.55)])
def test_presets_have_as_many_parameters_as_their_models(name, billions):
    assert PRESETS[name].params / 1e9 == pytest.approx(billions, abs=0.02)


def test_bytes_and_flops_of_a_small_model():
    assert TINY.layer_params == 4 * 128 * 128 + 3 * 128 * 128
    assert TINY.linear_flops == 2 * (7 * 128 * 128 + 128)
    # 4 rows of hidden, q, k, v, out and 4 of ffn, each 128 of 2 bytes; lse of one head.
    assert TINY.activation_bytes == 12 * 128 * 2 + 4


@pytest.mark.parametrize("begin", [0, 1, 100, 128, 300])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 500])
def test_every_tile_with_a_pair_counts(begin, rows):
    end = begin + rows
    ends = [min(first + ROWS, end) for first in range(begin, end, ROWS)]
    expected = sum(-(-last // ROWS) for last in ends)
    assert num_tiles(np.array([begin]), np.array([end])).tolist() == [expected]


def test_collectives_by_hand():
    machine = Machine(inside=Link(1.0, 100.0), between=Link(2.0, 10.0))
    assert machine.gather_seconds(400.0, 1, 8) == 0
    assert machine.gather_seconds(400.0, 4, 8) == 1.0 + 300 / 100
    # Half of the bytes come from the other node, through two network cards.
    assert machine.gather_seconds(400.0, 4, 2) == 2.0 + 200 / (2 * 10)
    assert machine.gather_seconds(400.0, 4, 1) == 2.0 + 300 / 10


# Documents.


def drawn_one_by_one(lengths: list[int], num_packs: int, tokens: int, seed: int) -> list[list[int]]:
    """Draw packs with the loop of benchmarks/training_step.py."""
    shuffled = list(lengths)
    random.Random(seed).shuffle(shuffled)
    stream, rest, packs = itertools.cycle(shuffled), 0, []
    for _ in range(num_packs):
        packs.append([])
        room = tokens
        while room > 0:
            length = rest or next(stream)
            packs[-1].append(min(length, room))
            rest = length - packs[-1][-1]
            room -= packs[-1][-1]
    return packs


@pytest.mark.parametrize("seed", range(3))
def test_packs_equal_those_of_the_training_benchmark(seed):
    generator = random.Random(seed)
    lengths = [generator.randint(1, 300) for _ in range(17)] + [2500]
    scenario = replace(UNIT, ranks=4, tokens=1000, context=1000, micro_batches=2)
    expected = drawn_one_by_one(lengths, 5 * 8, 1000, seed)
    for step, drawn in enumerate(draw(lengths, scenario, 5, seed)):
        of_step = documents(*expected[8 * step : 8 * step + 8])
        assert drawn.lengths.tolist() == of_step.lengths.tolist()
        assert drawn.pack.tolist() == of_step.pack.tolist()


def test_documents_longer_than_the_context_are_cut():
    scenario = replace(UNIT, ranks=1, tokens=1000, context=300)
    (drawn,) = draw([700], scenario, 1, seed=0)
    assert drawn.lengths.tolist() == [300, 300, 100, 300]


def test_long_packs_lie_on_several_groups():
    scenario = replace(UNIT, ranks=4, tokens=500, context=1000)
    assert (scenario.least_cp, scenario.packs) == (2, 2)
    (drawn,) = draw([900, 900], scenario, 1, seed=0)
    assert drawn.lengths.tolist() == [900, 100, 800, 200]
    assert pack_on(drawn.lengths, 4).pieces.tolist() == [
        [0, 0, 0, 500],
        [1, 0, 500, 400],
        [1, 1, 0, 100],
        [2, 2, 0, 500],
        [3, 2, 500, 300],
        [3, 3, 0, 200],
    ]


def test_two_runs_of_a_pack():
    """Runs of 100 tokens. Documents are counted by the ranks on which they begin: 0, 1 and 3."""
    assert pack_on(np.array([350, 200, 250]), 4, runs=2).pieces.tolist() == [
        [0, 0, 0, 100],
        [0, 2, 50, 100],
        [1, 0, 100, 100],
        [1, 2, 150, 50],
        [1, 1, 0, 50],
        [2, 0, 200, 100],
        [2, 1, 50, 100],
        [3, 0, 300, 50],
        [3, 2, 0, 50],
        [3, 1, 150, 100],
    ]


@pytest.mark.parametrize("text", ["fixed:5", "uniform:3:9", "lognormal:100:1.5"])
def test_distributions(text):
    lengths = distribution(text, seed=1)
    assert lengths == distribution(text, seed=1)
    assert min(lengths) >= 1
    if text.startswith("lognormal"):
        assert np.median(lengths) == pytest.approx(100, rel=0.03)
        assert np.log(lengths).std() == pytest.approx(1.5, rel=0.03)
    else:
        assert set(lengths) == ({5} if text.startswith("fixed") else set(range(3, 10)))


@pytest.mark.parametrize("text", ["fixed", "fixed:x", "uniform:1", "normal:1:2", "fixed:-1"])
def test_bad_distributions(text):
    with pytest.raises(ValueError, match="expected fixed:LENGTH"):
        distribution(text, seed=0)


def test_longest_documents_go_first_to_the_pack_with_least_work():
    lengths = np.array([1, 5, 3, 4, 2])
    packs = balanced_packs(lengths, lengths.astype(float), 2, most_tokens=100)
    # Packs get 5 | 4, then 3 joins the 4, 2 joins the 5, and 1 joins either.
    assert packs[1] == packs[4] != packs[3] == packs[2]


def test_packs_stay_within_their_tokens():
    lengths = np.array([6, 2, 2, 2])
    work = lengths.astype(float) ** 2
    assert np.bincount(balanced_packs(lengths, work, 2, 100), lengths).tolist() == [6, 6]
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 100, 400)
    packs = balanced_packs(lengths, lengths.astype(float) ** 2, 8, lengths.sum() / 8 + 10)
    assert np.bincount(packs, lengths).max() <= lengths.sum() / 8 + 10
    tight = balanced_packs(lengths, lengths.astype(float) ** 2, 8, 1)  # no document fits
    assert np.ptp(np.bincount(tight, lengths)) <= 100


def test_a_full_pack_takes_shorter_documents_later():
    packs = balanced_packs(np.array([8, 4, 3, 2]), np.array([1.0, 100.0, 1.0, 1.0]), 2, 10)
    assert packs.tolist() == [packs[0], packs[1], packs[1], packs[0]] and packs[0] != packs[1]


@pytest.mark.parametrize(
    "weights, num_bins, sums",
    [
        ([8, 7, 6, 5, 4], 2, [16, 14]),  # the method's own example: 15 and 15 would be best
        ([4, 5, 6, 7, 8], 3, [11, 11, 8]),
        ([5], 3, [5, 0, 0]),
        ([2, 2, 2, 2], 4, [2, 2, 2, 2]),
        ([3, 0, 1], 1, [4]),
        ([], 2, [0, 0]),
    ],
)
def test_the_karmarkar_karp_method(weights, num_bins, sums):
    bins = karmarkar_karp(weights, num_bins)
    assert np.bincount(bins, weights, num_bins).tolist() == sums


@pytest.mark.parametrize("num_bins", [2, 7, 64])
def test_karmarkar_karp_differs_by_less_than_greedy_packs(num_bins):
    lengths = np.random.default_rng(1).lognormal(6, 1, 400).astype(int) + 1
    work = lengths.astype(float) ** 2
    ours = np.bincount(karmarkar_karp(work, num_bins), work, num_bins)
    greedy = np.bincount(balanced_packs(lengths, work, num_bins, 1e12), work, num_bins)
    assert ours.sum() == work.sum() and ours.tolist() == sorted(ours, reverse=True)
    assert np.ptp(ours) <= np.ptp(greedy)


def test_sorted_micro_batches_hold_every_document_once_under_the_cap():
    lengths = np.random.default_rng(2).lognormal(6, 1, 100).astype(int) + 1
    most = 2 * int(lengths.max())
    batches = sorted_micro_batches(lengths, (lengths**2).tolist(), 4, most)
    assert {len(batch) for batch in batches} == {4} and len(batches) > 1
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(100))
    assert max(lengths[held].sum() for batch in batches for held in batch) <= most
    fewer = sorted_micro_batches(lengths, (lengths**2).tolist(), 4, 4 * most)
    assert len(fewer) < len(batches)
    with pytest.raises(ValueError, match="most_tokens is 9; expected at least 10"):
        sorted_micro_batches([10], [1], 4, 9)


# Baselines, by hand.


def test_fixed_packing_waits_for_the_slowest():
    # Linear work takes 2 + 4, attention of the slow rank 3 + 6.
    outcome = fixed(Step(UNIT, UNEVEN), 1)
    assert outcome.schedule.seconds == pytest.approx(6 + 9)
    busy = outcome.schedule.busy(UNIT)
    assert busy[LINEAR].tolist() == pytest.approx([6, 6])
    assert busy[ATTENTION].tolist() == pytest.approx([9, 6])
    assert busy[WAITING].tolist() == pytest.approx([0, 3])


def test_ideal_balance_is_the_mean():
    assert seconds_of("limit", UNIT, UNEVEN) == pytest.approx(6 + 7.5)


def test_all_gather_by_hand():
    """Of a document of 4 query tiles in 4 runs, each rank has 1 + 4 or 2 + 3 of 10 tiles."""
    slow = replace(UNIT, machine=replace(UNIT_MACHINE, inside=Link(10.0, 1024.0)))
    one = Documents(np.array([4 * ROWS]), np.array([0]))
    layers = context_parallel(slow, one, np.array([[4 * ROWS]]), cp=2, keys=GATHER_TWICE)
    assert layers.seconds[0, :, ATTENTION].tolist() == [[5, 5], [10, 10]]
    # k and v have 512 bytes per token; half of the 512 tokens come from the other rank.
    gather = 10 + 512 * 512 / 2 / 1024
    assert layers.seconds[0, :, EXCHANGE].tolist() == [[gather] * 2, [2 * gather] * 2]
    kept = context_parallel(slow, one, np.array([[4 * ROWS]]), cp=2, keys=GATHER_ONCE)
    assert kept.seconds[0, :, EXCHANGE].tolist() == [[gather] * 2, [gather] * 2]
    # A rank holds the gradients of one layer's keys, and the gathered keys of one layer or of all.
    assert layers.workspace_bytes.tolist() == [2 * 512 * 512] * 2
    deep = replace(slow, model=replace(TINY, layers=3))
    kept = context_parallel(deep, one, np.array([[4 * ROWS]]), cp=2, keys=GATHER_ONCE)
    assert kept.workspace_bytes.tolist() == [4 * 512 * 512] * 2


def test_ring_by_hand():
    # A hop carries the keys of 256 tokens, 131072 bytes. It takes 6.5 s forward and 11 s backward,
    # beside 2.5 s and 5 s of attention.
    slow = replace(UNIT, machine=replace(UNIT_MACHINE, inside=Link(2.0, 131072 / 4.5)))
    one = Documents(np.array([4 * ROWS]), np.array([0]))
    layers = context_parallel(slow, one, np.array([[4 * ROWS]]), cp=2, keys=RING)
    assert layers.seconds[0, :, EXCHANGE, 0].tolist() == pytest.approx([6.5 - 2.5, 11 - 5])
    quick = context_parallel(UNIT, one, np.array([[4 * ROWS]]), cp=2, keys=RING)
    assert quick.seconds[0, :, EXCHANGE].max() == 0


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_hop():
    machine = replace(UNIT_MACHINE, gpus_per_node=1, between=Link(100.0, 1e30))
    one = Documents(np.array([4 * ROWS]), np.array([0]))
    layers = context_parallel(
        replace(UNIT, machine=machine), one, np.array([[4 * ROWS]]), cp=2, keys=RING
    )
    assert layers.seconds[0, :, EXCHANGE, 0].tolist() == pytest.approx([97.5, 95])


# One document of 4 query tiles takes 42 s with its linear work. 28 of one tile take 6 s each.
LONG_AND_SHORT = documents([4 * ROWS, *[ROWS] * 4], *[[ROWS] * 8] * 3)
EIGHT_ROWS = replace(UNIT, ranks=4, tokens=8 * ROWS, context=8 * ROWS)


def test_variable_length_packing_lets_tokens_diverge():
    assert seconds_of("fixed", EIGHT_ROWS, LONG_AND_SHORT) == pytest.approx(42 + 4 * 6)
    outcome = SYSTEM["variable"].ways[0](Step(EIGHT_ROWS, LONG_AND_SHORT), 1)
    assert outcome.schedule.seconds == pytest.approx(9 * 6)
    beside = outcome.memory_bytes - EIGHT_ROWS.state_bytes()
    assert beside / EIGHT_ROWS.token_bytes() == pytest.approx(
        [6 * ROWS, 9 * ROWS, 9 * ROWS, 8 * ROWS]
    )


def test_variable_packing_keeps_within_memory():
    eight = EIGHT_ROWS.state_bytes() + 8.5 * ROWS * EIGHT_ROWS.token_bytes()
    machine = replace(UNIT_MACHINE, memory_gb=eight / 1e9 / Machine.usable_memory)
    outcome = SYSTEM["variable"].ways[0](
        Step(replace(EIGHT_ROWS, machine=machine), LONG_AND_SHORT), 1
    )
    assert outcome.memory_bytes.max() <= eight
    assert outcome.schedule.seconds == pytest.approx(42 + 4 * 6)


# distca.


def small_work() -> Work:
    """Return work in which rank 0 keeps 4 s and sends 2 s to rank 1, which has 1 s of its own."""
    return Work(
        home_seconds=np.array([[4.0, 1.0], [8.0, 2.0]]),
        visiting_seconds=np.array([[0.0, 2.0], [0.0, 4.0]]),
        home=np.array([0]),
        server=np.array([1]),
        query_rows=np.array([10]),
        key_rows=np.array([30]),
        kept_query_rows=np.array([0]),
        kept_key_rows=np.array([0]),
    )


def linked(inside: Link, between: Link = INSTANT, per_node: int = 8) -> Scenario:
    machine = replace(UNIT_MACHINE, inside=inside, between=between, gpus_per_node=per_node)
    return replace(UNIT, machine=machine)


@pytest.mark.parametrize("v_head_dim", [128, 64, 200])
def test_bytes_of_both_passes_sum_to_the_planners_row_bytes(v_head_dim):
    work, scenario = small_work(), replace(UNIT, model=replace(TINY, v_head_dim=v_head_dim))
    total = sum(
        sum(moved_bytes(scenario, work, pass_idx, Share())) for pass_idx in (FORWARD, BACKWARD)
    )
    query, key = scenario.attention_shape.row_bytes()
    assert total.tolist() == [10 * query + 30 * key]


def test_values_of_another_width():
    """wv and wo are of v's width, and so are half of the forward pass's FLOPs."""
    model = replace(PRESETS["8B"], v_head_dim=64)
    assert PRESETS["8B"].layer_params - model.layer_params == model.hidden * (32 + 8) * 64
    wide, narrow = (replace(UNIT, model=replace(TINY, v_head_dim=dim)) for dim in (128, 64))
    ratio = narrow.attention_cost().seconds_per_tile / wide.attention_cost().seconds_per_tile
    assert ratio.tolist() == pytest.approx([(128 + 64) / 256, (3 * 128 + 2 * 64) / (5 * 128)])
    assert model.attention(8) == AttentionShape(4, 1, 128, 2, 64)
    with pytest.raises(ValueError, match="model v_head_dim is 0"):
        replace(TINY, v_head_dim=0)


def test_kept_inputs_do_not_travel_again():
    work = replace(small_work(), kept_query_rows=np.array([4]), kept_key_rows=np.array([5]))
    for pass_idx, less in ((FORWARD, 0), (BACKWARD, 4 * 256 + 5 * 512)):
        out, back = moved_bytes(UNIT, work, pass_idx, Share())
        all_out, all_back = moved_bytes(UNIT, small_work(), pass_idx, Share())
        assert out == all_out - less and back == all_back
    deep = replace(UNIT, model=replace(TINY, layers=3))
    more = held_bytes(deep, work) - held_bytes(deep, small_work())
    assert more.tolist() == [0, 3 * (4 * 256 + 5 * 512)]


def test_visiting_tasks_wait_for_rows_and_results_travel_home():
    # q has 256 bytes per row, k and v 512, lse 4. Rank 0 sends 10 * 256 + 30 * 512 = 17920 bytes.
    scenario = linked(Link(0.5, 8960.0))
    times, beside = in_turn(scenario, small_work(), FORWARD)
    dispatch, combine = 0.5 + 2.0, 0.5 + 2600 / 8960
    assert times[ATTENTION].tolist() == [4, 3]
    # Rank 1 computes 0.5 s of its own while rows arrive, and as much while results leave. Rank 0
    # has computed the first 2 of its own 4 s long before, and waits.
    results = combine - 0.5
    assert times[EXCHANGE] == pytest.approx([0, (dispatch - 0.5) + results])
    assert times.sum(axis=0) == pytest.approx([dispatch + 2.0 + combine] * 2)
    assert beside == pytest.approx(dispatch + combine - (dispatch - 0.5) - results)


def test_late_home_tasks_hide_results():
    """Rank 1 has 6 s of its own: 3 s hide the arrival of rows, and 3 s the way home of results."""
    work = replace(small_work(), home_seconds=np.array([[4.0, 6.0]] * 2))
    times, _ = in_turn(linked(Link(0.5, 8960.0)), work, FORWARD)
    assert times.sum(axis=0) == pytest.approx([3 + 2 + 3] * 2)
    assert times[EXCHANGE] == pytest.approx([0, 0])


def test_parts_hide_transfers_behind_visiting_tasks():
    """Rows travel for 2 s, or in two parts of 1 s, and visiting tasks take 2 s."""
    scenario = linked(Link(0.0, 2 * 8960.0))
    scenario = replace(scenario, model=replace(TINY, heads=2, kv_heads=2))
    whole, _ = in_turn(scenario, small_work(), FORWARD)
    assert whole.sum(axis=0) == pytest.approx([2 + 2 + 0.5] * 2)
    work = replace(small_work(), home_seconds=np.array([[0.0, 1.0]] * 2), num_parts=2)
    times, _ = in_turn(scenario, work, FORWARD)
    # Rank 1 is done at 3 s, and computes its last 0.5 s of its own beside the results.
    assert times.sum(axis=0) == pytest.approx([1 + 1 + 1 + 0.5] * 2)
    assert times[EXCHANGE, 1] == pytest.approx(0.5)


def test_parts_that_share_key_heads():
    """k and v travel with the first of two parts of q, whose visiting tasks hide the second."""
    scenario = linked(Link(0.0, 8960.0))
    scenario = replace(scenario, model=replace(TINY, heads=2))
    query, key = 10 * 256 / 8960.0, 30 * 512 / 8960.0  # of a part
    assert shares_of_parts(scenario, 2) == [Share(0.5, 1, 0), Share(0.5, 0, 1)]
    work = replace(small_work(), home_seconds=np.zeros((2, 2)), num_parts=2)
    times, _ = in_turn(scenario, work, FORWARD)
    result = 10 * (256 + 4) / 8960.0
    assert times.sum(axis=0) == pytest.approx([query + key + 1 + 1 + result] * 2)


def test_an_exchange_between_nodes_takes_the_other_link():
    fast = in_turn(linked(INSTANT, Link(50.0, 1e30)), small_work(), FORWARD)[0]
    slow = in_turn(linked(INSTANT, Link(50.0, 1e30), per_node=1), small_work(), FORWARD)[0]
    assert fast.sum(axis=0) == pytest.approx([4, 4])
    assert slow.sum(axis=0) == pytest.approx([50 + 2 + 50] * 2)


def test_a_server_waits_for_its_busy_sender():
    """Rank 0 sends 30 rows to each of two servers, and both wait for all 60 rows."""
    nothing = np.array([0, 0])
    work = Work(
        np.zeros((2, 3)),
        np.array([[0.0, 1.0, 1.0]] * 2),
        np.array([0, 0]),
        np.array([1, 2]),
        nothing,
        np.array([30, 30]),
        nothing,
        nothing,
    )
    scenario = replace(linked(Link(0.0, 512 * 30.0)), ranks=3, tokens=ROWS, context=ROWS)
    times, _ = in_turn(scenario, work, FORWARD)
    assert times[:, 1].sum() == pytest.approx(2 + 1)


# Linear work of a pass takes 2 s forward; wq, wk and wv are 3 of its 7 matrices.
BEFORE, AFTER = 2 * 3 / 7, 2 * 4 / 7


def exposed_in_ping_pong(exchanges: list[float], attention: float) -> float:
    """Return the seconds of exchanges that the other half's work does not hide. `exchanges` are
    those of a third and of two thirds of the rows."""
    beside = 2 / 3 * (BEFORE + attention), 1 / 3 * (AFTER + attention)
    return sum(max(0, each - work) for each, work in zip(exchanges, beside, strict=True))


def test_ping_pong_hides_a_half_behind_the_other():
    scenario = replace(linked(Link(0.5, 8960.0)), sharding="zero1")
    assert scenario.seconds_around_attention(FORWARD) == pytest.approx((BEFORE, AFTER))
    exchanges = [0.5 + 0.5 + part * (17920 + 2600) / 8960 for part in (1 / 3, 2 / 3)]
    work = replace(small_work(), visiting_seconds=np.zeros((2, 2)), home_seconds=np.zeros((2, 2)))
    times, beside = ping_pong(scenario, work, FORWARD)
    exposed = exposed_in_ping_pong(exchanges, 0)
    assert exposed > 0 and times[EXCHANGE] == pytest.approx([exposed] * 2)
    assert beside == pytest.approx(2 / 3 * BEFORE + 1 / 3 * AFTER)
    # Attention of 3.5 s (mean) hides more: all of the first half's exchange, too.
    times, beside = ping_pong(scenario, small_work(), FORWARD)
    less = exposed_in_ping_pong(exchanges, 3.5)
    assert less < exposed and exchanges[0] < 2 / 3 * (BEFORE + 3.5)
    assert beside == pytest.approx(sum(exchanges) - less)
    assert times.sum(axis=0) == pytest.approx([4 + less] * 2) and times[WAITING].tolist() == [0, 1]


def test_runs_of_crossing_documents_are_halves():
    scenario = replace(linked(Link(0.5, 8960.0)), sharding="zero1")
    half = 0.5 + 0.5 + (17920 + 2600) / 2 / 8960
    idle = {"visiting_seconds": np.zeros((2, 2)), "home_seconds": np.zeros((2, 2))}
    work = replace(small_work(), **idle, first_part=0.5)
    times, _ = ping_pong(scenario, work, FORWARD)
    assert times[EXCHANGE, 0] == pytest.approx((half - BEFORE / 2) + (half - AFTER / 2))


def test_parameters_share_the_links_with_ping_pong():
    """The gather of a layer takes all of a pass, so that exchanges get half of the link."""
    scenario = linked(Link(0.0, TINY.layer_params / 100))
    work = small_work()
    alone = ping_pong(replace(scenario, sharding="zero1"), work, FORWARD)[0]
    shared = ping_pong(scenario, work, FORWARD)[0]
    whole = (17920 + 2600) / (TINY.layer_params / 100)
    for times, exchange in ((alone, whole), (shared, 2 * whole)):
        exposed = exposed_in_ping_pong([exchange / 3, 2 * exchange / 3], 3.5)
        assert times[EXCHANGE, 0] == pytest.approx(exposed)


@pytest.mark.parametrize("least_cp, runs", [(1, 1), (4, 1), (4, 2)])
def test_work_of_a_plan_equals_the_planners_report(least_cp, runs):
    generator = random.Random(least_cp)
    lengths = [generator.randint(1, 9000) for _ in range(60)]
    scenario = replace(
        UNIT, ranks=16, tokens=8192, context=8192 * least_cp, machine=replace(UNIT_MACHINE)
    )
    (drawn,) = draw(lengths, scenario, 1, seed=0)
    pack = pack_on(drawn.lengths, 16, runs)
    cost = scenario.attention_cost()
    cluster = cluster_of(scenario)
    _, loads = torch.ops.distca.plan(
        pack.as_tensor(),
        16,
        -1,
        0,
        cost.tensor(),
        scenario.attention_shape.row_bytes(),
        cluster.servers(),
        cluster.links(),
        scenario.tolerance,
    )
    tasks, *_ = plan(scenario, pack, cluster, cost)
    work = work_of(pack, tasks, cost)
    seconds = work.home_seconds + work.visiting_seconds
    assert seconds.sum(axis=0) == pytest.approx(loads[:, 1].numpy())
    query, key = scenario.attention_shape.row_bytes()
    num_bytes = work.query_rows * query + work.key_rows * key
    assert num_bytes.sum() > 0
    assert np.bincount(work.home, num_bytes, 16) == pytest.approx(loads[:, 2].numpy())
    assert np.bincount(work.server, num_bytes, 16) == pytest.approx(loads[:, 3].numpy())
    with pytest.raises(AssertionError):  # the comparison notices a task on another server
        tasks[0, 3] = (tasks[0, 3] + 1) % 16
        moved = work_of(pack, tasks, cost)
        moved_seconds = (moved.home_seconds + moved.visiting_seconds).sum(axis=0)
        assert moved_seconds == pytest.approx(loads[:, 1].numpy())


def test_queries_at_home_wait_for_keys_of_other_ranks():
    pack = Pack(2, 1, np.array([[0, 0, 0, 100], [1, 0, 100, 60]]))
    tasks = np.array([[0, 0, 100, 0, 0], [0, 100, 160, 1, 0]])
    work = work_of(pack, tasks, UNIT.attention_cost())
    assert work.home_seconds[FORWARD].tolist() == [1, 0]
    assert work.visiting_seconds[FORWARD].tolist() == [0, 2]
    assert [work.home, work.server, work.query_rows, work.key_rows] == [[0], [1], [0], [100]]
    # The first keys go to rank 1 once; the last of its two tasks determines their number.
    twice = np.array([[0, 0, 50, 1, 1], [0, 50, 90, 1, 1], [0, 90, 160, 1, 1]])
    work = work_of(pack, twice, UNIT.attention_cost())
    assert [work.home, work.server, work.query_rows, work.key_rows] == [[0], [1], [100], [100]]
    assert [work.kept_query_rows, work.kept_key_rows] == [[100], [100]]


# Parameters and pipelines.


def unit_layers(scenario: Scenario, forward: list[float], backward: list[float]) -> Layers:
    """Return layers of one group with these seconds per micro-batch."""
    layers = layers_of(scenario, np.zeros((len(forward), 1)), np.zeros((len(forward), 2, 1)))
    layers.seconds[:, FORWARD, LINEAR, 0] = forward
    layers.seconds[:, BACKWARD, LINEAR, 0] = backward
    return layers


def piped(pp: int, micro_batches: int) -> Scenario:
    return replace(
        UNIT,
        model=replace(TINY, layers=pp),
        ranks=pp,
        pp=pp,
        micro_batches=micro_batches,
        sharding="zero1",
    )


def test_parameters_are_hidden_behind_compute():
    scenario = replace(
        UNIT, machine=replace(UNIT_MACHINE, inside=Link(0.0, TINY.layer_params / 10))
    )
    layers = layers_of(scenario, np.full((1, 2), ROWS), np.zeros((1, 2, 2)))
    add_parameters(scenario, layers)
    # Each parameter gathers 2 bytes and reduces 4, half from the other rank: 10 s and 20 s beside
    # 1 s and 2 s of compute. The first gathers and the last reductions are exposed: of one layer,
    # and of embedding and head.
    edges = TINY.edge_params / TINY.layer_params
    expected = [9 + 10 * (1 + edges), 28 + 20 * (1 + edges)]
    assert layers.seconds[0, :, PARAMETERS, 0] == pytest.approx(expected)


def test_ranks_meet_in_every_micro_batch_only_under_fsdp():
    uneven = documents([2 * ROWS], [ROWS, ROWS], [ROWS, ROWS], [2 * ROWS])
    scenario = replace(UNIT, micro_batches=2)
    assert seconds_of("fixed", scenario, uneven) == pytest.approx(2 * (6 + 9))
    apart = replace(scenario, sharding="zero1")
    assert seconds_of("fixed", apart, uneven) == pytest.approx(6 + 9 + 6 + 6)


@pytest.mark.parametrize("pp, micro_batches", [(1, 3), (2, 2), (4, 8), (4, 2)])
def test_1f1b_of_equal_micro_batches(pp, micro_batches):
    scenario = piped(pp, micro_batches)
    layers = unit_layers(scenario, [1.0] * micro_batches, [2.0] * micro_batches)
    schedule = pipeline.one_f_one_b(scenario, layers)
    assert schedule.seconds == pytest.approx(3 * (micro_batches + pp - 1))
    assert len(schedule.operations) == 2 * pp * micro_batches


def test_1f1b_of_uneven_micro_batches_by_hand():
    # Stage 0: F0 0-1, F1 1-4; stage 1: F0 1-2, B0 2-4, F1 4-7, B1 7-13; stage 0: B0 4-6, B1 13-19.
    scenario = piped(2, 2)
    schedule = pipeline.one_f_one_b(scenario, unit_layers(scenario, [1, 3], [2, 6]))
    starts = {(o.stage, o.pass_idx, o.micro_batch): o.start[0] for o in schedule.operations}
    assert starts == {
        (0, FORWARD, 0): 0,
        (0, FORWARD, 1): 1,
        (1, FORWARD, 0): 1,
        (1, BACKWARD, 0): 2,
        (1, FORWARD, 1): 4,
        (1, BACKWARD, 1): 7,
        (0, BACKWARD, 0): 4,
        (0, BACKWARD, 1): 13,
    }
    assert schedule.seconds == 19
    assert schedule.busy(scenario)[WAITING] == pytest.approx([19 - 12, 19 - 12])


def test_1f1b_sends_between_stages():
    scenario = piped(2, 1)
    machine = replace(UNIT_MACHINE, inside=Link(5.0, 1e30))
    schedule = pipeline.one_f_one_b(
        replace(scenario, machine=machine), unit_layers(scenario, [1.0], [2.0])
    )
    assert schedule.seconds == pytest.approx(1 + 5 + 1 + 2 + 5 + 2)


def test_ticks_by_hand():
    scenario = replace(piped(2, 2), tokens=2 * ROWS, context=2 * ROWS)
    step = documents([2 * ROWS], [ROWS, ROWS])  # 3 tiles and 2
    # Seconds of attention on the slower rank, plus linear work, of the ticks: 0F0, 0F1 1F0, 1B0,
    # 1F1, 0B0 1B1, 0B1.
    expected = [2 + 2, 3 + 2, 4 + 4, 1 + 2, 6 + 4, 2 + 4]
    assert seconds_of("distca-ticks", scenario, step) == pytest.approx(sum(expected))
    outcome = SYSTEM["distca-ticks"].ways[0](Step(scenario, step), 1)
    busy = outcome.schedule.busy(scenario)
    assert busy[LINEAR] == pytest.approx([2 * 3 * 2] * 2)
    assert busy[ATTENTION].sum() == pytest.approx(2 * (3 + 2) * (1 + 2)), "idle stages serve"
    again = replace(scenario, recompute=True)
    expected = [2 + 2, 3 + 2, 4 + 4 + 4, 1 + 2, 6 + 4 + 5, 2 + 4 + 3]
    assert seconds_of("distca-ticks", again, step) == pytest.approx(sum(expected))


def test_ticks_send_to_the_next_stage():
    scenario = piped(2, 1)
    machine = replace(UNIT_MACHINE, inside=Link(5.0, 1e30))
    equal = documents([2 * ROWS])
    sends = [
        seconds_of("distca-ticks", replace(scenario, machine=each, tolerance=9.0), equal)
        for each in (machine, UNIT_MACHINE)
    ]
    assert sends[0] - sends[1] == pytest.approx(3 * 5), "between four ticks"


def test_a_server_by_hand():
    """One rank has six tiles of attention. The server computes three of them."""
    scenario = replace(UNIT, ranks=1, servers=1, tokens=3 * ROWS, context=3 * ROWS)
    step = documents([3 * ROWS])
    assert seconds_of("distca-servers", scenario, step) == pytest.approx(3 * (1 + 2) + 3 + 6)
    assert seconds_of("distca", scenario, step) == pytest.approx(3 * (1 + 2) + 6 + 12)
    outcome = SYSTEM["distca-servers"].ways[0](Step(scenario, step), 1)
    assert outcome.schedule.busy(scenario)[ATTENTION] == pytest.approx([3 + 6])
    assert outcome.memory_bytes.shape == (1,)


def test_a_server_of_documents_that_cross_ranks():
    """Two ranks hold ten tiles. With a server, none computes more than four."""
    scenario = replace(UNIT, servers=1, context=4 * ROWS)
    step = documents([4 * ROWS])
    assert seconds_of("distca-servers", scenario, step) == pytest.approx(3 * 2 + 4 + 8)
    assert seconds_of("distca", scenario, step) >= 3 * 2 + 5 + 10


def test_gradients_meet_once_a_step_under_zero1():
    machine = replace(UNIT_MACHINE, inside=Link(0.0, TINY.params / 2))
    apart = replace(UNIT, sharding="zero1", machine=machine)
    # Half of 4 + 2 bytes per parameter come from the other rank, in 6 s. The backward pass of the
    # first rank to end it hides up to 4 + 4.
    assert seconds_of("fixed", apart, UNEVEN) == pytest.approx(6 + 9)
    slow = replace(apart, machine=replace(machine, inside=Link(0.0, TINY.params / 20)))
    assert seconds_of("fixed", slow, UNEVEN) == pytest.approx(6 + 9 + 60 - 8)


# Properties of all systems.


def random_step(scenario: Scenario, seed: int) -> Step:
    lengths = np.random.default_rng(seed).lognormal(6, 1.5, 300).astype(int) + 1
    (drawn,) = draw(lengths.tolist(), scenario, 1, seed)
    return Step(scenario, drawn)


REAL = Scenario(
    model=PRESETS["8B"].changed(2, 128), ranks=16, tokens=4096, context=4096, micro_batches=2
)


@pytest.mark.parametrize("name", [s.name for s in SYSTEMS if s.lacks(REAL) is None])
def test_equal_documents_and_single_ranks_take_as_long_as_fixed_packing(name):
    equal = documents(*[[4096]] * 8)
    wide = Scenario(model=PRESETS["8B"].changed(2, 128), ranks=8, tokens=4096, context=4096)
    alone = replace(wide, ranks=1)
    plain = seconds_of("fixed", alone, documents([4096]))
    assert seconds_of("fixed", wide, equal) == pytest.approx(seconds_of(name, wide, equal))
    assert seconds_of(name, alone, documents([4096])) == pytest.approx(plain)


@pytest.mark.parametrize("pp", [1, 2])
def test_work_and_tokens_are_conserved(pp):
    scenario = replace(REAL, pp=pp, sharding="zero1", tolerance=0.02)
    step = random_step(scenario, seed=3)
    results = run(scenario, [step])
    total = {
        result.system.name: result.outcome.schedule.busy(scenario).sum(axis=1)
        for result in results
        if result.cp == 1
    }
    assert len(total) == 7 + (pp > 1)
    expected = total["fixed"]
    for name, busy in total.items():
        assert busy[LINEAR] == pytest.approx(expected[LINEAR]), name
        # Cuts inside tiles cost some extra time.
        assert expected[ATTENTION] * 0.999 <= busy[ATTENTION] < 1.06 * expected[ATTENTION], name


@pytest.mark.parametrize("pp", [1, 2])
def test_busy_and_waiting_add_up_to_the_step(pp):
    scenario = replace(REAL, pp=pp, tp=2, sharding="fsdp" if pp == 1 else "zero1")
    for result in run(scenario, [random_step(scenario, seed=1)]):
        busy = result.outcome.schedule.busy(scenario)
        assert busy.sum(axis=0) == pytest.approx(np.full(16 // 2, result.mean)), result.system.name
        assert busy.min() > -1e-9, result.system.name


def test_a_sorting_loader_balances_work_but_not_tokens():
    """One long document and a short one, and eight short ones of like work but more tokens."""
    step = documents([4 * ROWS, ROWS], [ROWS] * 8)
    scenario = replace(UNIT, tokens=8 * ROWS, context=8 * ROWS)
    sorted_, distca = (
        SYSTEM[name].ways[0](Step(scenario, step), 1) for name in ("sorted", "sorted-distca")
    )
    busy = sorted_.schedule.busy(scenario)
    # Work of the long document: 10 tiles and 4 rows of linear work; of a short one: 1 and 1.
    assert sorted(busy[ATTENTION]) == pytest.approx([3 * 8, 3 * 11])
    assert sorted(busy[LINEAR]) == pytest.approx([3 * 5, 3 * 8])
    assert np.ptp(sorted_.memory_bytes) > 0
    balanced = distca.schedule.busy(scenario)
    assert balanced[ATTENTION] == pytest.approx(busy[ATTENTION]), "the rank of more tokens lags"
    assert balanced[LINEAR] == pytest.approx(busy[LINEAR])
    assert distca.schedule.seconds == pytest.approx(sorted_.schedule.seconds)


@pytest.mark.parametrize("level", ["inside", "between"])
def test_faster_links_are_never_slower(level):
    """The plan stays the same, because the planner may choose another one for another link."""
    step = random_step(REAL, seed=2)
    works = [step.work(pack, in_turn)[0] for pack in step.drawn(runs=1)]
    before = {}
    for factor in (1.0, 2.0, 8.0, 1e6):
        link = getattr(Machine, level)
        quick = Link(link.latency_s / factor, link.bytes_per_second * factor)
        machine = replace(REAL.machine, **{level: quick}, gpus_per_node=4)
        scenario = replace(REAL, machine=machine)
        now = {
            name: seconds_of(name, scenario, step.documents, cp=8)
            for name in ("fixed", "all-gather", "ring")
        }
        for attend in (in_turn, ping_pong):
            layers = [attend(scenario, work, idx)[0] for work in works for idx in (0, 1)]
            now[attend.__name__] = sum(layer[:, 0].sum() for layer in layers)
        for name, seconds in before.items():
            assert now[name] <= seconds * (1 + 1e-12), (name, factor)
        before = now


def test_links_between_nodes_that_are_too_slow_for_balance():
    """The balancer alone, with the true bytes of rows, would move next to nothing."""
    lengths = distribution("lognormal:3000:1.6", 0)
    machine = Machine(between=Link(50e-6, 12.5e9))
    model = PRESETS["8B"].changed(2, 128)
    scenario = Scenario(model=model, machine=machine, ranks=64, context=131072, recompute=True)
    (step,) = draw(lengths, scenario, 1, 0)
    ours, fixed_packing = (seconds_of(name, scenario, step, 2) for name in ("distca", "fixed"))
    assert ours < 0.75 * fixed_packing


def test_ideal_balance_is_a_lower_bound():
    """The bound holds for systems that keep tokens on their ranks."""
    step = random_step(REAL, seed=4)
    limit = seconds_of("limit", REAL, step.documents)
    for name in ("fixed", "distca", "distca-ping-pong"):
        assert seconds_of(name, REAL, step.documents) >= limit * (1 - 1e-9)


def test_the_planner_is_told_of_ping_pong(monkeypatch):
    """There are two micro-batches, and distca.plan passes the same hidden part."""
    step, hidden_parts = random_step(REAL, seed=2), []

    def told(scenario, pack, cluster, cost):
        hidden_parts.append(cluster.hidden_part)
        return plan(scenario, pack, cluster, cost)

    monkeypatch.setattr(systems, "plan", told)
    for name in ("distca", "distca-ping-pong"):
        seconds_of(name, REAL, step.documents)
    expected = [
        hidden_by_halves(pack.as_tensor(), REAL.groups, (-1, 0), 0.0)["hidden_part"]
        for pack in Step(REAL, step.documents).drawn(runs=1)
    ]
    # Under ping-pong, each micro-batch has a plan for whole blocks, too.
    assert hidden_parts == [0, 0, 0, expected[0], 0, expected[1]]
    assert all(0 < each <= 1 for each in expected)


def test_planning_shows_where_it_is_longer_than_a_step(monkeypatch):
    step = random_step(REAL, seed=2)
    hidden, exposed = 1e-6, 1e6
    expected = seconds_of("limit", REAL, step.documents)
    for planning in (hidden, exposed):
        monkeypatch.setattr(systems, "plan", lambda *a, s=planning: (*plan(*a)[:-1], s))
        seconds = seconds_of("distca", REAL, step.documents)
        assert seconds == 2 * planning if planning == exposed else seconds < 2 * expected


def test_memory_by_hand():
    outcome = fixed(Step(UNIT, UNEVEN), 1)
    params = 7 * 128 * 128
    state = 16 * (params + 2 * 128) / 2 + 8 * params
    assert outcome.memory_bytes.tolist() == pytest.approx([state + 256 * TINY.activation_bytes] * 2)
    stage = replace(piped(2, 4), tokens=ROWS, context=ROWS)
    outcome = fixed(Step(stage, documents(*[[ROWS]] * 4)), 1)
    kept = ROWS * TINY.activation_bytes
    assert np.ptp(outcome.memory_bytes) == pytest.approx(kept)  # stages have two and one in flight


def test_recomputation_repeats_the_forward_pass():
    repeated = replace(UNIT, recompute=True)
    assert seconds_of("fixed", repeated, UNEVEN) == pytest.approx((6 + 9) + (2 + 3))
    assert repeated.token_bytes() == 2 * 128
    held = fixed(Step(repeated, UNEVEN), 1).memory_bytes - repeated.state_bytes()
    assert held.tolist() == [256 * (2 * 128 + TINY.activation_bytes)] * 2


def test_tensor_parallel_ranks_share_heads_and_matrices():
    scenario = replace(REAL, ranks=8, micro_batches=1)
    halved = replace(scenario, ranks=16, tp=2)
    step = random_step(scenario, seed=5).documents
    whole, half = (fixed(Step(each, step), 1).schedule.busy(each) for each in (scenario, halved))
    assert half[ATTENTION] == pytest.approx(whole[ATTENTION] / 2)
    assert halved.linear_seconds(7)[0] == pytest.approx(scenario.linear_seconds(7)[0] / 2)
    # Each pass of a layer has two all-reduces of 4096 tokens x 4096 x 2 bytes, half from the other
    # rank.
    one = 2 * (2 * 4096 * 4096 * 2 / 2 / Machine.inside.bytes_per_second)
    expected = 2 * 2 * (one + 2 * Machine.inside.latency_s)
    assert half[KINDS.index("tensor_parallel")] == pytest.approx(np.full(8, expected))


def test_a_fit_reproduces_the_measured_step():
    drawn = [random_step(REAL, seed).documents for seed in range(3)]
    scenario = fitted(REAL, drawn, step_seconds=0.5)
    (result,) = run(scenario, [Step(scenario, each) for each in drawn], ["fixed"])
    assert result.mean == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(ValueError, match="fit_step_ms is 1e-06"):
        fitted(REAL, drawn, step_seconds=1e-9)


# Steps of benchmarks/training_step.py on two H200, with four layers of 8B's width. Synthetic
# documents replace those of two lists, and make ranks as unequal as in the measurement: (length of
# short documents, length / 1024 of the long document that one rank has in each of nine steps).
PRETRAIN = (4096, [55, 8, 6, 24, 6, 25, 9, 34, 6])
PROLONG = (7168, [19, 14, 11, 24, 44, 11, 19, 10, 16])
MEASURED = [  # GB/s of a link, ms by system
    (PRETRAIN, 330, {"fixed": 798, "distca": 757, "limit": 739}),
    (PRETRAIN, 22, {"fixed": 819, "distca": 791, "distca-ping-pong": 794, "limit": 761}),
    (PRETRAIN, 7.5, {"fixed": 917, "distca": 1012, "distca-ping-pong": 953, "limit": 850}),
    (PROLONG, 22, {"fixed": 832, "limit": 795}),
    (PROLONG, 22, {"distca": 818, "distca-ping-pong": 817}),  # with kept inputs
]


def filled(filler: int, *lengths: int, tokens: int = 65536) -> list[int]:
    """Return documents of `tokens` tokens."""
    count, rest = divmod(tokens - sum(lengths), filler)
    return [*lengths, *[filler] * count, *[rest] * (rest > 0)]


@pytest.mark.parametrize("case", range(len(MEASURED)))
def test_predictions_of_measured_steps(case, monkeypatch):
    """The plans of the measured steps assumed 200 GB/s over any link. Their rows travelled in one
    part, and ping-pong always ran on equal halves."""
    monkeypatch.setattr(halves, "FIRST_PART", 0.5)
    monkeypatch.setattr(systems, "pay", lambda *_: True)
    (filler, longest), gb_per_s, measured_ms = MEASURED[case]
    scenario = Scenario(
        model=PRESETS["8B"].changed(4, 8192),
        machine=Machine(inside=Link(50e-6, 1e9 * gb_per_s)),
        ranks=2,
        keep_inputs_gb=10.0 if "fixed" not in measured_ms else 0.0,
    )
    told = replace(scenario, machine=Machine(inside=Link(0.0, 200e9)))
    monkeypatch.setattr(systems, "cluster_of", lambda *_: replace(cluster_of(told), num_parts=1))
    drawn = [documents(filled(filler, 1024 * each), filled(filler)) for each in longest]
    for name, expected_ms in measured_ms.items():
        seconds = np.mean([seconds_of(name, scenario, each) for each in drawn])
        assert 1e3 * seconds == pytest.approx(expected_ms, rel=0.04), name


# Steps on four H200 with NVLink, from docs/performance.md and docs/servers.md. As above, synthetic
# documents make ranks as unequal as in the measurement. Each case is (tokens of a rank, layers,
# length of short documents, lengths / 1024 of the long document of each rank in each of nine steps,
# ms by system). In the case "server", three ranks train.
FOUR = {
    "pretrain": (
        *(65536, 4, 4096),
        "7 25 6 8, 2 25 2 8, 6 35 7 8, 13 18 64 11, 2 8 9 11, 2 5 11 64, 9 11 7 16, 7 10 14 6, "
        "7 30 8 2",
        {"fixed": 905.7, "all-gather": 762.0, "distca": 747.5, "limit": 737.0},
    ),
    "longer": (
        *(65536, 4, 3072),
        "23 5 45 61, 10 13 2 18, 8 11 5 15, 12 13 19 16, 18 16 17 15, 9 15 5 10, 18 6 15 27, "
        "10 16 17 14, 20 2 16 16",
        {"fixed": 785.9, "all-gather": 749.9, "distca": 731.2, "limit": 720.1},
    ),
    "pretrain, 128K": (
        *(131072, 3, 3072),
        "23 76 12 17, 10 68 17 25, 15 17 32 13, 18 37 19 37, 82 43 21 16, 17 12 20 13, "
        "32 33 62 22, 12 14 16 14, 13 15 20 14",
        {"fixed": 1367, "distca": 1152, "limit": 1124},
    ),
    "longer, 128K": (
        *(131072, 3, 4096),
        "14 31 22 20, 13 2 17 39, 16 19 16 19, 18 10 14 36, 23 5 12 8, 26 21 10 2, 2 12 6 5, "
        "23 42 22 7, 9 32 12 14",
        {"fixed": 1135, "distca": 1081, "limit": 1057},
    ),
    "server": (
        *(65536, 4, 3072),
        "8 10 11, 10 26 10, 11 8 26, 8 11 10, 35 10 11, 15 19 64, 13 6 11, 12 13 6, 9 13 64",
        {"distca": 767.2, "distca-servers": 734.3},
    ),
}


@pytest.mark.parametrize("case", FOUR)
def test_predictions_of_measured_steps_on_four_gpus(case):
    """Nothing is fitted. Speeds of attention and links are from a calibration of these GPUs."""
    tokens, layers, filler, longest, measured_ms = FOUR[case]
    calibration = Calibration.load(Path(__file__).parent / "calibration_of_4_h200.json")
    drawn = [
        documents(*[filled(filler, 1024 * int(each), tokens=tokens) for each in step.split()])
        for step in longest.split(",")
    ]
    scenario = Scenario(
        model=PRESETS["8B"].changed(layers, 8192),
        machine=Machine(calibration=calibration, inside=calibration.links.inside),
        ranks=3 if case == "server" else 4,
        servers=1 if case == "server" else 0,
        tokens=tokens,
    )
    for name, expected_ms in measured_ms.items():
        cp = 4 if name == "all-gather" else 1
        seconds = np.mean([seconds_of(name, scenario, each, cp) for each in drawn])
        assert 1e3 * seconds == pytest.approx(expected_ms, rel=0.03), name


def test_predictions_of_measured_steps_of_equal_documents():
    """The steps on four ranks are those of docs/performance.md."""
    scenario = Scenario(model=PRESETS["8B"].changed(4, 8192), ranks=4)
    for name, expected_ms in (("fixed", 736), ("distca", 737), ("limit", 735)):
        predicted = seconds_of(name, scenario, documents(*[[8192] * 8] * 4))
        assert 1e3 * predicted == pytest.approx(expected_ms, rel=0.02)


def test_the_best_degree_is_no_slower_than_a_fixed_one():
    scenario = replace(REAL, micro_batches=1, tokens=32768, context=32768)
    step = random_step(scenario, seed=6)
    names = ["variable", "all-gather"]
    free = run(scenario, [step], names)
    degrees = {r.system.name: {cp for cp in r.system.degrees(scenario)} for r in free}
    assert degrees == {"variable": {1, 2, 4, 8, 16}, "all-gather": {2, 4, 8, 16}}
    pinned = replace(scenario, cp=4)
    for result, best in zip(run(pinned, [step], names), free, strict=True):
        assert result.cp == 4 and result.mean >= best.mean


def test_a_faster_degree_that_does_not_fit_is_not_chosen():
    """Gathered keys take more memory if more ranks share a pack."""
    machine = replace(REAL.machine, inside=INSTANT, between=INSTANT)
    scenario = replace(REAL, micro_batches=1, tokens=32768, context=32768, machine=machine)
    step = random_step(scenario, seed=6)
    system = SYSTEM["all-gather"]
    two, four = (run_system(system, system.ways[1], scenario, [step], cp) for cp in (2, 4))
    assert two.mean > four.mean and two.memory_max < four.memory_max
    memory_gb = (two.memory_max + 1) / 1e9 / Machine.usable_memory
    tight = replace(scenario, machine=replace(machine, memory_gb=memory_gb))
    (chosen,) = run(tight, [Step(tight, step.documents)], ["all-gather"])
    assert chosen.cp == 2 and chosen.fits


def test_servers_keep_what_memory_allows():
    """Each of the 4 layers gets the same part of the memory that tokens and weights leave."""
    scenario = Scenario(model=PRESETS["8B"].changed(4, 8192), ranks=4, context=65536)
    in_use = scenario.state_bytes() + scenario.tokens * scenario.token_bytes()
    for memory_gb in (141.0, 1.0):
        changed = replace(scenario, machine=replace(scenario.machine, memory_gb=memory_gb))
        free = changed.machine.usable_bytes - in_use
        assert changed.kept_cap_bytes == int(max(0.0, free) / 4)
        assert replace(changed, keep_inputs_gb=2.0).kept_cap_bytes == 2_000_000_000
    slow = replace(scenario, machine=Machine(inside=Link(0.0, 20e9)))
    drawn = documents([60_000, *[1024] * 5], *[[8192] * 8] * 3)
    kept, sent_again = (
        seconds_of("distca", replace(slow, keep_inputs_gb=each), drawn) for each in (None, 0.0)
    )
    assert kept < 0.99 * sent_again


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ranks": 6, "tp": 4}, "ranks is 6"),
        ({"ranks": 0}, "ranks is 0"),
        ({"context": 300}, "context is 300"),
        ({"ranks": 2, "context": 8 * ROWS}, "lies on 4 groups"),
        ({"cp": 3}, "cp is 3"),
        ({"sharding": "none"}, "sharding is 'none'"),
        ({"keep_inputs_gb": -1}, "keep_inputs_gb is -1"),
        ({"pp": 2}, "pp is 2"),
        ({"servers": -1}, "servers is -1"),
        ({"ranks": 4, "tp": 2, "servers": 1}, "servers is 1; expected a multiple of tp = 2"),
    ],
)
def test_bad_scenarios(change, message):
    with pytest.raises(ValueError, match=message):
        replace(UNIT, **change)


def test_models_from_files(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({k: v for k, v in vars(TINY).items() if k != "name"}))
    assert ModelShape.load(path) == replace(TINY, name="model")
    path.write_text('{"layers": 2}')
    with pytest.raises(ValueError, match="expected a JSON object of name, layers"):
        ModelShape.load(path)


def test_attention_shapes_have_the_heads_of_one_rank():
    assert PRESETS["8B"].attention(8) == AttentionShape(4, 1, 128, 2)
    assert PRESETS["34B"].attention(16) == AttentionShape(4, 1, 128, 2)
    with pytest.raises(ValueError, match="tp is 3"):
        PRESETS["8B"].attention(3)
