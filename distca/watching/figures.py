"""Figures that logs, reports and pictures share."""

import statistics
from collections.abc import Sequence

STEPS_FILE = "steps.jsonl"  # of a run's records, a JSON object a line
SPANS_FOLDER = "spans"  # of a run: when a step's phases began and ended, a file a rank
LINKS = ("link_gb_per_s", "node_link_gb_per_s")  # left out if there is no such link
MEASURED = ("attention_ms", "exposed_ms")  # lists by rank that are measured, not predicted

# FLOPs of attention's backward pass over the forward pass's: five products of two matrices to two.
BACKWARD_OVER_FORWARD = 2.5
FORWARD_SHARE = 1 / (1 + BACKWARD_OVER_FORWARD)


def max_over_mean(seconds: Sequence[float]) -> float:
    """Imbalance of one step's ranks; 1 is perfect, also when no rank has work."""
    mean = statistics.fmean(seconds)
    return max(seconds) / mean if mean > 0 else 1.0
