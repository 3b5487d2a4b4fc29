"""What a prediction rests on, in sentences that are printed with it."""

from dataclasses import replace

from distca.simulate.machine import Machine
from distca.simulate.scenario import Scenario


def assumptions(scenario: Scenario) -> list[str]:
    machine = scenario.machine
    links = ", ".join(
        f"{name} {link.bytes_per_second / 1e9:g} GB/s + {1e6 * link.latency_s:g} us"
        for name, link in (("in a node", machine.inside), ("between nodes", machine.between))
    )
    repeated = "repeated in backward, exchanges included" if scenario.recompute else "kept"
    return [
        _linear(scenario),
        f"attention {_attention(machine)}; the same kernels for every system",
        f"links, one way a GPU, {machine.gpus_per_node} GPUs a node: {links}; no contention",
        "all-gather context parallelism overlaps nothing, a ring its hops; baselines choose cp by "
        "mean step",
        f"parameters: {scenario.sharding}, hidden behind compute as far as it lasts; tensor "
        "parallel all-reduces exposed",
        "ping-pong hides exchanges up to the linear work of the other half, not its attention; the "
        "planner is told of faster links for it (the best of several factors)",
        f"variable-length packing may fill {machine.usable_memory:.0%} of "
        f"{machine.memory_bytes / 1e9:g} GB a GPU, and moves no document to another step",
        f"activations are {repeated}; loss in chunks, logits not kept",
        f"planner tolerance {scenario.tolerance:g}; planning runs ahead and costs nothing",
    ]


def _linear(scenario: Scenario) -> str:
    machine = scenario.machine
    if machine.linear_seconds_per_token is not None:
        unfitted = replace(scenario, machine=replace(machine, linear_seconds_per_token=None))
        by_speed = sum(unfitted.linear_seconds(1)) * scenario.stage_layers
        return (
            f"linear work {1e6 * machine.linear_seconds_per_token:.4g} us a token, measured or "
            f"fitted, {machine.linear_seconds_per_token / by_speed:.2f} times what "
            f"{machine.matmul_tflops:g} TFLOP/s and {machine.memory_bytes_per_second / 1e12:g} "
            "TB/s give; the optimizer is in it"
        )
    return (
        f"matrices {machine.matmul_tflops:g} TFLOP/s; elementwise "
        f"{scenario.model.elementwise_bytes / 1e3:.0f} KB a token, layer and forward pass at "
        f"{machine.memory_bytes_per_second / 1e12:g} TB/s"
    )


def _attention(machine: Machine) -> str:
    if machine.calibration is not None:
        return f"as measured on {machine.calibration.device_name}"
    speeds = " / ".join(f"{speed:g}" for speed in machine.attention_tflops)
    return (
        f"{speeds} TFLOP/s forward / backward in whole tiles of 128 x 128, and "
        f"{machine.key_block_tiles:g} tiles for each task and 128 keys in backward"
    )
