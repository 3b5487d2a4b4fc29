"""A back end from outside the library computes the calls that it supports."""

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
from oracle import Case
from ranks import Ranks
from test_core_attention import attend, gathered
from torch.utils import cpp_extension

from distca import _library

TESTS = Path(__file__).parent
# Documents that cross ranks and tasks that share keys, under a window on both sides.
CASE = Case([[200, 1, 0, 131], []], head_dim=24, window_size=(37, 5), sharded=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Build reference_backend.cpp, linked to distca's library. Return its path."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("backend") / "reference_backend.so"
    includes = [f"-I{folder}" for folder in [TESTS.parent / "csrc", *cpp_extension.include_paths()]]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    sources = [TESTS / "reference_backend.cpp", _library.LIBRARY]
    flags = ["-std=c++20", "-fPIC", "-shared", *includes, *libraries, "-ltorch_cpu", "-lc10"]
    subprocess.run([compiler, *flags, *sources, "-o", path], check=True)
    return path


def attend_with(rank: int, world_size: int, library: Path, case: Case):
    """Return results by the back end, and the number of its calls."""
    backend = ctypes.CDLL(str(library))
    if backend.num_reference_calls() == 0:
        backend.register_reference_backend()
    before = backend.num_reference_calls()
    return attend(rank, world_size, case), backend.num_reference_calls() - before


def test_a_back_end_of_other_files_computes_what_it_takes(library):
    two = Ranks(2)
    try:
        for case, is_taken in [(CASE, True), (replace(CASE, head_dim=16), False)]:
            results, num_calls = zip(*two.run(attend_with, library, case), strict=True)
            oracle.assert_close(gathered(results), oracle.forward_backward(case), [1e-12] * 4)
            assert [num > 0 for num in num_calls] == [is_taken] * 2
    finally:
        two.stop()
