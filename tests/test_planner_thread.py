"""When the planner thread begins its calls."""

import time

from distca.ranks.planner_thread import PlannerThread

FOREVER_S = 3600.0


def test_calls_wait_while_nobody_awaits_them():
    thread = PlannerThread(patience_s=0.5)
    start = time.monotonic()
    begun = [thread.submit(time.monotonic) for _ in range(2)]
    while not all(future.done() for future in begun):
        time.sleep(0.01)
    thread.close()
    assert all(future.result() - start >= 0.5 for future in begun)


def test_awaited_calls_begin_at_once():
    thread = PlannerThread(FOREVER_S)
    calls = [thread.submit(lambda value=value: value) for value in range(3)]
    assert calls[2].result(60) == 2
    assert [future.done() for future in calls] == [True] * 3
    later = thread.submit(lambda: 3)
    time.sleep(0.1)
    assert not later.done(), "an earlier wait is over"
    assert later.result(60) == 3
    thread.close()


def test_calls_begin_when_the_thread_is_closed():
    thread = PlannerThread(FOREVER_S)
    last = thread.submit(lambda: "saved")
    thread.close()
    thread.join(60)
    assert last.done() and last.result() == "saved"
