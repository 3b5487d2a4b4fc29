import extension
import pytest
import torch
from ranks import Ranks


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def ranks():
    """ranks(world_size): processes that all tests of the session share. They are started once, and
    again when a test has left some of them dead."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        found = started.get(world_size)
        if found is not None and not all(process.is_alive() for process in found.processes):
            found.stop()
            found = None
        if found is None:
            found = started[world_size] = Ranks(world_size)
        return found

    yield get
    for processes in started.values():
        processes.stop()


@pytest.fixture(scope="session")
def test_extension():
    """Builds tests/extension.py's library before the clock of a test runs."""
    extension.load()
