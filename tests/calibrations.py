"""Write files of distca.calibrate whose seconds follow a formula."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

Seconds = Callable[[int, int], float]


def content(
    seconds_of: Seconds = lambda rows, keys: 1e-9 * rows * keys,
    rows: Sequence[int] = (128, 1024, 8192),
    keys: Sequence[int] = (128, 1024, 8192, 65536),
    **changes,
) -> dict:
    """Return the content of a file, where a quarter of seconds_of(rows, keys) is forward.

    `changes` replace fields.
    """
    table = [[seconds_of(r, k) for k in keys] for r in rows]
    fields = {
        "format": 1,
        "device_type": "cuda",
        "device_name": "by hand",
        "torch": "2.11.0",
        "date": "2026-01-31T12:00:00+00:00",
        "heads_q": 32,
        "heads_kv": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        "rows": list(rows),
        "keys": list(keys),
        "forward_seconds": [[0.25 * value for value in line] for line in table],
        "backward_seconds": [[0.75 * value for value in line] for line in table],
        "seconds_per_task": 0.0,
        "links": {"inside": None, "between": None},
    }
    return {**fields, **changes}


def write(path: Path, seconds_of: Seconds, **changes) -> str:
    path.write_text(json.dumps(content(seconds_of, **changes)))
    return str(path)
