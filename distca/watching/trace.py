"""A step's attention as planned and as measured, in a trace for chrome://tracing and Perfetto: a
process a rank, with a row of times predicted without distca, one of those planned, one measured.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from distca.watching.figures import FORWARD_SHARE, SPANS_FOLDER, TICKS_FOLDER

# Rows of a rank in the trace, and the list of a step's record whose seconds they show.
PREDICTED = {"without distca, predicted": "seconds_before", "planned": "seconds_after"}
MEASURED = "measured"


def save_spans(
    folder: str | Path, rank: int, step: int, phases: Sequence[str], times: Tensor
) -> None:
    """Keeps when phases of step `step` began and ended on rank `rank`, in place of an earlier step.

    `phases`, such as "forward early home tasks", and `times` int64 [num_spans, 3] (layer, begin,
    end) are as torch.ops.distca.spans returns them: nanoseconds since 1970.
    """
    spans = [[phase, *row] for phase, row in zip(phases, times.tolist(), strict=True)]
    save_times(Path(folder) / SPANS_FOLDER, {"rank": rank, "step": step, "spans": spans})


def save_times(folder: Path, times: Mapping) -> None:
    """Save the times of a step on one rank, and replace those of an earlier step."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{times['rank']}.json"
    written = path.with_suffix(".new")  # readers see the earlier step or this one
    written.write_text(json.dumps(times))
    written.replace(path)


def read_times(folder: Path) -> list[dict]:
    """Return the times of the latest step that ranks saved, by rank; [] if there are none."""
    paths = folder.glob("*.json")
    saved = [json.loads(path.read_text()) for path in paths]
    latest = max((each["step"] for each in saved), default=None)
    return sorted((each for each in saved if each["step"] == latest), key=lambda each: each["rank"])


def forget_times(folder: Path) -> None:
    """Remove the times of an earlier run from its folder."""
    for name in (SPANS_FOLDER, TICKS_FOLDER):
        for path in (folder / name).glob("*.json"):
            path.unlink()


def chrome_trace(record: Mapping, saved: Sequence[Mapping]) -> dict:
    """Complete events (ts and dur in us) of the step that `record` and `saved` are of. Predictions
    are of a layer, forward and backward together; each pass is drawn with its part of them, by
    FLOPs, from when it began."""
    origin = min(begin for each in saved for _, _, begin, _ in each["spans"])
    events = []
    for each in saved:
        rank = each["rank"]
        events.append(name_event("process_name", rank, 0, f"rank {rank}"))
        for row, name in enumerate((*PREDICTED, MEASURED)):
            events.append(name_event("thread_name", rank, row, name))
        for phase, layer, begin, end in each["spans"]:
            start, direction = (begin - origin) / 1e3, phase.rpartition(" attention")[0]
            name = phase if layer < 0 else f"layer {layer} {phase}"
            events.append(event(name, rank, len(PREDICTED), start, (end - begin) / 1e3))
            if not direction:
                continue
            share = 1 - FORWARD_SHARE if direction == "backward" else FORWARD_SHARE
            for row, key in enumerate(PREDICTED.values()):
                events.append(event(name, rank, row, start, 1e6 * share * record[key][rank]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def event(name: str, rank: int, row: int, start: float, duration: float) -> dict:
    """Return a complete event. Times are in us."""
    return {"name": name, "ph": "X", "pid": rank, "tid": row, "ts": start, "dur": duration}


def name_event(what: str, rank: int, row: int, name: str) -> dict:
    """Return a metadata event. `what` is "process_name" or "thread_name"."""
    return {"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
