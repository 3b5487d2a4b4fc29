"""benchmarks/planner.py: its counts, bounds, baseline planners and command line."""

import csv
import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import planner  # noqa: E402
from planner_optimum import CLUSTERS, Problem, max_tiles_out, optimum  # noqa: E402
from planner_reference import (  # noqa: E402
    BASELINES,
    Bounds,
    Pack,
    Prices,
    check_cover,
    draw_pack,
    least_bytes_within,
    least_roots,
    loads_of,
    triangle,
)

import distca  # noqa: E402
from distca.planning.cluster import Cluster  # noqa: E402

TILE, QUERY_BYTES, KEY_BYTES = 128, 9, 4  # 2 * sqrt(9 * 4) = 12 bytes per root of pairs
PRICES = Prices(torch.empty(0), TILE, 1.0, QUERY_BYTES, KEY_BYTES)
TOLERANCE = 0.02


def pack_of(*lengths_by_rank: list[int]) -> Pack:
    home = [rank for rank, lengths in enumerate(lengths_by_rank) for _ in lengths]
    lengths = list(itertools.chain(*lengths_by_rank))
    return Pack(len(lengths_by_rank), np.array(lengths), np.array(home))


def cut_in_a_loop(lengths: list[int], num_ranks: int, tokens: int, seed: int) -> list[list[int]]:
    shuffled = list(lengths)
    random.Random(seed).shuffle(shuffled)
    stream = itertools.cycle(shuffled)
    packs, rest = [], 0
    for _ in range(num_ranks):
        packs.append([])
        while sum(packs[-1]) < tokens:
            length = rest or next(stream)
            packs[-1].append(min(length, tokens - sum(packs[-1])))
            rest = length - packs[-1][-1]
    return packs


@pytest.mark.parametrize("seed", range(4))
def test_packs_are_those_cut_one_by_one(seed):
    generator = random.Random(seed)
    lengths = [generator.randint(1, 300) for _ in range(17)] + [2500]
    pack = draw_pack(lengths, 9, 1000, seed)
    expected = pack_of(*cut_in_a_loop(lengths, 9, 1000, seed))
    assert pack.lengths.tolist() == expected.lengths.tolist()
    assert pack.home.tolist() == expected.home.tolist()
    assert not np.array_equal(pack.lengths, draw_pack(lengths, 9, 1000, seed + 1).lengths)


def test_tiles_against_counting():
    tile = 4
    prices = Prices(torch.empty(0), tile, 1.0, QUERY_BYTES, KEY_BYTES)
    for begin, end in itertools.combinations(range(20), 2):
        last_queries = (min(first + tile, end) for first in range(begin, end, tile))
        expected = sum(len(range(0, last, tile)) for last in last_queries)
        assert prices.tiles(np.array([begin]), np.array([end])).tolist() == [expected]


def test_keys_travel_once_to_a_server_and_queries_once_a_task():
    pack = pack_of([1024], [256])
    tasks = np.array([(0, 0, 256, 1), (0, 256, 512, 0), (0, 512, 640, 1), (0, 640, 1024, 0)])
    tasks = np.concatenate([tasks, [(1, 0, 256, 1)]])
    check_cover(pack, tasks)
    loads = loads_of(pack, tasks, PRICES)
    num_bytes = (256 + 128) * QUERY_BYTES + 640 * KEY_BYTES
    assert loads.bytes_out.tolist() == [num_bytes, 0]
    assert loads.bytes_in.tolist() == [0, num_bytes]
    # Query tiles of 1 to 8 key tiles; the second document is 1 + 2.
    assert loads.seconds.tolist() == [3 + 4 + 6 + 7 + 8, 1 + 2 + 5 + 1 + 2]


def test_least_roots_fill_the_largest_first():
    capacities = np.array([4.0, 0.0, 9.0, 1.0])
    amounts = np.array([0.0, 4.0, 9.0, 13.0, 13.25, 14.0])
    assert least_roots(amounts, capacities).tolist() == pytest.approx([0, 2, 3, 5, 5.5, 6])


def test_bounds_by_hand():
    seconds = np.array([9.0, 0.0, 4.0, 3.0])  # mean 4: a surplus of 5 for deficits of 4 and 1
    root = 12 * TILE  # bytes for the pairs of one tile
    bounds = Bounds.of(seconds, PRICES)
    assert bounds.total == pytest.approx((2 + 1) * root)
    assert bounds.egress.tolist() == pytest.approx([(2 + 1) * root, 0, 0, 0])
    assert bounds.ingress.tolist() == pytest.approx([0, 2 * root, 0, root])
    # With a limit of 5, the rank with 5 tiles of room takes the 4 tiles above the limit.
    assert least_bytes_within(5.0, seconds, PRICES) == pytest.approx(2 * root)
    assert least_bytes_within(9.0, seconds, PRICES) == 0


def test_no_task_moves_less_than_the_bound():
    for num_rows, num_keys in itertools.product((128, 256, 1024), (1024, 2048, 8192)):
        tiles = PRICES.tiles(np.array(num_keys - num_rows), np.array(num_keys))
        least = PRICES.bytes_of_pair * (tiles * TILE**2) ** 0.5
        assert num_rows * QUERY_BYTES + num_keys * KEY_BYTES >= least


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("seed", range(3))
def test_baselines_cover_every_token(name, seed):
    generator = random.Random(seed)
    lengths = [int(generator.lognormvariate(6.5, 1.5)) + 1 for _ in range(300)]
    pack = draw_pack(lengths, 16, 16384, seed)
    tasks = BASELINES[name](pack, PRICES, TOLERANCE)
    check_cover(pack, tasks)
    home, loads = (loads_of(pack, each, PRICES) for each in (pack.home_tasks(), tasks))
    assert loads.seconds.sum() == home.seconds.sum(), "whole tiles: cutting costs nothing"
    largest = PRICES.tiles(np.zeros_like(pack.lengths), pack.lengths).max()
    assert loads.seconds.max() <= min(home.seconds.max(), loads.seconds.mean() + largest)
    if name == "greedy":
        assert loads.seconds.max() <= (1 + TOLERANCE) * loads.seconds.mean()
        assert loads.bytes_out.sum() >= least_bytes_within(
            loads.seconds.max(), home.seconds, PRICES
        )


def test_baselines_by_hand():
    pack = pack_of([4 * TILE], [TILE] * 4)
    assert triangle(4) == 10
    # The mean is 7 tiles. The document's last query tile has 4 key tiles; with it the other rank
    # has 8, which is within the tolerance.
    moved = BASELINES["greedy"](pack, PRICES, 0.2)
    assert (0, 3 * TILE, 4 * TILE, 1) in map(tuple, moved.tolist())
    assert loads_of(pack, moved, PRICES).seconds.tolist() == [6, 8]
    assert (0, 0, 4 * TILE, 0) in map(tuple, BASELINES["greedy"](pack, PRICES, 0.1).tolist())
    placed = BASELINES["longest first"](pack_of([300, 200, 100], [10]), PRICES, 0.0)
    assert placed[:, 3].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "tasks",
    [
        [(0, 0, 5, 0)],
        [(0, 0, 5, 0), (1, 0, 6, 1)],
        [(0, 0, 5, 0), (1, 0, 8, 1)],
        [(0, 0, 5, 0), (1, 1, 7, 1)],
        [(0, 0, 5, 0), (1, 0, 4, 1), (1, 3, 7, 0)],
        [(0, 0, 5, 0), (1, 0, 3, 1), (1, 4, 7, 0)],
        [(0, 0, 5, 0), (1, 0, 7, 2)],
        [(0, 0, 5, 0), (0, 0, 5, 1), (1, 0, 7, 1)],
        [(0, 0, 5, 0), (1, 0, 7, 1), (2, 0, 1, 1)],
    ],
)
def test_incomplete_or_repeated_tasks_are_noticed(tasks):
    pack = pack_of([5], [7])
    check_cover(pack, np.array([(1, 3, 7, 0), (0, 0, 5, 0), (1, 0, 3, 1)]))
    with pytest.raises(RuntimeError, match="once"):
        check_cover(pack, np.array(tasks))


def test_a_report_that_differs_from_the_tasks_is_noticed():
    pack = pack_of([1024], [256, 256])
    home = loads_of(pack, pack.home_tasks(), PRICES)
    moved = loads_of(pack, BASELINES["longest first"](pack, PRICES, 0.0), PRICES)
    columns = [home.seconds, moved.seconds, moved.bytes_out, moved.bytes_in]
    columns += [moved.node_bytes_out, moved.node_bytes_in, moved.bytes_in, moved.seconds_visiting]
    reported = torch.from_numpy(np.stack(columns, axis=1).astype(np.float64))
    planner.check_report(reported, home, moved, np.ones(2))
    for column, name in enumerate(
        ("seconds_home", "seconds", "bytes_out", "bytes_in", "node_bytes_out", "node_bytes_in")
    ):
        wrong = reported.clone()
        wrong[1, column] += 1
        with pytest.raises(RuntimeError, match=f"{name} of rank 1"):
            planner.check_report(wrong, home, moved, np.ones(2))


@pytest.fixture
def lengths_file(tmp_path) -> Path:
    path = tmp_path / "short.json"
    path.write_text(json.dumps([3000, 40, 0, 900, 170, 2100, 600]))
    return path


def test_one_case_as_json(lengths_file, tmp_path, capsys):
    out = tmp_path / "folder" / "case.json"
    case = ["--ranks", "4", "--tokens", "4096", "--seeds", "3", "--json", str(out)]
    planner.main(["--lengths", str(lengths_file), *case])
    record = json.loads(out.read_text())
    assert (record["lengths"], record["ranks"], record["tokens"]) == ("short", 4, 4096)
    assert record["seeds"] == 3
    assert 1 <= record["max_over_mean"] <= record["home_max_over_mean"]
    assert 0 < record["layout_ms"] < record["plan_ms"] < 1000
    for name in ("bytes_over_bound", "egress_over_bound", "ingress_over_bound"):
        assert 0.5 < record[name] < 10
    assert set(record["baselines"]) == set(BASELINES)
    assert "longest first" in capsys.readouterr().out


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_plan_beats_the_optimum(name):
    for seed, num_ranks in itertools.product(range(4), (8, 24)):
        generator = random.Random(seed)
        lengths = [int(generator.lognormvariate(7, 1.5)) + 1 for _ in range(300)]
        pack = draw_pack(lengths, num_ranks, 32768, seed)
        figures = planner.Benchmark(distca.Options()).figures_by_planner(pack, name)
        assert 1 - 1e-9 <= figures["distca"].makespan_over_optimum < 1.3


def test_optimum_by_hand():
    """One rank holds all work. 4 servers share it, unless links are slow or only two serve."""
    pack = pack_of([64 * TILE], [], [], [])
    home = loads_of(pack, pack.home_tasks(), PRICES).seconds
    work = home.sum()
    assert work == 64 * 65 / 2
    fast = Cluster(4, link_bytes_per_second=1e15)
    assert optimum(pack, home, fast, PRICES) == pytest.approx(work / 4)
    halves = Cluster(4, speeds=(0.5, 0, 0, 0.5), link_bytes_per_second=1e15)
    assert optimum(pack, home, halves, PRICES) == pytest.approx(work)
    # Links are so slow that the work that leaves is bounded by its bytes.
    slow = Cluster(4, link_bytes_per_second=100.0)
    seconds = optimum(pack, home, slow, PRICES)
    tiles_out = max_tiles_out(Problem.of(pack, slow, PRICES), seconds * 100, seconds)[0]
    assert work - seconds == pytest.approx(tiles_out, rel=1e-3)
    assert seconds > work / 4
    apart = Cluster(
        4, ranks_per_node=1, link_bytes_per_second=1e15, node_link_bytes_per_second=100.0
    )
    assert optimum(pack, home, apart, PRICES) == pytest.approx(seconds)


@pytest.mark.parametrize("largest", (60.0, 300.0, 1e9))
def test_no_visits_give_more_than_is_possible(largest):
    """Cut a document of 64 tiles downward into slices, each as large as a server can take."""
    problem = Problem.of(pack_of([64 * TILE]), Cluster(1), PRICES)
    closest = 0.0
    for top in range(1, 65):
        end, work, num_bytes = top, 0.0, 0.0
        while end > 0:
            num_rows = np.arange(1, end + 1)
            tiles = num_rows * (end - num_rows / 2 + 0.5)
            num_rows = int((tiles <= largest).sum())
            if num_rows == 0:
                break
            work += tiles[num_rows - 1]
            num_bytes += (QUERY_BYTES * num_rows + KEY_BYTES * end) * TILE
            end -= num_rows
            most = max_tiles_out(problem, num_bytes, largest)[0]
            assert work <= most
            closest = max(closest, work / most)
    assert closest > 0.93


def test_grid_is_saved(lengths_file, tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "RANKS", (2, 4))
    monkeypatch.setattr(planner, "TOKENS", (1024, 2048))
    planner.main(["--lengths", str(lengths_file), "--seeds", "1", "--out", str(tmp_path / "grid")])
    with (tmp_path / "grid" / "planner.csv").open() as file:
        rows = list(csv.DictReader(file))
    cases = {(row["tokens"], row["ranks"], row["planner"]) for row in rows}
    assert len(rows) == len(cases) == 2 * 2 * (1 + len(BASELINES))
    assert all(float(row["max_over_mean"]) >= 1 for row in rows)
    assert (tmp_path / "grid" / "planner.png").stat().st_size > 10000


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ranks", "0"], "'0'; expected an integer from 1 to 65536"),
        (["--ranks", "many"], "'many'; expected an integer"),
        (["--cluster", "fast"], "invalid choice: 'fast'"),
        (["--tokens", "-5"], "'-5'; expected an integer"),
        (["--seeds", "0"], "'0'; expected an integer"),
        (["--tolerance", "-1"], "--tolerance is -1.0"),
        (["--json", "x.json"], "--json describes one case, and these are 20"),
        (["--lengths", "nowhere.json"], "--lengths nowhere.json: not a readable JSON file"),
    ],
)
def test_bad_arguments_are_named(lengths_file, capsys, flags, message):
    with pytest.raises(SystemExit):
        planner.main(["--lengths", str(lengths_file), *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", "{}", "3", "[]", "[0]", "[5, -1]", "[1.5]", '["a"]', "[true]"]
)
def test_bad_lists_are_named(tmp_path, capsys, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        planner.main(["--lengths", str(path)])
    assert f"--lengths {path}: " in capsys.readouterr().err
