"""Who does what when: segments of a step by rank, and the trace that chrome://tracing reads."""

from collections.abc import Iterator
from dataclasses import dataclass

from distca.simulate.layers import (
    ATTENTION,
    EXCHANGE,
    KINDS,
    LINEAR,
    PARAMETERS,
    TENSOR_PARALLEL,
    WAITING,
)
from distca.simulate.machine import FORWARD
from distca.simulate.pipeline import IDLE, Operation, Schedule
from distca.simulate.scenario import Scenario
from distca.watching.trace import event, name_event

# Inside a layer's forward pass, schematically; backward mirrors it.
ORDER = (LINEAR, TENSOR_PARALLEL, EXCHANGE, ATTENTION, WAITING, PARAMETERS)
STREAMS = {"compute": 0, "communication": 1, "waiting": 2}
STREAM_OF_KIND = {
    LINEAR: "compute",
    ATTENTION: "compute",
    EXCHANGE: "communication",
    TENSOR_PARALLEL: "communication",
    PARAMETERS: "communication",
    WAITING: "waiting",
}
SHORTEST = 1e-9  # seconds; what is left over by rounding is not drawn
MAX_EVENTS = 50_000  # of a trace; beyond, layers are drawn as one


@dataclass(frozen=True)
class Segment:
    kind: int
    start: float  # seconds since the step began
    seconds: float
    what: str


def segments(schedule: Schedule, scenario: Scenario, rank: int, layers: int) -> Iterator[Segment]:
    """Of planner rank `rank` (stage * groups + group) in order of time; every operation is drawn as
    `layers` equal layers."""
    stage, group = divmod(rank, scenario.groups)
    own = [each for each in schedule.operations if each.stage == stage]
    for operation in sorted(own, key=lambda each: float(each.start[group])):
        yield from _of_operation(operation, group, layers)
    now = schedule.seconds - float(schedule.closing[:, group].sum())
    for kind in (PARAMETERS, LINEAR):
        seconds = float(schedule.closing[kind, group])
        if seconds > SHORTEST:
            yield Segment(kind, now, seconds, "end of step")
        now += seconds


def _of_operation(operation: Operation, group: int, layers: int) -> Iterator[Segment]:
    is_forward = operation.pass_idx == FORWARD
    task = "serving only" if operation.micro_batch == IDLE else f"{operation.micro_batch}"
    what = f"{'forward' if is_forward else 'backward'} {task}"
    now = float(operation.start[group])
    for _ in range(layers):
        for kind in ORDER if is_forward else reversed(ORDER):
            seconds = float(operation.seconds[kind, group]) / layers
            if seconds > SHORTEST:
                yield Segment(kind, now, seconds, what)
            now += seconds


def some_ranks(scenario: Scenario, count: int) -> list[int]:
    """At most `count` planner ranks, evenly over stages and groups."""
    total = scenario.pp * scenario.groups
    count = min(count, total)
    return [total * i // count for i in range(count)]


def chrome_trace(schedule: Schedule, scenario: Scenario, num_ranks: int) -> dict:
    """Complete events (ts and dur in us) of `num_ranks` planner ranks: pid is the first GPU of a
    rank's tensor parallel group, tid its stream."""
    ranks = some_ranks(scenario, num_ranks)
    num_operations = len(schedule.operations) // scenario.pp
    by_layer = num_operations * len(ranks) * len(KINDS) * scenario.stage_layers <= MAX_EVENTS
    layers = scenario.stage_layers if by_layer else 1
    events = []
    for rank in ranks:
        pid = rank * scenario.tp
        events.append(name_event("process_name", pid, 0, f"rank {pid}"))
        events += [name_event("thread_name", pid, tid, name) for name, tid in STREAMS.items()]
        for each in segments(schedule, scenario, rank, layers):
            kind = KINDS[each.kind]
            row = STREAMS[STREAM_OF_KIND[each.kind]]
            times = (1e6 * each.start, 1e6 * each.seconds)
            events.append(event(f"{kind}, {each.what}", pid, row, *times, cat=kind))
    return {"traceEvents": events, "displayTimeUnit": "ms"}
