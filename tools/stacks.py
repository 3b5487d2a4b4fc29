"""Runs tests with the packages that training stacks pin: `python tools/stacks.py transformers`, or
`stacks` for the recipes of docs/recipes.md.

Each set of packages has an environment of its own in build/stacks, which sees the packages of the
environment that runs this, PyTorch among them.
"""

import os
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
    "verl": ("verl==0.9.1", "trl==0.19.1", *SERVERS),
}


def test(name: str, packages: tuple[str, ...], tests: list[str], flags: list[str]) -> None:
    print(f"== {name}: {' '.join(packages)}", flush=True)
    folder, shared = ROOT / "build" / "stacks" / name, Path(sysconfig.get_path("purelib"))
    constraint = f"torch=={version('torch')}"
    python = environment(folder, packages, shared=shared, constraint=constraint)
    command = [python, "-m", "pytest", "-q", *flags, *tests]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def main(what: str, flags: list[str]) -> None:
    if what == "stacks":
        for name, packages in STACKS.items():
            test(name, packages, ["tests/test_stacks.py"], flags)
        return
    tests = {str(path) for path in ROOT.glob("tests/test_transformers*.py")}
    tests.remove(str(ROOT / "tests" / "test_transformers_families.py"))  # of the newest release
    for release in TRANSFORMERS:
        packages = (f"transformers=={release}", "tokenizers>=0.22,<=0.23.0")
        test(f"transformers-{release}", packages, sorted(tests), flags)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
