"""A rank dies, stops, sleeps or raises, and the others end with an error that names it.

They end within the timeout, whether rows travel through peer memory or by NCCL.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_fault_script import FAULTS, TIMEOUT_S, VICTIM
from ranks import open_store

import distca

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parent / "gpu_fault_script.py"
START_S = 40  # of processes with CUDA
MESSAGES = {
    "die": "is dead",
    "stop": "is stopped",
    "raise_error": "KeyError: 'layers.417.weight'",
    "sleep": "",
    "run_out_of_memory": "out of memory",
}


def survivor(process: subprocess.Popen, deadline: float) -> tuple[int, str]:
    try:
        _, error = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        _, error = process.communicate()
        pytest.fail("hangs:\n" + error)
    return process.returncode, error


def errors_of_survivor(fault: str, moment: str, failing_pass: str, transport: str) -> str:
    """Return the error output of the other rank, which must end with a nonzero exit code."""
    if transport == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    store = open_store()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(distca.__file__).parents[1]),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun, whose agent hosts the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), fault, moment, failing_pass, transport],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        code, error = survivor(processes[1 - VICTIM], time.monotonic() + START_S + 2 * TIMEOUT_S)
    finally:
        processes[VICTIM].send_signal(signal.SIGKILL)
        processes[VICTIM].communicate()
    assert code != 0, error
    return error


def last_named(error: str) -> str:
    named = [line for line in error.splitlines() if "DistBackendError: distca: " in line]
    assert named, error
    return named[-1]


@pytest.mark.parametrize("failing_pass", ["forward", "backward"])
@pytest.mark.parametrize(
    "fault",
    [
        *(fault for fault in FAULTS if fault != "run_out_of_memory"),
        pytest.param("run_out_of_memory", marks=pytest.mark.whole_gpu),
    ],
)
@pytest.mark.parametrize("transport", ["peer", "process_group"])
def test_the_others_name_the_rank_at_fault(fault, failing_pass, transport):
    message = last_named(errors_of_survivor(fault, "fail_between_calls", failing_pass, transport))
    assert f"rank {VICTIM} " in message and MESSAGES[fault] in message
    assert f"{failing_pass} pass" in message


@pytest.mark.parametrize("transport", ["peer", "process_group"])
def test_a_busy_store_delays_no_error(transport):
    started = time.monotonic()
    message = last_named(
        errors_of_survivor("die", "fail_beside_a_busy_store", "forward", transport)
    )
    assert f"rank {VICTIM} is dead" in message
    assert time.monotonic() - started < START_S + TIMEOUT_S


@pytest.mark.parametrize("failing_pass", ["forward", "backward"])
@pytest.mark.parametrize("fault", ["die", "stop", "sleep"])
def test_copies_to_a_rank_at_fault(fault, failing_pass):
    message = last_named(errors_of_survivor(fault, "fail_between_copies", failing_pass, "peer"))
    assert f"rank {VICTIM} " in message and MESSAGES[fault] in message
    assert f"attention layer 1, {failing_pass} pass" in message


def test_a_rank_fails_before_buffers_grow():
    """The error names the earlier call in which the device still waits."""
    message = last_named(errors_of_survivor("die", "fail_before_growth", "forward", "peer"))
    assert f"rank {VICTIM} is dead" in message
    assert "of attention layer 1, forward pass, step 0" in message


@pytest.mark.parametrize(
    "fault, failing_pass",
    [("die", "forward"), ("stop", "backward"), ("raise_error", "backward"), ("sleep", "forward")],
)
def test_a_rank_fails_while_buffers_grow(fault, failing_pass):
    message = last_named(errors_of_survivor(fault, "fail_in_growth", failing_pass, "peer"))
    assert f"rank {VICTIM} " in message and MESSAGES[fault] in message
    assert f"growth of peer memory of attention layer 0, {failing_pass} pass, step 1" in message
