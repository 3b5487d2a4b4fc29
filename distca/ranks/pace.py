"""The speed at which each rank computes its tasks, relative to the predictions of plans. It is
measured in training, and all ranks use the same values."""

import collections
import statistics

import torch
from torch import Tensor

from distca import ops

NUM_WORDS = 1
UNKNOWN = -1
SCALE = 1e6  # words are whole numbers
MAX_PLANS = 64  # latest plans whose predictions are remembered
MAX_TIMES = 4096
NUM_SAMPLES = 8  # latest samples of a rank that count
LEAST_SAMPLES = 3
LEAST_SECONDS = 2e-4  # of a layer's tasks; shorter ones look slow because of launches
ALIKE = 0.9  # of the fastest rank's speed: ranks above it count as equally fast


class Pace:
    """Speeds of a group's ranks. Used on the planner thread."""

    def __init__(self, num_ranks: int) -> None:
        self._predicted: dict[int, float] = {}  # seconds of a layer on this rank, by plan
        self._times = torch.zeros(0, 4, dtype=torch.int64)  # of plans that are still in use
        self._samples: list[collections.deque[int]] = [  # words of each rank
            collections.deque(maxlen=NUM_SAMPLES) for _ in range(num_ranks)
        ]

    def predict(self, step: int, seconds: float) -> None:
        """Note the seconds of this rank's tasks in a layer under plan `step`, at speed 1."""
        self._predicted[step] = seconds
        while len(self._predicted) > MAX_PLANS:
            del self._predicted[next(iter(self._predicted))]

    def word(self, group_name: str) -> int:
        """Return SCALE times the predicted over the measured seconds of this rank's tasks, under
        plans whose measurements were completed since the last call. UNKNOWN if there are none."""
        times = torch.cat([self._times, ops.take_task_times(group_name)])[-MAX_TIMES:]
        if not len(times):
            return UNKNOWN
        # The latest plan may still be in use, so its last calls may not have run yet.
        seconds = layer_seconds(times[times[:, 0] < times[:, 0].max()])
        self._times = times[~torch.isin(times[:, 0], torch.tensor([*seconds]))]
        speeds = [
            self._predicted[step] / each
            for step, each in seconds.items()
            if self._predicted.get(step, 0.0) >= LEAST_SECONDS and each > 0
        ]
        return round(SCALE * statistics.median(speeds)) if speeds else UNKNOWN

    def add(self, words: Tensor) -> None:
        """Note the words of all ranks, int64 [num_ranks]."""
        for samples, word in zip(self._samples, words.tolist(), strict=True):
            if word != UNKNOWN:
                samples.append(word)

    def speeds(self) -> list[float]:
        """Return the speed of each rank relative to the fastest, rounded to two digits. Empty if
        all are equally fast, or if too little is known."""
        medians = {
            rank: statistics.median(samples)
            for rank, samples in enumerate(self._samples)
            if len(samples) >= LEAST_SAMPLES
        }
        if not medians:
            return []
        fastest = max(medians.values())
        speeds = [medians.get(rank, fastest) / fastest for rank in range(len(self._samples))]
        speeds = [1.0 if speed >= ALIKE else round(speed, 2) for speed in speeds]
        return speeds if min(speeds) < 1 else []


def layer_seconds(times: Tensor) -> dict[int, float]:
    """Return the mean seconds of a layer's tasks in both passes, by plan. `times` is int64
    [num_times, 4], as take_task_times returns it. Plans without both passes are left out."""
    seconds = {}
    for step in times[:, 0].unique().tolist():
        passes = []
        for is_backward in (False, True):
            own = times[(times[:, 0] == step) & (times[:, 2] == is_backward)]
            if len(own):
                passes.append(own[:, 3].sum().item() / own[:, 1].unique().numel())
        if len(passes) == 2:
            seconds[step] = 1e-9 * sum(passes)
    return seconds
