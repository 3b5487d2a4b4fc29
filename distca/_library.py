"""Loads the library of operators, after checking that it was built for the torch that runs."""

import mmap
import re
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "_C.so"
REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def built_for(library: Path) -> str:
    """The torch version that `library` was built against, e.g. '2.11.0'.

    Raises ImportError when the file is missing or is not a library of distca.
    """
    if not library.exists():
        raise ImportError(f"distca: {library} is missing; build it with `{REBUILD}`")
    version = None
    if library.stat().st_size > 0:  # an empty file cannot be mapped
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            match = re.search(rb"distca-built-for-torch:([^:\0]+):end", content)
            version = match[1].decode() if match else None
    if version is None:
        raise ImportError(f"distca: {library} is not distca's library; rebuild it with `{REBUILD}`")
    return version


def load(library: Path = LIBRARY) -> None:
    """Registers torch.ops.distca.*; raises ImportError naming both versions if they differ."""
    expected, running = built_for(library), torch.__version__.split("+")[0]
    if expected.split("+")[0] != running:
        raise ImportError(
            f"distca: the library was built for torch {expected}, but torch {running} is running; "
            f"rebuild it with `{REBUILD}` in the environment that runs it"
        )
    torch.ops.load_library(str(library))


load()
