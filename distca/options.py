"""The one configuration of distca: its fields, and the command-line flags made of them."""

import argparse
import ast
import hashlib
import inspect
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Options:
    """How distca plans and communicates. Must be equal on all ranks of a group."""

    enabled: bool = True
    """Balance attention over ranks. Off: every rank computes its own documents."""

    tolerance: float = 0.02
    """Excess of the slowest rank's predicted attention time over the mean that is left alone."""

    attention_tflops: float | None = None
    """Attention speed of one rank, 1e12 FLOP/s. None: 300 on CUDA devices, 0.03 on the CPU."""

    link_gb_per_s: float | None = None
    """Bandwidth out of one rank, 1e9 byte/s. None: 200 on CUDA devices, 2 on the CPU."""

    cost_table: str | None = None
    """JSON file with measured attention times, used instead of attention_tflops:
    {"rows": [...], "keys": [...], "seconds": [[...]]}, forward + backward of full rectangles."""

    deterministic: bool = False
    """Gradients equal bit by bit in every run of the same plan; the backward pass is up to a tenth
    slower on Hopper. Off: as torch.use_deterministic_algorithms says."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for another before it raises."""

    patch_sdpa: bool = False
    """Replace torch.nn.functional.scaled_dot_product_attention for the whole process (launcher)."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance}; expected 0 <= tolerance < 1")
        for name in ("attention_tflops", "link_gb_per_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}; expected a positive number")

    def digest(self) -> int:
        """63 bits that differ when any option differs."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 1


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
