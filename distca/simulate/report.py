"""Results as a table, as JSON, and the files of --out."""

import json
import textwrap
from pathlib import Path

from distca.simulate import pictures
from distca.simulate.assumptions import assumptions
from distca.simulate.results import Result
from distca.simulate.scenario import Scenario
from distca.simulate.timeline import chrome_trace

FORMAT = 1
NO_GAIN = "<1"
WIDTH = 100


def heading(scenario: Scenario, source: str, num_steps: int) -> str:
    model, groups = scenario.model, scenario.groups
    parts = [
        f"{model.name} ({model.layers} layers, {model.params / 1e9:.2f}e9 parameters)",
        f"{scenario.ranks} GPUs = {groups} groups x tp {scenario.tp} x pp {scenario.pp}",
        f"{scenario.tokens} tokens a group and micro-batch, {scenario.micro_batches} of them",
        f"documents of {source} up to {scenario.context} tokens, {num_steps} steps",
    ]
    return "\n".join(parts)


def assumed(scenario: Scenario) -> str:
    lines = [
        textwrap.fill(each, WIDTH, initial_indent="  ", subsequent_indent="    ")
        for each in assumptions(scenario)
    ]
    return "\n".join(["Assumptions (formulas: distca/simulate/__init__.py)", *lines])


def table(results: list[Result]) -> str:
    """Systems with their figures, then what each gains over every baseline."""
    head = (
        f"{'system':<30}{'cp':>4}{'step ms':>10}{'slowest':>10}{'attn':>7}{'compute':>8}"
        f"{'exposed':>9}{'waiting':>9}{'memory GB':>15}{'tokens/s':>14}"
    )
    units = (
        f"{'':<30}{'':>4}{'mean':>10}{'tenth':>10}{'max/mean':>15}{'ms':>9}{'ms':>9}"
        f"{'max / mean':>15}"
    )
    lines = [head, units, *(_figures(result) for result in results)]
    baselines = [result for result in results if result.system.is_baseline]
    if baselines:
        lines += ["", "speed-up over" + " " * 17]
        lines[-1] += "".join(f"{baseline.system.name:>12}" for baseline in baselines)
        ours = [result for result in results if not result.system.is_baseline]
        lines += [_gains(result, baselines) for result in ours]
    lines.append(f"{NO_GAIN} = slower than that baseline, ! = does not fit in memory")
    return "\n".join(lines)


def _figures(result: Result) -> str:
    cp = result.cp if result.system.is_baseline else "-"
    memory = f"{result.memory_max / 1e9:.1f} / {result.memory_mean / 1e9:.1f}"
    return (
        f"{result.system.label:<30}{cp:>4}{1e3 * result.mean:>10.1f}"
        f"{1e3 * result.slowest_decile:>10.1f}{result.attention_imbalance:>7.2f}"
        f"{result.compute_imbalance:>8.2f}{1e3 * result.exposed_seconds:>9.1f}"
        f"{1e3 * max(0.0, result.waiting_seconds):>9.1f}{memory:>15}"
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
                "attention_imbalance": result.attention_imbalance,
                "compute_imbalance": result.compute_imbalance,
                "exposed_communication_ms": 1e3 * result.exposed_seconds,
                "waiting_ms": 1e3 * result.waiting_seconds,
                "memory_max_bytes": result.memory_max,
                "memory_mean_bytes": result.memory_mean,
                "fits_in_memory": result.fits,
                "tokens_per_second": result.tokens_per_second,
                "speed_up_over": {
                    baseline.system.name: result.speed_up_over(baseline) for baseline in baselines
                },
            }
            for result in results
        ],
    }


def save_json(path: Path, title: str, scenario: Scenario, results: list[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_data(title, scenario, results), indent=2) + "\n")


def save(folder: Path, results: list[Result], num_ranks: int) -> None:
    """timeline.png, balance.png, and a trace of each system's shown step."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        trace = chrome_trace(result.outcome.schedule, result.scenario, num_ranks)
        path = folder / f"trace_{result.system.name}.json"
        path.write_text(json.dumps(trace) + "\n")
    pictures.draw_timeline(folder / "timeline.png", results, num_ranks)
    pictures.draw_balance(folder / "balance.png", results)
