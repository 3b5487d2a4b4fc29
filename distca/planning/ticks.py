"""Ticks of a pipeline. In a tick all ranks run the same phase, forward or backward, each for one
micro-batch of one of its stages at most. So their attention is one pool."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

Kind = TypeVar("Kind", bound=Hashable)


class Pass(NamedTuple):
    """A micro-batch in a stage."""

    stage: int
    micro_batch: int


@dataclass
class Tick:
    is_forward: bool
    passes: dict[int, Pass]
    """By rank of the pipeline. A rank without a pass is idle, and serves."""
    split: set[int] = field(default_factory=set)
    """Ranks whose backward pass leaves out gradients of weights."""
    weights: dict[int, Pass] = field(default_factory=dict)
    """By idle rank: the backward pass whose gradients of weights it computes now."""

    @property
    def stages(self) -> list[int]:
        """The stages that run, in order."""
        return sorted(each.stage for each in self.passes.values())

    def label(self, own: Pass) -> str:
        """Return the name of a pass: "0F3" for micro-batch 3 in stage 0 in a forward tick."""
        return f"{own.stage}{'F' if self.is_forward else 'B'}{own.micro_batch}"

    def __str__(self) -> str:
        return " ".join(map(self.label, sorted(self.passes.values())))


def ticks_of(
    rank_of_stage: Sequence[int],
    num_micro_batches: int,
    max_in_flight: int | None = None,
    *,
    has_backward: bool = True,
    splits_backward: bool = False,
) -> list[Tick]:
    """Return the ticks of a step. Forward and backward ticks alternate where both have work.

    `rank_of_stage[i]` is the rank of the pipeline that has stage i. `max_in_flight` limits the
    micro-batches between their first forward and their last backward pass (None: no limit). With
    `splits_backward`, gradients of weights move to ticks in which their rank is idle.
    """
    num_stages = len(rank_of_stage)
    forward, backward = [0] * num_stages, [0] * num_stages  # micro-batches done, by stage
    limit = num_micro_batches if max_in_flight is None or not has_backward else max_in_flight

    def runnable(is_forward: bool) -> dict[int, Pass]:
        # The stage nearest to the end of its micro-batch first: micro-batches leave soon.
        passes: dict[int, Pass] = {}
        for stage in reversed(range(num_stages)) if is_forward else range(num_stages):
            if is_forward:
                first = min(num_micro_batches, backward[0] + limit)
                done, most = forward, first if stage == 0 else forward[stage - 1]
            else:
                is_last = stage == num_stages - 1
                done, most = backward, forward[stage] if is_last else backward[stage + 1]
            if done[stage] < most:
                passes.setdefault(rank_of_stage[stage], Pass(stage, done[stage]))
        return passes

    ticks: list[Tick] = []
    while (backward if has_backward else forward[::-1])[0] < num_micro_batches:
        after_forward = bool(ticks) and ticks[-1].is_forward
        options = {False: runnable(False) if has_backward else {}, True: runnable(True)}
        is_forward = not options[False] or (bool(options[True]) and not after_forward)
        tick = Tick(is_forward, options[is_forward])
        for stage, _ in tick.passes.values():
            (forward if is_forward else backward)[stage] += 1
        ticks.append(tick)
    if splits_backward:
        for rank in set(rank_of_stage):
            _move_weights(ticks, rank)
    return ticks


def _move_weights(ticks: Sequence[Tick], rank: int) -> None:
    """Move gradients of weights of the last backward passes to later ticks in which `rank` is idle.
    Stage 0 has no other gradients."""
    idle: list[Tick] = []  # later ticks, the next one last
    for tick in reversed(ticks):
        own = tick.passes.get(rank)
        if own is None:
            idle.append(tick)
        elif not tick.is_forward and own.stage > 0 and idle:
            tick.split.add(rank)
            idle.pop().weights[rank] = own


def common_calls(calls: Mapping[int, Sequence[Kind]]) -> list[tuple[Kind, frozenset[int]]]:
    """Return one sequence of calls that contains those of every stage in order, with the stages
    that take part in each call. It is short, but need not be the shortest."""
    left = {stage: list(kinds) for stage, kinds in sorted(calls.items())}
    common = []
    while any(left.values()):
        weights: Counter = Counter()  # of the next calls: those of long sequences come first
        for kinds in left.values():
            if kinds:
                weights[kinds[0]] += len(kinds)
        (kind, _), *_ = weights.most_common(1)
        stages = frozenset(stage for stage, kinds in left.items() if kinds[:1] == [kind])
        for stage in stages:
            del left[stage][0]
        common.append((kind, stages))
    return common
