"""A C++ library that tests add to distca, built once. phases.cpp sleeps or kills the process at
phases of attention; mailbox.cpp is a transport, reference_backend.cpp a back end."""

import fcntl
import functools
from pathlib import Path

import torch

from distca._library import LIBRARY

ROOT = Path(__file__).parent.parent
SOURCES = sorted((Path(__file__).parent / "extension_sources").glob("*.cpp"))
FOLDER = ROOT / "build" / "test_extension"
NAME = "distca_tests"


@functools.cache
def load() -> None:
    """Build the library if it is older than its sources or distca's library, and load it."""
    library = FOLDER / f"{NAME}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = max(path.stat().st_mtime for path in (*SOURCES, Path(__file__), LIBRARY))
        if not library.exists() or library.stat().st_mtime < newest:
            from torch.utils import cpp_extension  # slow to import

            # One compilation: the headers of PyTorch take most of its time.
            together = FOLDER / "all.cpp"
            together.write_text("".join(f'#include "{path}"\n' for path in SOURCES))
            cpp_extension.load(
                NAME,
                [str(together)],
                extra_cflags=["-std=c++20", "-O1"],
                extra_ldflags=[str(LIBRARY)],
                extra_include_paths=[str(ROOT / "csrc")],
                build_directory=str(FOLDER),
                is_python_module=False,
            )
            library.touch()
    torch.ops.load_library(library)


def at_phase(phase: str, sleep_s: float, kill_after_s: float = -1) -> None:
    """Let this process sleep when it next enters the phase ("distca forward layer 2 combine"), and
    kill it `kill_after_s` later unless that is negative."""
    load()
    torch.ops.distca_tests.at_phase(phase, sleep_s, kill_after_s)


def delay_phases(max_s: float, seed: int) -> None:
    """Let this process sleep up to `max_s`, at random, whenever it enters a phase of attention."""
    load()
    torch.ops.distca_tests.delay_phases(max_s, seed)
