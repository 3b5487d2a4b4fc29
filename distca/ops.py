"""Operators of torch.ops.distca that Python calls, with types.

csrc/ops/schemas.cpp has the schemas, with shapes and units. `layout` and `rows` are one rank's
share of a plan. `group_name` names the process group of a session's rows; it is "" for a plan of
one rank.
"""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from distca import _library  # noqa: F401  the operators must be there first

NOT_BACKWARD = -1  # see backward_pass
CORE_ATTENTION = torch.ops.distca.core_attention.default  # as activation checkpointing names it

P, R = ParamSpec("P"), TypeVar("R")
Two, Three = tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]


def _operator(declaration: Callable[P, R]) -> Callable[P, R]:
    """Return the operator that a function declares by its name, types and defaults."""
    return getattr(torch.ops.distca, declaration.__name__)


# fmt: off
@_operator
def core_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, rows: Tensor, softmax_scale: float,
    group_name: str, num_kept_queries: int = 0, num_kept_keys: int = 0, caller: int = -1,
    softcap: float = 0.0,
) -> Three:
    """Compute attention under a layout; returns out, lse and the kept inputs of other ranks."""


@_operator
def core_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Tensor,
    rows: Tensor, softmax_scale: float, group_name: str, kept: Tensor | None = None,
    caller: int = -1, grad_lse: Tensor | None = None, softcap: float = 0.0,
) -> Three:
    """Compute the gradients of q, k and v under a layout, which may be another one than that of the
    forward pass if nothing is kept."""


@_operator
def exchange(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, rows: Tensor, group_name: str,
) -> None:
    """Send the rows of a layout to their servers, to measure links. Collective."""


@_operator
def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Tensor, rows: Tensor, softmax_scale: float, tasks: str,
) -> Two:
    """Compute one task list of a layout; returns out and lse."""


@_operator
def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Tensor,
    rows: Tensor, softmax_scale: float, tasks: str,
) -> Three:
    """Compute the gradients of q, k and v for one task list of a layout."""


@_operator
def gather(words: Tensor, group_name: str, step: int) -> list[Tensor]:
    """Return every rank's `words`, int64 of any length, by rank. Collective, on the planning
    group."""


@_operator
def agreed_calls(group_name: str, step: int, window_left: int, window_right: int) -> Tensor:
    """Return the calls that ranks last agreed on under a plan for this window. They are to be
    announced with plan `step`."""


@_operator
def agree_on_plan(layout: Tensor, calls: Tensor, group_name: str) -> None:
    """Compare a plan with the other ranks', and announce the calls to come. Collective, on the
    planning group."""


@_operator
def plan(
    pieces: Tensor, num_ranks: int, window_left: int, window_right: int, cost: Tensor,
    row_bytes: Sequence[int], servers: Tensor, links: Tensor, tolerance: float, rounds: int = 1,
    kept_cap_bytes: float = 0, held_bytes: Sequence[int] | None = None,
    kept_bytes: Sequence[int] | None = None, kept_gain: float = 0,
) -> Two:
    """Return the plan for the pieces of all ranks, and loads by rank."""


@_operator
def plan_of_tasks(
    pieces: Tensor, tasks: Tensor, num_ranks: int, window_left: int, window_right: int,
) -> Tensor:
    """Return the plan that consists of these tasks."""


@_operator
def layout(
    pieces: Tensor, plan: Tensor, rank: int, step: int, device_type: str,
    deterministic: bool = False, held_bytes: Sequence[int] = (), round_bytes: float | None = None,
    by_peer_memory: bool = False, batch: int | None = None, ranks_per_node: int = 0,
    num_parts: int = 1, early_part: float = 0.5,
) -> Two:
    """Return a rank's layout and the packed form of its rows."""


@_operator
def head_parts(heads_q: int, heads_kv: int, most: int) -> list[int]:
    """Return how many parts of query heads, and how many parts of key heads, a call has if
    num_parts of its layout is `most`."""


@_operator
def unpack_rows(layout: Tensor, packed_rows: Tensor) -> Tensor:
    """Return the rows of a layout from their packed form, on its device."""


@_operator
def kept_rows(layout: Tensor) -> list[int]:
    """Return how many visiting query and key rows this rank keeps for the backward pass."""


@_operator
def take_kept_peak() -> list[int]:
    """Return the peak bytes of kept inputs, and the peak number of core_attention calls whose
    backward pass is still to come, in this process since the previous take_kept_peak()."""


@_operator
def open_session(
    data_group: str, control_group: str, planning_group: str, configuration: str, timeout_s: float,
    transport: str = "process_group", peer_device: int | None = None, peer_memory_bytes: int = 0,
    node_group: str = "", ranks_per_node: int = 0, servers_group: str | None = None,
) -> None:
    """Open a session under the name of its data group. Collective."""


@_operator
def transports() -> list[str]:
    """Return the names that open_session accepts as `transport`."""


@_operator
def has_peer_transport() -> bool:
    """Return whether this build can write to other ranks' memory."""


@_operator
def close_session(group_name: str) -> None:
    """Close a session."""


@_operator
def leave_session(group_name: str, how: str) -> None:
    """End this rank's part in a session, and tell the others `how`: "has ended its process"."""


@_operator
def tell_servers(group_name: str, kind: int, step: int, details: Sequence[int]) -> None:
    """Tell servers what all ranks do next on the planning group. They do not take part yet."""


@_operator
def next_notice(group_name: str) -> list[int]:
    """Wait, on a server, for what all ranks do next: kind, step, caller, number of the forward call
    with kept inputs, ten details, and eight numbers of calls whose inputs can be forgotten."""


@_operator
def serve_call(
    notice: Sequence[int], layout: Tensor, rows: Tensor, kept: Tensor | None, group_name: str,
) -> Tensor:
    """Compute this server's tasks of a call. `kept` are the inputs that it kept in the forward
    pass; returns those that it keeps now."""


@_operator
def agree_on_refusal(group_name: str, step: int) -> None:
    """Take part, on a server, in the agreement on a call whose arguments rank 0 refuses."""


@_operator
def may_be_busy(group_name: str) -> bool:
    """Return whether abandoned exchanges of a session may still be under way."""


@_operator
def keep_groups(names: Sequence[str]) -> None:
    """Keep process groups until the process ends."""


@_operator
def any_has_batch(group_name: str, has_batch: bool) -> bool:
    """Return whether any rank has another batch. Collective, on the planning group."""


@_operator
def attention_shape(group_name: str) -> list[int]:
    """Return the fields of an AttentionShape, that of the last attention; 0 before any."""


@_operator
def watch_step(group_name: str, step: int) -> None:
    """Time the attention of a step."""


@_operator
def attention_times(group_name: str) -> list[int]:
    """Return microseconds of the timed attention and of its waits; [] while they are not known."""


@_operator
def await_results(group_name: str) -> None:
    """Let the current stream wait until the results of a session's latest forward call that moved
    rows are home."""


@_operator
def take_exchange_times(group_name: str) -> Tensor:
    """Return int64 [num_exchanges, 4] of timed exchanges by process group that have ended on the
    device since the last call: whether in the backward pass, whether combine, bytes, ns."""


@_operator
def take_task_times(group_name: str) -> Tensor:
    """Return the times of tasks that have ended on the device since the last take_task_times: int64
    [num_times, 4] of (step, layer, whether in the backward pass, ns). No tasks are timed before the
    first take_task_times."""


@_operator
def take_gap_times(group_name: str) -> Tensor:
    """Return the times of the work between calls of attention, as take_task_times does for tasks.
    Step, layer and pass are those of the call that follows. The work between the two passes is left
    out."""


@_operator
def layer_seconds(loads: Tensor, servers: Tensor, links: Tensor) -> float:
    """Return the predicted seconds of a layer, forward and backward, under a plan with these loads.
    They include what moving rows costs even if other work hides the transfers. `plan` describes
    `servers` and `links`."""


@_operator
def await_dispatch(group_name: str) -> None:
    """Let the current stream wait until rows of a session's latest call of attention are on their
    way. Calls of attention before the first await_dispatch do not count."""


@_operator
def backward_pass() -> int:
    """Return a number that identifies the backward pass that runs on this thread, or on the thread
    whose state this thread has taken over. NOT_BACKWARD outside of a backward pass."""


@_operator
def raise_sequence_number(number: int) -> int:
    """Raise the number of this thread's next autograd node to at least `number`, and return it."""


@_operator
def spans(group_name: str) -> tuple[list[str], Tensor]:
    """Return phases of the timed step, and int64 [num_spans, 3]: layer, begin and end in ns."""


@_operator
def check_ranks(group_name: str, doing: str) -> None:
    """Raise DistBackendError if a rank of the group has failed, has left or is gone. `doing` says
    what this rank waits for elsewhere."""


@_operator
def announce_failure(group_name: str, message: str) -> None:
    """Tell the other ranks of a session what went wrong on this one."""


@_operator
def name_caller(caller: int, name: str) -> None:
    """Name the module of a number, for errors. Numbers are equal on all ranks."""


@_operator
def await_plan(group_name: str, is_awaited: bool) -> None:
    """Say whether training waits for the plan that the planner thread gathers."""


@_operator
def version() -> int:
    """Return the version of the library: 10000 major + 100 minor + patch."""
