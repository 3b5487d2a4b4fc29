"""tools/figures.py: its commands are those of the benchmarks, and it stops what takes too long."""

import argparse
import itertools
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import figures  # noqa: E402
from figures import FIGURES, Figure, measure  # noqa: E402
from pipeline_step import VARIANTS as PIPELINES  # noqa: E402
from step_variants import VARIANTS  # noqa: E402


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(lengths=None, longer=None, out=tmp_path)


def sources_of(figure: Figure) -> str:
    """Return the sources that define the options of a figure's command."""
    if figure.command[0] == "-m":
        return (ROOT / "distca" / "calibrate" / "__main__.py").read_text()
    assert (ROOT / figure.command[0]).is_file()
    return "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", FIGURES)
def test_figures_use_options_that_exist(name):
    figure = FIGURES[name]
    assert (ROOT / "docs" / figure.page).is_file()
    sources = sources_of(figure)
    flags = [part for part in figure.command if part.startswith("--")]
    assert all(f'"{flag}"' in sources for flag in flags)
    if "--variants" in flags:
        after = figure.command[figure.command.index("--variants") + 1 :]
        variants = set(itertools.takewhile(lambda part: not part.startswith("--"), after))
        is_pipeline = figure.command[0].endswith("pipeline_step.py")
        assert variants and variants <= set(PIPELINES if is_pipeline else VARIANTS)


def test_shows_the_lines_of_a_figure(args, monkeypatch, capsys):
    script = "print('out of', 1); print('32k  712 TFLOP/s'); print('ms 3')"
    figure = Figure("performance.md", 1, 10, ("-c", script), "TFLOP")
    monkeypatch.setitem(FIGURES, "own", figure)
    assert measure("own", args, 60.0) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "32k  712 TFLOP/s" and shown[2].startswith("--- own: ") and len(shown) == 3
    assert "ms 3" in (args.out / "own.txt").read_text()


def test_shows_the_end_of_what_fails(args, monkeypatch, capsys):
    figure = Figure("performance.md", 1, 10, ("-c", "raise ValueError('no GPU')"), "TFLOP")
    monkeypatch.setitem(FIGURES, "own", figure)
    assert measure("own", args, 60.0) == 1
    assert "ValueError: no GPU" in capsys.readouterr().out


def test_stops_what_takes_too_long(args, monkeypatch, capsys):
    child = "import subprocess, sys, time; "
    child += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    monkeypatch.setitem(FIGURES, "own", Figure("x", 1, 1, ("-c", child + "time.sleep(60)")))
    start = time.monotonic()
    assert measure("own", args, 1.0) == 124
    assert time.monotonic() - start < 20 and "exit status 124" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [(["other"], "expected some of kernels"), (["steps"], "steps needs --lengths, a JSON file")],
)
def test_refuses_what_it_cannot_measure(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["figures.py", *flags])
    with pytest.raises(SystemExit):
        figures.main()
    assert message in capsys.readouterr().err


def test_lists_all_figures(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    figures.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in FIGURES)
