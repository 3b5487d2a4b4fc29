"""Scenarios in which a rank dies at an exact place of a step, for a group of three ranks.

Rank VICTIM kills itself after layers 0 and 1. The others continue until they get an error.
"""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import torch
from extension import at_phase
from small_step import SHARDED, small_step

import distca

VICTIM, SLOW = 1, 2
KILL_AFTER_S, DELAY_S = 0.4, 1.2  # the victim is blocked when it dies, because SLOW is late
LAYER = 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def occupy_store(seconds: float) -> None:
    """Let a thread wait `seconds` in the store of torch.distributed."""
    store = torch.distributed.distributed_c10d._get_default_store()

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            store.wait(["a key that nobody sets"], timedelta(seconds=seconds))

    threading.Thread(target=wait, daemon=True).start()


def _die_soon() -> None:
    threading.Timer(KILL_AFTER_S, die).start()


def _wait_then_die() -> None:
    time.sleep(KILL_AFTER_S)  # until sent rows have arrived
    die()


def _delay() -> None:
    time.sleep(DELAY_S)


def before_dispatch(rank, step, group_name):
    if rank == VICTIM:
        die()
    step.attend()


def inside_dispatch(rank, step, group_name):
    if rank == VICTIM:
        _die_soon()
    if rank == SLOW:
        _delay()
    step.attend()


def inside_attend(rank, step, group_name):
    if rank == VICTIM:
        at_phase(f"distca forward layer {LAYER} visiting tasks", KILL_AFTER_S, 0)
    step.attend()


def inside_combine(rank, step, group_name):
    if rank == VICTIM:
        _die_soon()
    if rank == SLOW:
        at_phase(f"distca forward layer {LAYER} visiting tasks", DELAY_S)
    step.attend()


def before_backward_dispatch(rank, step, group_name):
    out = step.attend()
    if rank == VICTIM:
        _wait_then_die()
    out.sum().backward()


def inside_backward_dispatch(rank, step, group_name):
    out = step.attend()
    if rank == VICTIM:
        _die_soon()
    if rank == SLOW:
        _delay()
    out.sum().backward()


def inside_backward_attend(rank, step, group_name):
    if rank == VICTIM:
        at_phase(f"distca backward layer {LAYER} visiting tasks", KILL_AFTER_S, 0)
    step.attend().sum().backward()


def inside_backward_combine(rank, step, group_name):
    if rank == VICTIM:
        at_phase(f"distca backward layer {LAYER} visiting tasks", 0, KILL_AFTER_S)
    if rank == SLOW:
        at_phase(f"distca backward layer {LAYER} visiting tasks", DELAY_S)
    step.attend().sum().backward()


def before_plan(rank, step, group_name):
    if rank == VICTIM:
        die()
    distca.plan(step.documents)


def before_plan_ahead(rank, step, group_name):
    if rank == VICTIM:
        die()
    distca.plan(step.documents, ahead=True)
    step.attend()


def inside_plan_ahead(rank, step, group_name):
    """Kill the victim while its planner thread waits in the exchange."""
    if rank == SLOW:
        _delay()
    distca.plan(step.documents, ahead=True)
    if rank == VICTIM:
        _wait_then_die()
    step.attend()


SCENARIOS = {
    function.__name__: function
    for function in (
        before_dispatch,
        inside_dispatch,
        inside_attend,
        inside_combine,
        before_backward_dispatch,
        inside_backward_dispatch,
        inside_backward_attend,
        inside_backward_combine,
        before_plan,
        before_plan_ahead,
        inside_plan_ahead,
    )
}


def run(rank: int, world_size: int, scenario: str, victim: int = VICTIM) -> None:
    """Run a scenario. For another victim all roles shift, so that SLOW follows the victim."""
    step = small_step(rank, world_size, SHARDED)
    group_name = distca.plan(step.documents).group_name
    step.attend()
    step.attend()
    role = (rank + VICTIM - victim) % world_size
    SCENARIOS[scenario](role, step, group_name)
    step.attend()
    raise AssertionError("no error")
