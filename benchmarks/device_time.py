"""Break down the device time of a profiled step on every rank, from the intervals of its kernels.

There are four kinds of time. "communication" are NCCL's kernels, distca's kernels that move rows
(store, fetch, pack, unpack, and the pause that gives them a head start), and copies on streams
without other work. "waiting" is the part of these in which a kernel waits for a slower rank.
"attention" are the attention kernels, and "compute" is the rest.

Some kernels meet kernels of other ranks, and wait until the last rank has arrived. An NCCL kernel
waits for its counterparts. await_rows waits until the call has begun on every rank, and
await_results until every rank has published its results. A rank that arrives after the kernel has
ended does not count. Kernels are matched by their order. If ranks have different numbers of
kernels, all of that time counts as communication.
"""

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from intervals import Interval, length, merged, without
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity

COMPUTE, ATTENTION, COMMUNICATION, WAITING = "compute", "attention", "communication", "waiting"
KINDS = (COMPUTE, ATTENTION, COMMUNICATION, WAITING)
ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op", "user_annotation")
# Chrome traces have demangled names, or mangled ones if demangling failed.
PEER_KERNEL = re.compile(
    r"transport.*peer.*(start|store|await_rows|await_results|publish|finish|fetch|close)_kernel"
)
ROW_KERNEL = re.compile(r"distca.*(copy_rows|reduce_rows|hold)_kernel")
ATTENTION_KERNEL = re.compile(r"attention|attend|flash|fmha|sdpa")
HOST_COMMUNICATION = re.compile(r"^(gloo|c10d)\b")
HOST_COPY = re.compile(r"HtoD|DtoH|HtoH")
FIGURES = ("attention_ms", "exposed_ms", "waiting_ms", "idle_ms")  # of step_profile, to print
OPENINGS = ("start", "store")  # a peer call's first kernels


@dataclass(frozen=True)
class Span:
    begin: float  # us, on the host's clock
    end: float
    kind: str
    role: str = ""  # shared by kernels that meet: NCCL's kernel name, or start, fetch...
    stream: int = 0

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


def synchronise(device: torch.device, group: ProcessGroup | None = None) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group)


def gathered(value: float, device: torch.device, group: ProcessGroup | None = None) -> list[float]:
    """Return every rank's value, ordered by rank."""
    values = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    values[dist.get_rank(group)] = value
    dist.all_reduce(values, group=group)
    return values.tolist()


def gathered_text(text: str, device: torch.device, group: ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, ordered by rank."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [int(size) for size in gathered(own.numel(), device, group)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [
        each[:size].cpu().numpy().tobytes().decode()
        for each, size in zip(texts, sizes, strict=True)
    ]


def timed(
    train_step: Callable[[], Tensor], device: torch.device, group: ProcessGroup | None = None
) -> tuple[float, float]:
    """Run one step on the ranks of `group` (default: all). Return its milliseconds from barrier to
    barrier, and the sum over ranks of the losses that `train_step` returns."""
    synchronise(device, group)
    start = time.perf_counter()
    loss = train_step()
    synchronise(device, group)
    ms = 1e3 * (time.perf_counter() - start)
    dist.all_reduce(loss, group=group)
    return ms, loss.item()


def profiled(
    train_step: Callable[[], object], device: torch.device, group: ProcessGroup | None = None
) -> list[list[Span]]:
    """Profile one step and return the spans of each rank, with waiting split off."""
    synchronise(device, group)
    with torch.profiler.profile(activities=[ACTIVITIES[device.type]]) as profiler:
        train_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())
    own = json.dumps([astuple(span) for span in spans_of(trace)])
    ranks = [json.loads(text) for text in gathered_text(own, device, group)]
    return with_waiting([[Span(*each) for each in spans] for spans in ranks])


def spans_of(trace: dict) -> list[Span]:
    """Return the spans of a Chrome trace, ordered by begin. On the CPU, operators are the spans."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    timed = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if timed:
        kinds_and_roles = _kinds_on_device(timed)
    else:
        timed = [event for event in events if event.get("cat") in HOST_CATEGORIES]
        kinds_and_roles = [_kind_on_host(event["name"]) for event in timed]
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    spans = [
        Span(base + event["ts"], base + event["ts"] + event["dur"], *kind_and_role, event["tid"])
        for event, kind_and_role in zip(timed, kinds_and_roles, strict=True)
        if kind_and_role is not None
    ]
    return sorted(spans, key=lambda span: span.begin)


def _kinds_on_device(events: list[dict]) -> list[tuple[str, str]]:
    kinds_and_roles = [_kind_of_kernel(event) for event in events]
    computing = {
        event["tid"]
        for event, (kind, _) in zip(events, kinds_and_roles, strict=True)
        if event["cat"] == "kernel" and kind != COMMUNICATION
    }
    for idx, event in enumerate(events):
        is_copy = event["cat"] == "gpu_memcpy" and not HOST_COPY.search(event["name"])
        if is_copy and event["tid"] not in computing:
            kinds_and_roles[idx] = COMMUNICATION, "copy"
    return kinds_and_roles


def _kind_of_kernel(event: dict) -> tuple[str, str]:
    name = event["name"]
    if event["cat"] != "kernel":
        return COMPUTE, ""
    if "nccl" in name.lower():
        return COMMUNICATION, name.split("(")[0]
    if peer := PEER_KERNEL.search(name):
        return COMMUNICATION, peer[1]
    if ROW_KERNEL.search(name):
        return COMMUNICATION, ""
    return (ATTENTION if ATTENTION_KERNEL.search(name.lower()) else COMPUTE), ""


def _kind_on_host(name: str) -> tuple[str, str] | None:
    if HOST_COMMUNICATION.search(name):
        return COMMUNICATION, ""
    if name.startswith("distca::") or "scaled_dot_product" in name:
        return ATTENTION, ""
    return (COMPUTE, "") if name.startswith("aten::") else None


Meeting = tuple[str, int]  # name of the kernels that meet, and their index in order


@dataclass
class _Meetings:
    """One rank's meetings with other ranks."""

    arrivals: dict[Meeting, float] = field(default_factory=dict)
    """Time at which the rank arrives at each meeting."""
    waits: dict[int, Meeting] = field(default_factory=dict)
    """Meeting that a span waits for, by index of the span."""

    @classmethod
    def of(cls, spans: list[Span]) -> "_Meetings":
        meetings = cls()
        meetings._add_nccl(spans)
        meetings._add_peer(spans)
        return meetings

    def _add_nccl(self, spans: list[Span]) -> None:
        nccl_spans = [(idx, span) for idx, span in enumerate(spans) if "nccl" in span.role.lower()]
        streams = sorted({span.stream for _, span in nccl_spans})
        counts: Counter[str] = Counter()
        for idx, span in nccl_spans:
            name = f"{streams.index(span.stream)} {span.role}"
            self.waits[idx] = name, counts[name]
            self.arrivals[name, counts[name]] = span.begin
            counts[name] += 1

    def _add_peer(self, spans: list[Span]) -> None:
        call, is_open = -1, False
        for idx, span in enumerate(spans):
            if span.role in OPENINGS and not is_open:
                call, is_open = call + 1, True
                self.arrivals["call", call] = span.begin
            elif span.role == "await_rows" and is_open:
                self.waits[idx] = "call", call
            elif span.role == "publish" and is_open:
                self.arrivals["results", call] = span.begin
            elif span.role == "await_results" and is_open:
                self.waits[idx] = "results", call
            elif span.role == "close" and is_open:
                self.waits[idx], is_open = ("call", call), False
            elif span.role in ("fetch", "finish"):
                is_open = False

    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.arrivals)


def with_waiting(ranks: list[list[Span]]) -> list[list[Span]]:
    """Split each communication span where its wait for other ranks ends."""
    meetings = [_Meetings.of(spans) for spans in ranks]
    counts = [each.counts() for each in meetings]
    alike = {name for name, count in counts[0].items() if all(c[name] == count for c in counts)}

    def last_arrival(meeting: Meeting | None, begin: float, end: float) -> float:
        """Return when the last rank arrives during [begin, end), or `begin`."""
        if meeting is None or meeting[0] not in alike:
            return begin
        arrivals = [each.arrivals.get(meeting, end) for each in meetings]
        return max([begin, *(at for at in arrivals if at < end)])

    split_ranks = []
    for spans, own in zip(ranks, meetings, strict=True):
        split = []
        for idx, span in enumerate(spans):
            ready = last_arrival(own.waits.get(idx), span.begin, span.end)
            if ready > span.begin:
                split.append(replace(span, end=ready, kind=WAITING))
            split.append(replace(span, begin=ready))
        split_ranks.append(sorted(split, key=lambda span: span.begin))
    return split_ranks


def by_kind(spans: list[Span]) -> dict[str, list[Interval]]:
    """Return the union of each kind's spans."""
    return {kind: merged(s.interval for s in spans if s.kind == kind) for kind in KINDS}


def step_profile(ranks: list[list[Span]]) -> dict[str, list[float]]:
    """Return milliseconds by rank.

    "exposed_ms" is communication without simultaneous compute, "waiting_ms" is waiting without
    compute or communication, and "idle_ms" is the time without any span.
    """
    rows = [_profile_of_rank(spans) for spans in ranks]
    return {name: [row[name] / 1e3 for row in rows] for name in rows[0]}


def _profile_of_rank(spans: list[Span]) -> dict[str, float]:
    kinds = by_kind(spans)
    computing = merged(kinds[COMPUTE] + kinds[ATTENTION])
    exposed = without(kinds[COMMUNICATION], computing)
    waiting = without(kinds[WAITING], merged(computing + exposed))
    busy = merged(span.interval for span in spans)
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    return {
        "step_ms": whole,
        "compute_ms": length(computing),
        "attention_ms": length(kinds[ATTENTION]),
        "communication_ms": length(kinds[COMMUNICATION]),
        "exposed_ms": length(exposed),
        "waiting_ms": length(waiting),
        "idle_ms": whole - length(busy),
    }
