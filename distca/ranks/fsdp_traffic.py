"""What FSDP2 moves for a layer, beside the rows of its attention: read from the model, and equal on
all ranks."""

import statistics
from dataclasses import dataclass

from torch import Tensor

from distca._torch_private import sharded_layers

NUM_WORDS = 4
UNKNOWN = [-1] * NUM_WORDS


@dataclass(frozen=True)
class FsdpTraffic:
    """Of a layer, on one rank."""

    num_params: int
    """Parameters of the gathered layer."""
    gathered_bytes: int
    reduced_bytes: int
    """Of the gradients, before they are scattered."""
    num_ranks: int
    """Ranks that hold the layer together."""


class ModelTraffic:
    """The FSDP traffic of the models in this process. Used on the planner thread."""

    def __init__(self) -> None:
        self._words: list[int] | None = None

    def words(self, has_run: bool) -> list[int]:
        """Return the NUM_WORDS words of FsdpTraffic, or UNKNOWN without FSDP2. They are read once,
        when the model `has_run`. If layers differ, a word is the median of theirs."""
        if self._words is None and has_run:
            layers = sharded_layers()
            self._words = [int(statistics.median(each)) for each in zip(*layers, strict=True)]
        return self._words or UNKNOWN


def common_traffic(words: Tensor) -> FsdpTraffic | None:
    """Return what the words of all ranks say, int64 [num_ranks, NUM_WORDS]. None if ranks differ,
    or if it is unknown."""
    if (words < 0).any() or (words != words[0]).any():
        return None
    return FsdpTraffic(*words[0].tolist())
