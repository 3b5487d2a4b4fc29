"""Figures that logs, reports and pictures share."""

import collections
import statistics
from collections.abc import Collection, Mapping, Sequence

STEPS_FILE = "steps.jsonl"  # of a run's records, a JSON object a line
SPANS_FOLDER = "spans"  # of a run: when a step's phases began and ended, a file a rank
TICKS_FOLDER = "ticks"  # of a run: when a step's ticks began and ended, one file per rank
LINKS = ("link_gb_per_s", "node_link_gb_per_s")  # left out if there is no such link
MEASURED = ("attention_ms", "exposed_ms")  # lists by rank that are measured, not predicted

# FLOPs of attention's backward pass over the forward pass's: five products of two matrices to two.
BACKWARD_OVER_FORWARD = 2.5
FORWARD_SHARE = 1 / (1 + BACKWARD_OVER_FORWARD)


def max_over_mean(seconds: Sequence[float]) -> float:
    """Imbalance of one step's ranks; 1 is perfect, also when no rank has work."""
    mean = statistics.fmean(seconds)
    return max(seconds) / mean if mean > 0 else 1.0


def without(ranks: Collection[int], values: Sequence[float]) -> list[float]:
    """Return the values, by rank, of all ranks but these."""
    return [value for rank, value in enumerate(values) if rank not in ranks]


MIN_TIMED = 2  # timed steps before advice
PAYS_ABOVE = 0.05  # of the step: exposed communication from which ping-pong is advised


class ExposedShare:
    """Exposed communication as a fraction of the step, over the records of a run."""

    def __init__(self) -> None:
        self._step_ms: collections.deque[float] = collections.deque(maxlen=64)
        self._exposed_ms: collections.deque[float] = collections.deque(maxlen=64)  # mean of ranks
        self._latest: Sequence[float] = ()  # of the latest timed step, by rank
        self._can_ping_pong = False

    def add(self, record: Mapping) -> None:
        """Add one step's record. Records repeat the times of the latest timed step."""
        if "step_ms" in record:
            self._step_ms.append(record["step_ms"])
        exposed_ms = record["exposed_ms"]
        if exposed_ms and exposed_ms != self._latest:
            if self._latest:  # the first timed step includes the start of the run
                self._exposed_ms.append(statistics.fmean(exposed_ms))
            self._latest = exposed_ms
        self._can_ping_pong = record.get("can_ping_pong", False)

    @property
    def value(self) -> float | None:
        """Mean over ranks and over the latest timed steps, without the first of the run. None until
        MIN_TIMED more steps have been timed."""
        if len(self._exposed_ms) < MIN_TIMED or not self._step_ms:
            return None
        return statistics.fmean(self._exposed_ms) / statistics.median(self._step_ms)

    @property
    def advice(self) -> str | None:
        """Advice to use ping-pong. None if it is in use, would not pay, or `value` is None."""
        if not self._can_ping_pong or self.value is None or self.value < PAYS_ABOVE:
            return None
        return (
            f"{self.value:.0%} of the step is exposed communication: wrap blocks in "
            "distca.PingPong, so that other work hides it (docs/pingpong.md)"
        )
