"""A server or a rank that trains dies, stops, raises or skips a call: all others end with an error
that names it, and no process survives."""

import os
import signal
import time
from pathlib import Path

import programs
import pytest
from test_fault_scripts import ENVIRONMENT

SCRIPT = Path(__file__).parent / "server_fault_script.py"
TIMEOUT_S = 4.0
START_S, LIMIT_S = 60, TIMEOUT_S + 8
NUM_RANKS = 4
TRAINER = 1  # as the script's VICTIM

FAULTS = {  # servers, victim, what happens to it, what the others say
    "server killed": ("1", 3, signal.SIGKILL, "rank 3 is dead"),
    "one of two servers killed": ("2", 2, signal.SIGKILL, "rank 2 is dead"),
    "server stopped": ("1", 3, signal.SIGSTOP, "rank 3 is stopped"),
    "trainer killed": ("2", TRAINER, signal.SIGKILL, "rank 1 is dead"),
    "first trainer killed": ("1", 0, signal.SIGKILL, "rank 0 is dead"),
    "trainer stopped": ("1", TRAINER, signal.SIGSTOP, "rank 1 is stopped"),
    "trainer raises": ("1", TRAINER, "raise", "rank 1 failed: KeyError: 'layers.417.weight'"),
    "trainer skips a layer": ("2", TRAINER, "skip", "rank 1"),
}


def start(servers: str, fault: str, folder: Path) -> list:
    flags = ["--attention-servers", servers, "--timeout-s", TIMEOUT_S, "--link-gb-per-s", "1e5"]
    processes = []
    for rank, place in enumerate(programs.places(NUM_RANKS, programs.free_port())):
        environment = {**ENVIRONMENT, **place, "STARTED": str(folder / "started")}
        with (folder / f"{rank}").open("w") as output:
            arguments = ["-m", "distca.run", *flags, SCRIPT, fault]
            processes.append(programs.start(arguments, environment, output, output))
    return processes


def await_start(folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while not (folder / "started").exists():
        errors = [(folder / f"{rank}").read_text() for rank in range(NUM_RANKS)]
        has_failed = any("Traceback" in error for error in errors)
        if has_failed and (folder / "started").exists():
            return  # a rank has failed since then, as it should
        assert not has_failed and time.monotonic() < deadline, errors
        time.sleep(0.05)


@pytest.mark.parametrize("name", FAULTS)
def test_every_other_rank_ends_with_an_error(tmp_path, running, name):
    servers, victim, fault, message = FAULTS[name]
    is_signal = isinstance(fault, signal.Signals)
    processes = start(servers, "none" if is_signal else fault, tmp_path)
    running += processes
    await_start(tmp_path)
    if is_signal:
        os.kill(processes[victim].pid, fault)
    begin = time.monotonic()
    others = [rank for rank in range(NUM_RANKS) if rank != victim]
    for rank in others:
        processes[rank].wait(max(0.1, begin + LIMIT_S - time.monotonic()))
    if is_signal:
        os.kill(processes[victim].pid, signal.SIGKILL)
    processes[victim].wait(LIMIT_S)
    for rank in others:
        error = (tmp_path / f"{rank}").read_text()
        assert processes[rank].returncode != 0, error
        last = error.strip().splitlines()[-1]
        assert "torch.distributed.DistBackendError: distca: " in last and message in last, error
    assert programs.survivors(processes) == []
