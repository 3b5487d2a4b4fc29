"""Records, traces and pictures of the planned and measured ticks of a pipeline."""

import json

import pipelined
import pytest
from pipelined import Pipeline

from distca.ranks.planner_thread import PlannerThread
from distca.watching import report
from distca.watching.figures import FORWARD_SHARE
from distca.watching.ticks import TickTimes, draw_ticks, save_ticks, trace_of_ticks
from distca.watching.trace import read_times

SLOW_RANK, SLOW_S = 2, 0.03  # of the last of two stages, which has two of five layers
SHARES = {"F": FORWARD_SHARE, "B": 1 - FORWARD_SHARE}


def num_calls(tick: str) -> int:
    """Return how many calls of attention each rank makes in a tick of stages with 3 and 2 layers.
    A rank serves the calls of other stages."""
    stages = {each[0] for each in tick.split(": ")[1].split()}
    return 3 if "0" in stages else 2


def test_ticks_are_recorded_as_planned_and_as_measured(own_ranks, tmp_path):
    pytest.importorskip("matplotlib")
    plans = own_ranks(4).run(pipelined.timed_step, Pipeline(), str(tmp_path), SLOW_RANK, SLOW_S)
    names = list(dict.fromkeys(name for name, _ in plans[0]))
    records = report.read_steps(tmp_path)
    assert [each["tick"] for each in records[: len(plans[0])]] == [name for name, _ in plans[0]]
    saved = read_times(tmp_path / "ticks")
    assert [(each["rank"], each["step"]) for each in saved] == [(rank, 0) for rank in range(4)]
    for rank, each in enumerate(saved):
        assert [tick["name"] for tick in each["ticks"]] == names
        for tick, following in zip(each["ticks"], [*each["ticks"][1:], None], strict=True):
            check_tick(rank, tick, [seconds for name, seconds in plans[0] if name == tick["name"]])
            assert following is None or tick["end"] <= following["begin"]
    report.draw_run(tmp_path)
    events = json.loads((tmp_path / "ticks.json").read_text())["traceEvents"]
    assert {each["name"] for each in events if each.get("tid") == 1} >= {"tick 0: 0F0 (serves)"}
    assert (tmp_path / "ticks.png").stat().st_size > 10_000


def test_times_that_cannot_be_saved_end_in_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    thread = PlannerThread()
    with caplog.at_level("WARNING"):
        thread.save("ticks of step 3", save_ticks, tmp_path / "file", 0, 3, [])
        assert thread.submit(lambda: "alive").result(10) == "alive"
    thread.close()
    assert "ticks of step 3 not saved: NotADirectoryError: " in caplog.text


def check_tick(rank: int, tick: dict, plans: list[list[float]]) -> None:
    """`plans` are the seconds by rank of the tick's plans, each for one call or for several."""
    name = tick["name"]
    assert tick["is_forward"] == ("F" in name), tick
    passes = [each for each in name.split(": ")[1].split() if int(each[0]) == rank // 2]
    assert tick["own"] == "".join(passes), tick
    assert len(tick["attention"]) == num_calls(name), tick
    share = SHARES["F" if tick["is_forward"] else "B"]
    least, most = (1e3 * share * each(seconds[rank] for seconds in plans) for each in (min, max))
    calls = num_calls(name)
    assert 0.999 * least * calls <= tick["planned_ms"] <= 1.001 * most * calls, tick
    ends = [tick["begin"]]
    for begin, end in tick["attention"]:
        assert ends[-1] <= begin <= end <= tick["end"], tick
        ends.append(end)
    outside = tick["end"] - tick["begin"] - sum(end - begin for begin, end in tick["attention"])
    if rank == SLOW_RANK and tick["is_forward"] and tick["own"]:
        assert outside >= 2 * SLOW_S * 1e9, "the tick includes what attention does not"


def test_times_of_an_earlier_step_give_way(tmp_path):
    ticks = [
        TickTimes("tick 0: 0F0", "0F0", True, 2.0, 1_000_000, 4_000_000, [(2_000_000, 3_000_000)]),
        TickTimes("tick 1: 0B0", "", False, 5.0, 5_000_000, 9_000_000, [(6_000_000, 9_000_000)]),
    ]
    save_ticks(tmp_path, 0, 0, ticks[:1])
    save_ticks(tmp_path, 1, 3, ticks)
    (saved,) = read_times(tmp_path / "ticks")
    assert (saved["rank"], saved["step"], len(saved["ticks"])) == (1, 3, 2)
    events = [each for each in trace_of_ticks([saved])["traceEvents"] if each["ph"] == "X"]
    assert [(each["name"], each["tid"], each["ts"], each["dur"]) for each in events] == [
        ("tick 0: 0F0 (0F0)", 0, 0, 2000),
        ("tick 0: 0F0 (0F0)", 1, 0, 3000),
        ("tick 0: 0F0 (0F0)", 2, 1000, 1000),
        ("tick 1: 0B0 (serves)", 0, 4000, 5000),
        ("tick 1: 0B0 (serves)", 1, 4000, 4000),
        ("tick 1: 0B0 (serves)", 2, 5000, 3000),
    ]
    pytest.importorskip("matplotlib")
    planned, measured = draw_ticks(report.new_figure(8, 6), [saved]).axes
    assert [(bar.get_x(), bar.get_width()) for bar in planned.patches] == [(0, 2), (2, 5)]
    assert [text.get_text() for text in measured.texts] == ["0F0", ""]
