"""Results as a table and as JSON, the assumptions that they rest on, and measured steps beside."""

import json
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distca.simulate.layers import NUM_PASSES, plain_attention
from distca.simulate.packing import Documents
from distca.simulate.results import Result, slowest_tenth
from distca.simulate.scenario import Scenario

FORMAT = 1
NO_GAIN = "<1"
WIDTH = 100
# What the benchmark calls systems here; of those that it ran the last.
VARIANTS = (("plain", "fixed"), ("process_group", "distca"), ("peer", "distca"))


def heading(scenario: Scenario, source: str, num_steps: int) -> str:
    model, groups = scenario.model, scenario.groups
    return (
        f"{model.name} ({model.layers} layers, {model.params / 1e9:.2f}e9 parameters)\n"
        f"{scenario.ranks} GPUs = {groups} groups x tp {scenario.tp} x pp {scenario.pp}\n"
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
    return "\n".join(lines)


def _figures(result: Result) -> str:
    cp = result.cp if result.system.is_baseline else "-"
    attention, compute, exposed_ms, waiting_ms, memory_mean = result.means.values()
    memory = f"{result.memory_max / 1e9:.1f} / {memory_mean / 1e9:.1f}"
    return (
        f"{result.system.label:<30}{cp:>4}{1e3 * result.mean:>10.1f}"
        f"{1e3 * result.slowest_decile:>10.1f}{attention:>7.2f}{compute:>8.2f}{exposed_ms:>9.1f}"
        f"{max(0.0, waiting_ms):>9.1f}{memory:>15}"
        f"{'' if result.fits else '!':1}{result.tokens_per_second:>13,.0f}"
    )


def _gains(result: Result, baselines: list[Result]) -> str:
    line = f"{result.system.label:<30}"
    for baseline in baselines:
        gain = result.speed_up_over(baseline)
        line += f"{NO_GAIN + ' ' if gain < 1 else '':>7}{gain:.2f}x"
    return line


def as_data(title: str, scenario: Scenario, results: list[Result]) -> dict:
    baselines = [result for result in results if result.system.is_baseline]
    return {
        "format": FORMAT,
        "scenario": title,
        "ranks": scenario.ranks,
        "tokens_per_step": scenario.step_tokens,
        "linear_seconds_per_token": scenario.machine.linear_seconds_per_token,
        "assumptions": assumptions(scenario),
        "systems": [
            {
                "name": result.system.name,
                "is_baseline": result.system.is_baseline,
                "cp": result.cp,
                "step_ms": [1e3 * seconds for seconds in result.step_seconds],
                "step_ms_mean": 1e3 * result.mean,
                "step_ms_slowest_decile": 1e3 * result.slowest_decile,
                **result.means,
                "memory_max_bytes": result.memory_max,
                "fits_in_memory": result.fits,
                "tokens_per_second": result.tokens_per_second,
                "speed_up_over": {
                    baseline.system.name: result.speed_up_over(baseline) for baseline in baselines
                },
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
    attention = (
        f"{forward:g} / {backward:g} TFLOP/s forward / backward in whole tiles of 128 x 128, and "
        f"{machine.key_block_tiles:g} tiles for each task and 128 keys in backward"
    )
    if machine.calibration is not None:
        attention = f"as measured on {machine.calibration.device_name}"
    return [
        _linear(scenario),
        f"attention {attention}; the same kernels for every system",
        f"links, one way a GPU, {machine.gpus_per_node} GPUs a node: {links}; no contention",
        "all-gather context parallelism overlaps nothing, a ring its hops; baselines choose cp by "
        "mean step",
        f"parameters: {scenario.sharding}, hidden behind compute as far as it lasts; tensor "
        "parallel all-reduces exposed",
        "ping-pong hides exchanges up to the linear work of the other half, not its attention; the "
        "planner is told of faster links for it (the best of several factors)",
        f"variable-length packing may fill {machine.usable_memory:.0%} of "
        f"{machine.memory_gb:g} GB a GPU, and moves no document to another step",
        f"activations are {repeated}; loss in chunks, logits not kept",
        f"planner tolerance {scenario.tolerance:g}; planning runs ahead and costs nothing",
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


@dataclass(frozen=True)
class Measured:
    step_ms: dict[str, list[float]]  # by system: fixed, and distca where it was run
    attention_ms: np.ndarray  # [steps, ranks] of each rank's own documents, all layers

    @classmethod
    def load(cls, path: Path, skip: int, num_steps: int) -> "Measured":
        """Steps [skip, skip + num_steps) of the benchmark's --out; raises ValueError naming the
        file and what is wrong."""
        chosen = slice(skip, skip + num_steps)
        try:
            content = json.loads(path.read_text())
            ran = [(name, system) for name, system in VARIANTS if name in content["variants"]]
            steps = {system: content["variants"][name]["step_ms"][chosen] for name, system in ran}
            if "fixed" not in steps:
                raise ValueError("no variant plain, in which ranks do not balance")
            attention = np.array(content["attention_ms"]["plain"][chosen], dtype=float)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"measured {path}: {error!r}; expected a file of benchmarks/training_step.py --out"
            ) from error
        if any(len(each) != num_steps for each in (*steps.values(), attention)):
            raise ValueError(
                f"measured {path}: holds fewer than skip + steps = {skip + num_steps} steps"
            )
        return cls(steps, attention)


def comparison(
    measured: Measured, scenario: Scenario, drawn: list[Documents], results: list[Result]
) -> str:
    """Mean and slowest tenth of both variants, and attention alone."""
    rows = [
        (f"step, {each.system.label}", measured.step_ms[each.system.name], each.step_seconds)
        for each in results
        if each.system.name in measured.step_ms
    ]
    packs = scenario.packs * scenario.micro_batches
    attention = np.array([plain_attention(scenario, each, packs) for each in drawn])
    shape = (len(drawn), NUM_PASSES * scenario.micro_batches, scenario.packs)
    attention = attention.reshape(shape).sum(axis=1) * scenario.model.layers  # [steps, packs]
    by_rank = measured.attention_ms
    rows.append(("attention, mean of ranks", by_rank.mean(1), attention.mean(1)))
    rows.append(("attention, slowest rank", by_rank.max(1), attention.max(1)))
    lines = [f"{'measured / predicted, ms':<30}{'mean':>24}{'slowest tenth':>28}"]
    for name, measured_ms, predicted in rows:
        line = f"{name:<30}"
        for figure in (np.mean, slowest_tenth):
            theirs, ours = float(figure(measured_ms)), 1e3 * float(figure(predicted))
            line += f"{theirs:>10.1f} /{ours:>8.1f} ({100 * (ours / theirs - 1):+.1f} %)"
        lines.append(line)
    return "\n".join(lines)
