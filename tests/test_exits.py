"""Exit codes of processes that leave a group, and errors of the ranks that continue."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exit_script import ODD, SIGNALLED, WAYS

import distca

SCRIPT = Path(__file__).parent / "exit_script.py"
LIMIT_S = 25  # including start-up; far below the group's timeout of 40
OTHERS = [rank for rank in range(3) if rank != ODD]
Outcome = tuple[int, str, float]  # exit code, standard error, seconds


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, list[Outcome]]:
    """Return each rank's outcome by way. One process runs all ways, because it starts slowly."""
    folder = tmp_path_factory.mktemp("ways")
    package = str(Path(distca.__file__).parents[1])
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *WAYS],
        env={**os.environ, "PYTHONPATH": package, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        check=True,
        timeout=400,
    )
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in WAYS}


def test_every_rank_ends_in_time(ended):
    for name, outcomes in ended.items():
        for rank, (_, error, seconds) in enumerate(outcomes):
            assert seconds < LIMIT_S, f"{name}: rank {rank} took {seconds:.0f} s: {error}"
            assert "terminate called" not in error, f"{name}: rank {rank}: {error}"


def test_early_exits_with_a_pending_plan_succeed(ended):
    """Ranks exit with and without distca.close and destroy_process_group."""
    names = [name for name in WAYS if name.startswith("end_early")]
    for name, outcomes in ((name, ended[name]) for name in names):
        assert [code for code, _, _ in outcomes] == [0, 0, 0], f"{name}: {outcomes}"


def last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


MESSAGES = {  # the odd rank's exit code, and a part of the others' error
    "skip_backward_pass": (0, "backward pass, step 0: rank 1 has ended its process"),
    "close_in_finally": (1, "rank 1 failed: KeyError: 'layers.417.weight'"),
    "raise_with_a_plan": (1, "rank 1 failed: KeyError: 'layers.417.weight'"),
    "close_while_others_plan": (0, "plan, step 1: rank 1 has closed its session"),
    "end_while_others_plan": (0, "plan, step 1: rank 1 has ended its process"),
    "close_while_others_attend": (0, "forward pass, step 0: rank 1 has closed its session"),
    "close_before_another_attends": (0, "forward pass, step 0: rank 1 has closed its session"),
}


def test_a_rank_that_leaves_is_named_by_those_that_continue(ended):
    for name, (code, message) in MESSAGES.items():
        outcomes = ended[name]
        assert outcomes[ODD][0] == code, f"{name}: {outcomes[ODD]}"
        if code:
            assert last_line(outcomes[ODD][1]).endswith("KeyError: 'layers.417.weight'")
        for rank in OTHERS:
            assert outcomes[rank][0] == 1, f"{name}: {outcomes[rank]}"
            assert "DistBackendError: distca: " in last_line(outcomes[rank][1]), name
            assert message in last_line(outcomes[rank][1]), f"{name}: {outcomes[rank][1]}"
            assert outcomes[ODD][0] or "distca.join" in last_line(outcomes[rank][1])


def test_an_interrupt_ends_a_wait_at_once(ended):
    names = [name for name in WAYS if name.startswith("interrupt")]
    for name, outcomes in ((name, ended[name]) for name in names):
        code, error, _ = outcomes[SIGNALLED]
        assert code == -2, f"{name}: {error}"  # as Python ends uncaught KeyboardInterrupts
        assert last_line(error).endswith("KeyboardInterrupt"), f"{name}: {error}"
        seconds = float(re.search(r"interrupted after ([0-9.]+) s", error)[1])
        assert seconds < 2.0, f"{name}: signal after 0.7 s, end of the wait after {seconds} s"
        assert "rank 2 failed: KeyboardInterrupt" in last_line(outcomes[0][1]), outcomes[0][1]


def test_the_wait_continues_after_a_handler_that_does_not_raise(ended):
    outcomes = ended["handle_a_signal"]
    assert [code for code, _, _ in outcomes] == [0, 0, 0], outcomes


def test_a_failed_init_leaves_no_thread(ended):
    outcomes = ended["fail_to_open"]
    assert [code for code, _, _ in outcomes] == [0, 0, 0], outcomes
