"""Seconds that a task adds to a busy server, over a grid of query rows and keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distca import ops
from distca.calibrate.timing import ProgressBar, median_seconds
from distca.planning.chosen_tasks import layout_of_server
from distca.planning.cost import TILE

FULL = (-1, -1)
MAX_ROWS = 16384  # more rows cost in proportion
# Tickets of a kernel are (query tile, head): so many on each processor fill it evenly.
TICKETS_PER_PROCESSOR = 8
OVERHEAD_KEYS = 8  # tiles of keys of the task that a task of one tile is compared with


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    max_keys: int
    repeats: int
    budget_s: float  # of one entry, beyond which calls are repeated less often
    flops: float  # forward, of a call at least


EFFORTS = {  # by (device type, quick)
    ("cuda", False): Effort(131072, repeats=7, budget_s=0.5, flops=5e11),
    ("cuda", True): Effort(32768, repeats=5, budget_s=0.2, flops=2e11),
    ("cpu", False): Effort(4096, repeats=5, budget_s=1.0, flops=2e9),
    ("cpu", True): Effort(1024, repeats=3, budget_s=0.3, flops=5e8),
}


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int
    dim_v: int
    dtype: torch.dtype


def axis(tile: int, most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... tiles, up to `most` but at least one."""
    powers = [tile << i for i in range((most // tile).bit_length())]
    middles = [3 * power // 2 for power in powers[1:]]
    return sorted(point for point in {tile, *powers, *middles} if point <= max(most, tile))


def grid(device_type: str, effort: Effort) -> tuple[list[int], list[int]]:
    """(rows, keys) of a table."""
    keys = axis(TILE[device_type], effort.max_keys)
    return [point for point in keys if point <= MAX_ROWS], keys


def entries(rows: list[int], keys: list[int]) -> Iterator[tuple[int, int]]:
    """Indices of the entries that are measured, those of the largest tasks first: they need most
    memory, so that what follows reuses theirs."""
    for j in reversed(range(len(keys))):
        for i in reversed(range(len(rows))):
            if rows[i] <= keys[j]:
                yield i, j


def measure(
    heads: Heads, device: torch.device, effort: Effort, bar: ProgressBar
) -> dict[str, list | float]:
    """The fields of a Calibration that say seconds; a step of the bar for each of `entries`."""
    rows, keys = grid(device.type, effort)
    seconds = np.full((2, len(rows), len(keys)), np.nan)
    for i, j in entries(rows, keys):
        bar.advance(f"attention of {rows[i]} rows, {keys[j]} keys")
        seconds[:, i, j] = _seconds_of_task(rows[i], keys[j], heads, device, effort)
    forward, backward = continued(seconds, np.array(rows))
    return {
        "rows": rows,
        "keys": keys,
        "forward_seconds": forward.tolist(),
        "backward_seconds": backward.tolist(),
        "seconds_per_task": seconds_per_task(keys, forward[0] + backward[0]),
    }


def seconds_per_task(keys: Sequence[int], seconds: Sequence[float]) -> float:
    """What is left of a task without keys: a task of one tile, n of which in one call are compared
    with one task of as many rows as one of them and as many keys as all. `seconds` [keys] are of
    tasks of one tile of rows."""
    at = max(i for i, each in enumerate(keys) if each <= OVERHEAD_KEYS * keys[0])
    num_tiles = keys[at] / keys[0]
    if at == 0:
        return 0.0
    return max(0.0, float(num_tiles * seconds[0] - seconds[at]) / (num_tiles - 1))


def continued(seconds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Entries of more rows than keys: on the line through their column's last measured entry and
    that of half its rows."""
    for times in seconds:
        for column in times.T:
            last = np.flatnonzero(~np.isnan(column))[-1]
            half = np.interp(rows[last] / 2, [0, *rows[: last + 1]], [0, *column[: last + 1]])
            slope = max(0.0, column[last] - half) / (rows[last] / 2)
            column[last + 1 :] = column[last] + slope * (rows[last + 1 :] - rows[last])
    return seconds


def _seconds_of_task(
    rows: int, keys: int, heads: Heads, device: torch.device, effort: Effort
) -> tuple[float, float]:
    """(forward, backward)"""
    count = num_tasks(rows, keys, heads, device, effort)
    q, k, v, grad_out = _inputs(count * rows, count * keys, heads, device)
    served = [(document, keys - rows, keys) for document in range(count)]
    layout, indices = layout_of_server([keys] * count, served, 1, FULL, device.type)
    share = layout, indices.to(device), heads.dim**-0.5, "visiting"

    def forward() -> tuple[Tensor, Tensor]:
        return ops.attend(q, k, v, *share)

    out, lse = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        return ops.attend_backward(grad_out, q, k, v, out, lse, *share)

    passes = (forward, backward)
    return tuple(
        median_seconds(call, device, effort.repeats, effort.budget_s) / count for call in passes
    )


def num_tasks(rows: int, keys: int, heads: Heads, device: torch.device, effort: Effort) -> int:
    """Tasks of a call: enough to fill the device and to take a while, as far as memory goes. Of
    such numbers the one that leaves fewest processors without a ticket at the end."""
    processors = _num_processors(device)
    tickets = heads.q * -(-rows // TILE[device.type])
    fills = TICKETS_PER_PROCESSOR * processors / tickets
    lasts = effort.flops / (2 * rows * keys * (heads.dim + heads.dim_v) * heads.q)
    # q, out, their gradients and a float32 sum; k, v, their gradients and two such sums.
    row_bytes = (heads.dim + heads.dim_v) * (2 * heads.dtype.itemsize + 2)
    task_bytes = row_bytes * (rows * heads.q + keys * 2 * heads.kv)
    most = max(1, int(min(max(fills, lasts, 1), _memory_bytes(device) / task_bytes)))

    def idle_share(count: int) -> float:
        rounds = count * tickets / processors
        return -(-rounds // 1) / rounds

    return min(range(-(-most // 2), most + 1), key=lambda count: (idle_share(count), -count))


def _num_processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


def _memory_bytes(device: torch.device) -> int:
    """That a call may use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (free + reserved) // 2
    return 2**30


def _inputs(num_q: int, num_k: int, heads: Heads, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v, grad_out from N(0, 1)."""
    generator = torch.Generator(device).manual_seed(0)
    q, k = (num_q, heads.q, heads.dim), (num_k, heads.kv, heads.dim)
    shapes = (q, k, (*k[:2], heads.dim_v), (*q[:2], heads.dim_v))
    return tuple(
        torch.randn(*shape, generator=generator, device=device, dtype=heads.dtype)
        for shape in shapes
    )
