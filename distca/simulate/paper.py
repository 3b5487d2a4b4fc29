"""Compares core attention disaggregation with every baseline at the scale of its publication."""

import itertools

from distca.simulate.machine import Machine
from distca.simulate.packing import draw
from distca.simulate.results import best, run
from distca.simulate.scenario import PRESETS, Scenario
from distca.simulate.systems import Step

RANKS = (64, 128, 256, 512)
CONTEXTS = (131072, 262144, 524288)
TP = 8
TOKENS = {"8B": 131072, "34B": 65536}  # of a group; activations fit without recomputation
PUBLISHED = (
    "Published, over variable-length packing: 1.07 to 1.20 on pretraining lengths, 1.05 to 1.12 on "
    "ProLong\n(512 H200, 50 GB/s a GPU between nodes of 8)"
)


def table(lengths: list[int], machine: Machine, num_steps: int, seed: int) -> str:
    lines = [
        f"{'model':<6}{'GPUs':>5}{'context':>9}{'best baseline':>16}{'ms':>9}{'distca':>9}"
        f"{'ping-pong':>11}{'balanced for free':>19}"
    ]
    gains = []
    for model, ranks, context in itertools.product(TOKENS, RANKS, CONTEXTS):
        scenario = Scenario(
            model=PRESETS[model],
            machine=machine,
            ranks=ranks,
            tp=TP,
            tokens=TOKENS[model],
            context=context,
        )
        drawn = draw(lengths, scenario, num_steps, seed)
        results = run(scenario, [Step(scenario, documents) for documents in drawn])
        baseline = best(result for result in results if result.system.is_baseline)
        name = f"{baseline.system.name} cp{baseline.cp}"
        gains.append([each.speed_up_over(baseline) for each in results[-3:]])
        turn, ping_pong, limit = gains[-1]
        lines.append(
            f"{model:<6}{ranks:>5}{context:>9}{name:>16}{1e3 * baseline.mean:>9.0f}"
            f"{turn:>8.2f}x{ping_pong:>10.2f}x{limit:>18.2f}x"
        )
    means = (sum(column) / len(gains) for column in zip(*gains, strict=True))
    turn, ping_pong, limit = means
    lines += [f"{'mean':<45}{turn:>8.2f}x{ping_pong:>10.2f}x{limit:>18.2f}x", PUBLISHED]
    return "\n".join(lines)
