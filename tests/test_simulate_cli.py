"""`python -m distca.simulate`: flags, tables, JSON and the picture."""

import itertools
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from calibrations import write

from distca.planning.cost import Link
from distca.simulate import __main__ as cli
from distca.simulate import paper
from distca.simulate.disaggregated import cluster_of, pack_on
from distca.simulate.layers import KINDS
from distca.simulate.machine import Machine
from distca.simulate.packing import draw
from distca.simulate.pictures import segments
from distca.simulate.report import table
from distca.simulate.results import run
from distca.simulate.scenario import PRESETS, Scenario
from distca.simulate.systems import Step

DRAWN = ["--distribution", "lognormal:2000:1.3", "--steps", "2", "--tokens", "16384"]


def simulated(tmp_path, *flags: str) -> dict:
    path = tmp_path / "figures" / "all.json"
    cli.main([*DRAWN, "--json", str(path), *flags])
    return json.loads(path.read_text())


def test_a_table_and_its_json(tmp_path, capsys):
    data = simulated(tmp_path, "--ranks", "16", "--layers", "4")
    shown = capsys.readouterr().out
    assert data["format"] == 2 and "16 GPUs" in data["scenario"]
    names = [system["name"] for system in data["systems"]]
    assert names[:2] == ["fixed", "variable"] and names[-1] == "limit"
    assert {"distca", "distca-ping-pong", "all-gather", "ring"} < set(names)
    for system in data["systems"]:
        assert len(system["step_ms"]) == 2
        assert system["step_ms_mean"] == pytest.approx(np.mean(system["step_ms"]))
        assert system["step_ms_slowest_decile"] == pytest.approx(max(system["step_ms"]))
        assert system["tokens_per_second"] == pytest.approx(
            16 * 16384 / (1e-3 * system["step_ms_mean"])
        )
        assert system["memory_max_bytes"] >= system["memory_mean_bytes"] > 0
        assert f"{system['step_ms_mean']:.1f}" in shown
    assert "Assumptions" in shown and "640 / 580 TFLOP/s" in shown
    words = " ".join(shown.split())
    assert data["assumptions"] and all(line in words for line in data["assumptions"])


def test_lengths_may_be_given_one_by_one(tmp_path):
    few = ["--ranks", "4", "--layers", "1", "--tokens", "16384", "--steps", "2"]
    path, out = tmp_path / "lengths.json", tmp_path / "all.json"
    path.write_text("[9000, 400]")
    found = []
    for lengths in ("9000,400", str(path)):
        cli.main(["--lengths", lengths, *few, "--json", str(out)])
        found.append(json.loads(out.read_text()))
    assert found[0]["systems"] == found[1]["systems"]
    assert "documents of 9000,400 up to" in found[0]["scenario"]


def test_pipelines_and_the_picture(tmp_path):
    flags = ["--ranks", "32", "--tp", "2", "--pp", "4", "--layers", "4", "--context", "32768"]
    data = simulated(tmp_path, *flags, "--out", str(tmp_path / "out"))
    assert len(data["systems"]) == 10
    assert (tmp_path / "out" / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def small_results() -> tuple[Scenario, list]:
    scenario = Scenario(
        model=PRESETS["8B"].changed(2, 128), ranks=4, tokens=8192, context=8192, micro_batches=2
    )
    drawn = list(draw([300, 7000, 2000], scenario, 2, seed=0))
    steps = [Step(scenario, each) for each in drawn]
    return scenario, run(scenario, steps, ["fixed", "distca", "limit"])


def test_the_picture_has_each_ranks_seconds():
    scenario, results = small_results()
    schedule = results[1].outcome.schedule
    busy = schedule.busy(scenario)
    for rank in range(4):
        spans = list(segments(schedule, scenario, rank))
        for (_, start, seconds), (_, next_start, _) in itertools.pairwise(spans):
            assert start + seconds <= next_start + 1e-12
        assert spans[-1][1] + spans[-1][2] == pytest.approx(schedule.seconds)
        for kind in ("linear", "attention", "exchange"):
            total = sum(span[2] for span in spans if KINDS[span[0]] == kind)
            assert total == pytest.approx(busy[KINDS.index(kind), rank])


def test_the_table_marks_slow_systems_and_those_that_do_not_fit():
    scenario, results = small_results()
    assert "<1" not in table(results).rsplit("<1 = slower", 1)[0]
    slower = replace(results[1], step_seconds=[2 * x for x in results[0].step_seconds])
    shown = table([results[0], slower]).rsplit("<1 = slower", 1)[0]
    assert "<1 0.50x" in shown and "!" not in shown
    alike = replace(results[1], step_seconds=[1.004 * x for x in results[0].step_seconds])
    shown = table([results[0], alike]).rsplit("<1 = slower", 1)[0]
    assert " 1.00x" in shown and "<1" not in shown
    heavy = replace(results[0], memory_max=1e15)
    assert "!" in table([heavy, slower]).rsplit("<1 = slower", 1)[0]


def test_columns_of_long_figures_do_not_run_together():
    _, results = small_results()
    means = {name: 1e12 * value for name, value in results[0].means.items()}
    seconds = [1e12 * x for x in results[0].step_seconds]
    long = replace(results[0], step_seconds=seconds, means=means, memory_max=1e25)
    short, row = (table([each]).splitlines()[2].split() for each in (results[0], long))
    assert len(row) == len(short)


def test_the_table_says_what_to_change_where_distca_does_not_pay():
    _, results = small_results()
    fixed, distca = results[:2]
    assert "times as fast as distca" not in table(results) and "needs" not in table(results)
    slower = replace(distca, step_seconds=[2 * x for x in fixed.step_seconds])
    assert f"{fixed.system.label} is 2.00 times as fast as distca" in table([fixed, slower])
    heavy = replace(distca, memory_max=1e15)
    assert "distca needs 1000000 GB a GPU, of 127: pass --recompute" in table([fixed, heavy])


def test_speed_ups_at_the_scale_of_the_publication(monkeypatch, capsys):
    monkeypatch.setattr(paper, "RANKS", (64,))
    cli.main([*DRAWN, "--paper"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:7]] == [
        [model, "64", context]
        for model in ("8B", "34B")
        for context in ("131072", "262144", "524288")
    ]
    gains = np.array([[float(gain[:-1]) for gain in row.split()[-3:]] for row in rows[1:8]])
    assert (gains[:, 1] <= gains[:, 2]).all()  # nothing is faster than perfect balance for free
    assert gains[:-1].mean(axis=0) == pytest.approx(gains[-1], abs=0.01)
    assert rows[7].startswith("mean") and "1.07 to 1.20" in rows[8]


def test_a_measured_step_is_fitted(tmp_path):
    data = simulated(tmp_path, "--ranks", "4", "--layers", "4", "--fit-step-ms", "700")
    fixed = data["systems"][0]
    assert fixed["step_ms_mean"] == pytest.approx(700, rel=1e-4)
    linear_us = 1e6 * data["linear_seconds_per_token"]
    again = simulated(
        tmp_path, "--ranks", "4", "--layers", "4", "--linear-us-per-token", str(linear_us)
    )
    assert again["systems"][0]["step_ms"] == pytest.approx(fixed["step_ms"])


def test_the_first_steps_are_skipped(tmp_path):
    few = ["--ranks", "4", "--layers", "1", "--systems", "fixed"]
    (all_steps,) = simulated(tmp_path, *few, "--steps", "4")["systems"]
    (last,) = simulated(tmp_path, *few, "--steps", "3", "--skip", "1")["systems"]
    assert last["step_ms"] == all_steps["step_ms"][1:]


def test_a_cost_table_gives_the_planners_seconds(tmp_path):
    path = write(tmp_path / "table.json", lambda rows, keys: 1e-9 * (rows + 50) * (keys + 200))
    args = cli.parser().parse_args([*DRAWN, "--cost-table", path])
    machine = cli.machine_of(args)
    scenario = Scenario(model=PRESETS["8B"], machine=machine, ranks=4, tokens=9000, context=9000)
    (drawn,) = draw([1, 127, 128, 129, 3000, 700, 9000, 77], scenario, 1, seed=0)
    pack = pack_on(drawn.lengths, 4)
    cost, cluster = scenario.attention_cost(), cluster_of(scenario)
    _, loads = torch.ops.distca.plan(
        pack.as_tensor(),
        4,
        -1,
        0,
        cost.tensor(),
        scenario.attention_shape.row_bytes(),
        cluster.servers(),
        cluster.links(),
        1e9,
    )
    by_pass = cost.seconds(np.zeros_like(drawn.lengths), drawn.lengths)
    by_rank = np.bincount(drawn.pack, by_pass.sum(axis=0), 4)
    assert by_rank == pytest.approx(loads[:, 0].numpy())
    assert by_pass[0] == pytest.approx(by_pass[1] / 3)


def test_flags_override_measured_links(tmp_path):
    link = {"latency_s": 7e-6, "bytes_per_second": 5e9}
    links = {"inside": link, "between": None}
    path = write(tmp_path / "table.json", lambda rows, keys: 1e-9 * rows * keys, links=links)
    flags = [*DRAWN, "--cost-table", path]
    machine = cli.machine_of(cli.parser().parse_args(flags))
    assert machine.inside == Link(**link) and machine.between == Machine.between
    machine = cli.machine_of(cli.parser().parse_args([*flags, "--link-inside", "123"]))
    assert machine.inside == Link(7e-6, 123e9)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ranks", "6", "--tp", "4"], "ranks is 6"),
        (["--systems", "best"], "system is 'best'"),
        (["--systems", "distca-ticks"], "system distca-ticks needs pipeline stages, but pp is 1"),
        (
            ["--systems", "distca-servers"],
            "system distca-servers needs servers, but there are none",
        ),
        (["--steps", "0"], "steps is 0"),
        (["--skip", "-1"], "skip is -1"),
        (["--distribution", "normal:1"], "there is no 'normal'"),
        (["--attention-tflops", "0", "1"], "attention_tflops forward is 0"),
        (["--link-inside", "-1"], "bytes_per_second is -1"),
        (["--fit-step-ms", "0.001"], "fit_step_ms is 0.001"),
        (["--gpus-per-node", "0"], "gpus_per_node is 0"),
        (["--layers", "0"], "layers is 0"),
        (["--distribution", "fixed:0"], "not all 0"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit):
        cli.main([*DRAWN, *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--json"])
def test_files_that_cannot_be_written_are_refused_before_the_simulation(flag, capsys, monkeypatch):
    monkeypatch.setattr(cli, "run", lambda *arguments: pytest.fail("it was simulated"))
    with pytest.raises(SystemExit):
        cli.main([*DRAWN, flag, "/dev/null/x"])
    assert f"{flag} /dev/null/x cannot be written: Not a dir" in capsys.readouterr().err


def test_a_missing_matplotlib_is_named_before_the_simulation(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        cli.main([*DRAWN, "--out", "anywhere"])
    shown = capsys.readouterr()
    assert "pip install matplotlib" in shown.err and shown.out == ""
