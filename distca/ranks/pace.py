"""How fast each rank computes attention, and how fast everything between calls of attention:
measured in training, and equal on all ranks."""

import collections
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distca import ops

NUM_WORDS = 2  # of attention, and of other work
UNKNOWN = -1
SCALE = 1e6  # words of attention are whole numbers
MAX_PLANS = 64  # latest plans that are remembered
MAX_TIMES = 4096
NUM_SAMPLES = 8  # latest samples of a rank that count
LEAST_SAMPLES = 3
LEAST_SECONDS = 2e-4  # of a layer's tasks; launches make shorter ones look slow
ALIKE = 0.8  # of the fastest rank's speed: ranks above it count as equally fast
LEAST_LAG = 0.003  # of a layer's other work; below it, nothing is worth its transfer


class LayerTimes:
    """Seconds of a layer by plan. `take` returns the times of calls that have ended since the last
    take, as ops.take_task_times does."""

    def __init__(self, take: Callable[[str], Tensor]) -> None:
        self._take = take
        self._times = torch.zeros(0, 4, dtype=torch.int64)  # of plans that are still in use

    def take(self, group_name: str) -> dict[int, float]:
        """Return the mean seconds of a layer, by plan, for plans that are no longer in use."""
        times = torch.cat([self._times, self._take(group_name)])[-MAX_TIMES:]
        if not len(times):
            return {}
        # The last calls under the latest plan may be still to come.
        seconds = layer_seconds(times[times[:, 0] < times[:, 0].max()])
        self._times = times[~torch.isin(times[:, 0], torch.tensor([*seconds]))]
        return seconds


class Samples:
    """The latest words of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._of_rank: list[collections.deque[int]] = [
            collections.deque(maxlen=NUM_SAMPLES) for _ in range(num_ranks)
        ]

    def add(self, words: Sequence[int]) -> None:
        for samples, word in zip(self._of_rank, words, strict=True):
            if word != UNKNOWN:
                samples.append(word)

    def known(self, typical: Callable[[Sequence[int]], float]) -> dict[int, float]:
        """Return the typical sample of each rank that has enough of them."""
        return {
            rank: typical(samples)
            for rank, samples in enumerate(self._of_rank)
            if len(samples) >= LEAST_SAMPLES
        }


class Pace:
    """Speeds of a group's ranks. Used on the planner thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Seconds of a layer's attention on this rank at speed 1, and the rank's tokens, by plan.
        self._plans: dict[int, tuple[float, int]] = {}
        self._tasks = LayerTimes(lambda name: ops.take_task_times(name))
        self._gaps = LayerTimes(lambda name: ops.take_gap_times(name))
        self._speeds, self._others = Samples(num_ranks), Samples(num_ranks)

    def note(self, step: int, seconds: float, num_tokens: int) -> None:
        """Note plan `step`: the predicted seconds of this rank's tasks in a layer at speed 1, and
        the tokens that this rank holds."""
        self._plans[step] = seconds, num_tokens
        while len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]

    def words(self, group_name: str) -> list[int]:
        """Return the NUM_WORDS words of this rank for plans that were used since it last knew them:
        predicted over measured seconds of attention, and picoseconds of other work for each token
        and layer. UNKNOWN where nothing was measured."""
        speeds = [
            self._plans[step][0] / seconds
            for step, seconds in self._tasks.take(group_name).items()
            if self._plans.get(step, (0.0, 0))[0] >= LEAST_SECONDS and seconds > 0
        ]
        others = [
            seconds / self._plans[step][1]
            for step, seconds in self._gaps.take(group_name).items()
            if self._plans.get(step, (0.0, 0))[1] > 0
        ]
        return [
            round(scale * statistics.median(each)) if each else UNKNOWN
            for scale, each in ((SCALE, speeds), (1e12, others))
        ]

    def add(self, words: Tensor) -> None:
        """Note the words of all ranks, int64 [num_ranks, NUM_WORDS]."""
        speeds, others = words.T.tolist()
        self._speeds.add(speeds)
        self._others.add(others)

    def speeds(self) -> list[float]:
        """Return the speed of each rank's attention relative to the fastest, to two digits. Empty
        if all are alike, or if too little is known."""
        medians = self._speeds.known(statistics.median)
        if not medians:
            return []
        fastest = max(medians.values())
        speeds = [medians.get(rank, fastest) / fastest for rank in range(self._num_ranks)]
        speeds = [1.0 if speed >= ALIKE else round(speed, 2) for speed in speeds]
        return speeds if min(speeds) < 1 else []

    def lags(self, num_tokens: Sequence[int]) -> list[float]:
        """Return the seconds by which a layer's other work takes longer on each rank than on the
        rank with the least, forward and backward, if ranks hold `num_tokens`. Empty if all are
        alike, or if too little is known."""
        of_token = self._others.known(lower_quartile)
        if len(of_token) < self._num_ranks:
            return []
        seconds = [1e-12 * of_token[rank] * count for rank, count in enumerate(num_tokens)]
        least = min(seconds)
        lags = [round(each - least, 6) for each in seconds]
        return lags if max(lags) > LEAST_LAG * max(seconds) else []


def lower_quartile(samples: Sequence[int]) -> float:
    """Return the quartile of the samples with the least waits for other ranks."""
    return sorted(samples)[len(samples) // 4]


def layer_seconds(times: Tensor) -> dict[int, float]:
    """Return the mean seconds of a layer in both passes, by plan. `times` is int64 [num_times, 4],
    as take_task_times returns it. Plans without both passes are left out."""
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
