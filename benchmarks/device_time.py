"""What a step's device time goes to, by rank, from the kernels' own intervals."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def gathered(value: float, device: torch.device) -> list[float]:
    """Every rank's value, by rank."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


def profiled(train_step: Callable[[], object]) -> dict[str, list[float]]:
    """Milliseconds by rank of one step's device time, from the kernels' own intervals."""
    device = torch.device("cuda", torch.cuda.current_device())
    synchronise(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        train_step()
        synchronise(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return {name: gathered(ms, device) for name, ms in device_time(events).items()}


def device_time(events: list[dict]) -> dict[str, float]:
    """From a Chrome trace: time with computing kernels, with NCCL kernels alone, with neither."""
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in ran]
    if not spans:
        return {"compute_ms": 0.0, "only_nccl_ms": 0.0, "idle_ms": 0.0}
    compute = covered([span[:2] for span in spans if not span[2]])
    either = covered([span[:2] for span in spans])
    whole = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    return {
        "compute_ms": compute / 1e3,
        "only_nccl_ms": (either - compute) / 1e3,
        "idle_ms": (whole - either) / 1e3,
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    length, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return length
