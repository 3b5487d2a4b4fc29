"""A rank of a training script dies or raises.

All others end with an error that names it and quotes its message. No exit code is 0, and no process
survives.
"""

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import programs
import pytest
from kill_at import VICTIM
from processes import run_command

import distca

SCRIPT = Path(__file__).parent / "fault_script.py"
MARK = "DISTCA_TEST_RUN"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(distca.__file__).parents[1]),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
HANG_S = 40  # includes the start-up of three processes
LIMIT_S = 16.0  # from the first exit to the last; a busy machine takes seconds to end a process
pytestmark = pytest.mark.usefixtures("test_extension")


def marked(run: str) -> list[int]:
    """Return the processes of this run that are still alive."""
    alive = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={run}".encode() in (process / "environ").read_bytes():
                alive.append(int(process.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return alive


@pytest.fixture
def environment():
    """Yield the environment of a run, and kill the processes that survive it."""
    run = uuid.uuid4().hex
    yield {**ENVIRONMENT, MARK: run}
    for process in marked(run):
        os.kill(process, signal.SIGKILL)


def run_ranks(fault: str, folder: Path, processes: list) -> list[tuple[int, str]]:
    """Run three ranks without a launcher. Return (exit code, output) of each."""
    for rank, place in enumerate(programs.places(3, programs.free_port())):
        with (folder / f"{rank}").open("w") as output:
            processes.append(
                programs.start([SCRIPT, fault], {**ENVIRONMENT, **place}, output, output)
            )
    deadline, first_exit = time.monotonic() + HANG_S, None
    while (running := [p for p in processes if p.poll() is None]) and time.monotonic() < deadline:
        if first_exit is None and len(running) < len(processes):
            first_exit = time.monotonic()
        time.sleep(0.05)
    errors = [(folder / f"{rank}").read_text() for rank in range(3)]
    hanging = [rank for rank, process in enumerate(processes) if process.poll() is None]
    assert not hanging, f"ranks {hanging} hang:\n" + "\n".join(errors)
    assert first_exit is None or time.monotonic() - first_exit < LIMIT_S, errors
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


MESSAGES = {  # parts of the victim's own error and of the others'
    "raise_in_the_model": ("KeyError: 'layers.417.weight'",) * 2,
    "raise_while_planning_ahead": ("KeyError: 'layers.417.weight'",) * 2,
    "run_out_of_memory": ("can't allocate memory",) * 2,
    "pass_wrong_rows_in_a_later_layer": ("documents of this rank have 463",) * 2,
    "exit_early": ("", "has ended its process"),
    "die_inside_combine": ("", "is dead"),
}


@pytest.mark.parametrize("fault", MESSAGES)
def test_every_rank_of_a_script_ends_with_the_error(tmp_path, running, fault):
    ended = run_ranks(fault, tmp_path, running)
    own, others = MESSAGES[fault]
    for rank, (code, error) in enumerate(ended):
        assert code != 0, error
        if rank == VICTIM:
            assert own in error
            continue
        last = error.strip().splitlines()[-1]
        assert "torch.distributed.DistBackendError: distca: " in last, error
        assert f"rank {VICTIM} " in last and others in last, error
        assert "rank 0 failed" not in last and "rank 2 failed" not in last, error
    assert programs.survivors(running) == []


@pytest.mark.parametrize("fault", ["raise_in_the_model", "die_inside_combine"])
def test_torchrun_ends_with_the_error(environment, fault):
    started = time.monotonic()
    result = run_command(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3",
         "--master-port", str(programs.free_port()), str(SCRIPT), fault],
        env=environment, timeout_s=HANG_S,
    )  # fmt: skip
    assert result.returncode != 0
    assert MESSAGES[fault][0] in result.stderr
    assert f"rank      : {VICTIM} " in result.stderr, result.stderr
    assert marked(environment[MARK]) == []
    assert time.monotonic() - started < HANG_S / 2
