"""The pages of docs/ and the README agree with the code: generated pages, links and messages.

Every documented command runs in a short form.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import setuptools
import torch
import torch.distributed.run as torch_run
from module_files import module_of
from packaging.version import Version
from processes import run_command
from programs import run_ranks

import distca
from distca import report, run
from distca.explain import __main__ as explain
from distca.planning.plan_report import PlanReport
from distca.simulate import __main__ as simulate

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_COLUMNS = 120  # of prose; tables and blocks of code cannot be wrapped
MAX_PICTURE_BYTES = 150_000
COMMAND = re.compile(r"(make|torchrun|python|pip)\s")
CALIBRATION = ROOT / "tests" / "calibration_of_4_h200.json"
LENGTHS = [9000, 400, 400, 200, 3000, 50, 1200, 700]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    "OMP_NUM_THREADS": "1",
}

# Documented commands that other tests run, by their beginning.
ELSEWHERE = {
    "python -m distca.calibrate": ("test_calibrate.py::test_the_planner_reads_the_commands_file"),
    "torchrun --nproc-per-node 4 -m distca.calibrate": (
        "test_calibrate.py::test_the_planner_reads_the_commands_file"
    ),
    "python benchmarks/planner.py": "test_planner_benchmark.py::test_grid_is_saved",
    "torchrun --nproc-per-node 2 examples/transformers_finetune.py": (
        "test_transformers_training.py::test_the_example_trains"
    ),
    "torchrun --nproc-per-node 2 examples/trl_packing.py": (
        "test_transformers_training.py::test_the_example_trains"
    ),
    "torchrun --nproc-per-node 2 examples/rl_lengths.py": (
        "test_rl_lengths.py::test_the_example_trains_every_way_alike"
    ),
    "python examples/rl_lengths.py": "test_rl_lengths.py::test_lengths_are_written_without_ranks",
    "torchrun --nproc-per-node 8 -m verl.trainer.sft_trainer": "test_stacks.py::test_recipe",
    "torchrun --nproc-per-node 8 -m torchtitan.train": (
        "test_torchtitan.py::test_the_documented_command_configures_torchtitan"
    ),
    "torchrun --nproc-per-node 2 benchmarks/training_step.py": (
        "test_step_benchmarks.py::test_training_step_saves_its_figures"
    ),
    "torchrun --nproc-per-node 4 benchmarks/training_step.py": (
        "test_step_benchmarks.py::test_training_step_saves_its_figures"
    ),
    "torchrun --nproc-per-node 4 benchmarks/long_document.py": (
        "test_step_benchmarks.py::test_long_document_against_a_rank_alone"
    ),
    "torchrun --nproc-per-node 4 benchmarks/loss_curve.py": (
        "test_step_benchmarks.py::test_loss_curve_against_noise"
    ),
    "torchrun --nproc-per-node 2 benchmarks/pipeline_step.py": (
        "test_step_benchmarks.py::test_pipelines_train_alike"
    ),
    "torchrun --nproc-per-node 2 benchmarks/server_step.py server": (
        "test_server_step.py::test_a_server_takes_a_part_of_attention"
    ),
    "torchrun --nproc-per-node 4 benchmarks/server_step.py server": (
        "test_server_step.py::test_a_server_takes_a_part_of_attention"
    ),
    "torchrun --nproc-per-node 2 benchmarks/server_step.py slow": (
        "test_server_step.py::test_other_work_beside_one_rank"
    ),
    "python docs/generate.py": "test_docs.py::test_generated_pages_follow_the_code",
    "python benchmarks/attention.py": "test_docs.py::test_gpu_command",
    "python benchmarks/prefix_trees.py": (
        "test_prefixes.py::test_a_group_of_samples_takes_half_the_work_of_whole_documents"
    ),
    "torchrun --nproc-per-node 2 benchmarks/transport.py": "test_docs.py::test_gpu_command",
    "torchrun --nproc-per-node 2 examples/torchtitan_train.py": "test_docs.py::test_gpu_command",
}


def commands_of(page: Path) -> list[str]:
    """Return the shell commands in blocks without a language and in code spans."""
    text, fenced = page.read_text(), r"^```(\w*)\n(.*?)^```"
    lines = [
        line.split("#")[0]
        for language, block in re.findall(fenced, text, re.DOTALL | re.MULTILINE)
        if not language
        for line in block.replace("\\\n", "").splitlines()
    ]
    lines += re.findall(r"`([^`\n]+)`", re.sub(fenced, "", text, flags=re.DOTALL | re.MULTILINE))
    return [" ".join(line.split()) for line in lines if COMMAND.match(line.strip())]


def run_python(arguments: list, folder: Path) -> str:
    result = run_command(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def torchrun(arguments: list, folder: Path) -> str:
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_python([*started, *arguments], folder)


def run_two_ranks(arguments: list, folder: Path) -> str:
    result = run_ranks(arguments, 2, ENVIRONMENT, folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def with_files(arguments: list[str], folder: Path) -> list[str]:
    """Return the arguments with lengths.json and calibration.json replaced by existing files."""
    files = {"lengths.json": folder / "lengths.json", "calibration.json": CALIBRATION}
    files["lengths.json"].write_text(json.dumps(LENGTHS))
    return [str(files.get(each, each)) for each in arguments]


def check_explain(arguments: list[str], folder: Path) -> None:
    explain.main(with_files(arguments or ["--lengths", "9,4", "--ranks", "2"], folder))


def check_simulate(arguments: list[str], folder: Path) -> None:
    short = {"--ranks": "16", "--context": "16384", "--tokens": "16384", "--out": str(folder)}
    arguments = with_files(arguments or ["--distribution", "fixed:9000", "--ranks", "8"], folder)
    for index, name in enumerate(arguments):
        if name in short:
            arguments[index + 1] = short[name]
    simulate.main(
        [*arguments, "--layers", "2", *([] if "--steps" in arguments else ["--steps", "1"])]
    )


def check_report(arguments: list[str], folder: Path) -> None:
    record = PlanReport([2.0, 1.0], [1.5, 1.5], [9, 0], [0, 9], 1.0, 0.0).record()
    (folder / "steps.jsonl").write_text(json.dumps({"step": 0, **record}) + "\n")
    report.main([str(folder)])


def check_pip(arguments: list[str], folder: Path) -> None:
    """Check what pip would install. Other packages must be those of the Makefile."""
    names = [each for each in arguments if not each.startswith("-")]
    if names != ["."]:
        build_files = (ROOT / "Makefile").read_text() + (ROOT / "pyproject.toml").read_text()
        assert [each for each in names if each not in build_files] == []
        return
    if Version(setuptools.__version__) < Version("77"):
        pytest.skip("needs setuptools 77 or newer")
    offline = ["--dry-run", "--no-deps", "--no-build-isolation", "--no-index"]
    output = run_python(["-m", "pip", "install", *offline, ROOT], folder)
    assert f"Would install distca-{distca.__version__}" in output


def check_make(arguments: list[str], folder: Path) -> None:
    """Check what make would do if nothing were up to date."""
    command = ["make", "--dry-run", "--always-make", "-C", str(ROOT), *arguments]
    result = run_command(command, timeout_s=60)
    assert result.returncode == 0 and len(result.stdout.splitlines()) > 3, result.stderr


def check_watching(arguments: list[str], folder: Path) -> None:
    small = ["--layers", "1", "--tokens", "64", "--blocks", "2", "--out", folder]
    output = run_two_ranks([ROOT / "benchmarks" / "watching.py", *small], folder)
    assert re.search(r"us a step of 1 layers, \S+ % of a training step", output)


def check_pipeline(arguments: list[str], folder: Path) -> None:
    flags = ["--steps", "2", "--tokens", "256", "--micro-batches", "3", "--compare", "stages"]
    output = run_two_ranks([ROOT / "examples" / "pipeline.py", *flags], folder)
    assert "largest loss difference" in output


def check_host_time(arguments: list[str], folder: Path) -> None:
    output = run_python(
        [ROOT / "benchmarks" / "host_time.py", "--ranks", "1", "3", "--documents", "2"], folder
    )
    assert len(output.splitlines()) == 3, output


def check_plain_example(arguments: list[str], folder: Path) -> None:
    *flags, script = arguments
    launcher = ["-m", "distca.run", *flags, ROOT / script]
    output = run_two_ranks([*launcher, "--steps", "12", "--tokens-per-rank", "512"], folder)
    first, last = map(float, re.search(r"loss (\S+) -> (\S+)", output).groups())
    assert last < first
    assert "imbalance" in output


def check_torchrun(arguments: list[str], folder: Path) -> None:
    torch_run.get_args_parser().parse_args(["--max-restarts", "3", "train.py"])


def check_nodes(arguments: list[str], folder: Path) -> None:
    parsed = torch_run.get_args_parser().parse_args(["--nnodes", *arguments])
    assert parsed.nnodes == "4" and parsed.rdzv_backend == "c10d" and parsed.module
    assert parsed.training_script == "distca.run"
    check_launcher(parsed.training_script_args, folder)


def check_launcher(arguments: list[str], folder: Path) -> None:
    if arguments == ["--help"]:
        run.parser().format_help()
        return
    parsed = run.parser().parse_args(arguments)
    assert parsed.is_module or parsed.script in ("train.py", "pretrain_gpt.py")
    for kind in run.SETTINGS:
        run.from_flags(parsed, kind)


def check_train(arguments: list[str], folder: Path) -> None:
    """Check that the flags are those of the example. Other tests run it."""
    text = (ROOT / "examples" / "train.py").read_text()
    flags = shlex.split(" ".join(arguments).partition("TRAIN_FLAGS=")[2])
    for flag in shlex.split(flags[0]) if flags else []:
        assert not flag.startswith("--") or f'"{flag}"' in text
    assert "examples/train.py $(TRAIN_FLAGS)" in (ROOT / "Makefile").read_text()


def check_quickstart(arguments: list[str], folder: Path) -> None:
    (script,) = re.findall(
        r"^```python\n(import.*?)^```",
        (ROOT / "docs" / "quickstart.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    (folder / "quickstart.py").write_text(script)
    lines = run_two_ranks(["quickstart.py"], folder).splitlines()
    assert len(lines) == 20 and all(re.fullmatch(r"1\.[5-9]\d -> 1\.0\d", line) for line in lines)


CHECKS = {  # beginning of a command, and the function that checks the rest of it
    "python -m distca.explain": check_explain,
    "python -m distca.simulate": check_simulate,
    "python -m distca.report": check_report,
    "python -m distca.run": check_launcher,
    "torchrun --nproc-per-node 8 -m distca.run": check_launcher,
    "torchrun ... -m distca.run": check_launcher,
    "torchrun --nproc-per-node 2 quickstart.py": check_quickstart,
    "torchrun --nproc-per-node 2 -m distca.run": check_plain_example,
    "torchrun --nproc-per-node 2 benchmarks/watching.py": check_watching,
    "python benchmarks/host_time.py": check_host_time,
    "torchrun --nproc-per-node 4 examples/pipeline.py": check_pipeline,
    "torchrun --max-restarts": check_torchrun,
    "torchrun --nnodes": check_nodes,
    "make train": check_train,
    "make ": check_make,
    "pip install": check_pip,
}
GPU_COMMANDS = {  # flags for a short run, by the beginning of the command
    "python benchmarks/attention.py": "--quick --out .",
    "torchrun --nproc-per-node 2 benchmarks/transport.py": "--mib 1 --tokens 8192 --batches 2",
    "torchrun --nproc-per-node 2 examples/torchtitan_train.py": "--steps 3",
}


def beginning(command: str) -> str | None:
    """Return the longest key of CHECKS and ELSEWHERE that the command begins with."""
    keys = [key for key in [*CHECKS, *ELSEWHERE] if command.startswith(key)]
    return max(keys, key=len, default=None)


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


def test_tables_list_exactly_the_documented_commands():
    assert len(COMMANDS) > 30
    assert [command for command in COMMANDS if beginning(command) is None] == []
    used = {beginning(command) for command in COMMANDS}
    assert {*CHECKS, *ELSEWHERE} - used == set()
    for name in ELSEWHERE.values():
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()
    of_gpus = {key for key, name in ELSEWHERE.items() if name.endswith("::test_gpu_command")}
    assert of_gpus == set(GPU_COMMANDS)


def need_torchtitan(monkeypatch) -> None:
    """Skip the test without torchtitan, and with a PyTorch that is too old for it."""
    pytest.importorskip("torchtitan", reason="needs torchtitan, and this environment has none")
    monkeypatch.syspath_prepend(ROOT / "examples")
    try:
        module_of(ROOT / "examples" / "torchtitan_train.py").trainer()
    except ImportError as error:
        if "does not run on PyTorch" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("command", [c for c in COMMANDS if beginning(c) in GPU_COMMANDS])
def test_gpu_command(command, tmp_path, monkeypatch):
    if command.startswith("torchrun") and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and this machine has one")
    if "torchtitan" in command:
        need_torchtitan(monkeypatch)
    program, *arguments = shlex.split(command)
    short = shlex.split(GPU_COMMANDS[beginning(command)])
    if program == "torchrun":
        arguments = arguments[arguments.index("2") + 1 :]
    arguments = [ROOT / arguments[0], *with_files(arguments[1:], tmp_path), *short]
    assert (torchrun if program == "torchrun" else run_python)(arguments, tmp_path)


@pytest.mark.parametrize("command", [c for c in COMMANDS if beginning(c) in CHECKS])
def test_command(command, tmp_path, capsys):
    key = beginning(command)
    rest = command.removeprefix(key)
    split = [rest] if key == "make train" else shlex.split(rest)
    CHECKS[key](split, tmp_path)


@pytest.mark.parametrize("more", [[], ["--ping-pong"]])
def test_the_example_has_equal_losses_with_documents_across_ranks(tmp_path, more):
    flags = ["--compare", "--sharded", "--checkpoint", "--steps", "2", "--tokens-per-rank", "128"]
    flags += more
    output = run_two_ranks([ROOT / "examples" / "train.py", *flags, "--out", tmp_path], tmp_path)
    assert output.startswith("2 ranks on ") and re.search(r"torch \S+ tokens/s, distca \S+", output)
    assert float(re.search(r"largest loss difference (\S+)", output)[1]) <= 1e-4
    assert (tmp_path / "balance.png").exists() and (tmp_path / "summary.json").exists()


def test_the_example_refuses_a_folder_that_it_cannot_write(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    train = module_of(ROOT / "examples" / "train.py")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", "/dev/null/x"])
    with pytest.raises(SystemExit):
        train.arguments()
    assert "--out /dev/null/x cannot be written: Not a directory" in capsys.readouterr().err


def generator():
    return module_of(ROOT / "docs" / "generate.py")


def test_generated_pages_follow_the_code():
    generate = generator()
    for name, text in (("options.md", generate.options_page()), ("api.md", generate.api_page())):
        assert (ROOT / "docs" / name).read_text() == text, "run: python docs/generate.py"
    assert {path.name for path in (ROOT / "docs" / "pictures").iterdir()} == set(generate.PICTURES)


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.stat().st_size <= MAX_PICTURE_BYTES, picture


def long_lines(text: str) -> list[str]:
    """Return the lines of prose that are longer than MAX_COLUMNS."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.startswith("|")]
    return [line for line in lines if len(line) > MAX_COLUMNS]


def test_prose_is_wrapped():
    for page in PAGES:
        assert long_lines(page.read_text()) == [], page.name
    assert long_lines("word " * 40) and not long_lines("| " + "word " * 40)


def test_files_named_in_code_spans_exist():
    folders = "csrc|distca|tests|benchmarks|examples|tools|docs"
    named = re.compile(rf"`((?:{folders})/[\w./-]*(?:\.\w+|/))`")
    for page in PAGES:
        for path in named.findall(page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def sources() -> str:
    """Return the text of all sources, with adjacent string literals joined."""
    files = [ROOT / "setup.py", *(ROOT / "distca").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", text).replace('\\"', '"')


def test_messages_of_the_troubleshooting_page_occur_in_the_code():
    text, rows = sources(), (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 30
    assert [message for message in messages if message not in text] == []
