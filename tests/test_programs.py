"""Forked programs end as new interpreters do, and those that go on are noticed."""

import os
import subprocess

import programs
import pytest

SCRIPT = """
import atexit, os, sys
import helper
atexit.register(lambda: print("at exit", os.environ["RANK"], sys.argv[1:], helper.VALUE))
if os.environ["RANK"] == "1":
    raise KeyError("layers.417.weight")
"""


def test_a_program_has_its_own_environment_exit_code_and_exit_handlers(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 42\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    result = programs.run_ranks([tmp_path / "script.py", "-x"], 1, dict(os.environ), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "at exit 0 ['-x'] 42\n"
    result = programs.run_ranks(["-m", "script"], 2, dict(os.environ), tmp_path)
    assert result.returncode == 1
    assert result.stderr.endswith("KeyError: 'layers.417.weight'\n")
    assert "at exit 1 [] 42" in result.stdout


def test_processes_that_go_on_are_noticed(tmp_path, running):
    (tmp_path / "script.py").write_text(
        "import subprocess; subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)"
    )
    with (tmp_path / "output").open("w") as output:
        running.append(programs.start([tmp_path / "script.py"], dict(os.environ), output, output))
    assert running[0].wait(20) == 0
    (child,) = programs.survivors(running)
    os.kill(child, 9)
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    with (tmp_path / "output").open("w") as output:
        running.append(programs.start([tmp_path / "script.py"], dict(os.environ), output, output))
    with pytest.raises(subprocess.TimeoutExpired):
        running[1].wait(0.1)
    assert programs.survivors(running[1:]) == [running[1].pid]
