"""Prints results as a table or as JSON, with the assumptions behind them."""

import textwrap
from dataclasses import replace

from distca.simulate.results import Result, best
from distca.simulate.scenario import Scenario

FORMAT = 2
NO_GAIN = "<1"
OURS = ("distca", "distca-ping-pong")
NOTABLE = 1.005  # times as fast
WIDTH = 100


def heading(scenario: Scenario, source: str, num_steps: int) -> str:
    model, groups = scenario.model, scenario.groups
    servers = f", servers: {scenario.servers}" * bool(scenario.servers)
    return (
        f"{model.name} ({model.layers} layers, {model.params / 1e9:.2f}e9 parameters)\n"
        f"{scenario.ranks} GPUs = {groups} groups x tp {scenario.tp} x pp {scenario.pp}{servers}\n"
        f"{scenario.tokens} tokens a group and micro-batch, {scenario.micro_batches} of them\n"
        f"documents of {source} up to {scenario.context} tokens, {num_steps} steps"
    )


def table(results: list[Result]) -> str:
    """Systems with their figures, then what each gains over every baseline."""
    lines = [
        f"{'system':<30}{'cp':>4}{'step ms':>10}{'slowest':>10}{'attn':>7}{'compute':>8}"
        f"{'exposed':>9}{'waiting':>9}{'memory GB':>15}{'tokens/s':>14}",
        f"{'mean':>44}{'tenth':>10}{'max/mean':>15}{'ms':>9}{'ms':>9}{'max / mean':>15}",
        *map(_figures, results),
    ]
    baselines = [result for result in results if result.system.is_baseline]
    if baselines:
        names = "".join(f"{baseline.system.name:>12}" for baseline in baselines)
        lines += ["", f"{'speed-up over':<30}{names}"]
        ours = [result for result in results if not result.system.is_baseline]
        lines += [_gains(result, baselines) for result in ours]
    lines.append(f"{NO_GAIN} = slower than that baseline, ! = does not fit in memory")
    return "\n".join([*lines, *map(textwrap.TextWrapper(WIDTH).fill, hints(results))])


def hints(results: list[Result]) -> list[str]:
    """Say what to change where distca does not fit in memory, or is slower than a baseline."""
    ours = [result for result in results if result.system.name in OURS]
    if not ours:
        return []
    texts, distca = [], best(ours)
    if not distca.fits:
        texts.append(
            f"distca needs {distca.memory_max / 1e9:.0f} GB a GPU, of "
            f"{distca.scenario.machine.usable_bytes / 1e9:.0f}: pass --recompute, fewer --tokens, "
            "or divide the model with --tp or --pp"
        )
    others = [each for each in results if each.system.is_baseline and each.fits >= distca.fits]
    if others and best(others).mean < distca.mean / NOTABLE:
        other, exposed_ms = best(others), distca.means["exposed_communication_ms"]
        texts.append(
            f"{other.system.label} is {distca.mean / other.mean:.2f} times as fast as distca, of "
            f"whose step {exposed_ms:.0f} ms are exposed communication: see "
            "docs/when-it-does-not-pay.md, and try faster links"
        )
    return texts


def _figures(result: Result) -> str:
    cp = result.cp if result.system.is_baseline else "-"
    attention, compute, exposed_ms, waiting_ms, memory_mean = result.means.values()
    memory = f"{result.memory_max / 1e9:.1f} / {memory_mean / 1e9:.1f}"
    return (  # with a space before each figure, however long it is
        f"{result.system.label:<30} {cp:>3} {1e3 * result.mean:>9.1f} "
        f"{1e3 * result.slowest_decile:>9.1f} {attention:>6.2f} {compute:>7.2f} {exposed_ms:>8.1f} "
        f"{max(0.0, waiting_ms):>8.1f} {memory:>14}"
        f"{'' if result.fits else '!':1} {result.tokens_per_second:>12,.0f}"
    )


def _gains(result: Result, baselines: list[Result]) -> str:
    line = f"{result.system.label:<30}"
    for baseline in baselines:
        factor = f"{result.speed_up_over(baseline):.2f}"
        # A figure of 1.00 is not marked, although the step may be slower by less than it shows.
        mark = f"{NO_GAIN} " if float(factor) < 1 else ""
        line += f" {mark + factor + 'x':>11}"
    return line


def as_data(title: str, scenario: Scenario, results: list[Result]) -> dict:
    return {
        "format": FORMAT,
        "scenario": title,
        "linear_seconds_per_token": scenario.machine.linear_seconds_per_token,
        "assumptions": assumptions(scenario),
        "systems": [
            {
                "name": result.system.name,
                "cp": result.cp,
                "step_ms": [1e3 * seconds for seconds in result.step_seconds],
                "step_ms_mean": 1e3 * result.mean,
                "step_ms_slowest_decile": 1e3 * result.slowest_decile,
                **result.means,
                "memory_max_bytes": result.memory_max,
                "fits_in_memory": result.fits,
                "tokens_per_second": result.tokens_per_second,
            }
            for result in results
        ],
    }


def assumed(scenario: Scenario) -> str:
    wrapped = textwrap.TextWrapper(WIDTH, initial_indent="  ", subsequent_indent="    ")
    lines = map(wrapped.fill, assumptions(scenario))
    return "\n".join(["Assumptions (formulas: distca/simulate/__init__.py)", *lines])


def assumptions(scenario: Scenario) -> list[str]:
    """What a prediction rests on, in sentences."""
    machine = scenario.machine
    links = ", ".join(
        f"{name} {link.bytes_per_second / 1e9:g} GB/s + {1e6 * link.latency_s:g} us"
        for name, link in (("in a node", machine.inside), ("between nodes", machine.between))
    )
    repeated = "repeated in backward, exchanges included" if scenario.recompute else "kept"
    forward, backward = machine.attention_tflops
    attention = f"{forward:g} / {backward:g} TFLOP/s forward / backward in whole tiles of 128 x 128"
    if machine.calibration is not None:
        attention = f"as measured on {machine.calibration.device_name}"
    return [
        _linear(scenario),
        f"attention {attention}; the same kernels for every system",
        f"links, one way a GPU, {machine.gpus_per_node} GPUs a node: {links}; no contention",
        "all-gather context parallelism overlaps nothing, a ring its hops; baselines choose cp "
        "and whether they keep gathered keys by mean step",
        f"parameters: {scenario.sharding}, hidden behind compute as far as it lasts; tensor "
        "parallel all-reduces exposed",
        "ping-pong hides one half's exchange behind the other half's attention and the work on one "
        "side of it",
        f"variable-length packing may fill {machine.usable_memory:.0%} of "
        f"{machine.memory_gb:g} GB a GPU, and moves no document to another step",
        f"activations are {repeated}; loss in chunks, logits not kept",
        f"planner tolerance {scenario.tolerance:g}; servers keep at most "
        f"{1e-9 * scenario.kept_cap_bytes:.3g} GB of inputs a layer",
        "planning counts where it takes this processor longer than a step",
    ]


def _linear(scenario: Scenario) -> str:
    machine, per_token = scenario.machine, scenario.machine.linear_seconds_per_token
    if per_token is not None:
        unfitted = replace(scenario, machine=replace(machine, linear_seconds_per_token=None))
        by_speed = sum(unfitted.linear_seconds(1)) * scenario.stage_layers
        return (
            f"linear work {1e6 * per_token:.4g} us a token, measured or fitted, "
            f"{per_token / by_speed:.2f} times what {machine.matmul_tflops:g} TFLOP/s and "
            f"{machine.memory_tb_per_s:g} TB/s give; the optimizer is in it"
        )
    return (
        f"matrices {machine.matmul_tflops:g} TFLOP/s; elementwise "
        f"{scenario.model.elementwise_bytes / 1e3:.0f} KB a token, layer and forward pass at "
        f"{machine.memory_tb_per_s:g} TB/s"
    )
