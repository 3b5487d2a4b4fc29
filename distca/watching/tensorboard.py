"""Scalars for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path


class Scalars:
    """Writes event files into a folder. Raises ImportError where tensorboard is not installed."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "Watching.tensorboard needs tensorboard; install it: pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"distca/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
