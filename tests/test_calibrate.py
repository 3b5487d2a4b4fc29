"""Calibration: its measurements, its file, and the costs that the planner derives from it."""

import io
import json
import math
import re
import sys
import time
import warnings

import calibrations
import numpy as np
import pytest
import torch

import distca
from distca import calibrate
from distca.calibrate import attention
from distca.calibrate.__main__ import main
from distca.calibrate.timing import NUM_WARM_UP_CALLS, ProgressBar, median_seconds
from distca.planning.cluster import Cluster, cluster_of
from distca.planning.cost import (
    AttentionShape,
    Calibration,
    Link,
    Links,
    cost_tensor,
)
from distca.planning.solver import ANY_IMBALANCE

SHAPE = AttentionShape()
NOT_A_NUMBER, INFINITE = float("nan"), float("inf")
FULL = (-1, -1)


def table(**changes) -> str:
    return json.dumps({**calibrations.content(rows=[128, 256], keys=[128]), **changes})


TABLES = {
    "not JSON": "rows: 128",
    "truncated": table()[:-3],
    "binary": "\xff\x00",
    "a list": "[]",
    "a number": "3",
    "deep": "[" * 100000,
    "bare": '{"rows": [1], "keys": [1], "seconds": [[1.0]]}',
}
WRONG_FIELDS = {
    "format": [0, 2, "1", True, None],
    "device_type": ["tpu", None, 3],
    "device_name": [None],
    "torch": [2],
    "date": [20260131],
    "heads_q": [0, -1, 1.5, "32", None, 2**31],
    "head_dim": [0],
    "dtype": ["int8", None, ["bfloat16"]],
    "rows": [[], [-1, 256], "ab", [1, 10**400], [1, 2**63], [128, 128], list(range(1, 5001))],
    "keys": [[0], [1.5], None, {}],
    "forward_seconds": [[[1.0]], [[1.0], [-2.0]], [[1.0], [NOT_A_NUMBER]], [[1.0], [INFINITE]]],
    "backward_seconds": [[[1.0], [10**400]], [["1"], ["2"]], [[1.0], [0]], [[1.0], []], 3],
    "seconds_per_task": [-1e-9, NOT_A_NUMBER, "0", None],
    "links": [None, {}, {"inside": None}, {"inside": {}, "between": None}, []],
}


@pytest.mark.parametrize("case", TABLES)
def test_cost_tables_are_refused(tmp_path, case):
    path = tmp_path / "table.json"
    path.write_bytes(TABLES[case].encode("latin1"))
    with pytest.raises(ValueError, match=re.escape(f"cost_table {path}: ") + ".*calibrate --out"):
        Calibration.load(path)


@pytest.mark.parametrize("field", WRONG_FIELDS)
def test_wrong_fields_of_cost_tables_are_named(tmp_path, field):
    path = tmp_path / "table.json"
    for value in WRONG_FIELDS[field]:
        path.write_text(table(**{field: value}))
        with pytest.raises(ValueError, match=f"table.json: {field}.*; expected .*; measure again"):
            Calibration.load(path)


@pytest.mark.parametrize(
    "link, named",
    [
        ({"latency_s": -1, "bytes_per_second": 1}, "latency_s is -1"),
        ({"latency_s": 0, "bytes_per_second": 0}, "bytes_per_second is 0"),
        ({"latency_s": 0, "bytes_per_second": True}, "bytes_per_second is True"),
        ({"latency_s": 0}, "field 'bytes_per_second' is missing"),
        ({"latency_s": 0, "bytes_per_second": 1, "colour": 1}, "field 'colour' is not known"),
        (1e9, "is 1000000000.0"),
    ],
)
def test_wrong_links_of_cost_tables_are_named(tmp_path, link, named):
    path = tmp_path / "table.json"
    path.write_text(table(links={"inside": None, "between": link}))
    with pytest.raises(ValueError, match=re.escape("table.json: links.between") + f".*{named}"):
        Calibration.load(path)


@pytest.mark.parametrize("field", calibrations.content())
def test_missing_fields_of_cost_tables_are_named(tmp_path, field):
    path = tmp_path / "table.json"
    content = calibrations.content()
    del content[field]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        Calibration.load(path)


def test_a_missing_cost_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file.*missing.json"):
        Calibration.load(tmp_path / "missing.json")


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "table.json"
    fields = calibrations.content(lambda rows, keys: rows + 1 / keys)
    del fields["format"]
    fields["links"] = Links(Link(1e-5, 2e11), None)
    written = Calibration(**fields)
    written.save(path)
    read = Calibration.load(path)
    assert read == written
    assert read.seconds[2][1] == pytest.approx(8192 + 1 / 1024)
    assert read.forward_seconds[2][1] == pytest.approx(read.seconds[2][1] / 4)
    assert read.shape == AttentionShape(32, 8, 128, 2)


def test_every_field_of_the_file_is_documented():
    for name in calibrations.content():
        assert re.search(rf"\b{name}\b", calibrate.__doc__), name


def planned_seconds(rows: int, keys: int, cost: torch.Tensor) -> float:
    """Return the planner's prediction for `rows` queries that see all of `keys` keys.

    One rank holds these queries of a document, and another rank holds the rest.
    """
    pieces, cluster = [(0, 0, 0, rows), (1, 0, rows, keys - rows)], Cluster(2)
    _, loads = torch.ops.distca.plan(
        torch.tensor(pieces),
        cluster.num_ranks,
        *FULL,
        cost,
        SHAPE.row_bytes(),
        cluster.servers(),
        cluster.links(),
        ANY_IMBALANCE,
    )
    return loads[0, 0].item()


def cost_of(path: str, shape: AttentionShape = SHAPE, device_type: str = "cuda") -> torch.Tensor:
    return cost_tensor(distca.Options(cost_table=path), shape, device_type)


def test_the_planner_gets_the_sum_of_forward_and_backward(tmp_path):
    path = calibrations.write(tmp_path / "table.json", lambda rows, keys: 1e-9 * rows * keys)
    cost = cost_of(path)
    for rows, keys in ((128, 128), (1024, 8192), (8192, 65536), (16384, 131072)):
        assert planned_seconds(rows, keys, cost) == pytest.approx(1e-9 * rows * keys)
    # A partial tile costs as much as a whole one, in rows and in keys.
    assert planned_seconds(129, 129, cost) == pytest.approx(1e-9 * 256 * 256)
    assert planned_seconds(1, 128, cost) == pytest.approx(1e-9 * 128 * 128)


def kernel_seconds(rows: int, keys: int) -> float:
    """Model a kernel that works in whole tiles and has an overhead.

    Its rate grows with the number of tiles, and drops if keys do not fit in the cache.
    """
    q_tiles, k_tiles = -(-rows // 128), -(-keys // 128)
    uncached = 0.15 / (1 + math.exp(-(k_tiles - 128) / 24))
    return 3e-6 + 1e-6 * q_tiles * k_tiles * (1 + 0.5 / q_tiles) * (1 + 2 / k_tiles + uncached)


def test_the_grid_is_dense_enough(tmp_path):
    """The planner's interpolation is within 5 % of `kernel_seconds` for any rows and keys."""
    rows, keys = attention.grid("cuda", attention.EFFORTS["cuda", False])
    measured = np.full((2, len(rows), len(keys)), np.nan)
    for i, j in attention.entries(rows, keys):
        measured[:, i, j] = kernel_seconds(rows[i], keys[j])
    forward, _ = attention.continued(measured, np.array(rows)).tolist()
    zeros = [[1e-30] * len(keys)] * len(rows)
    path = tmp_path / "table.json"
    tables = {"forward_seconds": forward, "backward_seconds": zeros}
    path.write_text(json.dumps(calibrations.content(rows=rows, keys=keys, **tables)))
    cost = cost_of(str(path))
    generator = np.random.default_rng(0)
    drawn = [(128 * tiles + 1, 128 * tiles + 1) for tiles in range(64)]
    for _ in range(500):
        num_keys = int(np.exp(generator.uniform(0, math.log(keys[-1]))))
        num_rows = int(np.exp(generator.uniform(0, math.log(min(num_keys, rows[-1])))))
        drawn.append((num_rows, num_keys))
    ratios = [planned_seconds(r, k, cost) / kernel_seconds(r, k) for r, k in drawn]
    worst = max(abs(ratio - 1) for ratio in ratios)
    assert worst < 0.05


def test_other_heads_scale_by_flops_and_say_so_once(tmp_path):
    path = calibrations.write(tmp_path / "table.json", lambda rows, keys: 1e-9 * rows * keys)
    with pytest.warns(UserWarning, match="table.json is of .*multiplied by 0.125, the ratio"):
        quarter = cost_of(path, AttentionShape(8, 8, 64))
    assert planned_seconds(1024, 8192, quarter) == pytest.approx(0.125e-9 * 1024 * 8192)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost_of(path, AttentionShape(8, 8, 64))
        cost_of(path)


def test_another_device_is_refused(tmp_path):
    path = calibrations.write(tmp_path / "table.json", lambda rows, keys: 1.0)
    with pytest.raises(
        ValueError, match="table.json: device_type is cuda, but .* for cpu; measure"
    ):
        cost_of(path, device_type="cpu")


@pytest.mark.parametrize(
    "inside, between, gb_per_s, expected",
    [
        (None, None, None, 200e9),
        (300e9, 50e9, None, 300e9),
        (None, 50e9, None, 50e9),
        (300e9, 50e9, 100.0, 100e9),
    ],
)
def test_links_of_the_file_are_the_default(tmp_path, inside, between, gb_per_s, expected):
    link_fields = {
        level: bandwidth and {"latency_s": 1e-5, "bytes_per_second": bandwidth}
        for level, bandwidth in (("inside", inside), ("between", between))
    }
    path = calibrations.write(tmp_path / "table.json", lambda rows, keys: 1.0, links=link_fields)
    options = distca.Options(cost_table=path, link_gb_per_s=gb_per_s)
    assert cluster_of(options, 2, "cuda").link_bytes_per_second == expected


def test_axes_are_whole_tiles():
    assert attention.axis(32, 400) == [32, 64, 96, 128, 192, 256, 384]
    assert attention.axis(128, 100) == [128]
    rows, keys = attention.grid("cuda", attention.EFFORTS["cuda", False])
    assert (rows[-1], keys[-1]) == (16384, 131072)


def test_entries_of_more_rows_than_keys_are_extrapolated():
    rows = np.array([32, 64, 96, 128, 192])
    law = 5 + 2.0 * rows[:, None] * np.array([32, 64, 128, 256])
    measured = np.where(rows[:, None] <= np.array([32, 64, 128, 256]), law, np.nan)
    table = attention.continued(np.stack([measured, 3 * measured]), rows)
    assert table[0][:, 1:] == pytest.approx(law[:, 1:])
    assert table[1] == pytest.approx(3 * table[0])
    assert table[0][:, 0] == pytest.approx(law[0, 0] * rows / 32)  # proportional to rows


def test_overhead_is_the_cost_of_a_task_without_keys():
    keys = [32, 64, 128, 256, 512]
    line = [7.0 + 0.5 * k for k in keys]
    seconds = [3 * value for value in line]
    assert attention.seconds_per_task(keys, seconds) == pytest.approx(3 * 7.0)
    assert attention.seconds_per_task([32], [2.0]) == 0
    assert attention.seconds_per_task([32, 64], [2.0, 6.0]) == 0


def test_calls_fill_a_device_within_its_memory(monkeypatch):
    memory, processors = 39e9, 132
    monkeypatch.setattr(attention, "_num_processors", lambda device: processors)
    monkeypatch.setattr(attention, "_memory_bytes", lambda device: memory)
    heads, device = attention.Heads(32, 8, 128, 128, torch.bfloat16), torch.device("cuda")
    effort = attention.EFFORTS["cuda", False]
    rows, keys = attention.grid("cuda", effort)
    for i, j in attention.entries(rows, keys):
        count = attention.num_tasks(rows[i], keys[j], heads, device, effort)
        query_elements, key_elements = count * rows[i] * 32 * 128, count * keys[j] * 8 * 128
        assert 2 * (4 * query_elements + 4 * key_elements) < memory
        rounds = count * 32 * (rows[i] // 128) / processors
        assert rounds > 2 and math.ceil(rounds) / rounds < 1.05
        flops = 4 * count * rows[i] * keys[j] * 32 * 128
        assert flops > 0.4 * effort.flops


@pytest.mark.parametrize("repeats, budget_s, most", [(4, 10.0, 4), (1000, 0.05, 5), (4, 0.001, 0)])
def test_calls_are_repeated_within_a_budget(repeats, budget_s, most):
    called = []
    seconds = median_seconds(
        lambda: called.append(time.sleep(0.01)), torch.device("cpu"), repeats, budget_s
    )
    assert 0.01 <= seconds < 0.1
    assert min(most, 1) <= len(called) - NUM_WARM_UP_CALLS <= most
    assert len(called) == NUM_WARM_UP_CALLS + most or budget_s == 0.05


def test_progress_is_one_line_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = ProgressBar(2, shown)
        bar.advance("first")
        bar.advance("second")
        bar.finish()
        written = stream.getvalue()
        visible = shown and stream.isatty()
        assert ("1/2 second" in written and "2/2 done" in written) == visible
        assert written.count("\n") == visible


SMALL = ["--heads-q", "4", "--heads-kv", "2", "--head-dim", "16", "--head-dim-v", "8"]
SMALL += ["--dtype", "float32"]


def test_the_planner_reads_the_commands_file(tmp_path, capsys):
    out = tmp_path / "cal.json"
    main([*SMALL, "--device", "cpu", "--quick", "--max-keys", "128", "--out", str(out)])
    calibration = Calibration.load(out)
    assert (calibration.rows, calibration.keys) == ([32, 64, 96, 128], [32, 64, 96, 128])
    assert calibration.shape == AttentionShape(4, 2, 16, 4, 8)
    assert calibration.links == Links()
    seconds = np.array(calibration.seconds)
    assert seconds[-1].sum() > seconds[0].sum(), "four tiles of rows take longer than one"
    printed = capsys.readouterr().out
    assert "4:2 heads of 16 and 8, float32" in printed
    assert f"wrote {out}" in printed and "links inside nodes: not measured" in printed
    cost = cost_of(str(out), calibration.shape, "cpu")
    assert planned_seconds(64, 96, cost) == pytest.approx(calibration.seconds[1][2])


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--heads-q", "0"], "--heads-q is 0; expected 1 to"),
        (["--heads-kv", "33"], "--heads-kv is 33; expected 1 to 32"),
        (["--heads-kv", "3"], "--heads-q is 32; expected a multiple of --heads-kv 3"),
        (["--head-dim", "512"], "--head-dim is 512; expected 1 to 256"),
        (["--head-dim-v", "0"], "--head-dim-v is 0; expected 1 to 256"),
        (["--max-keys", "-1"], "--max-keys is -1; expected 1 to"),
        (["--max-keys", "0"], "--max-keys is 0; expected 1 to"),
        (
            ["--device", "cuda", "--dtype", "float32"],
            "--dtype is float32; expected bfloat16 or float16 on cuda",
        ),
        (["--dtype", "int8"], "--dtype"),
        (["--out", "."], "--out . cannot be written: Is a directory"),
        (["--out", "/dev/null/x.json"], "--out /dev/null/x.json cannot be written: Not a"),
    ],
)
def test_bad_flags_are_named(capsys, monkeypatch, flags, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *flags])
    assert named in capsys.readouterr().err
