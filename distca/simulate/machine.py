"""Seconds that hardware takes: for attention, collectives and messages."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distca.planning.cluster import gather_seconds
from distca.planning.cost import TILE, AttentionShape, Calibration, Link, whole_tiles

FORWARD, BACKWARD = 0, 1
TILE_ROWS = TILE["cuda"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of one GPU and its links. Raises ValueError naming the field that is wrong. Fields
    with a docstring are flags."""

    # NCCL's all-to-all between H200s over NVLink, 64 MiB to 1 GiB, and half of the 100 us measured
    # from Python; between nodes a 400 Gbit/s card for each GPU, its latency assumed.
    inside: Link = Link(50e-6, 330e9)
    between: Link = Link(50e-6, 50e9)
    gpus_per_node: int = 8
    """GPUs that share a node."""
    # Fitted to the plain step of benchmarks/training_step.py on two H200, which took 798 ms, with
    # elementwise work and attention as below.
    matmul_tflops: float = 620.0
    """Speed of linear layers."""
    # Forward, backward: distca's kernels on an H200, head_dim 128, documents of 2k to 64k
    # (docs/performance.md).
    attention_tflops: tuple[float, float] = (640.0, 580.0)
    memory_tb_per_s: float = 4.0
    """Of elementwise kernels: an H200's 4.8 TB/s, of which five sixths are assumed."""
    memory_gb: float = 141.0
    """Memory of a GPU, in 1e9 bytes."""
    usable_memory: float = 0.9  # share of memory_gb that may be planned with
    calibration: Calibration | None = None  # instead of attention_tflops
    # Of everything but attention and communication, forward and backward, on one rank, through all
    # layers of its stage: instead of matmul_tflops and memory_tb_per_s.
    linear_seconds_per_token: float | None = None

    def __post_init__(self) -> None:
        forward, backward = self.attention_tflops
        positive = {
            "gpus_per_node": self.gpus_per_node,
            "matmul_tflops": self.matmul_tflops,
            "attention_tflops forward": forward,
            "attention_tflops backward": backward,
            "memory_tb_per_s": self.memory_tb_per_s,
            "memory_gb": self.memory_gb,
            "linear_seconds_per_token": self.linear_seconds_per_token,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a positive number")

    @property
    def usable_bytes(self) -> float:
        return 1e9 * self.memory_gb * self.usable_memory

    def gather_seconds(self, num_bytes, members: int, members_in_node: int):
        """All-gather to (or reduce-scatter from) `num_bytes` on each of `members` ranks."""
        return gather_seconds(num_bytes, members, members_in_node, self.inside, self.between)

    def send_seconds(self, num_bytes, inside: bool):
        link = self.inside if inside else self.between
        return link.latency_s + num_bytes / link.bytes_per_second


class TileCost:
    """Seconds of causal core attention of one layer on one rank, by kernel tiles."""

    def __init__(self, machine: Machine, shape: AttentionShape) -> None:
        flops = TILE_ROWS**2 * np.array(shape.pair_flops())
        speeds = np.array(machine.attention_tflops) * 1e12
        self.seconds_per_tile = flops / speeds

    def seconds(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """[2, tasks], forward and backward, of queries [begin, end) with all keys before them."""
        return self.seconds_per_tile[:, None] * num_tiles(begin, end)

    def tensor(self) -> Tensor:
        """float64, forward + backward, as torch.ops.distca.plan takes it."""
        per_tile = float(self.seconds_per_tile.sum())
        return torch.tensor([TILE_ROWS, TILE_ROWS, per_tile, 0, 0, 0], dtype=torch.float64)


class TableCost:
    """What TileCost has, from measured times: interpolated as the planner does, and scaled by FLOPs
    where they are of another shape."""

    def __init__(self, measured: Calibration, shape: AttentionShape) -> None:
        scale = shape.tile_flops(TILE_ROWS) / measured.shape.tile_flops(TILE_ROWS)
        self.rows, self.keys, both = whole_tiles(measured, TILE_ROWS)
        forward_twice = replace(measured, backward_seconds=measured.forward_seconds)
        forward = whole_tiles(forward_twice, TILE_ROWS)[2] / 2
        self.by_pass = scale * np.stack([forward, both - forward])  # [2, rows, keys]
        # Of a task whatever its size, divided as the least entry's seconds are.
        self.per_task = scale * measured.seconds_per_task * self.by_pass[:, :1, 0]
        self.per_task /= self.by_pass[:, 0, 0].sum()  # [2, 1]

    def seconds(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        num_rows, num_keys = np.maximum(end - begin, 1), np.maximum(end, 1)
        row, next_row, row_weight, row_scale = _places(self.rows, num_rows)
        key, next_key, key_weight, key_scale = _places(self.keys, num_keys)
        lower, upper = (
            self.by_pass[:, at, key] * (1 - key_weight) + self.by_pass[:, at, next_key] * key_weight
            for at in (row, next_row)
        )
        whole = (lower * (1 - row_weight) + upper * row_weight) * (row_scale * key_scale)
        all_tiles = -(-num_rows // TILE_ROWS) * -(-num_keys // TILE_ROWS)
        visible = num_tiles(begin, end) / all_tiles  # share of the rectangle
        return (self.per_task + (whole - self.per_task) * visible) * (end > begin)

    def tensor(self) -> Tensor:
        both = self.by_pass.sum(0)
        per_task = self.per_task.sum()
        head = [TILE_ROWS, TILE_ROWS, both[0, 0], per_task, self.rows.size, self.keys.size]
        return torch.from_numpy(np.concatenate([head, self.rows, self.keys, both.ravel()]))


def num_tiles(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Kernel tiles of causal tasks that hold a visible pair; query tiles start at `begin`, key
    tiles at 0."""
    q_tiles = -((begin - end) // TILE_ROWS)
    above = (q_tiles - 1) * -(-begin // TILE_ROWS) + q_tiles * (q_tiles - 1) // 2
    return np.where(end > begin, above - (-end // TILE_ROWS), 0)


def _places(axis: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, ...]:
    """(entry at or before, entry after, its weight, scale): beyond an edge in proportion to it."""
    place = np.interp(points, axis, np.arange(axis.size))
    low = place.astype(int)
    return (
        low,
        np.minimum(low + 1, axis.size - 1),
        place - low,
        points / points.clip(*axis[[0, -1]]),
    )
