"""The launcher: flags for distca, everything else for the script."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from processes import run_command
from programs import run_alone, run_ranks

import distca
from distca import options, run

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

REPORT = """
import json, os, sys
import torch.nn.functional as F
import neighbour
import distca
from distca.ranks import session
report = {
    "argv": sys.argv,
    "name": __name__,
    "path": sys.path[0],
    "neighbour": neighbour.VALUE,
    "patched": F.scaled_dot_product_attention is distca.scaled_dot_product_attention,
    "default": repr(session.configured()),
}
"""
WRITE = "json.dump(report, open(os.environ['REPORT'] + os.environ.get('RANK', ''), 'w'))\n"
IN_A_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
opened = distca.init()
report["options"] = repr(opened.options)
report["ranks"] = opened.num_ranks
plan = distca.plan(distca.Documents([0, 5] if opened.rank else [0, 2000]))
report["bytes"] = sum(plan.report().bytes_out)
distca.close()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    """Return script(text), which writes a script beside a module and returns its path.

    The folder is not the working directory.
    """

    def write(text: str) -> Path:
        folder = tmp_path / "scripts"
        folder.mkdir(exist_ok=True)
        (folder / "neighbour.py").write_text("VALUE = 42\n")
        path = folder / "train.py"
        path.write_text(text)
        return path

    return write


def launch(arguments: list, tmp_path: Path, num_ranks: int = 1) -> subprocess.CompletedProcess:
    """Run distca.run in a new interpreter; two ranks by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", "distca.run"]
    return run_command(
        [*command, *map(str, arguments)],
        cwd=tmp_path,
        env={**ENVIRONMENT, "REPORT": str(tmp_path / "report")},
    )


def launch_forked(arguments: list, tmp_path: Path, num_ranks: int = 1):
    """Run distca.run in processes that start quickly."""
    command = ["-m", "distca.run", *arguments]
    if num_ranks > 1:
        return run_ranks(command, num_ranks, ENVIRONMENT, tmp_path)
    return run_alone(command, ENVIRONMENT, tmp_path)


def test_help_lists_every_option(tmp_path):
    result = launch_forked(["--help"], tmp_path)
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    words = re.sub(r"\W+", "", result.stdout)  # argparse breaks lines, also at hyphens
    for kind in run.SETTINGS:
        for field in fields(kind):
            assert "--" + field.name.replace("_", "-") in text
            assert f"(default: {field.default})" in text
        for name, documented in options.field_help(kind).items():
            assert re.sub(r"\W+", "", documented) in words, f"the help of {name} is missing"
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize("flags, num_ranks", [(["--log-every", "1"], 1), ([], 2)])
def test_a_script_that_never_calls_distca_is_told_so(script, tmp_path, flags, num_ranks):
    result = launch_forked([*flags, script("")], tmp_path, num_ranks)
    assert result.returncode == 0
    assert result.stderr.count("train.py ended without a plan, so nothing was balanced") == 1
    assert "pass --patch-sdpa or --transformers or --megatron, or call distca.plan" in result.stderr


@pytest.mark.parametrize(
    "given, ways",
    [
        ({"patch_sdpa": True}, "pass --document-end-id or --document-positions, or call"),
        ({"transformers": True}, "pass --patch-sdpa or --megatron, or call"),
        (
            {"patch_sdpa": True, "document_end_id": 2},
            "pass --transformers or --megatron, or call",
        ),
    ],
)
def test_the_hint_leaves_out_flags_that_were_given(given, ways):
    assert run.ways_to_plan(run.Launch(**given)).startswith(ways)


def test_a_missing_package_is_named_before_the_script_runs(script, monkeypatch, capsys):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run.main(["--transformers", str(script("raise KeyError"))])
    assert "--transformers needs transformers (pip install" in capsys.readouterr().err


@pytest.mark.parametrize("kind", run.SETTINGS)
def test_every_field_is_documented(kind):
    assert set(options.field_help(kind)) == {field.name for field in fields(kind)}


@pytest.mark.parametrize(
    "name, place",
    [("log_every", "distca.Watching"), ("run_dir", "distca.Watching"), ("patch_sdpa", "launcher")],
)
def test_options_that_moved_are_refused_with_their_new_place(name, place):
    with pytest.raises(ValueError, match=f"{name} is no option of attention: .*{place}"):
        distca.Options(tolerance=0.1, **{name: True})


def test_the_script_runs_as_without_the_launcher(script, tmp_path):
    path = script(REPORT + WRITE)
    arguments = ["--tolerance", "0.07", path, "--tolerance", "9", "data", "--help"]
    result = launch(arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report").read_text())
    assert report["argv"] == [str(path), "--tolerance", "9", "data", "--help"]
    assert report["name"] == "__main__"
    assert Path(report["path"]) == path.parent
    assert report["neighbour"] == 42
    assert report["default"] == repr(distca.Options(tolerance=0.07))
    assert not report["patched"]


def test_a_module_runs_as_by_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 42\n")
    (package / "train.py").write_text(
        "import json, os, sys\nfrom . import VALUE\n"
        "report = {'argv': sys.argv, 'name': __name__, 'value': VALUE}\n" + WRITE
    )
    result = launch(["--log-every", "1", "-m", "package.train", "-m", "data"], tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report").read_text())
    argv = [str(package / "train.py"), "-m", "data"]
    assert report == {"argv": argv, "name": "__main__", "value": 42}


def test_under_torchrun_options_reach_the_group(script, tmp_path):
    path = script(REPORT + IN_A_GROUP + WRITE)
    flags = ["--patch-sdpa", "--no-enabled", "--link-gb-per-s", "12.5", "--timeout-s", "60"]
    result = launch([*flags, path, "x"], tmp_path, num_ranks=2)
    assert result.returncode == 0, result.stderr
    wanted = distca.Options(enabled=False, link_gb_per_s=12.5, timeout_s=60.0)
    for rank in range(2):
        report = json.loads((tmp_path / f"report{rank}").read_text())
        assert report["options"] == repr(wanted)
        assert report["patched"] and report["ranks"] == 2
        assert report["argv"] == [str(path), "x"]
        assert report["bytes"] == 0, "disabled, yet the plan moves rows"


def test_an_exception_of_the_script_fails_the_launch(script, tmp_path):
    result = launch_forked([script("raise RuntimeError('planted failure')\n")], tmp_path)
    assert result.returncode not in (0, 2)
    assert "planted failure" in result.stderr


def test_the_launcher_returns_the_scripts_exit_code(script, tmp_path):
    assert launch_forked([script("import sys; sys.exit(7)\n")], tmp_path).returncode == 7


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--tolerance", "much", "SCRIPT"], "--tolerance"),
        (["--tolerance", "1.5", "SCRIPT"], "tolerance is 1.5"),
        (["--timeout-s", "-1", "SCRIPT"], "timeout_s is -1"),
        (["--attention-tflops", "nan", "SCRIPT"], "attention_tflops is nan"),
        (["--no-such-flag", "SCRIPT"], "--no-such-flag"),
        (["--tolerance", "0.1"], "required: script\n"),
        (["no_such_script.py"], "no_such_script.py"),
    ],
)
def test_bad_flags_exit_with_2_and_are_named(script, capfd, arguments, named):
    path = str(script("raise AssertionError('must not run')\n"))
    with pytest.raises(SystemExit) as stopped:
        run.main([path if argument == "SCRIPT" else argument for argument in arguments])
    assert stopped.value.code == 2
    assert named in capfd.readouterr().err


def test_flags_make_options():
    flags = ["--cost-table", "t.json", "--attention-tflops", "2", "--no-enabled"]
    flags += ["--log-every", "3", "--document-end-id", "2", "--patch-sdpa", "train.py"]
    for arguments, settings in (
        (["train.py"], [kind() for kind in run.SETTINGS]),
        (
            flags,
            [
                distca.Options(cost_table="t.json", attention_tflops=2.0, enabled=False),
                distca.Watching(log_every=3),
                run.Launch(document_end_id=2, patch_sdpa=True),
            ],
        ),
    ):
        parsed = run.parser().parse_args(arguments)
        assert [options.from_flags(parsed, kind) for kind in run.SETTINGS] == settings
