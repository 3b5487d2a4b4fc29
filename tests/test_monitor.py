"""Lines, records, scalars and summaries of a run, and their cost."""

import json
import logging
import os
import sys
import time
from pathlib import Path

import pytest
from processes import run_command
from programs import run_ranks
from small_step import SHARDED, WHOLE, small_step

import distca
from distca.planning.plan_report import PlanReport
from distca.report import main
from distca.watching import report
from distca.watching.monitor import (
    PREDICTED_SECONDS,
    Monitor,
    line,
    scalars,
)

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
NUM_STEPS = 7


def plan_report(num_ranks: int = 4, **changes) -> PlanReport:
    values = {
        "seconds_before": [1.0 + (rank == 1) for rank in range(num_ranks)],
        "seconds_after": [1.25] * num_ranks,
        "bytes_out": [500_000] * num_ranks,
        "bytes_in": [500_000] * num_ranks,
        "plan_ms": 4.0,
        "waited_ms": 0.0,
        "attention_ms": [],
        "exposed_ms": [],
    }
    return PlanReport(**{**values, **changes})


def train(rank: int, world_size: int, folder: str, log_every: int) -> list[dict]:
    """Train, and return the records of this rank's plans."""
    distca.close()
    distca.init(watching=distca.Watching(log_every=log_every, run_dir=folder))
    try:
        return [_step(rank, world_size, index) for index in range(NUM_STEPS)]
    finally:
        distca.close()


def _step(rank: int, world_size: int, index: int) -> dict:
    step = small_step(rank, world_size, WHOLE if index % 2 else SHARDED)
    plan = distca.plan(step.documents)
    step.attend().sum().backward()
    return plan.report().record()


def test_a_run_writes_its_records_and_its_summary(ranks, tmp_path):
    pytest.importorskip("matplotlib")
    recorded = ranks(3).run(train, str(tmp_path), 2)
    steps = report.read_steps(tmp_path)
    assert [step.pop("step") for step in steps] == list(range(NUM_STEPS))
    assert [step.pop("step_ms", 0.0) > 0 for step in steps] == [False] + [True] * (NUM_STEPS - 1)
    assert not any(step.pop("can_ping_pong") for step in steps), "on the CPU it hides nothing"
    plans = json.loads(json.dumps(recorded[0]))
    assert steps[1:] == plans[1:], "rank 0's plans, in order"
    scaled = {name for name, value in plans[0].items() if steps[0][name] != value}
    assert scaled == {"moved_mb", "bytes_out", "bytes_in", *PREDICTED_SECONDS}  # none are kept
    timed = [step["attention_ms"] for step in steps]
    assert timed[0] == timed[1] == [] and len(timed[2]) == 3 and min(timed[2]) > 0
    assert timed[2] == timed[3] != timed[4], "every second step is timed, and shown two steps later"
    for step in steps:
        pairs = zip(step["exposed_ms"], step["attention_ms"], strict=True)
        assert all(0 < exposed < attention for exposed, attention in pairs)
    values = json.loads((tmp_path / "summary.json").read_text())
    assert values == json.loads(json.dumps(report.run_summary(report.read_steps(tmp_path))))
    assert values["ranks"] == 3 and values["steps"] == NUM_STEPS
    assert values["imbalance_after"] < values["imbalance_before"]
    assert values["link_gb_per_s"] == 2.0 and "node_link_gb_per_s" not in values
    assert "links in a node" in (shown := report.table(values)) and "between" not in shown
    assert (tmp_path / "balance.png").stat().st_size > 10_000


def test_the_trace_shows_the_timed_step_as_planned_and_as_measured(ranks, tmp_path):
    spans = tmp_path / "spans"
    spans.mkdir()
    former = {"rank": 7, "step": 99, "spans": []}  # from an earlier run in the same folder
    (spans / "7.json").write_text(json.dumps(former))
    ranks(3).run(train, str(tmp_path), 2)
    steps = report.read_steps(tmp_path)
    (attention_ms,) = {tuple(step["attention_ms"]) for step in steps[-1:]}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(rows.values()) == ["without distca, predicted", "planned", "measured"]
    for rank in range(3):
        lengths = {
            name: [
                (e["name"], e["dur"])
                for e in events
                if e["ph"] == "X" and e["pid"] == rank and rows[e["tid"]] == name
            ]
            for name in rows.values()
        }
        passes = ["layer 0 forward attention", "layer 0 backward attention"]
        assert [name for name, _ in lengths["planned"]] == passes
        record = steps[4]  # the timed step whose times are in the last record
        for name, key in (("planned", "after"), ("without distca, predicted", "before")):
            total = sum(duration for _, duration in lengths[name])
            assert total == pytest.approx(1e6 * record[f"seconds_{key}"][rank])
            assert dict(lengths[name])[passes[0]] == pytest.approx(total / 3.5)
        measured = [duration for name, duration in lengths["measured"] if name in passes]
        assert sum(measured) == pytest.approx(1e3 * attention_ms[rank], abs=10)
        assert {"layer 0 forward wait for rows", "layer 0 backward late home tasks"} <= {
            name for name, _ in lengths["measured"]
        }
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_the_command_draws_a_run_again(tmp_path):
    record = plan_report(attention_ms=[8.0, 9, 9, 10], exposed_ms=[0.5, 2, 1, 1.5]).record()
    (tmp_path / "steps.jsonl").write_text(
        "".join(json.dumps({"step": step, **record}) + "\n" for step in range(3))
        + '{"step": 3, "imba'
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "distca.report", str(tmp_path)]
    result = run_command(command, env=ENVIRONMENT, timeout_s=60)
    assert result.returncode == 0, result.stderr
    shown = dict(text.split("  ", 1) for text in result.stdout.splitlines() if "  " in text)
    assert {name: text.strip() for name, text in shown.items()} == {
        "steps": "3 on 4 ranks",
        "imbalance before": "1.600 (worst 1.600)",
        "imbalance after": "1.000 (worst 1.000)",
        "attention, predicted": "1.60 times faster",
        "moved": "2.0 MB a layer, forward and backward, by all ranks",
        "plan": "4.0 ms, training waited 0.0 ms for it",
        "attention, measured": "8.0 to 10.0 ms a step, by rank",
        "of that exposed": "0.5 to 2.0 ms a step, by rank",
    }
    assert (tmp_path / "summary.json").exists()


def test_a_folder_without_records_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path)])
    assert stopped.value.code == 2
    assert f"{tmp_path}/steps.jsonl has no records" in capsys.readouterr().err


def test_the_picture_of_a_long_run_has_fewer_bars(tmp_path, monkeypatch):
    record = json.dumps({"step": 0, **plan_report(num_ranks=64).record()}) + "\n"
    (tmp_path / "steps.jsonl").write_text(record * 1000)
    drawn = []
    monkeypatch.setattr(report, "draw_balance", lambda path, before, after: drawn.append(before))
    report.draw_run(tmp_path)
    assert len(drawn[0]) * 64 <= 1.1 * report.MAX_BARS and len(drawn[0]) > 50


def test_lines_are_means_of_the_steps_between_them(caplog):
    caplog.set_level(logging.INFO, "distca")
    monitor = Monitor(distca.Watching(log_every=2))
    for step in range(5):
        waited = float(step)
        monitor.record(step, plan_report(plan_ms=4.0 + step, waited_ms=waited).record())
    monitor.close()
    assert [each.getMessage() for each in caplog.records] == [
        "distca  step 2  imbalance 1.600 -> 1.000  2.0 MB a layer  plan 4.5 ms, waited 0.5 ms",
        "distca  step 4  imbalance 1.600 -> 1.000  2.0 MB a layer  plan 6.5 ms, waited 2.5 ms",
    ]
    timed = plan_report(attention_ms=[7.0, 8.0, 7.5, 9.25], exposed_ms=[0.5, 1.0, 1.5, 0.75])
    hidden = line(0, [timed.record()])
    assert "attention 7.0-9.2 ms, exposed 0.5-1.5 ms  " in hidden
    assert hidden.endswith("plan 4.0 ms, hidden")


def monitored(monkeypatch, caplog, exposed_ms, num_steps=8, can_ping_pong=True, **settings):
    """Return the log of steps of 100 ms, every second of which was timed."""
    clock = iter(range(num_steps))
    monkeypatch.setattr("time.perf_counter", lambda: 0.1 * next(clock))
    caplog.clear()
    monitor = Monitor(distca.Watching(**settings))
    for step in range(num_steps):
        start = 1000.0 if step < 2 else 0.0  # the start of the run is slow
        times = [exposed_ms + start + step // 2, exposed_ms + start + step // 2 + 2]
        timed = plan_report(num_ranks=2, attention_ms=[5000.0] * 2, exposed_ms=times)
        monitor.record(step, {**timed.record(), "can_ping_pong": can_ping_pong})
    monitor.close()
    return [each.getMessage() for each in caplog.records if "PingPong" in each.getMessage()]


def test_exposed_communication_asks_for_ping_pong_once(monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.INFO, "distca")
    (advice,) = monitored(monkeypatch, caplog, 5.5)  # means 7.5 and 8.5 of 100 ms by then
    assert advice.startswith("distca: 8% of the step is exposed communication: wrap blocks in")
    assert not monitored(monkeypatch, caplog, 1.0)
    assert not monitored(monkeypatch, caplog, 5.5, can_ping_pong=False)
    assert not monitored(monkeypatch, caplog, 5.5, num_steps=4), "too few timed steps"
    monitored(monkeypatch, caplog, 5.5, run_dir=str(tmp_path))
    values = report.run_summary(report.read_steps(tmp_path))
    assert values["exposed_share"] == pytest.approx(0.085)  # of the second to fourth timed steps
    assert report.table(values).splitlines()[-1] == values["advice"]
    assert "exposed communication  8.5% of a step" in report.table(values)


def test_predictions_for_an_assumed_shape_are_scaled_to_the_known_one(tmp_path):
    monitor = Monitor(distca.Watching(run_dir=str(tmp_path)))
    record = {**plan_report().record(), "kept_mb": 12e-6, "kept_bytes": [4, 8]}
    for step in range(2):
        monitor.record(step, record, work=(8.0, 6.0), is_assumed=True)
    assert (tmp_path / "steps.jsonl").read_text() == ""
    monitor.record(2, record, work=(2.0, 3.0))
    monitor.record(3, record, work=(2.0, 3.0), is_assumed=True)
    monitor.close()
    steps = report.read_steps(tmp_path)
    assert [each["step"] for each in steps] == [0, 1, 2, 3]
    for each, seconds, moved in zip(steps, (0.25, 0.25, 1, 1), (0.5, 0.5, 1, 1), strict=True):
        assert each["seconds_before"] == [seconds * value for value in record["seconds_before"]]
        assert each["bytes_in"] == [moved * value for value in record["bytes_in"]]
        assert each["kept_bytes"] == [moved * value for value in record["kept_bytes"]]
        assert each["moved_mb"] == moved * record["moved_mb"]
        assert each["kept_mb"] == moved * record["kept_mb"]
        assert each["imbalance_before"] == record["imbalance_before"]


def test_records_do_not_wait_forever(tmp_path):
    monitor, record = Monitor(distca.Watching(run_dir=str(tmp_path))), plan_report().record()
    for step in range(100):
        monitor.record(step, record, work=(8.0, 6.0), is_assumed=True)
    assert len(report.read_steps(tmp_path)) > 80
    monitor.close()
    assert [each["step"] for each in report.read_steps(tmp_path)] == list(range(100))


def test_no_records_are_kept_without_lines():
    monitor = Monitor(distca.Watching())
    for step in range(100):
        monitor.record(step, plan_report().record())
    assert len(monitor._recent) <= 1


def test_a_full_disk_ends_the_records_but_not_the_training(tmp_path, caplog):
    monitor = Monitor(distca.Watching(run_dir=str(tmp_path)))

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    monitor._file.close()
    monitor._file = Full()
    for step in range(3):
        monitor.record(step, plan_report().record())
    monitor.close()
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "records end at step 0: [Errno 28] No space left on device"
    ]


def test_scalars_reach_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monitor = Monitor(distca.Watching(run_dir=str(tmp_path), tensorboard=True))
    times = {"attention_ms": [2.0, 4.0, 2.0, 4.0], "exposed_ms": [0.5, 1.0, 0.5, 0.0]}
    record = {**plan_report(**times).record(), "can_ping_pong": True}
    for step in range(3):
        monitor.record(step, record)
    monitor.close()
    accumulator = events.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    values = scalars(record)
    assert values["attention_ms_mean"] == 3.0 and values["attention_ms_max"] == 4.0
    assert values["exposed_ms_mean"] == 0.5 and values["exposed_ms_max"] == 1.0
    for name, value in values.items():
        read = accumulator.Scalars(f"distca/{name}")
        assert [each.step for each in read] == [0, 1, 2]
        assert read[1].value == pytest.approx(value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"log_every": -1}, "log_every is -1; expected 0 or more"),
        ({"tensorboard": True}, "tensorboard is True, run_dir None; expected a folder"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        distca.Watching(**settings)


def test_a_record_costs_less_than_half_a_percent_of_a_step(tmp_path):
    """A record of 64 ranks costs less than half a percent of a step of 100 ms.

    Only the cheapest of many records count, because the others shared the processor's caches with
    other programs.
    """
    monitor = Monitor(distca.Watching(log_every=10, run_dir=str(tmp_path)))
    report_of_ranks = plan_report(num_ranks=64, attention_ms=[8.0] * 64, exposed_ms=[0.5] * 64)
    costs = []
    for step in range(300):
        start = time.thread_time()
        monitor.record(step, report_of_ranks.record())
        costs.append(time.thread_time() - start)
    monitor.close()
    assert sorted(costs)[len(costs) // 10] < 0.5e-3


SCRIPT = """
import torch, torch.distributed as dist
import distca
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(4):
    documents = distca.Documents([0, 900] if rank else [0, 40])
    q = torch.randn(documents.num_tokens, 2, 8, requires_grad=True)
    distca.plan(documents)
    distca.core_attention(q, q, q, documents).sum().backward()
dist.destroy_process_group()
"""


def test_a_script_needs_only_the_launchers_flags(tmp_path):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    flags = ["--log-every", "2", "--run-dir", run_dir]
    result = run_ranks(["-m", "distca.run", *flags, script], 2, ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    lines = [each for each in result.stdout.splitlines() if each.startswith("distca  step")]
    assert [each.split("  ")[1] for each in lines] == ["step 2", "step 4"]
    assert "imbalance before" in result.stdout, "the closing table"
    steps = report.read_steps(run_dir)
    assert len(steps) == 4
    seconds = [each["seconds_before"] for each in steps]
    assert seconds[0] == pytest.approx(seconds[1]), "no attention of another shape"
