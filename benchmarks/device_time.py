"""What a profiled step's device time goes to, on every rank, from the kernels' own intervals.

Four kinds. "communication": NCCL's kernels, distca's that move rows (store, fetch, pack, unpack,
the pause that gives them a head start), copies on streams that do nothing but copy. "waiting": the
part of such a kernel in which it waits for a rank that is behind. "attention". "compute": the rest.

A kernel that meets others waits until the last of their ranks has come: an NCCL kernel for its
like, the kernel that awaits rows for every rank's call to begin, the one that awaits results for
every rank to have its own. Who came after a kernel had ended was not waited for. Kernels are
matched by their order; where ranks differ in how many there are, nothing is called waiting and all
of it is communication.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from intervals import Interval, length, merged, without
from torch.profiler import ProfilerActivity

COMPUTE, ATTENTION, COMMUNICATION, WAITING = "compute", "attention", "communication", "waiting"
KINDS = (COMPUTE, ATTENTION, COMMUNICATION, WAITING)
ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op", "user_annotation")
# Chrome traces have demangled names, or mangled ones where that failed.
PEER_KERNEL = re.compile(
    r"transport.*peer.*(start|store|await_rows|await_results|publish|finish|fetch|close)_kernel"
)
ROW_KERNEL = re.compile(r"distca.*(copy_rows|reduce_rows|hold)_kernel")
ATTENTION_KERNEL = re.compile(r"attention|attend|flash|fmha|sdpa")
HOST_COMMUNICATION = re.compile(r"^(gloo|c10d)\b")
HOST_COPY = re.compile(r"HtoD|DtoH|HtoH")
FIGURES = ("attention_ms", "exposed_ms", "waiting_ms", "idle_ms")  # of step_profile, to be shown
OPENINGS = ("start", "store")  # a peer call's first kernels


@dataclass(frozen=True)
class Span:
    begin: float  # us, on a clock that the ranks of a host share
    end: float
    kind: str
    role: str = ""  # what kernels that meet have in common: NCCL's name, or start, fetch...
    stream: int = 0

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


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


def gathered_text(text: str, device: torch.device) -> list[str]:
    """Every rank's text, by rank."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [int(size) for size in gathered(own.numel(), device)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [
        each[:size].cpu().numpy().tobytes().decode()
        for each, size in zip(texts, sizes, strict=True)
    ]


def profiled(train_step: Callable[[], object], device: torch.device) -> list[list[Span]]:
    """Spans of one step by rank, told apart."""
    synchronise(device)
    with torch.profiler.profile(activities=[ACTIVITIES[device.type]]) as profiler:
        train_step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())
    own = json.dumps([astuple(span) for span in spans_of(trace)])
    ranks = [json.loads(text) for text in gathered_text(own, device)]
    return told_apart([[Span(*each) for each in spans] for spans in ranks])


def spans_of(trace: dict) -> list[Span]:
    """Of a Chrome trace, by begin. On the CPU operators stand for kernels."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ran = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if ran:
        kind_and_role = _kinds_on_device(ran)
    else:
        ran = [event for event in events if event.get("cat") in HOST_CATEGORIES]
        kind_and_role = [_kind_on_host(event["name"]) for event in ran]
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    spans = [
        Span(base + event["ts"], base + event["ts"] + event["dur"], *found, event["tid"])
        for event, found in zip(ran, kind_and_role, strict=True)
        if found is not None
    ]
    return sorted(spans, key=lambda span: span.begin)


def _kinds_on_device(events: list[dict]) -> list[tuple[str, str]]:
    found = [_kind_of_kernel(event) for event in events]
    computing = {
        event["tid"]
        for event, (kind, _) in zip(events, found, strict=True)
        if event["cat"] == "kernel" and kind != COMMUNICATION
    }
    for idx, event in enumerate(events):
        is_copy = event["cat"] == "gpu_memcpy" and not HOST_COPY.search(event["name"])
        if is_copy and event["tid"] not in computing:
            found[idx] = COMMUNICATION, "copy"
    return found


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


Meeting = tuple[str, int]  # kernels that meet, and which of them in order


@dataclass
class _Meetings:
    """Of one rank."""

    came: dict[Meeting, float] = field(default_factory=dict)
    """When the rank came to each."""
    waits: dict[int, Meeting] = field(default_factory=dict)
    """By index of the span: what it waits for."""

    @classmethod
    def of(cls, spans: list[Span]) -> "_Meetings":
        made = cls()
        made._add_nccl(spans)
        made._add_peer(spans)
        return made

    def _add_nccl(self, spans: list[Span]) -> None:
        found = [(idx, span) for idx, span in enumerate(spans) if "nccl" in span.role.lower()]
        streams = sorted({span.stream for _, span in found})
        counts: Counter[str] = Counter()
        for idx, span in found:
            name = f"{streams.index(span.stream)} {span.role}"
            self.waits[idx] = name, counts[name]
            self.came[name, counts[name]] = span.begin
            counts[name] += 1

    def _add_peer(self, spans: list[Span]) -> None:
        call, is_open = -1, False
        for idx, span in enumerate(spans):
            if span.role in OPENINGS and not is_open:
                call, is_open = call + 1, True
                self.came["call", call] = span.begin
            elif span.role == "await_rows" and is_open:
                self.waits[idx] = "call", call
            elif span.role == "publish" and is_open:
                self.came["results", call] = span.begin
            elif span.role == "await_results" and is_open:
                self.waits[idx] = "results", call
            elif span.role == "close" and is_open:
                self.waits[idx], is_open = ("call", call), False
            elif span.role in ("fetch", "finish"):
                is_open = False

    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.came)


def told_apart(ranks: list[list[Span]]) -> list[list[Span]]:
    """Communication's spans cut where waiting for other ranks ends, and waiting that has none."""
    meetings = [_Meetings.of(spans) for spans in ranks]
    counts = [each.counts() for each in meetings]
    alike = {name for name, count in counts[0].items() if all(c[name] == count for c in counts)}

    def last_came(meeting: Meeting | None, begin: float, end: float) -> float:
        """When the last rank came, as far as [begin, end) tells."""
        if meeting is None or meeting[0] not in alike:
            return begin
        came = [each.came.get(meeting, end) for each in meetings]
        return max([begin, *(at for at in came if at < end)])

    told = []
    for spans, own in zip(ranks, meetings, strict=True):
        found = []
        for idx, span in enumerate(spans):
            ready = last_came(own.waits.get(idx), span.begin, span.end)
            if ready > span.begin:
                found.append(replace(span, end=ready, kind=WAITING))
            found.append(replace(span, begin=ready))
        told.append(sorted(found, key=lambda span: span.begin))
    return told


def by_kind(spans: list[Span]) -> dict[str, list[Interval]]:
    """The union of each kind's spans."""
    return {kind: merged(s.interval for s in spans if s.kind == kind) for kind in KINDS}


def step_profile(ranks: list[list[Span]]) -> dict[str, list[float]]:
    """Milliseconds by rank. "exposed_ms": communication while nothing computes; "waiting_ms":
    waiting while nothing computes nor communicates; "idle_ms": nothing at all."""
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
