"""Opening and closing groups next to other uses of torch.distributed."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from oracle import Case
from programs import free_port
from small_step import SHARDED, small_step

import distca
from distca.integrations import boundaries


def train(rank: int, world_size: int, group=None) -> list[float]:
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents, group=group)
    out = step.attend()
    out.sum().backward()
    return [out.detach().sum().item(), step.q.grad.sum().item()]


def train_beside_a_group_of_one_rank(rank: int, world_size: int) -> list[float]:
    dist.new_group([0])
    return train(rank, world_size)


def test_other_groups_may_have_fewer_ranks(fresh_ranks):
    assert len(fresh_ranks.run(train_beside_a_group_of_one_rank, timeout_s=40)) == 3


def names_beside_other_backends(rank: int, world_size: int) -> list[str]:
    from torch.distributed import fsdp  # noqa: F401  registers a back end

    session = distca.init()
    return [group.name() for group in (session.data, session.planning, session.control)]


def test_groups_have_a_back_end_of_their_own_name(fresh_ranks):
    """Otherwise PyTorch warns on every rank when they are closed."""
    assert fresh_ranks.run(names_beside_other_backends) == [["gloo"] * 3] * 3


def plan_offsets_on_one_rank(rank: int, world_size: int) -> str:
    try:
        distca.plan([0, 8] if rank == 1 else distca.Documents([0, 8]))
    except (ValueError, dist.DistBackendError) as error:
        return str(error)
    return ""


def test_offsets_in_place_of_documents_on_one_rank_are_an_error_on_all(fresh_ranks):
    for message in fresh_ranks.run(plan_offsets_on_one_rank, timeout_s=40):
        assert "documents is a list, [0, 8]; expected distca.Documents" in message


def open_twice(rank: int, world_size: int) -> str:
    distca.init(options=distca.Options(tolerance=0.1))
    with pytest.raises(ValueError) as raised:
        distca.init(options=distca.Options(tolerance=0.2, rounds=2))
    return str(raised.value)


def open_with(rank: int, world_size: int, settings: dict) -> str:
    with pytest.raises(ValueError) as refused:
        distca.init(**settings)
    return str(refused.value)


@pytest.mark.parametrize("name, kind", [("options", "Options"), ("watching", "Watching")])
def test_settings_of_another_type_are_refused(ranks, name, kind):
    for message in ranks(2).run(open_with, {name: {"log_every": 1}}):
        assert message == f"{name} is {{'log_every': 1}}; expected a distca.{kind}, or None"


def open_with_a_file_for_a_folder(rank: int, world_size: int, file: str) -> None:
    distca.init(watching=distca.Watching(run_dir=f"{file}/run"))
    distca.plan(distca.Documents([0, 10])).report()


def test_a_folder_that_cannot_be_written_is_named_on_all_ranks(fresh_ranks, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for outcome in fresh_ranks.outcomes(open_with_a_file_for_a_folder, str(file)):
        expected = f"run_dir is '{file}/run'; expected a folder to write records to"
        assert outcome.error is not None and expected in outcome.error, outcome


def test_other_options_are_refused_by_their_difference(fresh_ranks):
    for message in fresh_ranks.run(open_twice):
        assert message == (
            "options have tolerance=0.2, rounds=2, but this group was opened with tolerance=0.1, "
            "rounds=1; call distca.close(group) first"
        )


PAIR = Case([[300, 11], [5]], dtype=torch.float32)


def train_in_a_subgroup(rank: int, world_size: int, uneven: bool) -> float:
    """Train in the group of ranks 0 and 1, and return what all ranks add up in a later group. If
    `uneven`, the ranks know different numbers of groups."""
    group = dist.new_group([0, 1])
    if uneven:
        dist.new_group([0])
    for _ in range(2 * (rank < 2)):
        step = small_step(rank, 2, PAIR)
        distca.plan(step.documents, group=group)
        step.attend().sum().backward()
        distca.close(group)
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group())
    return total.item()


@pytest.mark.parametrize("uneven", [False, True])
def test_a_subgroup_leaves_no_trace_in_other_groups(fresh_ranks, uneven):
    num_groups = fresh_ranks.run(count_groups)
    assert fresh_ranks.run(train_in_a_subgroup, uneven, timeout_s=40) == [3.0] * 3
    added = [2 + uneven, 2, 1]  # by this test
    assert fresh_ranks.run(count_groups) == [a + b for a, b in zip(num_groups, added, strict=True)]


def count_groups(rank: int, world_size: int) -> int:
    return len(dist.distributed_c10d._world.pg_names)


def plan_after_a_pass(rank: int, world_size: int, reopens: bool) -> int:
    """Return how many plans a session makes ahead after a forward pass, perhaps of another session
    of the same group."""
    offsets = torch.tensor([0, 10], dtype=torch.int32)
    keywords = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    read = boundaries.read_boundaries(keywords, 1, 10, "test")
    session = distca.init()
    read.of_pass(torch.nn.Identity(), session, (-1, 0), torch.device("cpu"))
    if reopens:
        distca.close()
        session = distca.init()
    before = session.num_plans
    boundaries.plan_ahead(distca.Documents([0, 10]))
    return session.num_plans - before


def test_a_new_session_forgets_the_passes_of_the_old_one(fresh_ranks):
    assert fresh_ranks.run(plan_after_a_pass, False) == [1, 1, 1]
    assert fresh_ranks.run(plan_after_a_pass, True) == [0, 0, 0]


def open_close_and_start_again(rank: int, world_size: int, port: int) -> bool:
    first = distca.init()
    before = train(rank, world_size)
    num_groups = len(dist.distributed_c10d._world.pg_names)
    distca.close()
    assert len(dist.distributed_c10d._world.pg_names) == num_groups - 3
    assert distca.init() is not first
    assert train(rank, world_size) == before
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=40),
    )
    assert distca.init().group is dist.group.WORLD
    return train(rank, world_size) == before


def test_a_group_can_be_closed_and_torch_distributed_started_again(fresh_ranks):
    assert all(fresh_ranks.run(open_close_and_start_again, free_port(), timeout_s=60))


def open_on_one_rank_with(rank: int, world_size: int, options: dict, servers: list) -> str:
    """Return the error of a group for which rank 1 has these settings, and then open the group."""
    settings = (distca.Options(**options), None, servers) if rank == 1 else ()
    with pytest.raises(ValueError) as refused:
        distca.init(None, *settings)
    distca.init()
    return str(refused.value)


@pytest.mark.parametrize(
    "options, servers, error",
    [
        ({"transport": "carrier pigeon" * 99}, [], "transport is 'carrier pigeon"),
        ({}, [3], "servers is (3,); expected ranks from 1 to 2"),
        ({}, [2], "servers differ between ranks"),
    ],
)
def test_ranks_hear_what_one_rank_cannot_open(fresh_ranks, options, servers, error):
    errors = fresh_ranks.run(open_on_one_rank_with, options, servers, timeout_s=40)
    assert all(error in each for each in errors), errors
    is_own = "differ" not in error
    assert not is_own or all("rank 1 cannot open the group" in errors[rank] for rank in (0, 2))


def demand_peer_memory(rank: int, world_size: int) -> tuple[str, list[float]]:
    try:
        distca.init(options=distca.Options(transport="peer"))
        error = ""
    except ValueError as raised:
        error = str(raised)
    return error, train(rank, world_size)


def test_peer_memory_is_refused_if_unavailable(fresh_ranks):
    """Every rank raises an error with the reason, and can open the group without peer memory."""
    for error, _ in fresh_ranks.run(demand_peer_memory, timeout_s=40):
        assert error.startswith('transport is "peer", but on rank 0 ')


def open_with_own_transport(rank: int, world_size: int) -> str:
    chosen = ("peer", "auto", "process_group")[rank]
    try:
        distca.init(options=distca.Options(transport=chosen))
    except ValueError as raised:
        return str(raised)
    return ""


def test_ranks_with_different_transports_raise_an_error(fresh_ranks):
    for error in fresh_ranks.run(open_with_own_transport, timeout_s=40):
        assert error.startswith('transport is "peer", but on rank ')
