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
    """Balance attention over ranks. Off: every rank computes its own documents."""

    tolerance: float = 0.005
    """Excess of the slowest rank's predicted attention time over the mean that is left alone."""

    server_speeds: str | None = None
    """Relative attention speeds of the ranks as servers, comma-separated, SPEED*COUNT for several,
    repeated over all ranks: "1,0.5" alternates, "0*7,1" lets every eighth rank compute for all. 0
    computes nothing. None: all alike."""

    memory_cap_gb: float | None = None
    """Most that a rank may hold of other ranks' rows for one layer, 1e9 byte: queries with their
    results, keys once. What returns to a rank through peer memory comes on top. None: no limit."""

    rounds: int = 1
    """Rounds of a layer, about, in each of which a rank may hold memory_cap_gb of other ranks'
    rows: better balance in little memory, but what travels after the first is not hidden."""

    keep_inputs_gb: float = 0.0
    """Most that a rank keeps for one layer of queries, keys and values that arrive for its tasks,
    1e9 byte, from the forward to the backward pass, for which they then need not travel again. Keys
    that rounds, or halves of ping-pong, share are kept by each and count once. 0: nothing."""

    attention_tflops: float | None = None
    """Attention speed of one rank, 1e12 FLOP/s. None: 300 on CUDA devices, 0.03 on the CPU."""

    link_gb_per_s: float | None = None
    """Bandwidth out of one rank to ranks of its node, 1e9 byte/s. None: 200 on CUDA devices, 2 on
    the CPU."""

    node_link_gb_per_s: float | None = None
    """Bandwidth out of one rank to ranks of other nodes, 1e9 byte/s. None: 50 on CUDA devices, 2 on
    the CPU."""

    ranks_per_node: int | None = None
    """Consecutive ranks of a group that share a node. None: as the ranks' host names say."""

    cost_table: str | None = None
    """File that `python -m distca.calibrate` wrote: measured attention times, used instead of
    attention_tflops, and the links' bandwidth where link_gb_per_s is None. Times of other heads
    than the model's are scaled by FLOPs, with a warning."""

    deterministic: bool = False
    """Results and gradients equal bit by bit in every run of the same plan; the backward pass is up
    to a tenth slower on Hopper. Off: as torch.use_deterministic_algorithms says."""

    transport: str = "auto"
    """How rows travel. "peer": ranks write to each other's GPU memory over NVLink, beside
    attention, which takes Hopper GPUs of one node. "process_group": NCCL or gloo, which is what
    ping-pong's halves take. "auto": peer where that works."""

    peer_memory_gb: float = 0.0
    """Peer memory that a rank takes when rows first travel, 1e9 byte, so that later plans find it:
    where a plan needs more than any before, all ranks wait while it grows. It must be there: a rank
    without it raises. 0: what plans need."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for another before it raises."""

    log_every: int = 0
    """Steps between two lines on what was balanced, by the first rank: imbalance before and after,
    measured attention time of the ranks and what they waited in it, bytes moved, time of plans. 0:
    no lines."""

    run_dir: str | None = None
    """Folder for records: steps.jsonl, a line a step, and at the end summary.json, balance.png and
    trace.json. `python -m distca.report RUN_DIR` shows them at any time. None: no records."""

    tensorboard: bool = False
    """Write the same figures as TensorBoard scalars into run_dir/tensorboard."""

    patch_sdpa: bool = False
    """Replace torch.nn.functional.scaled_dot_product_attention for the whole process (launcher)."""

    document_end_id: int | None = None
    """Token id that ends a document in the integers that the script's model is called with: the
    documents of patch_sdpa, without an edit of the script (launcher)."""

    document_positions: str | None = None
    """Name of the model's argument whose positions restart at 0 with each document: the same from
    position ids (launcher)."""

    transformers: bool = False
    """Register attn_implementation="distca" with transformers for the script (launcher)."""

    documents_may_mix: bool = False
    """Let recurrent and convolution layers of a transformers model carry their state from each
    document of a packed row into the next: only attention keeps documents apart. Off: such a model
    is refused on packed rows, unless its layers are told where documents begin."""

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
