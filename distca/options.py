"""The configuration of balanced attention, and command-line flags from dataclasses."""

import argparse
import ast
import contextlib
import errno
import hashlib
import inspect
import itertools
import math
import numbers
import os
import sys
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

MAX_SPEEDS = 65536
MAX_COUNT = 65536  # of rounds, and of ranks of a node
MIN_SIZE, MAX_SIZE = 1e-12, 1e9  # of numbers with a unit
MOVED = {  # former fields, and how to set them now
    **dict.fromkeys(
        ("log_every", "run_dir", "tensorboard"),
        "pass distca.Watching({0}=...) as `watching` to distca.init or distca.configure",
    ),
    **dict.fromkeys(
        ("patch_sdpa", "document_end_id", "document_positions", "transformers"),
        "it belongs to the launcher, python -m distca.run (distca.run.Launch)",
    ),
}

KINDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
KINDS[type(None)] = "None"

T = typing.TypeVar("T")


def digest_of(data: bytes) -> int:
    """63 bits that differ when any byte differs."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, of Python or NumPy, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check(name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raise ValueError naming a value unless it is valid."""
    if not is_valid:
        raise ValueError(f"{name} is {value!r:.80}; expected {expected}")


def check_number(name: str, value: object, zero: bool = False) -> None:
    """Raise ValueError unless `value` is a positive number, or 0 with `zero`. Integers are not
    converted, because not all of them are floats."""
    numeric = type(value) in (int, float)
    is_valid = numeric and (0 < value <= sys.float_info.max or (zero and value == 0))
    check(name, value, is_valid, "zero or a positive number" if zero else "a positive number")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How distca plans and communicates. Must be equal on all ranks of a group."""

    enabled: bool = True
    """Balance attention over ranks. If off, every rank computes its own documents."""

    tolerance: float = 0.005
    """Allowed excess of the slowest rank's predicted attention time over the mean, as a fraction. A
    step within it moves nothing."""

    server_speeds: str | None = None
    """Relative attention speeds of the ranks, as a comma-separated list of SPEED or SPEED*COUNT
    that repeats over all ranks: "1,0.5" alternates, "0*7,1" lets every eighth rank compute for all.
    A rank of speed 0 computes nothing. None: all ranks are equally fast."""

    memory_cap_gb: float | None = None
    """Memory cap for the rows that a rank holds of other ranks in one layer, in 1e9 bytes: queries
    with their results, and keys once. Results that return to a rank through peer memory are not
    counted. None: no cap."""

    rounds: int = 1
    """Approximate number of rounds of a layer. In each round a rank may hold memory_cap_gb of other
    ranks' rows. More rounds balance better in little memory, but transfers after the first round
    are exposed."""

    keep_inputs_gb: float | None = None
    """Limit for the queries, keys and values of other ranks that a rank keeps in one layer from the
    forward to the backward pass, in 1e9 bytes. Kept inputs do not travel again. If several rounds,
    or both halves of ping-pong, use the same keys, each keeps a copy, but only one copy counts.
    None: as much as free memory of CUDA devices allows, if that shortens attention by 1 % or more.
    0 keeps nothing."""

    attention_tflops: float | None = None
    """Attention speed of one rank, in TFLOP/s. None: measured when a group of CUDA devices opens.
    Where nothing is measured, 0.03 is assumed on the CPU, and 300 on CUDA devices in deterministic
    mode."""

    link_gb_per_s: float | None = None
    """Bandwidth from one rank to the ranks of its node, in GB/s (1e9 bytes/s). None: taken from
    cost_table, else measured when a group of CUDA devices opens. Where nothing is measured, 2 is
    assumed on the CPU, and 200 on CUDA devices in deterministic mode."""

    node_link_gb_per_s: float | None = None
    """Bandwidth from one rank to the ranks of other nodes, in GB/s (1e9 bytes/s). None: as for
    link_gb_per_s, with 50 instead of 200."""

    ranks_per_node: int | None = None
    """Number of consecutive ranks of a group that share a node. None: taken from host names."""

    cost_table: str | None = None
    """File written by `python -m distca.calibrate`. Its measured attention times replace
    attention_tflops, and its bandwidths are used if link_gb_per_s is None. If the model has other
    heads, the times are scaled by FLOPs, with a warning."""

    deterministic: bool = False
    """Make results and gradients bitwise equal in every run of the same plan. Links and speeds are
    not measured, so that equal documents get equal plans. On Hopper, the backward pass of whole
    documents takes up to a quarter longer. If off, torch.use_deterministic_algorithms decides
    whether results are deterministic."""

    transport: str = "auto"
    """How rows travel. "peer": ranks write to each other's GPU memory over NVLink, beside
    attention; this needs Hopper GPUs of one node. "process_group": NCCL or gloo. "hybrid": peer (on
    the CPU, process_group) inside nodes, and process_group between nodes. "auto": peer if it
    works for the whole group, hybrid if peer works only inside nodes, else process_group."""

    peer_memory_gb: float = 0.0
    """Peer memory that a rank allocates when rows first travel, in 1e9 bytes. Under ping-pong, each
    of the two halves allocates half of this, too, so that a rank allocates twice as much. A rank
    that cannot allocate it raises. If a plan needs more than any plan before, all ranks wait while
    the memory grows; a larger first allocation avoids that. 0 allocates what plans need."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for another rank before it raises an error."""

    balance_no_grad: bool = False
    """Balance passes without gradients, too, and those of models in eval mode: log-probabilities,
    reference, reward and value models. All ranks must then make equally many of them. Forward
    passes of transformers models with a key-value cache, as in generate, stay on their rank. If
    off, every pass without gradients stays on its rank, unless distca.plan was called for its
    documents."""

    documents_may_mix: bool = False
    """Allow recurrent and convolution layers of a transformers model to carry their state from one
    document of a packed row into the next. Then only attention separates documents. If off, such a
    model is refused on packed rows, unless its layers are told where documents begin."""

    def __new__(cls, **values):
        for name in MOVED.keys() & values.keys():
            raise ValueError(f"{name} is no option of attention: " + MOVED[name].format(name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_kinds()
        check("tolerance", self.tolerance, 0 <= self.tolerance < 1, "0 <= tolerance < 1")
        if self.server_speeds is not None:
            parse_speeds(self.server_speeds)
        self._check_sizes(("rounds", "ranks_per_node"), 1, MAX_COUNT)
        self._check_sizes(("keep_inputs_gb", "peer_memory_gb"), 0)
        self._check_sizes(("attention_tflops", "link_gb_per_s", "node_link_gb_per_s"), MIN_SIZE)
        self._check_sizes(("memory_cap_gb", "timeout_s"), MIN_SIZE)

    def _check_kinds(self) -> None:
        for each in fields(self):
            kinds = typing.get_args(each.type) or (each.type,)  # of "T | None", both
            value = getattr(self, each.name)
            accepted = (*kinds, int) if float in kinds else kinds
            is_valid = isinstance(value, accepted) and (type(value) is not bool or bool in kinds)
            check(each.name, value, is_valid, " or ".join(KINDS[kind] for kind in kinds))

    def _check_sizes(self, names: tuple[str, ...], least: float, most: float = MAX_SIZE) -> None:
        for name in names:
            value = getattr(self, name)
            is_valid = value is None or least <= value <= most
            check(name, value, is_valid, f"{least} to {most:g}")

    def speeds(self, num_ranks: int) -> tuple[float, ...] | None:
        """Return the relative attention speed of each rank. None: all are equally fast."""
        if self.server_speeds is None:
            return None
        repeated = itertools.cycle(parse_speeds(self.server_speeds))
        return tuple(itertools.islice(repeated, num_ranks))

    def digest(self) -> int:
        """63 bits that differ when any option differs."""
        return digest_of(repr(self).encode())


def make_writable(flag: str, path: Path | None, *names: str) -> None:
    """Create the folder of what a command writes at its end: the file `path`, or files of these
    names in the folder `path`. None: it writes nothing. Raises ValueError as `writing` does."""
    if path is None:
        return
    with writing(flag, path):
        for file in [path / name for name in names] or [path]:
            with contextlib.suppress(FileExistsError):  # one that is no folder is named below
                file.parent.mkdir(parents=True)
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not file.exists():  # some folders, as /proc, take no new files even of root
                tempfile.TemporaryFile(dir=file.parent).close()
            elif not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Raise ValueError naming the flag, its value and the cause for an OSError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror or error}") from error


def parse_speeds(text: str) -> tuple[float, ...]:
    """The speeds that Options.server_speeds lists, before they are repeated over the ranks.

    Raises ValueError for what is not a list of speeds, none negative and not all 0.
    """
    speeds: list[float] = []
    try:
        for entry in text.split(","):
            speed, _, count = entry.partition("*")
            if not 1 <= int(count or 1) <= MAX_SPEEDS:
                raise ValueError
            speeds += [float(speed)] * int(count or 1)
        if not all(0 <= speed < math.inf for speed in speeds) or not any(speeds):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"server_speeds is {text!r}; expected SPEED or SPEED*COUNT, separated by commas, no "
            f"speed negative, one above 0, counts of 1 to {MAX_SPEEDS}"
        ) from None
    return tuple(speeds)


def field_help(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, by field name."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0].body
    help_by_name = {}
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            help_by_name[statement.target.id] = " ".join(following.value.value.split())
    return help_by_name


def add_flags(parser: argparse._ActionsContainer, kind: type = Options) -> None:
    """Add a flag for each documented field of a dataclass."""
    help_by_name = field_help(kind)
    for field in fields(kind):
        if field.name not in help_by_name:
            continue
        text = f"{help_by_name[field.name]} (default: {field.default})".replace("%", "%%")
        how = {"action": argparse.BooleanOptionalAction}
        if field.type is not bool:
            how = {"type": next(iter(typing.get_args(field.type)), field.type)}  # of "T | None", T
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, default=field.default, help=text, **how)


def from_flags(parsed: argparse.Namespace, kind: type[T] = Options) -> T:
    """Return the dataclass that flags of `add_flags` describe. Raises ValueError for bad values."""
    return kind(**values_of(parsed, kind))


def values_of(parsed: argparse.Namespace, kind: type) -> dict[str, object]:
    """Return the fields of a dataclass that flags of `add_flags` set, by name."""
    return {name: getattr(parsed, name) for name in field_help(kind)}
