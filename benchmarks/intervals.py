"""Unions and differences of intervals of time."""

from collections.abc import Iterable

Interval = tuple[float, float]  # begin, end


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint, sorted, nonempty intervals."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        elif begin < end:
            union.append((begin, end))
    return union


def without(intervals: list[Interval], removed: list[Interval]) -> list[Interval]:
    """Return `intervals` minus `removed`; both come from `merged`."""
    left, first = [], 0
    for begin, end in intervals:
        while first < len(removed) and removed[first][1] <= begin:
            first += 1
        for gap_begin, gap_end in removed[first:]:
            if gap_begin >= end:
                break
            if begin < gap_begin:
                left.append((begin, gap_begin))
            begin = max(begin, gap_end)
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: list[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
