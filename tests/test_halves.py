"""The part of the attention in each half of ping-pong, and the work that hides its transfers."""

import math
from dataclasses import replace

import pytest
import torch

import distca
from distca.planning.cluster import Cluster
from distca.planning.cost import AttentionShape, cost_tensor
from distca.planning.halves import (
    COST,
    FIRST_PART,
    FIRST_PART_OF_RUNS,
    attention_of_first_half,
    first_part_of,
    hidden_by_halves,
    pay,
    rows_of_first_half,
)
from distca.planning.solver import balance

# Rank, document, first row in the document, number of rows.
WHOLE = torch.tensor([[0, 0, 0, 7], [0, 1, 0, 5], [1, 2, 0, 12], [2, 3, 0, 1], [2, 4, 0, 2]])
CROSSING = torch.tensor([[0, 0, 0, 9], [0, 1, 0, 1], [1, 0, 9, 4], [1, 1, 1, 6]])
CAUSAL, WINDOW = (-1, 0), (3, 0)


def counted(pieces: torch.Tensor, num_ranks: int, left: int) -> float:
    """Return the first halves' part of all (query, key) pairs, counted row by row."""
    pairs = [0, 0]
    for rank in range(num_ranks):
        own = pieces[pieces[:, 0] == rank].tolist()
        num_first = int(sum(piece[3] for piece in own) * first_part_of(pieces))
        positions = [start + i for _, _, start, length in own for i in range(length)]
        for row, position in enumerate(positions):
            seen = position + 1 if left < 0 else min(position, left) + 1
            pairs[row >= num_first] += seen
    return pairs[0] / sum(pairs)


@pytest.mark.parametrize("window_size", [CAUSAL, WINDOW])
@pytest.mark.parametrize("pieces, num_ranks", [(WHOLE, 3), (CROSSING, 2)])
def test_the_part_of_attention_is_counted(pieces, num_ranks, window_size):
    expected = counted(pieces, num_ranks, window_size[0])
    assert attention_of_first_half(pieces, num_ranks, window_size) == pytest.approx(expected)


def test_runs_are_halves():
    assert (first_part_of(WHOLE), first_part_of(CROSSING)) == (FIRST_PART, FIRST_PART_OF_RUNS)


def test_rows_are_counted_in_order():
    assert rows_of_first_half(WHOLE, torch.tensor([8, 12, 0])).tolist() == [7, 1, 12, 0, 0]


def test_one_document_has_a_ninth_of_its_attention_in_the_first_third():
    pieces = torch.tensor([[0, 0, 0, 30000]])
    assert attention_of_first_half(pieces, 1, CAUSAL) == pytest.approx(1 / 9, rel=1e-3)
    hidden = hidden_by_halves(pieces, 1, CAUSAL, 2.0)
    # The second half's rows, 8/9 of all, travel beside 1/9 of the attention, and beside the work
    # after attention for a third of the tokens, which takes three times as long as work before it.
    assert hidden["hidden_part"] == pytest.approx(1 / 8, rel=1e-3)
    assert hidden["hidden_seconds"] == pytest.approx(9 / 8 * 2.0, rel=1e-3)


def test_many_short_documents_have_a_third():
    pieces = torch.tensor([[0, i, 0, 16] for i in range(3000)])
    hidden = hidden_by_halves(pieces, 1, CAUSAL, 2.0)
    assert hidden["hidden_part"] == pytest.approx(1 / 2, rel=1e-2)
    assert hidden["hidden_seconds"] == pytest.approx(3.0, rel=1e-2)


def test_the_half_that_hides_less_counts():
    # Nearly all attention is in the first third: its rows travel beside little attention.
    pieces = torch.tensor([[0, 0, 0, 1000]] + [[0, i, 0, 1] for i in range(1, 2001)])
    first = attention_of_first_half(pieces, 1, CAUSAL)
    hidden = hidden_by_halves(pieces, 1, CAUSAL, 3.0)
    assert first > 0.99
    assert hidden["hidden_part"] == pytest.approx((1 - first) / first)
    assert hidden["hidden_seconds"] == pytest.approx(2.0 / first)
    assert hidden["num_parts"] == 1


def test_steps_without_rows_hide_nothing():
    hidden = hidden_by_halves(torch.empty(0, 5, dtype=torch.int64), 2, CAUSAL, 0.0)
    one_part = {"num_parts": 1, "exposed_part": 1.0}
    assert hidden == {"hidden_part": 0.0, "hidden_seconds": 0.0, **one_part}


def choice(gb_per_s: float, seconds_before: float) -> bool:
    """Return whether halves pay if one rank holds a long document and one holds short ones."""
    lengths = [[65536], [4096] * 16]
    pieces = torch.tensor(
        [
            [rank, 100 * rank + i, 0, length, 0]
            for rank, own in enumerate(lengths)
            for i, length in enumerate(own)
        ]
    )
    shape = AttentionShape()
    cost = cost_tensor(distca.Options(attention_tflops=500.0), shape, "cuda")
    whole = Cluster(2, link_bytes_per_second=1e9 * gb_per_s)
    in_halves = replace(whole, **hidden_by_halves(pieces, 2, CAUSAL, seconds_before))
    loads, whole_loads = (
        balance(pieces, CAUSAL, cost, shape, each, 0.005)[1] for each in (in_halves, whole)
    )
    return pay(in_halves, loads, whole, whole_loads, seconds_before)


def test_halves_pay_where_links_are_slow():
    assert choice(10.0, 0.02) and choice(20.0, 0.02)
    assert not choice(300.0, 0.02), "nothing is exposed"
    assert not choice(0.01, 0.02), "nothing moves"


def test_halves_must_save_more_than_smaller_products_cost():
    """Under the same plan, halves save the transfers that are exposed in whole blocks."""
    loads = torch.zeros(2, 9, dtype=torch.float64)
    loads[:, 1] = 10e-3
    loads[0, 2] = loads[1, 3] = 20e6  # 20 ms at 1 GB/s, of which 10 ms are exposed
    whole = Cluster(2, link_bytes_per_second=1e9)
    in_halves = replace(whole, hidden_seconds=1.0)
    saved = 20e-3 * (0.37 + 0.63) - 10e-3
    for seconds_before, pays in ((0.9 * saved / COST / 4, True), (1.1 * saved / COST / 4, False)):
        assert pay(in_halves, loads, whole, loads, seconds_before) == pays
    assert not pay(whole, loads, whole, loads, math.ulp(1.0))
