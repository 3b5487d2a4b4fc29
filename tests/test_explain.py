"""distca.explain: packs, and a plan's bytes, seconds, bounds and tables."""

import json
import os
import random
import tempfile

import calibrations
import numpy as np
import programs
import pytest
import torch

import distca
from distca.explain import __main__ as cli
from distca.explain import account
from distca.explain.__main__ import main
from distca.explain.text import as_data, report
from distca.planning import task_rows
from distca.planning.cluster import Cluster
from distca.planning.cost import AttentionShape, cost_tensor
from distca.planning.packs import Pack, cut_pack, draw_pack, read_lengths

CAUSAL, FULL = (-1, 0), (-1, -1)
SHAPE = AttentionShape()
QUERY_BYTES, KEY_BYTES = SHAPE.row_bytes()
TILE_SECONDS = SHAPE.tile_flops(128) / 300e12
MAX_WIDTH = 99


def step_of(
    pack: Pack,
    window: tuple[int, int] = CAUSAL,
    tolerance: float = 0.02,
    links: tuple[float, float] = (200e9, 50e9),
) -> account.Step:
    cost = cost_tensor(distca.Options(), SHAPE, "cuda")
    inside, between = links
    cluster = Cluster(
        pack.num_ranks,
        ranks_per_node=4,
        link_bytes_per_second=inside,
        node_link_bytes_per_second=between,
    )
    return account.Step(pack, window, SHAPE, cost, cluster, tolerance)


def heavy_tailed(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [int(generator.lognormvariate(7.0, 1.6)) + 1 for _ in range(300)]


@pytest.mark.parametrize("seed", range(3))
def test_packs_are_cut_to_equal_runs(seed):
    lengths = heavy_tailed(seed)
    whole = draw_pack(lengths, 9, 8192, seed)
    crossing = draw_pack(lengths, 9, 8192, seed, crossing=True)
    for pack in (whole, crossing):
        tokens = np.bincount(pack.pieces[:, 0], pack.pieces[:, 3])
        assert tokens.tolist() == [8192] * 9
    assert (whole.pieces[:, 2] == 0).all() and len(whole.pieces) == whole.num_documents
    assert np.array_equal(whole.pieces[:, [0, 3]], crossing.pieces[:, [0, 3]])
    ordered = list(lengths)
    random.Random(seed).shuffle(ordered)
    num_whole = crossing.num_documents - 1  # the last one may be cut
    assert crossing.lengths[:num_whole].tolist() == ordered[:num_whole]


def test_crossing_packs_are_those_of_sharded_documents():
    for num_ranks, lengths in ((3, [3000, 2000]), (5, [3]), (4, [1, 1, 7, 2]), (2, [5])):
        pack = cut_pack(lengths, num_ranks, sum(lengths), crossing=True)
        pieces = [
            distca.Documents.sharded(lengths, r, num_ranks).pieces(r) for r in range(num_ranks)
        ]
        assert pack.pieces.tolist() == torch.cat(pieces)[:, :4].tolist()
        assert pack.lengths.tolist() == lengths


def test_lists_of_lengths_are_repeated_and_cut():
    pack = draw_pack([100, 50], 2, 200, seed=0)
    first = pack.pieces[pack.pieces[:, 0] == 0, 3].tolist()
    assert first in ([100, 50, 50], [50, 100, 50])


@pytest.mark.parametrize("window", [CAUSAL, FULL, (3, 0), (2, 1), (0, 0), (0, 4)])
def test_keys_against_counting(window):
    left, right = window
    length = 11
    for begin in range(length):
        for end in range(begin + 1, length + 1):
            seen = [
                key
                for key in range(length)
                if any(
                    (left < 0 or key >= query - left) and (right < 0 or key <= query + right)
                    for query in range(begin, end)
                )
            ]
            bounds = task_rows.keys_of(window, *map(np.array, (begin, end, length)))
            assert tuple(map(int, bounds)) == (seen[0], seen[-1] + 1)


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize("window", [CAUSAL, FULL, (700, 0), (100, 300)])
@pytest.mark.parametrize("seed", range(3))
def test_tasks_add_up_to_the_planners_report(crossing, window, seed):
    pack = draw_pack(heavy_tailed(seed), 13, 8192, seed, crossing)
    fast = (1e13, 1e13)  # so that rows travel with windows, too
    plan = account.explain(step_of(pack, window, links=fast))
    tasks, transfers = plan.tasks, plan.transfers
    assert plan.is_moved.any()
    by_server = np.bincount(tasks.server, tasks.seconds, 13)
    assert by_server == pytest.approx(plan.seconds_after, rel=1e-9)
    server = tasks.server[transfers.task]
    assert np.bincount(server, transfers.num_bytes, 13).tolist() == plan.bytes_in.tolist()
    assert np.bincount(transfers.home, transfers.num_bytes, 13).tolist() == plan.bytes_out.tolist()
    assert sum(plan.links()[2]) == tasks.num_bytes.sum() == plan.bytes_in.sum()


def test_keys_travel_once_to_a_server():
    pack = cut_pack([1024, 1024, 256], 3, 3 * 768)  # ranks hold 768 | 256, 512 | 512, 256
    assert pack.pieces[:, [0, 3]].tolist() == [[0, 768], [1, 256], [1, 512], [2, 512], [2, 256]]
    home = [(1, 0, 256, 1), (2, 0, 512, 1), (3, 0, 512, 2), (4, 0, 256, 2)]
    moved = [(0, 128, 256, 1), (0, 512, 640, 1), (0, 640, 768, 2)]
    words = torch.tensor([(0, 0, 128, 0), (0, 256, 512, 0), moved[0], moved[1], *home, moved[2]])
    tasks, transfers = account.account_for(step_of(pack), words)
    expected = np.zeros(9, dtype=np.int64)
    expected[2] = 128 * QUERY_BYTES + 256 * KEY_BYTES
    expected[3] = 128 * QUERY_BYTES + (640 - 256) * KEY_BYTES
    expected[8] = 128 * QUERY_BYTES + 768 * KEY_BYTES
    assert tasks.num_bytes.tolist() == expected.tolist()
    assert tasks.home[:4].tolist() == [0] * 4 and transfers.home.tolist() == [0] * 3
    tiles = np.array([1, 3 + 4, 2, 5, 1 + 2, 10, 10, 3, 6])
    assert tasks.seconds == pytest.approx(tiles * TILE_SECONDS)


def test_rows_of_several_homes():
    """Count bytes by home of a document of 600 tokens on three ranks.

    Queries of the last rank go to rank 0, which holds a third of the keys. Rank 1 computes other
    queries of theirs, together with some of its own.
    """
    pack = cut_pack([600], 3, 600, crossing=True)
    words = torch.tensor([(0, 0, 150, 0), (0, 500, 600, 0), (0, 150, 500, 1)])
    tasks, transfers = account.account_for(step_of(pack), words)
    bytes_by_home = {
        (task, home): num_bytes
        for task, home, num_bytes in zip(
            transfers.task.tolist(),
            transfers.home.tolist(),
            transfers.num_bytes.tolist(),
            strict=True,
        )
    }
    assert bytes_by_home == {
        (1, 1): 200 * KEY_BYTES,
        (1, 2): 100 * QUERY_BYTES + 200 * KEY_BYTES,
        (2, 0): 50 * QUERY_BYTES + 200 * KEY_BYTES,
        (2, 2): 100 * QUERY_BYTES + 100 * KEY_BYTES,
    }
    assert tasks.home.tolist() == [0, 2, 1] and tasks.num_homes.tolist() == [1, 1, 3]


def test_bounds_by_hand():
    pack = cut_pack([1280, *[128] * 10], 2, 2560)  # 55 tiles and 10: 22.5 have to move
    plan = account.explain(step_of(pack))
    assert plan.mean_seconds == pytest.approx(32.5 * TILE_SECONDS)
    pairs = 22.5 * 128 * 128
    assert plan.least_bytes == pytest.approx(2 * (QUERY_BYTES * KEY_BYTES * pairs) ** 0.5)
    assert plan.excess(plan.seconds_before) == pytest.approx(np.array([22.5, -22.5]) * TILE_SECONDS)
    moved = plan.is_moved
    pairs = plan.tasks.seconds[moved].sum() / TILE_SECONDS * 128 * 128
    ratio = plan.bytes_in.sum() / (2 * (QUERY_BYTES * KEY_BYTES * pairs) ** 0.5)
    assert plan.bytes_over_least[moved] == pytest.approx(ratio)


def test_the_price_of_a_pair_is_that_of_the_tables_largest_task(tmp_path):
    path = calibrations.write(tmp_path / "table.json", lambda rows, keys: 3e-9 * rows * keys)
    cost = cost_tensor(distca.Options(cost_table=path), SHAPE, "cuda")
    assert account.seconds_per_pair(cost) == pytest.approx(3e-9)
    constant = cost_tensor(distca.Options(), SHAPE, "cuda")
    assert account.seconds_per_pair(constant) == pytest.approx(TILE_SECONDS / 128**2)


def test_links_between_nodes_are_slower():
    plan = account.explain(step_of(draw_pack(heavy_tailed(0), 8, 8192, 0)))
    ranks = np.array([0, 0, 5]), np.array([3, 4, 7])
    assert plan.bandwidth(*ranks).tolist() == [200e9, 50e9, 200e9]


@pytest.mark.parametrize("rank, all_lines", [(None, False), (None, True), (3, False), (3, True)])
def test_tables_fit_the_screen(rank, all_lines):
    plan = account.explain(step_of(draw_pack(heavy_tailed(1), 64, 131072, 1, crossing=True)))
    lines = report(plan, rank, all_lines).splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    first_task = lines[lines.index(next(x for x in lines if x.startswith("Tasks"))) + 2].split()
    if rank is None:
        assert float(first_task[5]) == pytest.approx(
            1e3 * plan.tasks.seconds[plan.is_moved].max(), rel=1e-3
        )
    assert len(lines) < 70 or all_lines
    assert len(lines) > 1000 or not all_lines or rank is not None


def test_a_plan_on_the_screen_and_as_data(tmp_path, capsys):
    out = tmp_path / "folder" / "plan.json"
    fast = ["--link-gb-per-s", "1e4"]  # for these few tokens, transfers would not pay
    main(["--lengths", "1280" + ",128" * 10, "--ranks", "2", *fast, "--json", str(out)])
    printed = capsys.readouterr().out
    data = json.loads(out.read_text())
    moved = [task for task in data["tasks"] if task["bytes"] > 0]
    assert moved and all(task["server"] == 1 and task["home"] == 0 for task in moved)
    assert data["documents"] == [1280] + [128] * 10
    assert data["max_over_mean_before"] == pytest.approx(55 / 32.5)
    assert data["max_over_mean_after"] < 1.2
    assert data["bytes"] == sum(task["bytes"] for task in moved) == sum(data["bytes_out"])
    assert data["links"] == [{"home": 0, "server": 1, "bytes": data["bytes"]}]
    for task in moved:
        assert task["bytes_by_home"] == {"0": task["bytes"]}
        first, last = task["rows"]
        assert f"{first}-{last}" in printed
    for text in ("x 1.692 before", "busiest sender: rank 0", "busiest receiver: rank 1"):
        assert text in printed


@pytest.mark.parametrize(
    "flags, why",
    [
        (["--lengths", "512,512"], "tolerance is 0.5%"),
        (["--lengths", "1024,100", "--no-enabled"], "balancing is disabled"),
    ],
)
def test_the_reason_why_nothing_moves_is_printed(capsys, flags, why):
    main(["--ranks", "2", *flags])
    printed = capsys.readouterr().out
    assert f"nothing moves: {why}" in printed and "Links, most bytes first: none" in printed


def test_heads_with_another_head_dim_of_v(tmp_path, capsys):
    """A task moves q and out of its rows, k and v of its keys."""
    out = tmp_path / "plan.json"
    step = ["--ranks", "2", "--lengths", "4096,100", "--sharded", "--tolerance", "0"]
    rows = {}
    for heads in ("8:2:64", "8:2:64:32"):
        main([*step, "--heads", heads, "--json", str(out)])
        rows[heads] = [task["bytes"] for task in json.loads(out.read_text())["tasks"]]
    query, key = AttentionShape(8, 2, 64, 2, 32).row_bytes()
    assert all(num % np.gcd(query, key) == 0 for num in rows["8:2:64:32"])
    assert 0 < sum(rows["8:2:64:32"]) < sum(rows["8:2:64"])
    capsys.readouterr()


def test_a_rank_and_a_cost_table(tmp_path, capsys):
    path = calibrations.write(
        tmp_path / "table.json", lambda rows, keys: 1e-9 * rows * keys, heads_q=16
    )
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([4000, 100, 250]))
    step = ["--lengths", str(lengths), "--ranks", "4", "--tokens", "2000", "--cost-table", path]
    out = tmp_path / "plan.json"
    main([*step, "--rank", "1", "--sharded", "--json", str(out)])
    assert "1 of 4" not in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["tokens"] == 8000 and len(data["seconds_after"]) == 4
    query_bytes, key_bytes = AttentionShape(heads_q=16).row_bytes()
    assert all(task["bytes"] % np.gcd(query_bytes, key_bytes) == 0 for task in data["tasks"])


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--ranks", "0"], "--ranks is 0; expected 1 to 65536"),
        (["--tokens", "0"], "--tokens is 0; expected 1 to"),
        (["--rank", "2"], "--rank is 2; expected 0 to 1"),
        (["--heads", "32:8"], "--heads is '32:8'; expected Q:KV:DIM"),
        (["--heads", "8:3:64"], "expected Q a multiple of KV"),
        (["--window", "-2", "0"], "window_size is [-2, 0]; expected"),
        (["--tolerance", "1.5"], "tolerance is 1.5"),
        (["--lengths", "nowhere.json"], "nowhere.json: not a readable JSON file"),
        (["--lengths", "9000,a"], "--lengths is '9000,a'; expected lengths separated by commas"),
        (["--lengths", "0,0"], "--lengths: no document has a token"),
        (["--lengths", "1,99999999999"], "--lengths: length 1 is 99999999999; expected"),
        (["--cost-table", "nowhere.json"], "cost_table nowhere.json: "),
        (["--json", "/dev/null/x.json"], "--json /dev/null/x.json cannot be written: Not a dir"),
    ],
)
def test_bad_flags_are_named(capsys, flags, named):
    with pytest.raises(SystemExit):
        main(["--lengths", "100", "--ranks", "2", *flags])
    assert named in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(cli, "account_of", lambda step: pytest.fail("it was planned"))
    with pytest.raises(SystemExit):
        main(["--lengths", "100", "--ranks", "2", "--json", "/proc/x"])
    assert "--json /proc/x cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("name, more", [("explain", []), ("simulate", ["--layers", "1"])])
def test_a_reader_that_closes_the_pipe_ends_a_command_quietly(name, more, tmp_path):
    out = tmp_path / "all.json"
    flags = ["--lengths", "9000,400", "--ranks", "2", "--json", out, *more]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, tempfile.TemporaryFile("w+") as stderr:
        command = programs.start(["-m", f"distca.{name}", *flags], {**os.environ}, stdout, stderr)
        assert command.wait(timeout=120) == 1
        stderr.seek(0)
        assert stderr.read() == ""
    assert json.loads(out.read_text())


@pytest.mark.parametrize("text", ["{", "{}", "3", "[]", "[0]", "[5, -1]", "[1.5]", "[true]"])
def test_bad_lists_are_named(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.json: "):
        read_lengths(path)


def test_data_holds_every_task():
    plan = account.explain(step_of(draw_pack(heavy_tailed(2), 16, 8192, 2)))
    data = as_data(plan)
    json.dumps(data)
    assert len(data["tasks"]) == plan.tasks.server.size
    assert sum(link["bytes"] for link in data["links"]) == data["bytes"]
