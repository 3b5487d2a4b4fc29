"""distca.join: ranks with unequal numbers of batches train like one process with all batches."""

import pytest
import torch
import torch.distributed as dist
import uneven_training as uneven
from parallel_training import torch_attention

import distca

NUM_BATCHES = [7, 5, 0]
TOLERANCE = 1e-9  # of float64 over seven steps


@pytest.fixture(scope="module")
def truth():
    return uneven.train_alone(NUM_BATCHES, torch_attention)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
@pytest.mark.parametrize("ahead", [False, True])
def test_uneven_ranks_train_as_one_process(ranks, truth, wrapper, ahead):
    for result in ranks(3).run(uneven.train, NUM_BATCHES, wrapper, ahead, timeout_s=60):
        assert len(result[0]) == uneven.NUM_STEPS
        assert uneven.worst_error(result, truth) < TOLERANCE


def test_the_comparison_notices_a_missing_batch(truth):
    shorter = uneven.train_alone([7, 4, 0], torch_attention)
    assert uneven.worst_error(shorter, truth) > 100 * TOLERANCE


def count(rank: int, world_size: int, num_batches: list[int]) -> list[list[str]]:
    """Return the batches of two joins. The loop over the second ends early."""
    seen = [list(distca.join(map(str, range(num_batches[rank])), lambda: "empty"))]
    seen.append([])
    for batch in distca.join(map(str, range(num_batches[rank])), lambda: "empty"):
        seen[1].append(batch)
        if len(seen[1]) == 2:
            break
    return seen


@pytest.mark.parametrize("num_batches", [[0, 0, 0], [2, 2, 2], [0, 1, 3]])
def test_every_rank_sees_equally_many_batches(ranks, num_batches):
    most = max(num_batches)
    for own, seen in zip(num_batches, ranks(3).run(count, num_batches), strict=True):
        expected = [*map(str, range(own)), *["empty"] * (most - own)]
        assert seen == [expected, expected[:2]]


def join_beside_a_plan(rank: int, world_size: int) -> str:
    try:
        if rank == 1:
            distca.plan(distca.Documents([0, 5]))
        next(distca.join([1], lambda: 0))
    except ValueError as error:
        return str(error)
    finally:
        distca.close()  # because only rank 1 has counted a plan
    return ""


def test_an_empty_batch_in_place_of_its_function_is_refused_at_once():
    with pytest.raises(ValueError, match="empty is 1; expected a function"):
        distca.join([1, 2], 1)


def test_ranks_that_do_not_join_raise_an_error(ranks):
    for error in ranks(3).run(join_beside_a_plan, timeout_s=20):
        assert "ranks disagree on what comes next" in error
        assert "join on rank(s) 0 2; plan on rank(s) 1" in error


def test_one_process_needs_no_group(tmp_path):
    if not dist.is_initialized():
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        batches = distca.join(iter([torch.zeros(2), torch.ones(1)]), lambda: None)
        assert [batch.numel() for batch in batches] == [2, 1]
    finally:
        distca.close()
        dist.destroy_process_group()
