"""`python -m distca.simulate`: predicts a training step on 1 to 16384 ranks, for distca and for
what it is measured against. distca/simulate/__init__.py has the model of time.

    python -m distca.simulate --lengths lengths.json --ranks 512 --tp 8 --context 131072
    python -m distca.simulate --distribution lognormal:3000:1.2 --ranks 64 --model 34B --out runs/s

A measured run of benchmarks/training_step.py on 4 GPUs, whose plain step took 1202 ms with torch's
own attention:

    python -m distca.simulate --lengths lengths.json --ranks 4 --model 8B --layers 4 --vocab 8192 \\
        --skip 3 --steps 17 --attention-tflops 345 324 --key-block-tiles 1.2 \\
        --fit-step-ms 1202 --measured step.json

345 and 324 are FlashAttention-2's speeds on long documents, 1.2 what its short tasks lose
(machine.py); the one constant fitted is the linear work, to the plain step.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distca.options import add_flags, values_of
from distca.planning.cost import Calibration, Link
from distca.planning.packs import read_lengths
from distca.simulate import measured, report
from distca.simulate.machine import Machine
from distca.simulate.model import PRESETS, ModelShape
from distca.simulate.packing import DISTRIBUTIONS, Documents, distribution, draw
from distca.simulate.results import fitted, run, steps_of
from distca.simulate.scenario import Scenario


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
    output.add_argument("--out", type=Path, help="folder for timeline.png, balance.png, trace.json")
    output.add_argument("--show-step", type=int, default=0, help="that pictures and trace show")
    output.add_argument("--trace-ranks", type=int, default=16, help="ranks in pictures and trace")
    output.add_argument(
        "--measured",
        type=Path,
        help="file of benchmarks/training_step.py --out, of the same documents, to stand beside",
    )
    return flags


def _add_documents(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", type=Path, help="JSON list of document lengths")
    source.add_argument("--distribution", help=DISTRIBUTIONS)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--steps", type=int, default=20)
    group.add_argument("--skip", type=int, default=0, help="steps drawn before, and left out")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", choices=sorted(PRESETS), default="8B")
    group.add_argument("--config", type=Path, help="JSON file with another model's shape")
    group.add_argument("--layers", type=int, help="instead of the model's")
    group.add_argument("--vocab", type=int, help="instead of the model's")
    group.add_argument("--dp", type=int, help="checked against the others; needs --cp")
    add_flags(group, Scenario)


def _add_machine(group: argparse._ArgumentGroup) -> None:
    inside, between = Machine.inside, Machine.between
    group.add_argument("--gpus-per-node", type=int, default=Machine.gpus_per_node)
    group.add_argument("--link-inside", type=float, help="GB/s of a GPU, one way (330)")
    group.add_argument("--link-between", type=float, help="GB/s of a GPU, one way (50)")
    group.add_argument("--latency-inside", type=float, help=f"us ({1e6 * inside.latency_s:g})")
    group.add_argument("--latency-between", type=float, help=f"us ({1e6 * between.latency_s:g})")
    group.add_argument("--cost-table", type=Path, help="file of python -m distca.calibrate")
    group.add_argument("--matmul-tflops", type=float, default=Machine.matmul_tflops)
    group.add_argument(
        "--attention-tflops",
        type=float,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        default=Machine.attention_tflops,
    )
    group.add_argument(
        "--key-block-tiles",
        type=float,
        default=0.0,
        help="backward cost of a task's 128 keys beside its tiles, in tiles: 0 distca's kernels, "
        "1.2 FlashAttention-2, 2.2 FlashAttention-3",
    )
    group.add_argument("--memory-tb-per-s", type=float, default=4.0)
    group.add_argument("--memory-gb", type=float, default=Machine.memory_bytes / 1e9)
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
    links = calibration.links if calibration is not None else None

    def link(level: str) -> Link:
        default = (getattr(links, level) if links else None) or getattr(Machine, level)
        bandwidth = getattr(args, f"link_{level}")
        latency = getattr(args, f"latency_{level}")
        return Link(
            default.latency_s if latency is None else 1e-6 * latency,
            default.bytes_per_second if bandwidth is None else 1e9 * bandwidth,
        )

    per_token = args.linear_us_per_token
    return Machine(
        gpus_per_node=args.gpus_per_node,
        inside=link("inside"),
        between=link("between"),
        matmul_tflops=args.matmul_tflops,
        attention_tflops=tuple(args.attention_tflops),
        key_block_tiles=args.key_block_tiles,
        memory_bytes_per_second=1e12 * args.memory_tb_per_s,
        memory_bytes=1e9 * args.memory_gb,
        calibration=calibration,
        linear_seconds_per_token=None if per_token is None else 1e-6 * per_token,
    )


def scenario_of(args: argparse.Namespace) -> Scenario:
    model = ModelShape.load(args.config) if args.config is not None else PRESETS[args.model]
    if args.dp is not None and args.dp * (args.cp or 1) * args.tp * args.pp != args.ranks:
        raise ValueError(
            f"dp is {args.dp}; dp * cp * tp * pp is {args.dp * (args.cp or 1) * args.tp * args.pp} "
            f"and ranks {args.ranks}"
        )
    model = model.changed(args.layers, args.vocab)
    return Scenario(model=model, machine=machine_of(args), **values_of(args, Scenario))


def lengths_of(args: argparse.Namespace) -> list[int]:
    if args.lengths is not None:
        return read_lengths(args.lengths)
    return distribution(args.distribution, args.seed)


def drawn_steps(args: argparse.Namespace, scenario: Scenario) -> list[Documents]:
    if args.steps < 1 or args.skip < 0:
        raise ValueError(f"steps is {args.steps} and skip {args.skip}; expected 1 or more, and 0")
    if not 0 <= args.show_step < args.steps:
        raise ValueError(f"show_step is {args.show_step}; expected 0 to {args.steps - 1}")
    drawn = draw(lengths_of(args), scenario, args.skip + args.steps, args.seed)
    return [documents for i, documents in enumerate(drawn) if i >= args.skip]


def simulate(args: argparse.Namespace) -> None:
    scenario = scenario_of(args)
    drawn = drawn_steps(args, scenario)
    if args.fit_step_ms is not None:
        scenario = fitted(scenario, drawn, 1e-3 * args.fit_step_ms)
    benchmark = None
    if args.measured is not None:
        benchmark = measured.Measured.load(args.measured, args.skip, args.steps)
    results = run(scenario, steps_of(scenario, drawn), args.systems, args.show_step)
    source = args.distribution if args.lengths is None else args.lengths.name
    heading = report.heading(scenario, source, args.steps)
    print("\n".join([heading, "", report.table(results), "", report.assumed(scenario)]))
    if benchmark is not None:
        print("\n" + measured.comparison(benchmark, scenario, drawn, results))
    if args.json is not None:
        report.save_json(args.json, heading, scenario, results)
    if args.out is not None:
        report.save(args.out, results, args.trace_ranks)


def main(command_line: Sequence[str] | None = None) -> None:
    flags = parser()
    args = flags.parse_args(command_line)
    try:
        simulate(args)
    except ValueError as error:
        flags.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
