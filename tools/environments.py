"""Virtual environments for tests with other packages than those of the main environment."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(
    folder: Path,
    packages: tuple[str, ...],
    base: str = sys.executable,
    *,
    shared: Path | None,
    constraint: str = "",
) -> Path:
    """Return the Python of an environment in `folder` that has `packages`, after installing them if
    needed. `base` is the Python that it is made from. It also sees the packages in the folder
    `shared`. `constraint` keeps versions, as pip's constraints do."""
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(packages):
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
        if shared is not None:
            (packages_of(python) / "shared.pth").write_text(str(shared))
        (folder / "constraints.txt").write_text(constraint)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["--constraint", folder / "constraints.txt", "--no-build-isolation"]
        subprocess.run([*install, *constraints, *packages], check=True)
        stamp.write_text(" ".join(packages))
    return python


def packages_of(python: Path) -> Path:
    """Return the folder of packages of an environment, by its Python."""
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder
