"""FSDP2's traffic for a layer, which shares the links with rows of attention. It is read from the
model, and used if all ranks agree on it."""

import statistics
from dataclasses import dataclass

from torch import Tensor

from distca._torch_private import sharded_layers

NUM_WORDS = 4
UNKNOWN = [-1] * NUM_WORDS


@dataclass(frozen=True)
class FsdpTraffic:
    """FSDP2's traffic for a layer, on one rank."""

    num_params: int
    """Number of parameters of the gathered layer."""
    gathered_bytes: int
    reduced_bytes: int
    """Bytes of the gradients, before they are scattered."""
    num_ranks: int
    """Number of ranks over which the layer is sharded."""


class ModelTraffic:
    """The FSDP traffic of the models in this process. Used on the planner thread."""

    def __init__(self) -> None:
        self._words: list[int] | None = None

    def words(self, has_run: bool) -> list[int]:
        """Return the NUM_WORDS fields of FsdpTraffic, or UNKNOWN without FSDP2. They are read once,
        when the model `has_run`. If layers differ, each field is the median over layers."""
        if self._words is None and has_run:
            layers = sharded_layers()
            self._words = [int(statistics.median(each)) for each in zip(*layers, strict=True)]
        return self._words or UNKNOWN


def common_traffic(words: Tensor) -> FsdpTraffic | None:
    """Return the traffic that the words of all ranks, int64 [num_ranks, NUM_WORDS], describe.
    Return None if ranks differ, or if one of them does not know it."""
    if (words < 0).any() or (words != words[0]).any():
        return None
    return FsdpTraffic(*words[0].tolist())
