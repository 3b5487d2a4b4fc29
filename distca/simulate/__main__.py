"""`python -m distca.simulate`: predicts a training step on 1 to 16384 ranks, for distca and for
what it is measured against. distca/simulate/__init__.py has the model of time.

    python -m distca.simulate --lengths lengths.json --ranks 512 --tp 8 --context 131072
    python -m distca.simulate --distribution lognormal:3000:1.2 --ranks 64 --model 34B --out runs/s
    python -m distca.simulate --lengths lengths.json --paper

This command predicts steps of benchmarks/training_step.py on 2 GPUs, whose plain step took 798 ms:

    python -m distca.simulate --lengths lengths.json --ranks 2 --model 8B --layers 4 --vocab 8192 \\
        --skip 3 --steps 9 --fit-step-ms 798

Only the linear work is fitted. The output names it: pass it as --linear-us-per-token to predict
other systems, documents and links.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from distca._output import show
from distca.options import add_flags, make_writable, values_of, writing
from distca.planning.cost import Calibration, Link
from distca.planning.packs import listed_lengths, read_lengths
from distca.simulate import paper, pictures, report
from distca.simulate.machine import Machine
from distca.simulate.packing import DISTRIBUTIONS, Documents, distribution, draw
from distca.simulate.results import Result, fitted, run
from distca.simulate.scenario import PRESETS, ModelShape, Scenario
from distca.simulate.systems import Step
from distca.watching.report import new_figure

TIMELINE = "timeline.png"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m distca.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_documents(flags.add_argument_group("documents"))
    _add_model(flags.add_argument_group("model and how ranks divide it"))
    _add_machine(flags.add_argument_group("machine"))
    output = flags.add_argument_group("output")
    output.add_argument("--systems", nargs="+", help="names of some systems; default: all")
    output.add_argument("--json", type=Path, help="file for all figures")
    output.add_argument("--out", type=Path, help="folder for timeline.png of the first step")
    output.add_argument(
        "--paper",
        action="store_true",
        help="print speed-ups of 8B and 34B instead: 64 to 512 GPUs, tp 8, contexts 128K to 512K",
    )
    return flags


def _add_documents(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths",
        help="JSON file with a list of document lengths, or the lengths themselves: 9000,400",
    )
    source.add_argument("--distribution", help=DISTRIBUTIONS)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--steps", type=int, default=20)
    group.add_argument("--skip", type=int, default=0, help="steps drawn before, and left out")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", choices=sorted(PRESETS), default="8B")
    group.add_argument("--config", type=Path, help="JSON file with another model's shape")
    group.add_argument("--layers", type=int, help="instead of the model's")
    group.add_argument("--vocab", type=int, help="instead of the model's")
    add_flags(group, Scenario)


def _add_machine(group: argparse._ArgumentGroup) -> None:
    for level in ("inside", "between"):
        link = getattr(Machine, level)
        default = f"default: the cost table's, else {link.bytes_per_second / 1e9:g}"
        group.add_argument(f"--link-{level}", type=float, help=f"GB/s of a GPU, one way; {default}")
        default = f"default: the cost table's, else {1e6 * link.latency_s:g}"
        group.add_argument(f"--latency-{level}", type=float, help=f"us; {default}")
    group.add_argument("--cost-table", type=Path, help="file of python -m distca.calibrate")
    group.add_argument(
        "--attention-tflops",
        type=float,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        default=Machine.attention_tflops,
    )
    add_flags(group, Machine)
    linear = group.add_mutually_exclusive_group()
    linear.add_argument(
        "--linear-us-per-token",
        type=float,
        help="measured: all but attention and communication, forward and backward, one rank",
    )
    linear.add_argument(
        "--fit-step-ms",
        type=float,
        help="measured mean step of fixed packing with these documents, which gives "
        "--linear-us-per-token",
    )


def machine_of(args: argparse.Namespace) -> Machine:
    calibration = Calibration.load(args.cost_table) if args.cost_table is not None else None
    links = {}
    for level in ("inside", "between"):
        default = getattr(Machine, level)
        if calibration is not None:
            default = getattr(calibration.links, level) or default
        bandwidth, latency = getattr(args, f"link_{level}"), getattr(args, f"latency_{level}")
        links[level] = Link(
            default.latency_s if latency is None else 1e-6 * latency,
            default.bytes_per_second if bandwidth is None else 1e9 * bandwidth,
        )
    per_token = args.linear_us_per_token
    return Machine(
        **values_of(args, Machine),
        **links,
        attention_tflops=tuple(args.attention_tflops),
        calibration=calibration,
        linear_seconds_per_token=None if per_token is None else 1e-6 * per_token,
    )


def scenario_of(args: argparse.Namespace) -> Scenario:
    model = ModelShape.load(args.config) if args.config is not None else PRESETS[args.model]
    model = model.changed(args.layers, args.vocab)
    return Scenario(model=model, machine=machine_of(args), **values_of(args, Scenario))


def lengths_of(args: argparse.Namespace) -> list[int]:
    if args.lengths is not None:
        return listed_lengths(args.lengths) or read_lengths(args.lengths)
    return distribution(args.distribution, args.seed)


def drawn_steps(args: argparse.Namespace, scenario: Scenario) -> list[Documents]:
    if args.skip < 0:
        raise ValueError(f"skip is {args.skip}; expected 0 or more")
    return draw(lengths_of(args), scenario, args.skip + args.steps, args.seed)[args.skip :]


def simulate(args: argparse.Namespace) -> None:
    if args.steps < 1:
        raise ValueError(f"steps is {args.steps}; expected 1 or more")
    if args.paper:
        show(paper.table(lengths_of(args), machine_of(args), args.steps, args.seed))
        return
    if args.out is not None:  # all of this before the simulation, which may take minutes
        new_figure(1, 1)
        make_writable("--out", args.out, TIMELINE)
    make_writable("--json", args.json)
    scenario = scenario_of(args)
    drawn = drawn_steps(args, scenario)
    if args.fit_step_ms is not None:
        scenario = fitted(scenario, drawn, 1e-3 * args.fit_step_ms)
    results = run(scenario, [Step(scenario, documents) for documents in drawn], args.systems)
    source = args.distribution if args.lengths is None else Path(args.lengths).name
    heading = report.heading(scenario, source, args.steps)
    try:
        save(args, report.as_data(heading, scenario, results), results)
    finally:
        show("\n".join([heading, "", report.table(results), "", report.assumed(scenario)]))


def save(args: argparse.Namespace, data: dict, results: list[Result]) -> None:
    """Write the files that flags ask for. Raises ValueError naming the flag of one that fails."""
    if args.json is not None:
        with writing("--json", args.json):
            args.json.write_text(json.dumps(data, indent=2) + "\n")
    if args.out is not None:
        with writing("--out", args.out):
            pictures.draw_timeline(args.out / TIMELINE, results)


def main(command_line: Sequence[str] | None = None) -> None:
    flags = parser()
    args = flags.parse_args(command_line)
    try:
        simulate(args)
    except (ImportError, OSError, ValueError) as error:
        flags.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
