"""What the planner is told about kernels, rows and links: seconds, bytes per row, bandwidth."""

import functools
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distca.options import Options, check, check_number, is_integer
from distca.ranks import speed
from distca.ranks.links import Link, Links

TILE = {"cuda": 128, "cpu": 32}  # rows and keys of a kernel tile
DEFAULT_TFLOPS = {"cuda": 300.0, "cpu": 0.03}
SPEED_HEADS = (speed.HEADS_Q, speed.HEADS_KV, speed.HEAD_DIM)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
CALIBRATION_FORMAT = 1
MAX_TABLE_POINTS = 4096
MAX_TABLE_POINT = 2**31 - 1
MAX_SHAPE = 2**31 - 1
# The planner's table has entries at both ends of this many tiles. In longer tasks, a tile of rows
# and a tile of keys that are partly filled are at most 5 % of the task.
TILES_APART = 40


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a model's attention on one rank, and the bytes of an element."""

    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    head_dim_v: int | None = None
    """head_dim of v and out. None: as head_dim."""

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name, value in vars(self).items():
            is_count = is_integer(value) and 1 <= value <= MAX_SHAPE
            check(name, value, is_count, f"an integer from 1 to {MAX_SHAPE}")

    @classmethod
    def from_words(cls, words: list[int]) -> "AttentionShape":
        """Return a shape of the five fields in order. If any is 0, the shape is not known yet, and
        the defaults are returned."""
        return cls(*words) if all(words) else cls()

    def tensor_row_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of a row of q, of out, and of k and v together."""
        widths = (
            self.heads_q * self.head_dim,
            self.heads_q * self.head_dim_v,
            self.heads_kv * (self.head_dim + self.head_dim_v),
        )
        return tuple(self.element_bytes * width for width in widths)

    def row_bytes(self) -> tuple[int, int]:
        """Return the bytes that a query row and a key row move in one layer, forward and backward.

        Query: q out, (out, lse) back; (q, grad_out, lse, delta) out, dq back. Key: (k, v) out
        twice, (dk, dv) back.
        """
        q, out, kv = self.tensor_row_bytes()
        lse = 4 * self.heads_q
        return 3 * q + 2 * out + 3 * lse, 3 * kv

    def least_bytes(self, num_pairs: float) -> float:
        """Return the least bytes with which a task of `num_pairs` (query, key) pairs can move.

        n query rows of A bytes and m key rows of B bytes have at most n * m pairs. Their bytes,
        A * n + B * m, are least when both terms are equal.
        """
        query_bytes, key_bytes = self.row_bytes()
        return 2 * (query_bytes * key_bytes * num_pairs) ** 0.5

    def pair_flops(self) -> tuple[int, int]:
        """Return the FLOPs of a (query, key) pair for all query heads, forward and backward.

        Forward: q k^T and p v. Backward: q k^T, dq and dk, each of head_dim; dv and grad_out v^T,
        each of head_dim_v.
        """
        qk, pv = 2 * self.heads_q * self.head_dim, 2 * self.heads_q * self.head_dim_v
        return qk + pv, 3 * qk + 2 * pv

    def tile_flops(self, tile: int) -> float:
        """Return the FLOPs of a full tile, forward and backward, for all query heads."""
        return float(tile * tile * sum(self.pair_flops()))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `python -m distca.calibrate` measured on a machine. The fields are those of its file,
    which distca.calibrate documents. Raises ValueError naming a field that is wrong."""

    device_type: str
    device_name: str
    torch: str
    date: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int | None = None
    """None: as head_dim."""
    dtype: str
    rows: list[int]
    keys: list[int]
    forward_seconds: list[list[float]]
    """[rows][keys] of one layer; tasks are full rectangles."""
    backward_seconds: list[list[float]]
    seconds_per_task: float
    """Part of every entry, forward and backward, that does not depend on the size of the task."""
    links: Links = Links()

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name, known in (("device_type", TILE), ("dtype", DTYPE_BYTES)):
            value = getattr(self, name)
            check(name, value, value in list(known), "one of " + ", ".join(known))
        for name in ("device_name", "torch", "date"):
            value = getattr(self, name)
            check(name, value, type(value) is str, "text")
        for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v"):
            _check_point(name, getattr(self, name))
        for name in ("rows", "keys"):
            axis, expected = getattr(self, name), f"a list of 1 to {MAX_TABLE_POINTS} integers"
            check(name, axis, type(axis) is list and 1 <= len(axis) <= MAX_TABLE_POINTS, expected)
            before = 0
            for idx, point in enumerate(axis):
                _check_point(f"{name}[{idx}]", point)
                check(f"{name}[{idx}]", point, point > before, f"more than the {before} before it")
                before = point
        for name in ("forward_seconds", "backward_seconds"):
            seconds = getattr(self, name)
            _check_list(name, seconds, len(self.rows), "lists, one for each of rows")
            for i, line in enumerate(seconds):
                _check_list(f"{name}[{i}]", line, len(self.keys), "numbers, one for each of keys")
                for j, value in enumerate(line):
                    check_number(f"{name}[{i}][{j}]", value)
        check_number("seconds_per_task", self.seconds_per_task, zero=True)
        check("links", self.links, type(self.links) is Links, "inside and between")

    @property
    def shape(self) -> AttentionShape:
        """What was measured."""
        heads = (self.heads_q, self.heads_kv, self.head_dim)
        return AttentionShape(*heads, DTYPE_BYTES[self.dtype], self.head_dim_v)

    @property
    def seconds(self) -> list[list[float]]:
        """[rows][keys], forward and backward of one layer."""
        return np.add(self.forward_seconds, self.backward_seconds).tolist()

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Reads a file that `save` wrote. Raises ValueError naming the file, the field and value
        that are wrong, and the remedy."""
        remedy = f"measure again: python -m distca.calibrate --out {path}"
        try:
            return cls._of_content(json.loads(Path(path).read_text()))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"cost_table {path}: {error}; {remedy}") from error

    @classmethod
    def _of_content(cls, content: object) -> "Calibration":
        names = {"format"} | {field.name for field in fields(cls)}
        if type(content) is dict:  # older files have one head_dim
            content = {"head_dim_v": content.get("head_dim"), **content}
        _check_names("the file", content, names)
        is_known = content["format"] == CALIBRATION_FORMAT and type(content["format"]) is int
        check("format", content["format"], is_known, str(CALIBRATION_FORMAT))
        links = content["links"]
        _check_names("links", links, {"inside", "between"})
        by_level = {}
        for level, link in links.items():
            if link is not None:
                _check_names(f"links.{level}", link, {"latency_s", "bytes_per_second"})
                try:
                    link = Link(**link)
                except ValueError as error:
                    raise ValueError(f"links.{level}: {error}") from error
            by_level[level] = link
        measured = {name: content[name] for name in names - {"format", "links"}}
        return cls(**measured, links=Links(**by_level))

    def save(self, path: str | Path) -> None:
        """Writes the file, and creates missing folders."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format": CALIBRATION_FORMAT, **asdict(self)}) + "\n")


def _check_names(name: str, content: object, expected: set[str]) -> None:
    listed = ", ".join(sorted(expected))
    check(name, content, type(content) is dict, f"an object with {listed}")
    wrong = expected ^ content.keys()
    if wrong:
        field = min(wrong)
        state = "is missing" if field in expected else "is not known"
        raise ValueError(f"{name}: field {field!r:.40} {state}; expected {listed}")


def _check_point(name: str, value: object) -> None:
    is_valid = type(value) is int and 1 <= value <= MAX_TABLE_POINT
    check(name, value, is_valid, f"an integer from 1 to {MAX_TABLE_POINT}")


def _check_list(name: str, value: object, count: int, content: str) -> None:
    is_valid = type(value) is list and len(value) == count
    check(name, value, is_valid, f"a list of {count} {content}")


def check_device(device: torch.device, name: str) -> None:
    """Raises ValueError when there is no core attention for tensors on `device`."""
    if device.type not in TILE:
        raise ValueError(f"{name} is on {device}; expected {' or '.join(sorted(TILE))}")


def device_of(device: torch.device | str, name: str) -> torch.device:
    """Return a device of this process. Raises ValueError for what is none, and as check_device."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} is on {device!r:.80}; expected a device: {error}") from error
    check_device(device, name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name} is on {device}; expected a device that PyTorch finds here: cpu")
    return device


calibration_of = functools.lru_cache(maxsize=8)(Calibration.load)  # once a process


def measured_links(options: Options) -> Links:
    """Return the links of the cost table, or no links without a table."""
    return calibration_of(options.cost_table).links if options.cost_table is not None else Links()


def cost_tensor(
    options: Options,
    shape: AttentionShape,
    device_type: str,
    measured_seconds: float | None = None,
) -> Tensor:
    """Return the cost model as torch.ops.distca.plan takes it, float64: tiles, or the measured
    table of the options, forward + backward. `measured_seconds` is the time of the document of
    speed.measure. It is used if the options do not say how fast attention is.

    A table of other heads is scaled by FLOPs, with a warning. Raises ValueError for a file that
    cannot be read or was measured on another type of device.
    """
    if options.cost_table is not None:
        return _measured_cost(options.cost_table, shape, device_type)
    tile = TILE[device_type]
    tflops = options.attention_tflops or DEFAULT_TFLOPS[device_type]
    if options.attention_tflops is None and measured_seconds is not None:
        num_tiles = (speed.NUM_ROWS // tile) * (speed.NUM_ROWS // tile + 1) // 2
        flops = num_tiles * AttentionShape(*SPEED_HEADS).tile_flops(tile)
        tflops = 1e-12 * flops / measured_seconds
    values = [tile, tile, shape.tile_flops(tile) / (tflops * 1e12), 0.0, 0, 0]
    return torch.tensor(values, dtype=torch.float64)


def flops_per_second(cost: Tensor, shape: AttentionShape) -> float:
    """Return the FLOP/s of long tasks, forward and backward, according to `cost` of cost_tensor."""
    tile, _, seconds, _, num_rows, num_keys = cost[:6].tolist()
    num_pairs = tile * tile
    if num_rows > 0:  # a table: its last entry is the largest task, the last rows of its keys
        rows, keys = (cost[5 + int(end)].item() for end in (num_rows, num_rows + num_keys))
        num_pairs, seconds = rows * keys - rows * (rows - 1) / 2, cost[-1].item()
    return num_pairs * sum(shape.pair_flops()) / seconds


@functools.lru_cache(maxsize=8)
def _measured_cost(path: str, shape: AttentionShape, device_type: str) -> Tensor:
    measured = calibration_of(path)
    if measured.device_type != device_type:
        raise ValueError(
            f"cost_table {path}: device_type is {measured.device_type}, but this plan is for "
            f"{device_type}; measure there: python -m distca.calibrate --out FILE"
        )
    tile = TILE[device_type]
    scale = shape.tile_flops(tile) / measured.shape.tile_flops(tile)
    if shape != measured.shape:
        warnings.warn(
            f"cost_table {path} is of {measured.shape}, this plan of {shape}: its seconds are "
            f"multiplied by {scale:.3g}, the ratio of FLOPs; for this shape's own run python -m "
            "distca.calibrate with its --heads-q --heads-kv --head-dim --head-dim-v --dtype",
            stacklevel=3,
        )
    rows, keys, seconds = whole_tiles(measured, tile)
    seconds *= scale
    per_task = measured.seconds_per_task * scale
    head = [tile, tile, seconds[0, 0], per_task, len(rows), len(keys)]
    parts = np.concatenate([head, rows, keys, seconds.ravel()])
    return torch.from_numpy(parts.astype(np.float64))


def whole_tiles(measured: Calibration, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows, keys, seconds [rows, keys]) for the planner, which interpolates between
    entries.

    Kernels work in whole tiles, so a task of one row more than a tile costs two. For up to
    TILES_APART tiles, where that counts, the table has an entry at the first and at the last row
    (key) of each tile. Beyond them, it has entries at the rows (keys) of the file. The seconds of
    an entry are those of the file at the end of its tile, interpolated.
    """
    rows, keys = (_ends_of_tiles(axis, tile) for axis in (measured.rows, measured.keys))
    up_rows, up_keys = (-(-axis // tile) * tile for axis in (rows, keys))
    by_keys = [_interpolated(up_keys, measured.keys, line) for line in measured.seconds]
    columns = [_interpolated(up_rows, measured.rows, column) for column in np.transpose(by_keys)]
    return rows, keys, np.transpose(columns)


def _ends_of_tiles(axis: list[int], tile: int) -> np.ndarray:
    ends = np.arange(1, TILES_APART + 1) * tile
    near = np.concatenate([ends - tile + 1, ends])
    points = np.concatenate([near[near <= axis[-1]], axis])
    return np.unique(points)


def _interpolated(points: np.ndarray, axis: list[int], values: Sequence[float]) -> np.ndarray:
    """Interpolate linearly between entries. Before the first entry and beyond the last, values are
    proportional to the points, as in the planner."""
    inside = np.interp(points, axis, values)
    return inside * np.where(points < axis[0], points / axis[0], np.maximum(points / axis[-1], 1))
