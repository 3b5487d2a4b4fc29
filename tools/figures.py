"""Measures figures of docs/ again, on a machine with the GPUs that they need.

    python tools/figures.py NAME ... --lengths lengths.json [--longer longer.json]
        [--seconds 600] [--out DIR]

Without names, it lists all figures. --lengths and --longer are the documents of a pretraining mix
and of one with longer documents, as in docs/performance.md. Figures run one after the other until
the time is up. A figure is stopped then, and not started if less than half of its usual time is
left. The full output of each figure is in DIR/NAME.txt. Files that its command writes are
DIR/NAME.json and the like, or in DIR/NAME. The lines that a page quotes are printed.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LENGTHS, LONGER, OUT = "{lengths}", "{longer}", "{out}"  # {out} is DIR/NAME
STEPS = r"step, ms|balanced limit|faster than|GB/s|exposed communication, of the step +\d"


@dataclass(frozen=True)
class Figure:
    page: str
    num_gpus: int
    seconds: int
    """An estimate of how long it takes on H200."""
    command: tuple[str, ...]
    shows: str = ""
    """A pattern of the lines to print."""


def steps(page: str, num_gpus: int, seconds: int, variants: tuple[str, ...], *flags: str) -> Figure:
    command = ("benchmarks/training_step.py", "--steps", "12", "--variants", *variants)
    return Figure(page, num_gpus, seconds, (*command, *flags, "--out", OUT + ".json"), STEPS)


def attention(seconds: int, *flags: str) -> Figure:
    command = ("benchmarks/attention.py", "--lengths", LENGTHS, "--tokens", "32768", *flags)
    return Figure("performance.md", 1, seconds, command, r"TFLOP|distca|FA3|spills")


def document(seconds: int, *flags: str) -> Figure:
    return Figure("performance.md", 4, seconds, ("benchmarks/long_document.py", *flags))


BALANCED, EQUAL = ("plain", "context", "peer"), ("plain", "peer")
NODES = ("plain", "process_group", "hybrid", "hybrid pingpong")
HOST = ("plain", "process_group")
SOCKETS = (*HOST, "process_group pingpong")
SHORT_SHARDS = ("--shard-rows", "128", "--shard-keys", "8192")
LONG_STEPS = ("--tokens", "131072", "--layers", "3", "--turns", "2")
TWO_NODES = ("--links", "host", "--ranks-per-node", "2", "--turns", "2")
TURNS = ("--links", "socket", "--turns", "2")
OF_LENGTHS, OF_LONGER = ("--lengths", LENGTHS), ("--lengths", LONGER)
FIGURES = {
    "kernels-64": attention(230, "--head-dims", "64"),
    "kernels-128": attention(280, "--head-dims", "128"),
    "kernels-wide": attention(200, "--head-dims", "192,192:128,256", *SHORT_SHARDS),
    "steps": steps("performance.md", 4, 75, BALANCED, *OF_LENGTHS),
    "steps-longer": steps("performance.md", 4, 75, BALANCED, *OF_LONGER),
    "steps-128k": steps("performance.md", 4, 150, BALANCED, *OF_LENGTHS, *LONG_STEPS),
    "steps-128k-longer": steps("performance.md", 4, 150, BALANCED, *OF_LONGER, *LONG_STEPS),
    "steps-equal": steps("performance.md", 4, 90, EQUAL, "--equal", "8192"),
    "document-128k": document(60, "--document", "131072", "--rounds", "5"),
    "document-512k": document(50, "--document", "524288", "--ways", "alone", "peer"),
    "document-1m": document(145, "--document", "1048576", "--ways", "alone", "peer"),
    "document-mixed": document(90, "--mixed", "131072", *OF_LENGTHS),
    "transport": Figure("performance.md", 4, 90, ("benchmarks/transport.py",)),
    "loss": Figure(
        "performance.md",
        4,
        250,
        ("benchmarks/loss_curve.py", *OF_LENGTHS, "--out", OUT),
    ),
    "calibration": Figure("planner.md", 4, 45, ("-m", "distca.calibrate", "--out", OUT + ".json")),
    "nodes": steps("multi-node.md", 4, 125, NODES, *OF_LENGTHS, *TWO_NODES),
    "nodes-longer": steps("multi-node.md", 4, 125, NODES, *OF_LONGER, *TWO_NODES),
    "host": steps("multi-node.md", 2, 90, HOST, *OF_LENGTHS, "--links", "host"),
    "host-longer": steps("multi-node.md", 2, 90, HOST, *OF_LONGER, "--links", "host"),
    "sockets": steps("multi-node.md", 2, 180, SOCKETS, *OF_LENGTHS, *TURNS),
    "sockets-longer": steps("multi-node.md", 2, 180, SOCKETS, *OF_LONGER, *TURNS),
    "sockets-equal": steps("multi-node.md", 2, 180, SOCKETS, "--equal", "8192", *TURNS),
    "pipeline": Figure(
        "pipelines.md",
        4,
        110,
        ("benchmarks/pipeline_step.py", *OF_LENGTHS, "--layers", "8", "--checkpoint")
        + ("--steps", "5", "--variants", "1F1B", "pool"),
    ),
    "server": Figure(
        "servers.md",
        4,
        45,
        ("benchmarks/server_step.py", "server", *OF_LENGTHS, "--steps", "12")
        + ("--out", OUT + ".json"),
        STEPS + "|server",
    ),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--lengths", type=Path, help="JSON list of document lengths")
    parser.add_argument("--longer", type=Path, help="JSON list of longer documents")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all of them")
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), help="folder")
    args = parser.parse_args()
    for name in args.names:
        if name not in FIGURES:
            parser.error(f"NAME is {name!r}; expected some of {', '.join(FIGURES)}")
        for place, path in ((LENGTHS, args.lengths), (LONGER, args.longer)):
            if place in FIGURES[name].command and (path is None or not path.is_file()):
                parser.error(f"{name} needs --{place.strip('{}')}, a JSON file; it is {path}")
    return args


def show_all() -> None:
    print(f"{'NAME':18}{'GPUs':>5}{'seconds':>9}  docs/")
    for name, figure in FIGURES.items():
        print(f"{name:18}{figure.num_gpus:5}{figure.seconds:9}  {figure.page}")


def stop(process: subprocess.Popen) -> None:
    """Stop a process and its children. torchrun stops its own if it has time to."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure(name: str, args: argparse.Namespace, seconds: float) -> int:
    """Measure a figure in at most `seconds`. Return its exit status, 124 if the time was up."""
    figure = FIGURES[name]
    values = {"lengths": args.lengths, "longer": args.longer, "out": args.out / name}
    command = [part.format(**values) for part in figure.command]
    launch = [sys.executable]
    if figure.num_gpus > 1:
        launch += ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(figure.num_gpus)]
    print(f"=== {name}: {' '.join(command)}", flush=True)
    environ = {"OMP_NUM_THREADS": "4"} | os.environ
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    path, start = args.out / f"{name}.txt", time.monotonic()
    with path.open("w") as file:
        process = subprocess.Popen(
            [*launch, *command],
            cwd=ROOT,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
            stop(process)
    lines = path.read_text().splitlines()
    for line in lines if status == 0 else lines[-12:]:
        if status != 0 or re.search(figure.shows, line):
            print(line[:140])
    print(f"--- {name}: {time.monotonic() - start:.0f} s, exit status {status}", flush=True)
    return status


def main() -> None:
    args = arguments()
    if not args.names:
        show_all()
        return
    args.out = args.out.resolve()
    args.lengths, args.longer = (each and each.resolve() for each in (args.lengths, args.longer))
    args.out.mkdir(parents=True, exist_ok=True)
    end, statuses = time.monotonic() + args.seconds, []
    for name in args.names:
        left = end - time.monotonic()
        if left < FIGURES[name].seconds / 2:
            print(f"=== {name}: not started, {left:.0f} s are left")
            statuses.append(124)
            continue
        statuses.append(measure(name, args, left))
    sys.exit(max(statuses))


if __name__ == "__main__":
    main()
