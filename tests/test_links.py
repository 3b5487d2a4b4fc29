"""Links: measured when a group opens, equal on all ranks, and used by its plans."""

import functools
import logging
import os
import time
from math import inf
from unittest import mock

import calibrations
import pytest
import torch
from ranks import Outcome, Ranks
from small_step import SHARDED, small_step

import distca
from distca import ops
from distca.planning.cluster import cluster_of
from distca.planning.exchange import SHAPE_WORDS
from distca.ranks import links, session
from distca.ranks.links import Link, Links, directions_of_ranks, measure, peers_of_ranks
from distca.ranks.peers import Way

CPU = torch.device("cpu")
HANG_S = 30
STUCK_S = 3


@pytest.mark.parametrize(
    "num_ranks, per_node, inside, between",
    [
        (2, 2, [[1], [0]], [[], []]),
        (2, 1, [[], []], [[1], [0]]),
        (3, 5, [[1, 2], [2, 0], [0, 1]], [[], [], []]),
        (4, 2, [[1], [0], [3], [2]], [[2], [3], [0], [1]]),
        (3, 2, [[1], [0], []], [[2], [], [0]]),
    ],
)
def test_ranks_send_to_their_node_or_to_others(num_ranks, per_node, inside, between):
    assert peers_of_ranks(num_ranks, per_node) == {"inside": inside, "between": between}


def test_ranks_receive_as_much_as_they_send():
    for peers in peers_of_ranks(128, 8).values():
        received = [sum(rank in each for each in peers) for rank in range(128)]
        assert received == [len(each) for each in peers]
    assert len(peers[0]) == links.MAX_PEER_NODES


@pytest.mark.parametrize(
    "num_ranks, per_node, inside, between",
    [
        (2, 2, [[[1], []], [[], [0]]], [[[], []], [[], []]]),
        (4, 2, [[[1], [], [3], []], [[], [0], [], [2]]], [[[2], [3], [], []], [[], [], [0], [1]]]),
        (3, 5, [[[1], [], []], [[], [2], []]], [[[], [], []], [[], [], []]]),
        (3, 2, [[[1], [], []], [[], [0], []]], [[[2], [], []], [[], [], [0]]]),
    ],
)
def test_directions(num_ranks, per_node, inside, between):
    assert directions_of_ranks(num_ranks, per_node) == {"inside": inside, "between": between}


@pytest.mark.parametrize("num_ranks, per_node", [(128, 8), (72, 8), (13, 1), (12, 5)])
def test_ranks_send_or_receive(num_ranks, per_node):
    takes_part = {"inside": set(), "between": set()}
    for level, directions in directions_of_ranks(num_ranks, per_node).items():
        for peers in directions:
            sent = [len(each) for each in peers if each]
            received = [sum(rank in each for each in peers) for rank in range(num_ranks)]
            for rank, its_peers in enumerate(peers):
                assert not (its_peers and received[rank])
                assert len(set(its_peers)) == len(its_peers) <= links.MAX_PEER_NODES
                for peer in its_peers:
                    assert received[peer] == len(its_peers), "all receive as much as one sends"
                    assert (rank // per_node == peer // per_node) == (level == "inside")
            assert sum(sent) == sum(received)
            takes_part[level] |= {
                rank for rank in range(num_ranks) if peers[rank] or received[rank]
            }
    assert takes_part["between"] == set(range(num_ranks))


def measured(rank: int, world_size: int, **options) -> Links:
    distca.close()
    opened = distca.init(options=distca.Options(**options))
    try:
        return measure(opened, CPU)
    finally:
        distca.close()


def by_level(rank: int, world_size: int, per_node: int | None, told: dict) -> Links:
    return measured(rank, world_size, ranks_per_node=per_node, **told)


@pytest.mark.parametrize(
    "world_size, per_node, told, levels",
    [
        (2, None, {}, {"inside"}),
        (2, 1, {}, {"between"}),
        (3, 2, {}, {"inside", "between"}),
        (3, 2, {"link_gb_per_s": 3.0}, {"between"}),
        (3, 2, {"node_link_gb_per_s": 3.0}, {"inside"}),
    ],
)
def test_links_are_measured_by_level(ranks, world_size, per_node, told, levels):
    first, *others = ranks(world_size).run(by_level, per_node, told)
    assert others == [first] * (world_size - 1), "all ranks get the figures of the slowest"
    assert {level for level, link in vars(first).items() if link is not None} == levels
    for level in levels:
        link = getattr(first, level)
        assert 1e6 < link.bytes_per_second < 1e12 and 0 < link.latency_s < 1


def slow_rank(rank: int, world_size: int) -> Links:
    """Make every exchange of rank 1 a tenth of a second longer, by its own clock."""
    clock = links.seconds_of
    with mock.patch.object(
        links, "seconds_of", lambda call, device: clock(call, device) + 0.1 * (rank == 1)
    ):
        return measured(rank, world_size)


def test_the_slowest_rank_counts(ranks):
    first, second = ranks(2).run(slow_rank)
    assert first == second and 0.1 <= first.inside.latency_s < 1
    assert first.inside.bytes_per_second < links.PROBE_BYTES / 0.1


def as_on_devices():
    """Let groups on the CPU measure links as groups on devices do."""
    return mock.patch.object(session, "measures_links", lambda session: session.options.enabled)


def open_and_plan(rank: int, world_size: int) -> tuple:
    """Return what a group measures when it opens, the report of its first plan, the log, and what
    the measurement leaves behind."""
    distca.close()
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("distca")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with as_on_devices():
        opened = distca.init(options=distca.Options(ranks_per_node=2))
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    left = (
        torch.ops.distca.attention_shape(opened.group_name),
        torch.ops.distca.agreed_calls(opened.group_name, 0, 0, 0).numel(),
        opened.num_plans,
    )
    step = small_step(rank, world_size, SHARDED)
    report = distca.plan(step.documents).report()
    step.attend().sum().backward()
    distca.close()
    return opened.links, report, records, left


def test_plans_use_the_links_of_the_opening(ranks):
    outcomes = ranks(3).run(open_and_plan)
    measured_links = outcomes[0][0]
    for opened_links, report, _, left in outcomes:
        assert opened_links == measured_links
        assert 1e9 * report.link_gb_per_s == pytest.approx(opened_links.inside.bytes_per_second)
        between = opened_links.between.bytes_per_second
        assert 1e9 * report.node_link_gb_per_s == pytest.approx(between)
        assert left == ([0] * SHAPE_WORDS, 0, 0)
    logged = [line for line in outcomes[0][2] if "links" in line]
    assert logged == [
        f"distca: links {level} nodes: {link}" for level, link in vars(measured_links).items()
    ]
    assert not any("links" in line for _, _, lines, _ in outcomes[1:] for line in lines)


def open_halves(rank: int, world_size: int) -> tuple:
    """Return the groups of ping-pong's halves, those over which rows went when they opened, and
    what that leaves behind."""
    distca.close()
    went = []

    def noted(call, *arguments):
        went.append(arguments[-1])
        return call(*arguments)

    with as_on_devices():
        opened = distca.init(options=distca.Options(ranks_per_node=2))
        with mock.patch.object(links.ops, "exchange", functools.partial(noted, ops.exchange)):
            halves = [half.group_name for half in session.halves_of(opened)]
    left = [torch.ops.distca.attention_shape(name) for name in halves]
    distca.close()
    return halves, went, left


def test_groups_of_halves_are_connected_when_they_open(ranks):
    for halves, went, left in ranks(3).run(open_halves):
        assert sorted(went) == sorted(2 * halves), "inside nodes, and between them"
        assert left == [[0] * SHAPE_WORDS] * 2


def open_on_the_cpu(rank: int, world_size: int) -> tuple:
    distca.close()
    opened = distca.init()
    report = distca.plan(small_step(rank, world_size).documents).report()
    distca.close()
    return opened.links, report.link_gb_per_s, report.node_link_gb_per_s


def test_cpu_groups_plan_with_fixed_links(ranks):
    """Plans on a CPU must not vary with its load."""
    assert ranks(3).run(open_on_the_cpu) == [(Links(), 2.0, None)] * 3


@pytest.mark.parametrize(
    "options, is_measured",
    [({}, True), ({"deterministic": True}, False), ({"enabled": False}, False)],
)
def test_groups_on_devices_measure_links(options, is_measured):
    opened = session.Session(distca.Options(**options), None, 0, 2, way=Way(0))
    assert session.measures_links(opened) == is_measured


OPENED = Links(inside=Link(1e-5, 3e11), between=Link(1e-5, 4e10))


@pytest.mark.parametrize(
    "options, opened_links, inside, between",
    [
        ({}, None, 200e9, 50e9),
        ({}, OPENED, 3e11, 4e10),
        ({"link_gb_per_s": 7.0}, OPENED, 7e9, 4e10),
        ({"node_link_gb_per_s": 7.0}, OPENED, 3e11, 7e9),
        ({}, Links(between=Link(0, 4e10)), 4e10, 4e10),
    ],
)
def test_told_links_replace_measured_ones(options, opened_links, inside, between):
    cluster = cluster_of(distca.Options(**options), 4, "cuda", 2, opened_links)
    assert cluster.links().tolist() == [2, inside, between, 0, 1, 0, 0, 0, inf, inf, 0, 0]


def test_a_cost_table_replaces_measured_links(tmp_path):
    table_links = {"inside": {"latency_s": 0, "bytes_per_second": 9e9}, "between": None}
    path = calibrations.write(tmp_path / "table.json", lambda rows, keys: 1.0, links=table_links)
    cluster = cluster_of(distca.Options(cost_table=path), 4, "cuda", 2, OPENED)
    assert cluster.links().tolist() == [2, 9e9, 4e10, 0, 1, 0, 0, 0, inf, inf, 0, 0]


@pytest.fixture
def broken_ranks():
    """Return a group of three ranks that the test breaks."""
    started = Ranks(3)
    yield started
    started.stop()


def fail_on_one_rank(rank: int, world_size: int, fault: str) -> str:
    """Open a group while rank 1 fails. Return the error. If the fault is an exception, train
    afterwards."""
    seconds, calls = links.seconds_of, []

    def failing(call, device):
        calls.append(call)
        if rank == 1 and len(calls) == 2:
            if fault == "dies":
                os._exit(9)
            if fault == "raises":
                raise MemoryError("no memory for rows")
            time.sleep(3 * STUCK_S)
        return seconds(call, device)

    with as_on_devices(), mock.patch.object(links, "seconds_of", failing):
        try:
            timeout_s = STUCK_S if fault == "stops" else HANG_S
            distca.init(options=distca.Options(timeout_s=timeout_s))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    assert session.find() is None
    if fault == "raises":
        step = small_step(rank, world_size, SHARDED)
        distca.plan(step.documents)
        step.attend().sum().backward()
    return message


CAUSES = {
    "raises": "rank 1 failed: MemoryError: no memory",
    "dies": "rank 1 is dead",
    "stops": "rank 1 has not answered",
}


@pytest.mark.parametrize("fault", CAUSES)
def test_a_rank_that_fails_in_the_measurement_is_named(broken_ranks, fault):
    start = time.monotonic()
    stopped = [1] if fault == "stops" else []
    outcomes: list[Outcome] = broken_ranks.outcomes(
        fail_on_one_rank, fault, timeout_s=HANG_S, stopped=stopped
    )
    assert time.monotonic() - start < HANG_S / 2
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None, outcome
        assert "DistBackendError: distca: " in outcome.result and CAUSES[fault] in outcome.result
    if fault == "raises":
        assert outcomes[1].result == "MemoryError: no memory for rows"
