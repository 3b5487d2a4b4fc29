import os
import re

import extension
import programs
import pytest
import torch
from ranks import Ranks

# Names that occur in modules that start processes or open a group in pytest's own process.
STARTS_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|programs|run_command|Ranks|torchrun|init_process_group)\b"
)
STARTED = {"ranks", "own_ranks", "fresh_ranks", "fresh_pair"}  # fixtures that start processes

# The slowest files run first, so that the workers of pytest-xdist end together. pytest-xdist keeps
# this order only with --no-loadscope-reorder. Otherwise it runs files with few tests last.
LONGEST = (
    "test_transformers_families.py",
    "test_transformers_training.py",
    "test_docs.py",
    "test_hybrid.py",
    "test_step_benchmarks.py",
    "test_fault_scripts.py",
    "test_torchtitan_pipelines.py",
    "test_pipelining_faults.py",
    "test_compile.py",
)


def pytest_configure():
    """Share the cores among pytest-xdist's workers: by default, torch uses all of them in each."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def uses_processes(item: pytest.Item) -> bool:
    """Return whether a test starts processes, uses fixtures that do, or needs a GPU."""
    if STARTED & set(item.fixturenames) or "gpu" in item.keywords:
        return True
    return STARTS_PROCESSES.search(item.path.read_text()) is not None


def pytest_collection_modifyitems(items):
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    for item in items:
        if uses_processes(item):
            item.add_marker("processes")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


shared_ranks: dict[int, Ranks] = {}  # by world size


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Between files, free cached device memory for other processes, and end shared ranks if tests
    have left many process groups open."""
    if nextitem is None or nextitem.path != item.path:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        for size in [size for size, group in shared_ranks.items() if group.is_crowded()]:
            shared_ranks.pop(size).stop()


@pytest.fixture(scope="session")
def ranks():
    """Return ranks(world_size), processes that all tests of the session share.

    They start once, and again after a test has left some of them dead.
    """

    def get(world_size: int) -> Ranks:
        group = shared_ranks.get(world_size)
        if group is not None and not all(process.is_alive() for process in group.processes):
            group.stop()
            group = None
        if group is None:
            group = shared_ranks[world_size] = Ranks(world_size)
        return group

    yield get
    for processes in shared_ranks.values():
        processes.stop()


@pytest.fixture(scope="module")
def two_devices():
    """Return two processes that each have a CUDA device of their own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: ranks on one share its time")
    started = Ranks(2, "nccl")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def own_ranks():
    """Return own_ranks(world_size), processes for frameworks that leave state in them."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for processes in started.values():
        processes.stop()


def _fresh(world_size: int):
    started = Ranks(world_size)
    yield started
    started.stop()


@pytest.fixture
def fresh_ranks():
    """Return three processes for a test that may break their group."""
    yield from _fresh(3)


@pytest.fixture
def fresh_pair():
    """Return two processes for a test that may break their group."""
    yield from _fresh(2)


@pytest.fixture
def running():
    """Return a list of programs. Those that still run after the test are ended."""
    processes = []
    yield processes
    programs.end(processes)


@pytest.fixture(scope="session")
def test_extension():
    """Build the library of tests/extension.py before a test's clock starts."""
    extension.load()
