"""benchmarks/server_step.py and other_work.py on the CPU."""

import contextlib
import json
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import run_ranks
from test_step_benchmarks import CPU, FLOAT32_NOISE, MODEL, ROOT

import distca
from distca.planning import plan as plans
from distca.ranks.pace import LEAST_SAMPLES, SCALE, UNKNOWN, Pace

# From benchmarks/, which test_step_benchmarks puts on the path.
import other_work  # isort: skip
import server_step  # isort: skip
from other_work import PERIOD_S, OtherWork, num_products  # isort: skip
from step_report import Run  # isort: skip

PART = 0.3


def run_mode(mode: str, num_ranks: int, flags: list, folder) -> tuple[dict, dict, str]:
    """Run the benchmark, and return its summary, its variants and its output."""
    out = folder / f"{mode}.json"
    script = [ROOT / "benchmarks" / "server_step.py", mode, "--device", "cpu", *MODEL]
    result = run_ranks([*script, *flags, "--out", out], num_ranks, dict(os.environ))
    assert result.returncode == 0, result.stderr
    record = json.loads(out.read_text())
    return record["summary"], record["variants"], result.stdout


def check_losses(variants: dict) -> None:
    first, *others = variants.values()
    assert first["losses"][0] - first["losses"][-1] > 0.1  # it learns
    for each in others:
        assert each["losses"] == pytest.approx(first["losses"], abs=FLOAT32_NOISE)


def mean_ms(variants: dict, name: str, skip: int) -> float:
    ms = variants[name]["step_ms"][skip:]
    return sum(ms) / len(ms)


# Runs.


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_server_takes_a_part_of_attention(tmp_path, num_ranks):
    flags = ["--document", "1024", "--steps", "5", "--skip", "2", "--learning-rate", "1e-2"]
    summary, variants, output = run_mode("server", num_ranks, flags, tmp_path)
    assert list(variants) == ["alone", "served"] and summary["mode"] == "server"
    check_losses(variants)
    for name, num_planned in (("alone", num_ranks - 1), ("served", num_ranks)):
        plan = variants[name]["plans"][-1]
        assert len(plan["seconds_after"]) == num_planned and len(variants[name]["step_ms"]) == 5
        assert plan["servers"] == ([num_ranks - 1] if name == "served" else [])
    part = summary["served: part of attention on the server"]
    assert part == pytest.approx(1 / num_ranks, rel=0.2)
    times = mean_ms(variants, "alone", 2) / mean_ms(variants, "served", 2)
    assert summary["served: times faster than alone"] == pytest.approx(times)
    assert summary["served: max loss difference"] <= FLOAT32_NOISE
    assert summary["served: server's peak, GiB"] == 0 == summary["alone: peak, GiB"]
    assert "served: times faster than alone" in output


def test_other_work_beside_one_rank(tmp_path):
    flags = ["--document", "2048", "--steps", "4", "--skip", "1", "--learning-rate", "1e-2"]
    flags += ["--part", PART, "--turns", "2"]
    summary, variants, output = run_mode("slow", 2, flags, tmp_path)
    assert list(variants) == ["even", "slow", "slow measured"] and summary["mode"] == "slow"
    check_losses(variants)
    assert all(len(each["turns_ms"]) == 2 for each in variants.values())
    assert summary["even: other work, part of the device"] == 0
    for name in ("slow", "slow measured"):
        assert 0 < summary[f"{name}: other work, part of the device"] < 2 * PART
    even, slow, measured = (mean_ms(variants, name, 1) for name in variants)
    cost = summary["slow: cost of the other work, ms"]
    assert cost == pytest.approx(slow - even)
    taken_back = summary["slow measured: part of the cost taken back"]
    assert taken_back == pytest.approx((slow - measured) / cost)
    attention = summary["even: attention, part of the profiled step"]
    possible = summary["slow measured: part that can be taken back"]
    assert 0 < attention < 1 and 0 < possible < 1 / 1.5
    assert summary["slow measured: speeds of the last plan"] == []  # none on the CPU
    assert summary["slow measured: first step planned with speeds"] == "none"
    assert "part of the cost taken back" in output


def speeds_by_variant(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """Return the speeds that plans use in a group whose second rank is measured at half speed."""
    distca.close()
    flags = ["slow", "--device", "cpu", *MODEL, "--document", "1024", "--steps", "5", "--skip", "1"]
    with mock.patch.dict(os.environ, WORLD_SIZE=str(world_size)):
        args, workload = server_step.arguments(flags)
    with (
        mock.patch.object(plans, "measures_links", lambda _: True),
        mock.patch.object(Pace, "words", lambda self, _: [round(SCALE / (1 + rank)), UNKNOWN]),
    ):
        mode = server_step.SlowMode(args, workload, CPU)
        runs = {name: mode.run(name, 0).run for name in server_step.VARIANTS["slow"]}
        mode.close()
    return {name: [plan.measured_speeds for plan in run.plans] for name, run in runs.items()}


def test_only_the_variant_slow_ignores_measured_speeds(ranks):
    known = [1.0, 0.5]
    for speeds in ranks(2).run(speeds_by_variant):
        assert speeds["slow"] == [[]] * 5
        for name in ("even", "slow measured"):
            assert speeds[name] == [[]] * (LEAST_SAMPLES - 1) + [known] * (6 - LEAST_SAMPLES)


def test_an_unknown_pace_leaves_times_alone():
    pace = server_step.UnknownPace(2)
    pace.note(0, 1.0, 8)
    assert pace.words("no group of this name") == [UNKNOWN, UNKNOWN]


# Figures.


def report(**values) -> distca.PlanReport:
    values = {"bytes_out": [0, 0], "bytes_in": [0, 0], "plan_ms": 0, "waited_ms": 0, **values}
    return distca.PlanReport(seconds_before=[3.0, 0.0], **values)


def test_figures_of_a_server_by_hand():
    served = [report(seconds_after=[2.0, 1.0], servers=[1])]
    served += [report(seconds_after=[2.0, 2.0], servers=[1], measured_speeds=[1.0, 0.5])]
    runs = {
        "alone": Run([9e9, 30.0, 50.0], skip=1),
        "served": Run([9e9, 10.0, 22.0], plans=[report(seconds_after=[0.0, 3.0]), *served], skip=1),
    }
    assert server_step.server_figures(runs) == {
        "served: times faster than alone": 40 / 16,
        "served: part of attention on the server": 1 / 3,
    }


def test_figures_of_other_work_by_hand():
    profile = {"attention_ms": [10.0, 20.0], "step_ms": [24.0, 25.0]}
    late = report(seconds_after=[2.0, 1.0], measured_speeds=[1.0, 0.6], lags_ms=[0.0, 0.5])
    runs = {
        "even": Run([9e9, 100.0], profiles=[profile], skip=1),
        "slow": Run([9e9, 180.0], skip=1),
        "slow measured": Run(
            [9e9, 130.0], plans=[report(seconds_after=[3.0, 0.0]), late, late], skip=1
        ),
    }
    figures = server_step.slow_figures(runs, 0.4, 2)
    assert figures == {
        "slow: cost of the other work, ms": 80.0,
        "slow measured: part of the cost taken back": 50 / 80,
        "slow measured: part that can be taken back": pytest.approx(1 / 1.6),
        "even: attention, part of the profiled step": 0.6,
        "slow measured: speeds of the last plan": [1.0, 0.6],
        "slow measured: lags of the last plan, ms": [0.0, 0.5],
        "slow measured: first step planned with speeds": 1,
    }


@pytest.mark.parametrize("num_ranks, linear", [(2, 3.0), (5, 3.0), (5, 8.0)])
def test_the_largest_part_follows_from_step_times(num_ranks, linear):
    attention, part = 10.0 - linear, 0.4
    even, slow = 10.0, 10.0 / (1 - part)
    # The slow rank computes x of the attention, and the others share the rest, so that
    # (linear + x) / (1 - part) = linear + (num_ranks attention - x) / (num_ranks - 1).
    others = num_ranks - 1
    x = linear + num_ranks * attention / others - linear / (1 - part)
    x /= 1 / (1 - part) + 1 / others
    balanced = (linear + max(0.0, x)) / (1 - part)
    assert (x < 0) == (linear == 8.0)
    assert server_step.largest_part_taken_back(attention / even, part, num_ranks) == pytest.approx(
        server_step.part_taken_back(even, slow, balanced)
    )


def test_losses_that_disagree_end_the_program(tmp_path, monkeypatch, capsys):
    def result(loss: float) -> server_step.Result:
        plan = report(seconds_after=[2.0, 1.0], servers=[1])
        profile = {"exposed_ms": [1.0], "communication_ms": [2.0], "step_ms": [9.0]}
        return server_step.Result(Run([10.0], [2.0, loss], [plan], [profile], skip=0), [[]], {})

    flags = ["server", "--device", "cpu", "--document", "8", "--steps", "1", "--skip", "0"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    cases = {
        2.0 + 1e-5: None,
        2.00003: "step 1 has loss 2.0 in 'alone' and 2.00003 in 'served'; expected a difference",
        float("nan"): "step 1 has loss nan in 'served'; expected a finite loss",
    }
    for loss, wrong in cases.items():
        out = tmp_path / f"{loss}.json"
        argv = mock.patch("sys.argv", ["server_step.py", *flags, "--out", str(out)])
        results = {"alone": result(2.0), "served": result(loss)}
        with contextlib.ExitStack() as stack:
            stack.enter_context(argv)
            for name, value in (("join", CPU), ("leave", None), ("run_mode", results)):
                stack.enter_context(mock.patch.object(server_step, name, return_value=value))
            stack.enter_context(mock.patch.object(dist, "get_world_size", return_value=2))
            ended = stack.enter_context(pytest.raises(SystemExit))
            server_step.main()
        assert out.exists() and "times faster than alone" in capsys.readouterr().out
        assert (ended.value.code is None) if wrong is None else (wrong in ended.value.code)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["slow", "--part", "0.5"], "--part is 0.5; needs a number between 0 and 0.5"),
        (["slow", "--steps", "10"], "--skip is 10; needs 0 to 9, less than --steps"),
        (["server", "--turns", "0"], "--turns is 0; needs at least 1"),
        (["server", "--equal", "7", "--tokens", "8"], "--equal is 7; expected a divisor"),
        (["slow", "--document", "9"], "--document is 9 with 2 ranks"),
        (["fast"], "invalid choice: 'fast'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(flags, message, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        server_step.arguments(flags)
    assert message in capsys.readouterr().err


def test_one_rank_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        server_step.arguments(["server", "--document", "8"])
    assert "start it with torchrun" in capsys.readouterr().err


# Other work.


def test_other_work_starts_and_rests():
    work = OtherWork(CPU, PART)
    for _ in range(2):
        work.begin()
        time.sleep(20 * PERIOD_S)
        assert 0 < work.end() < 1.5 * PART
    work.begin()  # and ends with its rank
    work.close()
    assert work._process.returncode == 0


def test_other_work_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="the other work ended with exit code 1"):
        OtherWork(torch.device("meta"), PART)


def test_products_of_a_period():
    assert num_products(0.5, PERIOD_S / 20) == 10
    assert num_products(0.5, 10 * PERIOD_S) == 1


def worked(burst_periods: float, num_bursts: int) -> tuple[float, list[float]]:
    """Return the part of the time that bursts took, and the rests between them, in periods. On an
    idle device a burst takes a quarter of a period, but here it takes `burst_periods`."""
    now, rests = [0.0], []

    def burst() -> None:
        now[0] += burst_periods * PERIOD_S

    def is_over(rest_s: float) -> bool:
        rests.append(rest_s / PERIOD_S)
        now[0] += rest_s
        return len(rests) == num_bursts

    with mock.patch.object(other_work.time, "perf_counter", lambda: now[0]):
        return other_work.work(burst, PERIOD_S / 4, is_over), rests


def test_work_keeps_to_its_part():
    part, rests = worked(0.75, 4)
    assert part == pytest.approx(0.25) and rests == pytest.approx([0.25] * 4)
    part, rests = worked(2.0, 4)  # it cannot keep up, so it does not rest
    assert part == pytest.approx(0.125) and rests == [0.0] * 4


def test_a_rank_keeps_to_its_core():
    before = os.sched_getaffinity(0)
    for number in (0, 1):
        with other_work.own_core(number):
            assert os.sched_getaffinity(0) == {sorted(before)[number % len(before)]}
    assert os.sched_getaffinity(0) == before
