"""Command line of distca.explain: draws a step, plans it, prints the account."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from distca import explain, options
from distca._output import show
from distca.explain.account import Step
from distca.explain.account import explain as account_of
from distca.explain.text import as_data, report
from distca.planning.cluster import MAX_RANKS, cluster_of
from distca.planning.cost import TILE, AttentionShape, calibration_of, cost_tensor
from distca.planning.documents import INT32_MAX, check_window
from distca.planning.packs import Pack, cut_pack, draw_pack, listed_lengths, read_lengths
from distca.planning.plan import CAUSAL
from distca.planning.solver import ANY_IMBALANCE

DEFAULT_TOKENS = 65536


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m distca.explain",
        description=explain.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument(
        "--lengths",
        required=True,
        help="JSON file with a list of document lengths, or the lengths themselves: 9000,400",
    )
    flags.add_argument("--ranks", type=int, required=True)
    flags.add_argument(
        "--tokens",
        type=int,
        help=f"of each rank (default: {DEFAULT_TOKENS} of a file; lengths that are given one by "
        "one are taken once, in their order, in equal runs)",
    )
    flags.add_argument("--seed", type=int, default=0, help="of the order of documents")
    flags.add_argument("--sharded", action="store_true", help="documents may cross ranks")
    flags.add_argument(
        "--window", type=int, nargs=2, default=CAUSAL, help="left and right, -1: no limit"
    )
    flags.add_argument(
        "--heads",
        help="query heads, key heads and head_dim on a rank, and v's head_dim if it differs: "
        "Q:KV:DIM or Q:KV:DIM:DIM_V (default: the cost table's, else 32:8:128)",
    )
    flags.add_argument(
        "--device", choices=sorted(TILE), help="default: the cost table's, else cuda"
    )
    flags.add_argument("--rank", type=int, help="print only lines that concern this rank")
    flags.add_argument("--all", action="store_true", help="print every line, not only the largest")
    flags.add_argument("--json", type=Path, help="file for all figures as JSON")
    options.add_flags(flags.add_argument_group("options of distca"))
    return flags


def main(command_line: Sequence[str] | None = None) -> None:
    flags = parser()
    args = flags.parse_args(command_line)
    for flag, value, least, most in (
        ("--ranks", args.ranks, 1, MAX_RANKS),
        ("--tokens", args.tokens, 1, INT32_MAX),
        ("--rank", args.rank, 0, args.ranks - 1),
    ):
        if value is not None and not least <= value <= most:
            flags.error(f"{flag} is {value}; expected {least} to {most}")
    try:
        options.make_writable("--json", args.json)
        account = account_of(_step(args))
        if args.json is not None:
            with options.writing("--json", args.json):
                args.json.write_text(json.dumps(as_data(account)) + "\n")
    except (OSError, ValueError) as error:
        flags.error(str(error))
    show(report(account, args.rank, args.all))


def _step(args: argparse.Namespace) -> Step:
    """Raises ValueError naming what is wrong."""
    chosen = options.from_flags(args)
    measured = calibration_of(chosen.cost_table) if chosen.cost_table is not None else None
    device_type = args.device or (measured.device_type if measured else "cuda")
    shape = measured.shape if measured else AttentionShape()
    if args.heads is not None:
        shape = _shape(args.heads, shape.element_bytes)
    return Step(
        _pack(args),
        check_window(args.window),
        shape,
        cost_tensor(chosen, shape, device_type),
        cluster_of(chosen, args.ranks, device_type),
        chosen.tolerance if chosen.enabled else ANY_IMBALANCE,
    )


def _pack(args: argparse.Namespace) -> Pack:
    listed, tokens = listed_lengths(args.lengths), args.tokens
    if listed is not None and tokens is None:
        return cut_pack(listed, args.ranks, sum(listed), args.sharded)
    lengths = listed or read_lengths(args.lengths)
    return draw_pack(lengths, args.ranks, tokens or DEFAULT_TOKENS, args.seed, args.sharded)


def _shape(text: str, element_bytes: int) -> AttentionShape:
    parts = text.split(":")
    if len(parts) not in (3, 4) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--heads is {text!r:.80}; expected Q:KV:DIM, such as 32:8:128, or Q:KV:DIM:DIM_V"
        )
    heads_q, heads_kv, head_dim, *head_dim_v = map(int, parts)
    if heads_q % heads_kv != 0:
        raise ValueError(f"--heads is {text!r:.80}; expected Q a multiple of KV")
    return AttentionShape(heads_q, heads_kv, head_dim, element_bytes, *head_dim_v)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
