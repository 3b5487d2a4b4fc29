"""What hardware does in which time: matrices, memory, attention, links."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distca.planning.cost import TILE, AttentionShape, Calibration, Link, whole_tiles

FORWARD, BACKWARD = 0, 1
FORWARD_FLOPS, BACKWARD_FLOPS = 1.0, 2.5  # of attention, relative
TILE_ROWS = TILE["cuda"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds of one GPU and its links. Raises ValueError naming the field that is wrong."""

    gpus_per_node: int = 8
    inside: Link = Link(50e-6, 330e9)
    """Between GPUs of a node. 330 GB/s: NCCL's all-to-all between H200s over NVLink, 64 MiB to
    1 GiB. Latency: half of the 100 us measured from Python."""
    between: Link = Link(50e-6, 50e9)
    """Between nodes, each GPU with its own 400 Gbit/s card; latency assumed."""
    matmul_tflops: float = 700.0
    attention_tflops: tuple[float, float] = (640.0, 580.0)
    """Forward, backward: distca's kernels on an H200, head_dim 128."""
    key_block_tiles: float = 0.0
    """What a task's block of 128 keys costs in backward beside its tiles, in tiles: loading keys,
    writing their gradients. 0: as distca's kernels, whose tasks of one document share it.
    FlashAttention-3 measures as 2.2 and FlashAttention-2 as 1.2 (mean over tasks of 64 to 2048 rows
    and 8192 keys on an H200). Not with a calibration, which has it in its tables."""
    memory_bytes_per_second: float = 4e12
    """Of elementwise kernels: an H200's 4.8 TB/s, five sixths reached."""
    memory_bytes: float = 141e9
    usable_memory: float = 0.9
    """Share of memory_bytes that may be planned with."""
    calibration: Calibration | None = None
    """Instead of attention_tflops."""
    linear_seconds_per_token: float | None = None
    """Of everything but attention and communication, forward and backward, on one rank, through all
    layers of its stage: instead of matmul_tflops and memory_bytes_per_second."""

    def __post_init__(self) -> None:
        if type(self.gpus_per_node) is not int or self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node is {self.gpus_per_node}; expected 1 or more")
        positive = {
            "matmul_tflops": self.matmul_tflops,
            "attention_tflops forward": self.attention_tflops[0],
            "attention_tflops backward": self.attention_tflops[1],
            "memory_bytes_per_second": self.memory_bytes_per_second,
            "memory_bytes": self.memory_bytes,
            "linear_seconds_per_token": self.linear_seconds_per_token,
        }
        if not 0 <= self.key_block_tiles < float("inf"):
            raise ValueError(f"key_block_tiles is {self.key_block_tiles}; expected 0 or more")
        for name, value in positive.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; expected a positive number")

    def gather_seconds(self, num_bytes: float, members: int, members_in_node: int) -> float:
        """All-gather to (or reduce-scatter from) `num_bytes` on each of `members` ranks."""
        if members == 1:
            return 0.0
        in_node = max(1, min(members, members_in_node))
        inside = num_bytes * (members - 1) / members / self.inside.bytes_per_second
        if in_node == members:
            return self.inside.latency_s + inside
        between = num_bytes * (1 - in_node / members) / (in_node * self.between.bytes_per_second)
        latency = max(self.inside.latency_s, self.between.latency_s)
        return latency + max(inside if in_node > 1 else 0.0, between)

    def send_seconds(self, num_bytes: float, inside: bool) -> float:
        link = self.inside if inside else self.between
        return link.latency_s + num_bytes / link.bytes_per_second


class AttentionCost:
    """Seconds of causal core attention of one layer on one rank."""

    def __init__(self, machine: Machine, shape: AttentionShape) -> None:
        speeds = np.array(machine.attention_tflops) * 1e12
        flops = shape.tile_flops(TILE_ROWS) / (FORWARD_FLOPS + BACKWARD_FLOPS)
        self.seconds_per_tile = flops * np.array([FORWARD_FLOPS, BACKWARD_FLOPS]) / speeds
        self._key_block_tiles = np.array([[0.0], [machine.key_block_tiles]])
        self._table = None
        if machine.calibration is not None:
            self._table = _Table(machine.calibration, shape)

    def seconds(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """[2, tasks], forward and backward, of queries [begin, end) with all keys before them."""
        if self._table is not None:
            return self._table.seconds(begin, end)
        key_blocks = np.where(end > begin, -(-end // TILE_ROWS), 0)
        tiles = num_tiles(begin, end) + self._key_block_tiles * key_blocks
        return self.seconds_per_tile[:, None] * tiles

    def tensor(self) -> Tensor:
        """float64, forward + backward, as torch.ops.distca.plan takes it."""
        if self._table is not None:
            return self._table.tensor()
        per_tile = float(self.seconds_per_tile.sum())
        return torch.tensor([TILE_ROWS, TILE_ROWS, per_tile, 0, 0, 0], dtype=torch.float64)


def num_tiles(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Kernel tiles of causal tasks that hold a visible pair; query tiles start at `begin`, key
    tiles at 0."""
    q_tiles = -((begin - end) // TILE_ROWS)
    above = (q_tiles - 1) * -(-begin // TILE_ROWS) + q_tiles * (q_tiles - 1) // 2
    return np.where(end > begin, above - (-end // TILE_ROWS), 0)


class _Table:
    """Measured times, interpolated as the planner does; another shape's scaled by FLOPs."""

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
        num_rows = np.maximum(end - begin, 1)
        row, row_weight, row_scale = _places(self.rows, num_rows)
        key, key_weight, key_scale = _places(self.keys, np.maximum(end, 1))
        at = [
            self.by_pass[:, np.minimum(row + i, self.rows.size - 1), :][
                :, np.arange(row.size), np.minimum(key + j, self.keys.size - 1)
            ]
            * (row_weight if i else 1 - row_weight)
            * (key_weight if j else 1 - key_weight)
            for i in (0, 1)
            for j in (0, 1)
        ]
        all_tiles = -(-num_rows // TILE_ROWS) * -(-np.maximum(end, 1) // TILE_ROWS)
        visible = num_tiles(begin, end) / all_tiles  # share of the rectangle
        above = sum(at) * (row_scale * key_scale) - self.per_task
        return (self.per_task + above * visible) * (end > begin)

    def tensor(self) -> Tensor:
        both = self.by_pass.sum(0)
        per_task = self.per_task.sum()
        head = [TILE_ROWS, TILE_ROWS, both[0, 0], per_task, self.rows.size, self.keys.size]
        return torch.from_numpy(np.concatenate([head, self.rows, self.keys, both.ravel()]))


def _places(axis: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(entry at or before, weight of the one after, scale): beyond an edge in proportion to it."""
    inside = np.clip(points, axis[0], axis[-1])
    low = np.clip(np.searchsorted(axis, inside, side="right") - 1, 0, max(axis.size - 2, 0))
    width = (axis[np.minimum(low + 1, axis.size - 1)] - axis[low]).clip(1)
    return low, (inside - axis[low]) / width, points / inside
