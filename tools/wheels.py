"""Builds a wheel of distca for each minor version of PyTorch, and tests it in a fresh environment.

    python tools/wheels.py [--torch 2.11 2.15] [--cpu]

dist/distca-0.1.0+torch2.12-cp310-abi3-linux_x86_64.whl serves PyTorch 2.12 and any Python from 3.10
on. Each version has an environment of its own in build/wheels, of about 5 GB. A version that cannot
be installed here is named and left out.
"""

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from environments import ROOT, environment, packages_of

VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
BUILD_TOOLS = ("numpy", "setuptools>=77,<82", "wheel", "ninja", "packaging")
TEST_TOOLS = ("pytest==9.2.0",)
SOURCES = ("csrc", "distca", "setup.py", "pyproject.toml", "README.md", "LICENSE", "tools")
# Tests of the core, and of pipelines and FSDP2, which depend most on private names of PyTorch.
TESTS = (
    "test_core_attention.py",
    "test_operators.py",
    "test_planning.py",
    "test_pipelining.py",
    "test_fsdp_traffic.py",
)
# As in the Makefile. The PyTorch of the Makefile is too old for torchtitan's pipelines.
TORCHTITAN = ("torchtitan==0.3.0", "datasets==4.7.0")
TORCHTITANS_PYTHON = (3, 11)  # or newer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--torch", nargs="+", choices=VERSIONS, default=VERSIONS, help="minor versions of PyTorch"
    )
    parser.add_argument("--cpu", action="store_true", help="leave CUDA out, to check sources only")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    return parser.parse_args()


def build(version: str, python: Path, out: Path, is_cpu_only: bool) -> Path:
    """Build the wheel for `version` with the PyTorch of an environment, in a copy of sources."""
    folder = python.parents[1].with_name("build-" + version)
    shutil.rmtree(folder, ignore_errors=True)
    for name in SOURCES:
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        copy = shutil.copy if (ROOT / name).is_file() else partial(shutil.copytree, ignore=ignored)
        folder.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    tag = ["egg_info", "--tag-build", f"+torch{version}"]
    # A CUDA build is demanded, so that no wheel lacks the kernels by accident.
    choice = {"DISTCA_SKIP_CUDA_BUILD": "1"} if is_cpu_only else {"FORCE_CUDA": "1"}
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # ninja
    environ = {**os.environ, **choice, "PATH": path}
    subprocess.run(
        [python, "setup.py", "-q", *tag, "bdist_wheel"], check=True, cwd=folder, env=environ
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, out))


def test(version: str, wheel: Path, python: Path) -> None:
    """Run TESTS with the installed wheel, away from the sources. Under the newest PyTorch, also run
    torchtitan's pipelines."""
    folder = python.parents[1].with_name("test-" + version)
    shutil.rmtree(folder, ignore_errors=True)
    packages, tests = (str(wheel), *TEST_TOOLS), TESTS
    if version == VERSIONS[-1] and sys.version_info >= TORCHTITANS_PYTHON:
        packages, tests = (*packages, *TORCHTITAN), (*tests, "test_torchtitan_pipelines.py")
    tester = environment(folder, packages, shared=packages_of(python))
    for name in ("tests", "examples", "docs"):  # tests train the examples' model, and read a page
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    program = "import distca, torch; print(torch.__version__, distca.__file__)"
    subprocess.run([tester, "-c", program], check=True, cwd=folder)
    command = [tester, "-m", "pytest", "-q", *(f"tests/{name}" for name in tests)]
    subprocess.run(command, check=True, cwd=folder)


def main() -> None:
    args = arguments()
    outcomes = {}
    for version in args.torch:
        print(f"== torch {version}", flush=True)
        folder = ROOT / "build" / "wheels" / f"torch-{version}"
        step = "is not to be had here"
        try:
            python = environment(folder, (f"torch=={version}.*", *BUILD_TOOLS), shared=None)
            step = "does not build"
            wheel = build(version, python, args.out, args.cpu)
            step = "fails its tests"
            test(version, wheel, python)
        except subprocess.CalledProcessError as error:
            outcomes[version] = f"{step}: {error}"
        else:
            outcomes[version] = f"{wheel.name} built and tested"
    for version, outcome in outcomes.items():
        print(f"torch {version}: {outcome}")
    if not all(outcome.endswith("tested") for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
