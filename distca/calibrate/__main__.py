"""Command line of distca.calibrate: measures, prints a summary and writes the file."""

import argparse
import datetime
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from distca import calibrate
from distca._output import show
from distca.calibrate import attention
from distca.calibrate.timing import ProgressBar
from distca.options import Options, make_writable
from distca.planning.cost import DTYPE_BYTES, Calibration
from distca.ranks import session
from distca.ranks.links import Links, measure

CUDA_DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256
MAX_KEYS = 2**24


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m distca.calibrate",
        description=calibrate.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--out", default="calibration.json", help="file (default: %(default)s)")
    flags.add_argument("--heads-q", type=int, default=32, help="on one rank (default: %(default)s)")
    flags.add_argument("--heads-kv", type=int, default=8, help="on one rank (default: %(default)s)")
    flags.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    flags.add_argument("--head-dim-v", type=int, help="v's (default: as --head-dim)")
    flags.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    flags.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if available")
    flags.add_argument(
        "--max-keys",
        type=int,
        help="of a task; more are taken to cost in proportion "
        "(default: 131072 on cuda, 4096 on cpu; 32768 and 1024 with --quick)",
    )
    flags.add_argument(
        "--quick", action="store_true", help="a coarser and smaller table, fewer repeats"
    )
    return flags


def arguments(command_line: Sequence[str] | None) -> argparse.Namespace:
    flags = parser()
    args = flags.parse_args(command_line)
    args.head_dim_v = args.head_dim if args.head_dim_v is None else args.head_dim_v
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        flags.error("--device is cuda, but torch finds no CUDA device; expected cpu")
    for flag, value, most in (
        ("--heads-q", args.heads_q, 1024),
        ("--heads-kv", args.heads_kv, args.heads_q),
        ("--head-dim", args.head_dim, MAX_HEAD_DIM),
        ("--head-dim-v", args.head_dim_v, MAX_HEAD_DIM),
        ("--max-keys", 1 if args.max_keys is None else args.max_keys, MAX_KEYS),
    ):
        if not 1 <= value <= most:
            flags.error(f"{flag} is {value}; expected 1 to {most}")
    try:
        make_writable("--out", Path(args.out))
    except ValueError as error:
        flags.error(str(error))
    if args.heads_q % args.heads_kv != 0:
        flags.error(
            f"--heads-q is {args.heads_q}; expected a multiple of --heads-kv {args.heads_kv}"
        )
    if args.device == "cuda" and args.dtype not in CUDA_DTYPES:
        flags.error(f"--dtype is {args.dtype}; expected {' or '.join(CUDA_DTYPES)} on cuda")
    return args


def main(command_line: Sequence[str] | None = None) -> None:
    args = arguments(command_line)
    in_group = dist.is_available() and dist.is_torchelastic_launched()
    device = _device(args.device, dist.get_node_local_rank() if in_group else 0)
    if in_group:
        group = {"backend": "nccl", "device_id": device}
        dist.init_process_group(**(group if device.type == "cuda" else {"backend": "gloo"}))
    is_first = not in_group or dist.get_rank() == 0
    effort = attention.EFFORTS[device.type, args.quick]
    effort = replace(effort, max_keys=args.max_keys or effort.max_keys)
    bar = ProgressBar(len(list(attention.entries(*attention.grid(device.type, effort)))), is_first)
    links = _links(device) if in_group else Links()
    if not is_first:  # it would only be in the way
        return
    dims = (args.head_dim, args.head_dim_v)
    heads = attention.Heads(args.heads_q, args.heads_kv, *dims, getattr(torch, args.dtype))
    seconds = attention.measure(heads, device, effort, bar)
    bar.finish()
    calibration = _calibration(args, device, seconds, links)
    calibration.save(args.out)
    show(f"{_summary(calibration)}\nwrote {args.out}")


def _links(device: torch.device) -> Links:
    """Return the measured links between all ranks. Ends torch.distributed."""
    opened = session.init(options=Options(enabled=False))  # init itself then measures nothing
    links = measure(opened, device) if opened.num_ranks > 1 else Links()
    session.close()
    dist.destroy_process_group()
    return links


def _calibration(
    args: argparse.Namespace, device: torch.device, seconds: dict, links: Links
) -> Calibration:
    return Calibration(
        device_type=device.type,
        device_name=_device_name(device),
        torch=str(torch.__version__),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        heads_q=args.heads_q,
        heads_kv=args.heads_kv,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim_v,
        dtype=args.dtype,
        links=links,
        **seconds,
    )


def _device(device_type: str, index: int) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    vectors, num_threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{platform.machine()} {vectors}, {num_threads} thread(s)"


def _summary(table: Calibration) -> str:
    """Speeds along the table's diagonal and of its least rows, then links."""
    dims = dict.fromkeys((table.head_dim, table.head_dim_v))
    lines = [
        f"{table.device_name}, {table.heads_q}:{table.heads_kv} heads of "
        f"{' and '.join(map(str, dims))}, {table.dtype}, torch {table.torch}",
        f"{'rows':>8} {'keys':>8} {'forward ms':>12} {'TFLOP/s':>8} {'backward ms':>12} "
        f"{'TFLOP/s':>8}",
    ]
    square = [(i, table.keys.index(rows)) for i, rows in enumerate(table.rows)]
    wide = [(0, j) for j in range(1, len(table.keys))]
    forward_flops, backward_flops = table.shape.pair_flops()
    for i, j in square + wide:
        num_pairs = table.rows[i] * table.keys[j]
        forward, backward = table.forward_seconds[i][j], table.backward_seconds[i][j]
        lines.append(
            f"{table.rows[i]:8} {table.keys[j]:8} {1e3 * forward:12.4f} "
            f"{1e-12 * num_pairs * forward_flops / forward:8.3g} {1e3 * backward:12.4f} "
            f"{1e-12 * num_pairs * backward_flops / backward:8.3g}"
        )
    lines.append(f"each task costs {1e6 * table.seconds_per_task:.2f} us whatever its size")
    for level, link in vars(table.links).items():
        lines.append(f"links {level} nodes: {link or 'not measured'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
