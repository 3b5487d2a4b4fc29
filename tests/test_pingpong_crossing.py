"""Ping-pong over documents that cross ranks: equal to float64 attention over the whole pack."""

import random

import oracle
import pytest
import torch
from pingpong_blocks import Block, block_of, crossing_step_of, pair_of, rows_of_runs, step_of
from test_pingpong import errors

import distca
from distca.pingpong.pingpong import third

PACKS = {  # lengths of the documents of a pack
    "mixed": [310, 0, 1, 33, 57, 129],
    "one over all": [411],
    "border in the middle": [70, 50, 120],
    "long first half": [350, 9],
    "long second half": [7, 2, 341],
}
TINY = [[0], [1], [2], [3], [1, 1, 1], [5], [4, 3], [9, 1]]
WINDOWS = {
    "causal": [(-1, 0)],
    "window": [(37, 0)],
    "several": [(-1, 0), (9, 0), (0, 0), (-1, 0)],
}


class OracleBlock(Block):
    """A block whose attention is that of the oracle, on documents of these lengths."""

    def attend(self, q, k, v, window, documents):
        parts = zip(*(tensor.split(documents) for tensor in (q, k, v)), strict=True)
        return torch.cat([oracle.attention(*part, window)[0] for part in parts])


def error_of_step(
    rank: int, world_size: int, lengths: list[int], windows, moves_rows: bool | None = None
) -> float:
    """Return the largest error of out and of all gradients of a step in ping-pong. `moves_rows`:
    whether two halves must run."""
    truth = step_of(0, lengths).run(block_of(OracleBlock, windows), lengths)
    rows = rows_of_runs(rank, world_size, sum(lengths))
    step = crossing_step_of(rank, world_size, lengths)
    assert torch.equal(
        step.documents.position_ids, step_of(0, lengths).documents.position_ids[rows]
    )
    for window in dict.fromkeys(windows):
        distca.plan(step.documents, window_size=window)
    _, block = pair_of(windows=windows)
    out, grad_x, *grads = step.run(block, step.documents)
    num_cut = len({window for _, window in step.documents._halves})
    assert moves_rows is None or num_cut == moves_rows * len(set(windows))
    for grad in grads:
        torch.distributed.all_reduce(grad)
    return max(errors([out, grad_x, *grads], [truth[0][rows], truth[1][rows], *truth[2:]]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("pack", PACKS)
def test_equals_the_oracle(ranks, world_size, windows, pack):
    how = (PACKS[pack], WINDOWS[windows], world_size > 1)
    worst = ranks(world_size).run(error_of_step, *how)
    assert max(worst) <= 1e-12, worst


def errors_of_steps(rank: int, world_size: int, packs, windows, options: dict) -> list[float]:
    distca.close()
    distca.init(options=distca.Options(**options))
    worst = [error_of_step(rank, world_size, lengths, windows) for lengths in packs]
    distca.close()
    return worst


@pytest.mark.parametrize("world_size", [2, 4])
def test_fewer_tokens_than_runs(ranks, world_size):
    for options in ({}, {"keep_inputs_gb": 1.0}):
        how = (TINY, WINDOWS["several"], options)
        for worst in ranks(world_size).run(errors_of_steps, *how):
            assert max(worst) <= 1e-12, worst


@pytest.mark.parametrize("seed", range(8))
def test_random_packs(ranks, seed):
    generator = random.Random(seed)
    packs = [
        [generator.choice([0, 1, 2, 17, 90, 400]) for _ in range(generator.randint(1, 6))]
        for _ in range(4)
    ]
    windows = [(generator.choice([-1, -1, 0, 1, 5, 40, 150]), 0) for _ in range(2)]
    options = {"keep_inputs_gb": generator.choice([0.0, 1e-5, 1.0])}
    options |= generator.choice([{}, {"memory_cap_gb": 1e-3, "rounds": 3}])
    group = ranks(generator.randint(2, 4))
    for worst in group.run(errors_of_steps, packs, windows, options):
        assert max(worst) <= 1e-12, worst


def plan_ahead(rank: int, world_size: int) -> list:
    """Train three steps. From the second on, halves have plans before the forward pass."""
    distca.close()
    events = []
    for lengths in ([300, 40], [9, 9, 200], [411]):
        bare, block = pair_of()
        step = crossing_step_of(rank, world_size, lengths)
        distca.plan(step.documents, ahead=True)
        events.append(len(step.documents._halves))
        truth = step.run(bare, step.documents)
        events.append(max(errors(step.run(block, step.documents), truth)) <= 1e-12)
    single = distca.Documents.sharded([50, 31], rank, world_size)
    distca.plan(single, ahead=True).wait()
    events.append(len(single._halves))
    distca.close()
    return events


def test_later_steps_plan_their_halves_ahead(ranks):
    assert ranks(2).run(plan_ahead) == [[0, True, 1, True, 1, True, 0]] * 2


def refusals(rank: int, world_size: int) -> list[str]:
    """Return the errors of a cut elsewhere, of one on rank 1 alone, and of a full window."""
    messages = []
    cuts = [lambda documents: 3, lambda documents: third(documents) - rank, third]
    for cut, window in zip(cuts, [(-1, 0), (-1, 0), (-1, -1)], strict=True):
        _, block = pair_of(windows=[window], cut=cut)
        step = crossing_step_of(rank, world_size, [50, 31])
        distca.plan(step.documents, window_size=window)
        with pytest.raises((ValueError, RuntimeError)) as refused:
            step.run(block, step.documents)
        messages.append(str(refused.value))
        distca.close()
    return messages


def test_refusals(ranks):
    first, second = ranks(2).run(refusals, timeout_s=60)
    for message in (first[0], second[0]):
        assert "row is 3; expected 20, at which the second run begins" in message
    assert "row is 19; expected 20, at which" in second[1]
    assert "rank 1" in first[1] and "row is 19" in first[1]
    for message in (first[2], second[2]):
        assert "between two runs, and window_size (-1, -1) lets its first half see" in message
