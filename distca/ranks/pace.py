"""How fast each rank computes attention, and how fast it does the work between calls of attention.
Ranks measure both in training, and all of them use the same figures."""

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
LEAST_TOKEN_SAMPLES = 2  # one may be of a first step, which warms up
LEAST_LAG_SAMPLES = 3
MAX_PLANS_TO_LAGS = 16  # in which blocks in ping-pong run whole until lags are known
LEAST_LAG = 0.003  # of a layer's other work; smaller lags are not worth a transfer


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
        # The last calls under the latest plan may still be to come.
        seconds = layer_seconds(times[times[:, 0] < times[:, 0].max()])
        self._times = times[~torch.isin(times[:, 0], torch.tensor([*seconds]))]
        return seconds


class Pace:
    """Speeds of a group's ranks. Used on the planner thread."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Seconds of a layer's attention on this rank at speed 1, and the rank's tokens, by plan.
        self._plans: dict[int, tuple[float, int]] = {}
        self._tasks = LayerTimes(lambda name: ops.take_task_times(name))
        self._gaps = LayerTimes(lambda name: ops.take_gap_times(name))
        self._speeds: list[collections.deque[int]] = [  # words of each rank
            collections.deque(maxlen=NUM_SAMPLES) for _ in range(num_ranks)
        ]
        # Words of all ranks, by sample.
        self._others: collections.deque[list[int]] = collections.deque(maxlen=NUM_SAMPLES)

    def note(self, step: int, seconds: float, num_tokens: int) -> None:
        """Note plan `step`: the predicted seconds of this rank's tasks in a layer at speed 1, and
        the tokens that this rank holds."""
        self._plans[step] = seconds, num_tokens
        while len(self._plans) > MAX_PLANS:
            del self._plans[next(iter(self._plans))]

    def words(self, group_name: str) -> list[int]:
        """Return the NUM_WORDS words of this rank for plans whose times have become known since the
        last call: predicted over measured seconds of attention, in units of 1 / SCALE, and
        picoseconds of other work per token and layer. UNKNOWN where nothing was measured."""
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
        for samples, word in zip(self._speeds, speeds, strict=True):
            if word != UNKNOWN:
                samples.append(word)
        if UNKNOWN not in others:
            self._others.append(others)

    def speeds(self) -> list[float]:
        """Return the speed of each rank's attention relative to the fastest, to two digits. Empty
        if all are alike, or if too little is known."""
        medians = {
            rank: statistics.median(samples)
            for rank, samples in enumerate(self._speeds)
            if len(samples) >= LEAST_SAMPLES
        }
        if not medians:
            return []
        fastest = max(medians.values())
        speeds = [medians.get(rank, fastest) / fastest for rank in range(self._num_ranks)]
        speeds = [1.0 if speed >= ALIKE else round(speed, 2) for speed in speeds]
        return speeds if min(speeds) < 1 else []

    @property
    def knows_lags(self) -> bool:
        return len(self._others) >= LEAST_LAG_SAMPLES

    def lags(self, num_tokens: Sequence[int]) -> list[float]:
        """Return the seconds by which a layer's other work, forward and backward, takes longer on
        each rank than on the rank with the least other work, if ranks hold `num_tokens`. Empty if
        all are alike, or if too little is known.

        Times vary from step to step, and include waits for other ranks. So a rank counts as slower
        than the fastest only by as much as it was in three samples of four. Until there are
        LEAST_LAG_SAMPLES, only the ranks' numbers of tokens make a difference."""
        if len(self._others) < LEAST_TOKEN_SAMPLES:
            return []
        fastest = [max(1, min(words)) for words in self._others]
        of_token = 1e-12 * statistics.median_low(fastest)
        factors = [1.0] * self._num_ranks
        if self.knows_lags:
            factors = [
                lower_quartile([word / least for word, least in zip(words, fastest, strict=True)])
                for words in zip(*self._others, strict=True)
            ]
        pairs = zip(factors, num_tokens, strict=True)
        seconds = [factor * of_token * count for factor, count in pairs]
        least = min(seconds)
        lags = [round(each - least, 6) for each in seconds]
        return lags if max(lags) > LEAST_LAG * max(seconds) else []


def lower_quartile(samples: Sequence[float]) -> float:
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
