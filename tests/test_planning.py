"""Documents, plans and their reports, from a few tokens to 64 ranks."""

import random
import time

import calibrations
import pytest
import torch

import distca
from distca.options import parse_speeds
from distca.pingpong import nearest_border
from distca.planning.cluster import Cluster, cluster_of, held_row_bytes
from distca.planning.cost import AttentionShape, cost_tensor
from distca.planning.solver import balance
from distca.planning.step import plan_halves
from distca.ranks.links import ranks_of_a_node

ops = torch.ops.distca
CAUSAL = (-1, 0)
TOKENS_PER_RANK = 65536
MAX_IMBALANCE = 1.05


def random_lengths(generator: random.Random) -> list[int]:
    return [generator.choice([0, 0, 1, 2, 7, 30, 111]) for _ in range(generator.randint(0, 12))]


def brute_force(lengths: list[int], rank: int, world_size: int):
    """(document, position) of each of the rank's tokens, counted one by one."""
    tokens = [(d, position) for d, length in enumerate(lengths) for position in range(length)]
    return tokens[len(tokens) * rank // world_size : len(tokens) * (rank + 1) // world_size]


def runs_of(tokens) -> list[tuple[int, int, int]]:
    """(document, start, length) of the runs of one document."""
    runs: list[list[int]] = []
    for document, position in tokens:
        if runs and runs[-1][0] == document:
            runs[-1][2] += 1
        else:
            runs.append([document, position, 1])
    return [tuple(run) for run in runs]


@pytest.mark.parametrize("world_size", range(1, 8))
def test_sharded_documents_against_counting(world_size):
    generator = random.Random(world_size)
    for _ in range(30):
        lengths = random_lengths(generator)
        held = 0
        for rank in range(world_size):
            tokens = brute_force(lengths, rank, world_size)
            runs = runs_of(tokens)
            documents = distca.Documents.sharded(lengths, rank, world_size)
            assert documents.num_tokens == len(tokens)
            assert documents.position_ids.tolist() == [position for _, position in tokens]
            assert documents.pieces(rank).tolist() == [[rank, *run, 0] for run in runs]
            ends = torch.tensor([0, *(length for *_, length in runs)]).cumsum(0)
            assert documents.cu_seqlens.tolist() == ends.tolist()
            held += documents.num_tokens
        assert held == sum(lengths)


def test_whole_documents_against_counting():
    generator = random.Random(0)
    for _ in range(30):
        lengths = random_lengths(generator)
        documents = distca.Documents([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)])
        assert documents.num_tokens == sum(lengths)
        positions = [position for length in lengths for position in range(length)]
        assert documents.position_ids.tolist() == positions
        assert documents.cu_seqlens.dtype == torch.int32
        assert documents.cu_seqlens.diff().tolist() == lengths
        assert documents.pieces(3)[:, 2:].tolist() == [[0, length, 0] for length in lengths]


def test_ids_of_whole_documents_differ_between_ranks():
    documents = distca.Documents([0, 4, 9, 9])
    ids = torch.cat([documents.pieces(rank)[:, 1] for rank in range(5)])
    assert ids.unique().numel() == ids.numel()


def plans_of(rank: int, world_size: int, lengths_by_case: dict, options: dict) -> dict:
    """Report, layout and rows of each case, planned twice in a group of its own options."""
    distca.close()
    distca.init(options=distca.Options(**options))
    try:
        found = {}
        for name, lengths in lengths_by_case.items():
            offsets = torch.tensor([0, *lengths[rank]]).cumsum(0)
            first, second = (distca.plan(distca.Documents(offsets)) for _ in range(2))
            # Plans name their step; the rest of two layouts of the same pieces is the same.
            differing = (first.layout != second.layout).sum().item()
            found[name] = (first.report(), differing, torch.equal(first.rows, second.rows))
        return found
    finally:
        distca.close()


PLANNED = {
    "skewed": [[4096], [1024] * 4, [256] * 16, [64] * 64],
    "balanced": [[1024, 512]] * 4,
    "empty_rank": [[3000], [], [200, 1], []],
    "nothing": [[], [], [], []],
}


def planned(world_size: int) -> dict:
    return {name: lengths[:world_size] for name, lengths in PLANNED.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_plan_reports(ranks, world_size):
    results = ranks(world_size).run(plans_of, planned(world_size), {})
    for name in PLANNED:
        reports = [result[name][0] for result in results]
        for report in reports:
            assert report.seconds_before == reports[0].seconds_before
            assert report.seconds_after == reports[0].seconds_after
            assert report.bytes_out == reports[0].bytes_out
            assert sum(report.bytes_out) == sum(report.bytes_in)
            assert len(report.seconds_after) == world_size
            assert report.imbalance_after <= report.imbalance_before
            assert 0 < report.plan_ms < 2000 and 0 <= report.waited_ms < 2000
    skewed, empty = results[0]["skewed"][0], results[0]["empty_rank"][0]
    assert skewed.imbalance_before > 1.5 and skewed.imbalance_after <= 1.1
    assert empty.imbalance_before > 1.5 and empty.imbalance_after <= 1.2
    assert sum(skewed.bytes_out) > 0


@pytest.mark.parametrize(
    "options, names",
    [
        ({}, ["balanced", "nothing"]),
        ({"enabled": False}, list(PLANNED)),
        ({"tolerance": 0.99}, ["balanced"]),
    ],
)
def test_nothing_moves(ranks, options, names):
    for result in ranks(4).run(plans_of, planned(4), options):
        for name in names:
            report = result[name][0]
            assert sum(report.bytes_out) == sum(report.bytes_in) == 0
            assert report.seconds_after == report.seconds_before


def test_equal_pieces_give_equal_layouts(ranks):
    for result in ranks(4).run(plans_of, planned(4), {}):
        for _, num_differing_words, same_rows in result.values():
            assert same_rows
            assert num_differing_words <= 2, "only the step and the batch of the plan may differ"


def pieces_of(lengths_by_rank: list[list[int]]) -> torch.Tensor:
    return torch.cat(
        [
            distca.Documents(torch.tensor([0, *lengths]).cumsum(0)).pieces(rank)
            for rank, lengths in enumerate(lengths_by_rank)
        ]
    )


def heavy_tailed(num_ranks: int, seed: int) -> list[list[int]]:
    """Packs of TOKENS_PER_RANK tokens: log-normal document lengths, the last one cut to fit."""
    generator = random.Random(seed)
    packs = []
    for _ in range(num_ranks):
        pack, left = [], TOKENS_PER_RANK
        while left > 0:
            length = min(left, max(1, int(generator.lognormvariate(7.0, 1.6))))
            pack.append(length)
            left -= length
        packs.append(pack)
    return packs


def solve(
    pieces: torch.Tensor,
    num_ranks: int,
    options: distca.Options,
    device: str = "cuda",
    shape: AttentionShape = AttentionShape(),  # noqa: B008  frozen
):
    """(plan, loads) as distca.plan makes them, for a model of the default shape."""
    cluster = cluster_of(options, num_ranks, device)
    return ops.plan(
        pieces,
        num_ranks,
        *CAUSAL,
        cost_tensor(options, shape, device),
        shape.row_bytes(),
        cluster.servers(),
        cluster.links(),
        options.tolerance,
        held_bytes=held_row_bytes(shape),
    )


def max_over_mean(seconds: torch.Tensor) -> float:
    return (seconds.max() / seconds.mean()).item()


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("seed", [0, 1])
def test_heavy_tailed_packs_are_balanced(num_ranks, seed):
    pieces = pieces_of(heavy_tailed(num_ranks, seed))
    _, loads = solve(pieces, num_ranks, distca.Options())
    before, after, bytes_out, bytes_in = loads.unbind(1)[:4]
    assert max_over_mean(before) > 1.2, "the packs must need balancing"
    assert max_over_mean(after) <= MAX_IMBALANCE
    assert bytes_out.sum() == bytes_in.sum() > 0


def test_one_document_over_all_ranks_is_balanced():
    num_ranks = 16
    lengths = [num_ranks * TOKENS_PER_RANK]
    pieces = torch.cat(
        [distca.Documents.sharded(lengths, r, num_ranks).pieces(r) for r in range(num_ranks)]
    )
    _, loads = solve(pieces, num_ranks, distca.Options())
    assert max_over_mean(loads[:, 0]) > 1.5
    assert max_over_mean(loads[:, 1]) <= MAX_IMBALANCE


@pytest.mark.parametrize("speeds", ["1,0.5", "0*3,1", "2,1,0,1"])
def test_servers_work_as_their_speeds_say(speeds):
    num_ranks = 16
    pieces = pieces_of(heavy_tailed(num_ranks, 0))
    options = distca.Options(server_speeds=speeds)
    _, loads = solve(pieces, num_ranks, options)
    speed = torch.tensor(cluster_of(options, num_ranks, "cuda").speeds, dtype=torch.float64)
    _, alike = solve(pieces, num_ranks, distca.Options())
    fair = alike[:, 1].sum() / speed.sum()
    assert loads[speed == 0, 1].sum() == 0
    assert loads[:, 1].max() <= 1.03 * fair
    assert (loads[:, 1] * speed).sum() == pytest.approx(alike[:, 1].sum().item())


def test_nodes_keep_most_of_their_work():
    num_ranks = 16
    pieces = pieces_of(heavy_tailed(num_ranks, 0))
    one_node = distca.Options(ranks_per_node=num_ranks)
    two_nodes = distca.Options(ranks_per_node=8, node_link_gb_per_s=50)
    _, loads = solve(pieces, num_ranks, one_node)
    assert loads[:, 4:6].sum() == 0
    _, loads = solve(pieces, num_ranks, two_nodes)
    assert 0 < loads[:, 4].sum() == loads[:, 5].sum() < loads[:, 2].sum()
    assert max_over_mean(loads[:, 1]) <= MAX_IMBALANCE


def test_memory_caps_are_kept_or_named():
    num_ranks = 8
    pieces = pieces_of(heavy_tailed(num_ranks, 1))
    _, free = solve(pieces, num_ranks, distca.Options())
    cap = free[:, 6].max().item() / 2
    _, loads = solve(pieces, num_ranks, distca.Options(memory_cap_gb=1e-9 * cap))
    assert 0 < loads[:, 6].max() <= cap
    assert max_over_mean(loads[:, 1]) < max_over_mean(loads[:, 0])
    tight = distca.Options(memory_cap_gb=1e-6, server_speeds="0*7,1")
    with pytest.raises(ValueError, match="rank 0, which serves nothing.*server 7.*may hold 1000"):
        solve(pieces, num_ranks, tight)


def test_one_plan_serves_all_tensor_parallel_ranks():
    """Each has a part of the heads, which scales seconds and bytes alike."""
    pieces = pieces_of(heavy_tailed(16, 1))
    plans = [
        solve(pieces, 16, distca.Options(), shape=AttentionShape(32 // parts, 8 // parts))
        for parts in (1, 2, 8)
    ]
    for plan, loads in plans[1:]:
        assert torch.equal(plan, plans[0][0])
        ratio = plans[0][1][0, 1] / loads[0, 1]
        torch.testing.assert_close(loads * ratio, plans[0][1])


@pytest.mark.parametrize(
    "text, speeds", [("1", (1,)), ("1,0.5", (1, 0.5)), ("0*3,1.5*2", (0, 0, 0, 1.5, 1.5))]
)
def test_speeds_are_read(text, speeds):
    assert parse_speeds(text) == speeds


@pytest.mark.parametrize("text", ["", "fast", "-1", "0", "0*8", "1*0", "1*x", "inf", "nan", "1,"])
def test_bad_speeds_are_named(text):
    with pytest.raises(ValueError, match="server_speeds is"):
        distca.Options(server_speeds=text)


@pytest.mark.parametrize(
    "nodes, size", [([5], 1), ([5, 5, 5], 3), ([5, 5, 7, 7], 2), ([5, 5, 5, 7, 7], 1), ([5, 7], 1)]
)
def test_ranks_of_a_node(nodes, size):
    assert ranks_of_a_node(nodes) == size


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"speeds": (1.0,)}, r"servers: expected \[2, 3\] .*, got \[1, 3\]"),
        ({"speeds": (1.0, -1.0)}, r"servers\[1\].speed is -1;"),
        ({"speeds": (0.0, 0.0)}, "servers is without any speed above 0"),
        ({"memory_cap_bytes": -1}, r"servers\[0\].cap_bytes is -1;"),
        ({"ranks_per_node": 0}, r"links: expected \(ranks of a node, 1 to"),
        ({"rounds": 0}, "rounds is 0"),
        ({"kept_cap_bytes": -1}, "kept_cap_bytes is -1;"),
        ({"link_bytes_per_second": 0.0}, "links.bytes_per_second is 0;"),
        ({"node_link_bytes_per_second": -1.0}, "links.node_bytes_per_second is -1;"),
    ],
)
def test_bad_clusters_are_named(fields, message):
    cost, shape = cost_tensor(distca.Options(), AttentionShape(), "cpu"), AttentionShape()
    cluster = Cluster(**{"num_ranks": 2, **fields})
    with pytest.raises(ValueError, match=message):
        balance(pieces_of([[100], [300]]), CAUSAL, cost, shape, cluster, 0.1)


def heavy_tailed_report(rank: int, world_size: int) -> distca.PlanReport:
    offsets = torch.tensor([0, *heavy_tailed(world_size, seed=5)[rank]]).cumsum(0)
    # A second plan: the first one of a group also starts its thread.
    distca.plan(distca.Documents(offsets))
    return distca.plan(distca.Documents(offsets)).report()


@pytest.mark.parametrize("world_size", [2, 4])
def test_heavy_tailed_packs_in_a_group(ranks, world_size):
    for report in ranks(world_size).run(heavy_tailed_report):
        assert report.imbalance_after <= MAX_IMBALANCE < report.imbalance_before
        assert report.plan_ms < 1000


def bytes_without_and_with_halves(rank: int, world_size: int) -> list[int]:
    distca.close()
    distca.init(options=distca.Options(link_gb_per_s=0.01))
    lengths = [2048] * 4 if rank == 0 else [128] * 8
    offsets, causal = torch.tensor([0, *lengths]).cumsum(0), (-1, 0)
    moved = []
    for _ in range(2):
        documents = distca.Documents(offsets)
        moved.append(sum(distca.plan(documents).report().bytes_out))
        halves = plan_halves(documents, nearest_border, causal, torch.device("cpu"))
        for half in halves:
            half._plans[half.plan_key(causal)].wait()
    distca.close()
    return moved


def test_more_rows_travel_where_halves_hide_them(ranks):
    for whole, in_halves in ranks(2).run(bytes_without_and_with_halves):
        assert 0 < 1.05 * whole < in_halves


def test_equal_inputs_give_equal_plans_and_layouts():
    pieces = pieces_of(heavy_tailed(8, 3))
    (first, loads), (second, _) = (solve(pieces, 8, distca.Options()) for _ in range(2))
    assert torch.equal(first, second)
    for rank in range(8):
        layouts = [ops.layout(pieces, first, rank, 7, "cpu") for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*layouts, strict=True))
    other, _ = solve(pieces_of(heavy_tailed(8, 4)), 8, distca.Options())
    digests = first[3], other[3]
    assert digests[0] != digests[1], "other pieces must have another digest"


def test_cost_table_is_used(tmp_path):
    """Under a table where time is rows alone, packs of equal tokens are balanced already, but for
    the share of tiles that the causal mask leaves: 33 of 64 in the long document, 17 of 32."""
    pieces = pieces_of([[8192], [2048] * 4])
    by_rows = calibrations.write(tmp_path / "rows.json", lambda rows, keys: 1e-6 * rows)
    by_area = calibrations.write(tmp_path / "area.json", lambda rows, keys: 1e-9 * rows * keys)
    before_rows = solve(pieces, 2, distca.Options(cost_table=by_rows))[1][:, 0]
    before_area = solve(pieces, 2, distca.Options(cost_table=by_area))[1][:, 0]
    assert max_over_mean(before_rows) == pytest.approx(1.0, abs=0.03)
    assert max_over_mean(before_area) > 1.4
    # A table is of full rectangles; causal attention of a document is half of its square.
    assert before_rows[0].item() == pytest.approx(0.5 * 8192e-6, rel=0.05)


def test_many_short_documents_are_planned_at_once():
    """All of a step's work is on one rank. Planning time once grew with the cube of the documents
    that leave it."""
    lengths = [[1] * 20000, *([[]] * 7)]
    start = time.process_time()
    encoded, loads = solve(pieces_of(lengths), 8, distca.Options())
    ops.layout(pieces_of(lengths), encoded, 0, 0, "cpu")
    assert time.process_time() - start < 2
    assert loads[:, 1].max() < 0.2 * loads[:, 0].max()


def test_more_row_indices_than_fit_are_refused_for_all_ranks():
    pieces = torch.tensor([[rank, 0, rank * 2**25, 2**25, 0] for rank in range(64)])
    pieces[-1, 3] -= 1
    with pytest.raises(ValueError, match="plan: rank 0 holds 33554432 tokens, would send") as error:
        solve(pieces, 64, distca.Options())
    assert "row indices; expected at most 2147483647. Plan fewer tokens" in str(error.value)
