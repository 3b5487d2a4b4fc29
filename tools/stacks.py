"""Runs tests with the packages that training stacks pin: `python tools/stacks.py transformers`,
`stacks` for the recipes of docs/recipes.md, or `megatron`.

Each set of packages has an environment of its own in build/stacks. Those of the Python that runs
this see its packages, PyTorch among them. Megatron-Core needs a newer Python: its environment has
the same PyTorch, and distca's library serves both.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from environments import ROOT, environment

# Two releases in wide use between the oldest and the newest, which the Makefile installs.
TRANSFORMERS = ("5.5.4", "5.9.0", "5.15.0")
SERVERS = ("fastapi", "uvicorn", "aiohttp", "cachetools", "pyzmq")  # that verl imports, unnamed
STACKS = {
    "ms-swift": ("ms-swift==4.6.0",),
    "llamafactory": ("llamafactory==0.9.5",),
    "axolotl": ("axolotl==0.19.0",),
    "verl": ("verl==0.9.1", "trl==0.19.1", *SERVERS),
}
MEGATRON = ("megatron-core==0.19.2", "numpy", "pytest==9.2.0")
MEGATRONS_PYTHON = (3, 12)  # or newer
ASK_VERSION = "import sys; print(*sys.version_info[:2])"


def newer_python() -> str | None:
    """Return a Python for Megatron-Core: the one that runs this, one on PATH, or one of pyenv."""
    names = [sys.executable, *(f"python3.{minor}" for minor in range(MEGATRONS_PYTHON[1], 15))]
    installed = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    for name in [*names, *map(str, installed)]:
        if shutil.which(name) is None:
            continue
        asked = subprocess.run([name, "-c", ASK_VERSION], capture_output=True, text=True)
        if asked.returncode == 0 and tuple(map(int, asked.stdout.split())) >= MEGATRONS_PYTHON:
            return name
    return None


def test(
    name: str,
    packages: tuple[str, ...],
    tests: list[str],
    flags: list[str],
    python: str = sys.executable,
) -> None:
    print(f"== {name}: {' '.join(packages)}", flush=True)
    shared = Path(sysconfig.get_path("purelib")) if python == sys.executable else None
    constraint = f"torch=={version('torch')}"
    folder = ROOT / "build" / "stacks" / name
    own_python = environment(folder, packages, python, shared=shared, constraint=constraint)
    command = [own_python, "-m", "pytest", "-q", *flags, *tests]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def main(what: str, flags: list[str]) -> None:
    if what == "stacks":
        for name, packages in STACKS.items():
            test(name, packages, ["tests/test_stacks.py"], flags)
        return
    if what == "megatron":
        python = newer_python()
        if python is None:
            needed = ".".join(map(str, MEGATRONS_PYTHON))
            print(f"skipped: {MEGATRON[0]} needs Python {needed} or newer, and none was found")
            return
        packages = (f"torch=={version('torch')}", *MEGATRON)
        test("megatron", packages, ["tests/test_megatron.py"], flags, python)
        return
    tests = {str(path) for path in ROOT.glob("tests/test_transformers*.py")}
    tests.remove(str(ROOT / "tests" / "test_transformers_families.py"))  # of the newest release
    for release in TRANSFORMERS:
        packages = (f"transformers=={release}", "tokenizers>=0.22,<=0.23.0")
        test(f"transformers-{release}", packages, sorted(tests), flags)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
