"""Compare the loss of distca with the plain run, and with the noise between two plain runs.

    torchrun --nproc-per-node 4 benchmarks/loss_curve.py --lengths lengths.json --out runs/loss

Model, documents and tokens are those of training_step.py. "plain" is the run without balancing.
"plain permuted" trains on the same documents in each step, but on other ranks and in another order,
so that only the rounding of sums over rows and ranks differs. distca is as good as plain if it
differs from plain no more than this run does.
"""

import argparse
import csv
import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from step_loop import add_session_arguments, free_memory, join, leave
from step_model import add_model_arguments, check_device
from step_report import max_or_nan
from step_variants import PERMUTED, VARIANTS, chosen_variants
from training_step import run_variant
from workloads import Workload, add_arguments, make_workload

from distca.options import make_writable

PLAIN = "plain"
COLORS = {PLAIN: "#7a7a7a", PERMUTED: "#e1a32f"}
OURS_COLOR = "#2a7f8e"


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    add_model_arguments(parser)
    add_session_arguments(parser)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--variant", help="distca's variant; default: peer on CUDA, process_group on the CPU"
    )
    parser.add_argument("--out", type=Path, help="folder for loss.csv and loss.png")
    args = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    if world_size == 0:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 " + __file__)
    args.variant = args.variant or ("peer" if args.device == "cuda" else "process_group")
    try:
        workload = make_workload(args, world_size, args.steps)
        chosen_variants([PLAIN, PERMUTED, args.variant], workload, args.device)
        if VARIANTS[args.variant].is_sorted:
            raise ValueError(f"--variant is {args.variant!r}; expected one with the same documents")
        check_device(args)
        make_writable("--out", args.out, "loss.csv", "loss.png")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, workload


@dataclass(frozen=True)
class Difference:
    """The difference between a run's losses and the plain run's."""

    largest: float
    root_mean_square: float

    @classmethod
    def of(cls, losses: list[float], plain: list[float]) -> "Difference":
        differences = [one - other for one, other in zip(losses, plain, strict=True)]
        squares = sum(each**2 for each in differences)
        return cls(max_or_nan(list(map(abs, differences))), math.sqrt(squares / len(differences)))


def show(losses: dict[str, list[float]]) -> None:
    names = list(losses)
    print(f"{'step':>5}" + "".join(f"{name:>24}" for name in names))
    for step, row in enumerate(zip(*losses.values(), strict=True)):
        print(f"{step:5}" + "".join(f"{loss:24.6f}" for loss in row))
    print(f"{'difference from plain':24} {'largest':>12} {'root mean square':>18}")
    for name in names[1:]:
        difference = Difference.of(losses[name], losses[PLAIN])
        print(f"{name:24} {difference.largest:12.3e} {difference.root_mean_square:18.3e}")


def save(folder: Path, losses: dict[str, list[float]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loss.csv").open("w", newline="") as file:
        rows = [(step, *row) for step, row in enumerate(zip(*losses.values(), strict=True))]
        csv.writer(file).writerows([("step", *losses), *rows])
    if importlib.util.find_spec("matplotlib") is None:
        print("loss.png is left out: matplotlib is not installed")
        return
    draw(folder / "loss.png", losses)


def draw(path: Path, losses: dict[str, list[float]]) -> None:
    """Draw the curves, and below them the distance of each from the plain run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    curves, distances = figure.subplots(2, 1, sharex=True)
    for name, values in losses.items():
        color = COLORS.get(name, OURS_COLOR)
        curves.plot(values, color=color, label=name)
        if name != PLAIN:
            pairs = zip(values, losses[PLAIN], strict=True)
            distances.plot([abs(a - b) for a, b in pairs], color=color, label=name)
    curves.set_ylabel("loss")
    curves.legend()
    distances.set_ylabel("distance from plain")
    distances.set_xlabel("step")
    distances.legend()
    figure.savefig(path, dpi=110)


def train(
    args: argparse.Namespace, workload: Workload, device: torch.device
) -> dict[str, list[float]]:
    """Return the losses of each variant."""
    losses = {}
    for name in (PLAIN, PERMUTED, args.variant):
        run, _ = run_variant(args, workload, device, VARIANTS[name], num_profiled=0)
        losses[name] = run.losses
        free_memory(device)
    return losses


def main() -> None:
    args, workload = arguments()
    device = join(args.device)
    losses = train(args, workload, device)
    if dist.get_rank() == 0:
        show(losses)
        if args.out is not None:
            save(args.out, losses)
    leave()


if __name__ == "__main__":
    main()
