"""Figures that logs, reports and pictures share."""

import statistics
from collections.abc import Sequence

STEPS_FILE = "steps.jsonl"  # of a run's records, a JSON object a line


def max_over_mean(seconds: Sequence[float]) -> float:
    """Imbalance of one step's ranks; 1 is perfect, also when no rank has work."""
    mean = statistics.fmean(seconds)
    return max(seconds) / mean if mean > 0 else 1.0
