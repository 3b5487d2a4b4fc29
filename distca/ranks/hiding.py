"""The time of a block's work before attention. In ping-pong, rows of the other half travel during
this work. It is measured in training, and all ranks use the same value."""

import collections
import statistics

import torch
from torch import Tensor

NUM_WORDS = 1
UNKNOWN = -1
BLOCKS_TO_ONE_TIMED = 4
NUM_SAMPLES = 16  # latest blocks that count
BACKWARD_OVER_FORWARD = 2.0  # of the time of linear layers
Span = tuple[torch.cuda.Event, torch.cuda.Event, float]  # begin, end, 1 / share of the tokens


class WorkBeforeAttention:
    """Times that a session's blocks take before attention."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._spans: collections.deque[Span] = collections.deque(maxlen=NUM_SAMPLES)
        self._ns: collections.deque[float] = collections.deque(maxlen=NUM_SAMPLES)

    def is_due(self) -> bool:
        """Count a block, and return whether to time it."""
        self._num_blocks += 1
        return self._num_blocks % BLOCKS_TO_ONE_TIMED == 0

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event, share: float) -> None:
        """Note that the work for `share` of a block's tokens ran between two events."""
        self._spans.append((begin, end, 1 / share))

    def word(self) -> int:
        """Return the median time of the latest blocks in ns, or UNKNOWN. For the planner thread."""
        while self._spans and self._spans[0][1].query():
            begin, end, factor = self._spans.popleft()
            self._ns.append(1e6 * begin.elapsed_time(end) * factor)
        return round(statistics.median(self._ns)) if self._ns else UNKNOWN


def hidden_seconds(words: Tensor) -> float:
    """Return the seconds of a layer's work before attention, forward and backward, on the rank with
    the least work, or 0 until all ranks have measured it. `words`, int64 [num_ranks], are those of
    all ranks."""
    least = words.min().item()
    return 0.0 if least < 0 else 1e-9 * least * (1 + BACKWARD_OVER_FORWARD)
