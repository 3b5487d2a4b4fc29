"""What the planner is told about kernels and rows: seconds per tile, bytes per row."""

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distca.options import Options

TILE = {"cuda": 128, "cpu": 32}  # rows and keys of a kernel tile
DEFAULT_TFLOPS = {"cuda": 300.0, "cpu": 0.03}
DEFAULT_LINK_GB_PER_S = {"cuda": 200.0, "cpu": 2.0}
MAX_TABLE_POINTS = 4096
MAX_TABLE_POINT = 2**31 - 1


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model's attention on one rank, and the bytes of an element."""

    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    element_bytes: int = 2

    @classmethod
    def from_words(cls, words: list[int]) -> "AttentionShape":
        """From its four fields in order; zeros mean that it is not known yet."""
        return cls(*words) if all(words) else cls()

    def row_bytes(self) -> tuple[int, int]:
        """Bytes that a query row and a key row travel in one layer, forward and backward.

        Query: q out, (out, lse) back; (q, grad_out, lse, delta) out, dq back. Key: (k, v) out
        twice, (dk, dv) back.
        """
        q = self.heads_q * self.head_dim * self.element_bytes
        kv = 2 * self.heads_kv * self.head_dim * self.element_bytes
        lse = 4 * self.heads_q
        return 5 * q + 3 * lse, 3 * kv

    def tile_flops(self, tile: int) -> float:
        """FLOPs of a full tile: 4 * rows * keys * head_dim a head, and 2.5 times that backward."""
        return 3.5 * 4 * tile * tile * self.heads_q * self.head_dim


def check_device(device: torch.device, name: str) -> None:
    """Raises ValueError when there is no core attention for tensors on `device`."""
    if device.type not in TILE:
        raise ValueError(f"{name} is on {device}; expected {' or '.join(sorted(TILE))}")


def link_bytes_per_second(options: Options, device_type: str) -> float:
    return 1e9 * (options.link_gb_per_s or DEFAULT_LINK_GB_PER_S[device_type])


def cost_tensor(options: Options, shape: AttentionShape, device_type: str) -> Tensor:
    """float64, as torch.ops.distca.plan takes it: tiles, or the measured table of the options."""
    tflops = options.attention_tflops or DEFAULT_TFLOPS[device_type]
    tile = TILE[device_type]
    values = [tile, tile, shape.tile_flops(tile) / (tflops * 1e12), 0.0]
    if options.cost_table is None:
        return torch.tensor([*values, 0, 0], dtype=torch.float64)
    rows, keys, seconds = read_table(Path(options.cost_table))
    flat = [value for line in seconds for value in line]
    return torch.tensor([*values, len(rows), len(keys), *rows, *keys, *flat], dtype=torch.float64)


def read_table(path: Path) -> tuple[list[int], list[int], list[list[float]]]:
    """(rows, keys, seconds[row][key]) of a measured cost table; rows and keys increase.

    Raises ValueError naming the file and what is wrong with it.
    """
    try:
        table = json.loads(path.read_text())
        rows, keys, seconds = table["rows"], table["keys"], table["seconds"]
        points = [*rows, *keys]
        times = [value for line in seconds for value in line]
        shaped = len(seconds) == len(rows) and all(len(line) == len(keys) for line in seconds)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"cost_table {path}: not a readable cost table: {error!r}") from error
    if not shaped or not rows or not keys or len(points) > MAX_TABLE_POINTS:
        raise ValueError(
            f"cost_table {path}: expected seconds of shape [{len(rows)}, {len(keys)}], at least "
            f"one row and key and at most {MAX_TABLE_POINTS} in all"
        )
    if not all(type(p) is int and 0 < p <= MAX_TABLE_POINT for p in points):
        raise ValueError(
            f"cost_table {path}: rows and keys must be integers from 1 to {MAX_TABLE_POINT}"
        )
    if not all(p < after for axis in (rows, keys) for p, after in itertools.pairwise(axis)):
        raise ValueError(f"cost_table {path}: rows and keys must increase")
    if not all(type(t) in (int, float) and 0 < t <= sys.float_info.max for t in times):
        raise ValueError(f"cost_table {path}: seconds must be positive numbers")
    return rows, keys, seconds
