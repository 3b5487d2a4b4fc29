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
    """ranks(world_size): processes that are started once and used by all tests of the session."""
    started: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for processes in started.values():
        processes.stop()
