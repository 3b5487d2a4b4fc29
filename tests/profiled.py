"""distca's ranges in a profile of torch.profiler."""

import collections

import torch


def ranges_of(profile: torch.profiler.profile) -> dict[str, int]:
    """Return how often each range occurs.

    It reads the profiler's own events: profile.key_averages() takes seconds to build a tree of all
    operators.
    """
    names = (each.name() for each in profile.profiler.kineto_results.events())
    return dict(collections.Counter(name for name in names if name.startswith("distca ")))
