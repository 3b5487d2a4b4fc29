"""How long exchanges of rows wait for other traffic, such as FSDP's: measured in training, and
equal on all ranks."""

import collections
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from distca import ops

KINDS = [(False, False), (False, True), (True, False), (True, True)]  # (is backward, is combine)
NUM_WORDS = 2 * len(KINDS)  # bytes and nanoseconds of a call's exchanges, by kind
UNKNOWN = [0, -1] * len(KINDS)
NO_TIMES = torch.zeros(0, 4, dtype=torch.int64)
MAX_TIMES = 4096  # latest exchanges; passes without gradients alone never make all kinds known
NUM_SAMPLES = 8  # latest plans that count
LEAST_SAMPLES = 3  # the first exchanges open connections
FADING = 0.98  # of a wait for each plan without samples, so that ranks try again


class Waits:
    """Waits of a group's exchanges. Used on the planner thread."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=NUM_SAMPLES
        )
        self._times: dict[str, Tensor] = {}  # by group, not told yet

    def words(self, group_names: Sequence[str]) -> list[int]:
        """Return the NUM_WORDS words of this rank's exchanges since it last returned times. The
        calls of these groups make up a layer. Return UNKNOWN until each group has exchanges of all
        kinds."""
        if not group_names:
            return UNKNOWN
        totals = torch.zeros(len(KINDS), 2, dtype=torch.int64)
        for name in group_names:
            before = self._times.get(name, NO_TIMES)
            times = torch.cat([before, ops.take_exchange_times(name)])[-MAX_TIMES:]
            self._times[name] = times
            of_kind = [times[(times[:, :2] == torch.tensor(kind)).all(1), 2:] for kind in KINDS]
            num_calls = [len(of_kind[1]), len(of_kind[1]), len(of_kind[3]), len(of_kind[3])]
            if 0 in num_calls:
                return UNKNOWN
            sums = torch.stack([each.sum(0) for each in of_kind])
            totals += sums // torch.tensor(num_calls)[:, None]
        self._times.clear()
        return totals.flatten().tolist()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that the transfers of a layer wait in the forward and backward
        pass."""
        if len(self._samples) < LEAST_SAMPLES:
            return 0.0, 0.0
        forward, backward = zip(*self._samples, strict=True)
        return statistics.median(forward), statistics.median(backward)

    def add(self, words: Tensor, bytes_per_second: float) -> None:
        """Note what all ranks measured since the last plan, int64 [num_ranks, NUM_WORDS].

        An exchange takes the time of its bytes and waits for the slowest rank and other traffic.
        The rank that comes last waits for other traffic only, so the least wait of a kind counts.
        """
        num_bytes, ns = words.view(-1, len(KINDS), 2).unbind(2)
        if (ns < 0).any():
            self._samples = collections.deque(
                ((FADING * forward, FADING * backward) for forward, backward in self._samples),
                maxlen=NUM_SAMPLES,
            )
            return
        waits = (1e-9 * ns - num_bytes / bytes_per_second).clamp(min=0).amin(0)
        forward, backward = waits.view(2, 2).sum(1).tolist()
        self._samples.append((forward, backward))
