"""The one configuration of distca: its fields, and the command-line flags made of them."""

import argparse
import ast
import hashlib
import inspect
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

MAX_SPEEDS = 65536
TRANSPORTS = ("auto", "peer", "process_group")


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

    keep_inputs_gb: float = 0.0
    """Memory for the queries, keys and values of other ranks that a rank keeps in one layer from
    the forward to the backward pass, in 1e9 bytes. Kept inputs do not travel again. Keys that
    rounds, or halves of ping-pong, share are kept by each of them but count once. 0 keeps
    nothing."""

    attention_tflops: float | None = None
    """Attention speed of one rank, in TFLOP/s. None: 300 on CUDA devices, 0.03 on the CPU."""

    link_gb_per_s: float | None = None
    """Bandwidth from one rank to the ranks of its node, in GB/s (1e9 bytes/s). None: 200 on CUDA
    devices, 2 on the CPU."""

    node_link_gb_per_s: float | None = None
    """Bandwidth from one rank to the ranks of other nodes, in GB/s (1e9 bytes/s). None: 50 on CUDA
    devices, 2 on the CPU."""

    ranks_per_node: int | None = None
    """Number of consecutive ranks of a group that share a node. None: taken from host names."""

    cost_table: str | None = None
    """File written by `python -m distca.calibrate`. Its measured attention times replace
    attention_tflops, and its bandwidths are used if link_gb_per_s is None. If the model has other
    heads, the times are scaled by FLOPs, with a warning."""

    deterministic: bool = False
    """Make results and gradients bitwise equal in every run of the same plan. The backward pass is
    up to a tenth slower on Hopper. If off, torch.use_deterministic_algorithms decides."""

    transport: str = "auto"
    """How rows travel. "peer": ranks write to each other's GPU memory over NVLink, beside
    attention; this needs Hopper GPUs of one node. "process_group": NCCL or gloo; halves of
    ping-pong always use it. "auto": peer where it works, else process_group."""

    peer_memory_gb: float = 0.0
    """Peer memory that a rank allocates when rows first travel, in 1e9 bytes. A rank that cannot
    allocate it raises. If a plan needs more than any plan before, all ranks wait while the memory
    grows; a larger first allocation avoids that. 0 allocates what plans need."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for another rank before it raises an error."""

    log_every: int = 0
    """Log a one-line summary on rank 0 every N steps: imbalance before and after, measured
    attention time and exposed communication of the ranks, bytes moved, planning time. 0 disables
    it."""

    run_dir: str | None = None
    """Folder for records: steps.jsonl with a line per step, and at the end summary.json,
    balance.png and trace.json. `python -m distca.report RUN_DIR` shows them at any time. None: no
    records."""

    tensorboard: bool = False
    """Write the figures of run_dir as TensorBoard scalars too, into run_dir/tensorboard."""

    patch_sdpa: bool = False
    """Replace torch.nn.functional.scaled_dot_product_attention for the whole process (launcher)."""

    document_end_id: int | None = None
    """Token id that ends each document in the tokens that the script's model is called with. With
    patch_sdpa, documents are read from it without an edit of the script (launcher)."""

    document_positions: str | None = None
    """Name of the model's argument whose positions restart at 0 with each document. With
    patch_sdpa, documents are read from it without an edit of the script (launcher)."""

    transformers: bool = False
    """Register attn_implementation="distca" with transformers for the script (launcher)."""

    documents_may_mix: bool = False
    """Allow recurrent and convolution layers of a transformers model to carry their state from one
    document of a packed row into the next. Then only attention separates documents. If off, such a
    model is refused on packed rows, unless its layers are told where documents begin."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; expected 0 <= tolerance < 1")
        if self.server_speeds is not None:
            parse_speeds(self.server_speeds)
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"transport is {self.transport!r}; expected one of {', '.join(TRANSPORTS)}"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}; expected at least 1")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; expected at least 1")
        for name in ("keep_inputs_gb", "peer_memory_gb"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; expected 0 or a positive number"
                )
        if self.log_every < 0:
            raise ValueError(f"log_every is {self.log_every}; expected 0 or more steps")
        if self.tensorboard and self.run_dir is None:
            raise ValueError("tensorboard is True, run_dir None; expected a folder for the scalars")
        self._check_sources()
        for name in (
            "attention_tflops",
            "memory_cap_gb",
            "link_gb_per_s",
            "node_link_gb_per_s",
            "timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; expected a positive number")

    def _check_sources(self) -> None:
        """Where documents are read from: one source, and somebody who uses them."""
        given = [
            name
            for name in ("document_end_id", "document_positions")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(
                f"document_end_id is {self.document_end_id} and document_positions "
                f"{self.document_positions!r}; expected one of them"
            )
        if given and not self.patch_sdpa:
            raise ValueError(
                f"{given[0]} is {getattr(self, given[0])!r}, patch_sdpa False; expected both: it "
                "says where documents of scaled_dot_product_attention begin"
            )

    def digest(self) -> int:
        """63 bits that differ when any option differs."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1


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


def field_help(options: type = Options) -> dict[str, str]:
    """The docstring under each field of `options`, by field name."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(options))).body[0].body
    help_by_name = {}
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            help_by_name[statement.target.id] = " ".join(following.value.value.split())
    return help_by_name


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of Options, with its documentation."""
    help_by_name = field_help()
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        assert field.default is not MISSING
        text = f"{help_by_name[field.name]} (default: {field.default})".replace("%", "%%")
        if field.type is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=field.default, help=text
            )
        else:
            parser.add_argument(
                flag, type=_plain_type(field.type), default=field.default, help=text
            )


def _plain_type(annotation) -> type:
    if isinstance(annotation, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def from_flags(parsed: argparse.Namespace) -> Options:
    """Options from what a parser with `add_flags` parsed; raises ValueError for bad values."""
    return Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})


def parse(arguments: Sequence[str]) -> Options:
    """Options from flags alone, e.g. parse(["--tolerance", "0.05"])."""
    parser = argparse.ArgumentParser(prog="distca")
    add_flags(parser)
    return from_flags(parser.parse_args(arguments))
