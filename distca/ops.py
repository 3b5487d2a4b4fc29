"""Operators of torch.ops.distca that Python calls, each as a function with types.

csrc/ops/schemas.cpp has the schemas, with shapes and units. `layout` and `rows` are one rank's
share of a plan. `group_name` names the process group of a session's rows; it is "" for a plan of
one rank. torch.compile traces through these functions, because each is one call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distca import _library  # noqa: F401  the operators must be there first

CORE_ATTENTION = torch.ops.distca.core_attention.default  # as activation checkpointing names it


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    rows: Tensor,
    softmax_scale: float,
    group_name: str,
    num_kept_queries: int = 0,
    num_kept_keys: int = 0,
    caller: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention under a layout; returns out, lse and the kept inputs of other ranks."""
    return torch.ops.distca.core_attention(
        q,
        k,
        v,
        layout,
        rows,
        softmax_scale,
        group_name,
        num_kept_queries,
        num_kept_keys,
        caller,
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    rows: Tensor,
    softmax_scale: float,
    tasks: str,
) -> tuple[Tensor, Tensor]:
    """Compute one task list of a layout; returns out and lse."""
    return torch.ops.distca.attend(q, k, v, layout, rows, softmax_scale, tasks)


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Tensor,
    rows: Tensor,
    softmax_scale: float,
    tasks: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v for one task list of a layout."""
    return torch.ops.distca.attend_backward(
        grad_out, q, k, v, out, lse, layout, rows, softmax_scale, tasks
    )


def all_gather(tensor: Tensor, group_name: str, step: int) -> Tensor:
    """Return the tensors of all ranks, [num_ranks, ...], from the planning group. Collective."""
    return torch.ops.distca.all_gather(tensor, group_name, step)


def plan(
    pieces: Tensor,
    num_ranks: int,
    window_left: int,
    window_right: int,
    cost: Tensor,
    row_bytes: Sequence[int],
    servers: Tensor,
    links: Tensor,
    tolerance: float,
    rounds: int = 1,
    kept_cap_bytes: float = 0,
) -> tuple[Tensor, Tensor]:
    """Return the plan for the pieces of all ranks, and loads by rank."""
    return torch.ops.distca.plan(
        pieces,
        num_ranks,
        window_left,
        window_right,
        cost,
        row_bytes,
        servers,
        links,
        tolerance,
        rounds,
        kept_cap_bytes,
    )


def plan_of_tasks(
    pieces: Tensor, tasks: Tensor, num_ranks: int, window_left: int, window_right: int
) -> Tensor:
    """Return the plan that consists of given tasks."""
    return torch.ops.distca.plan_of_tasks(pieces, tasks, num_ranks, window_left, window_right)


def layout(
    pieces: Tensor,
    plan: Tensor,
    rank: int,
    step: int,
    device_type: str,
    deterministic: bool = False,
    held_bytes: Sequence[int] = (),
    round_bytes: float | None = None,
    by_peer_memory: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a rank's layout and the packed form of its rows."""
    return torch.ops.distca.layout(
        pieces,
        plan,
        rank,
        step,
        device_type,
        deterministic,
        held_bytes,
        round_bytes,
        by_peer_memory,
    )


def unpack_rows(layout: Tensor, packed_rows: Tensor) -> Tensor:
    """Return the rows of a layout from their packed form, on its device."""
    return torch.ops.distca.unpack_rows(layout, packed_rows)


def kept_rows(layout: Tensor) -> list[int]:
    """Return how many visiting query and key rows this rank keeps for the backward pass."""
    return torch.ops.distca.kept_rows(layout)


def open_session(
    data_group: str,
    control_group: str,
    planning_group: str,
    configuration: str,
    timeout_s: float,
    peer_device: int | None = None,
    peer_memory_bytes: int = 0,
) -> None:
    """Open a session under the name of its data group. Collective."""
    torch.ops.distca.open_session(
        data_group,
        control_group,
        planning_group,
        configuration,
        timeout_s,
        peer_device,
        peer_memory_bytes,
    )


def has_peer_transport() -> bool:
    """Return whether this build can write to other ranks' memory."""
    return torch.ops.distca.has_peer_transport()


def close_session(group_name: str) -> None:
    """Close a session."""
    torch.ops.distca.close_session(group_name)


def leave_session(group_name: str, how: str) -> None:
    """End this rank's part in a session, and tell the others `how`: "has ended its process"."""
    torch.ops.distca.leave_session(group_name, how)


def may_be_busy(group_name: str) -> bool:
    """Return whether abandoned exchanges of a session may still be under way."""
    return torch.ops.distca.may_be_busy(group_name)


def keep_groups(names: Sequence[str]) -> None:
    """Keep process groups until the process ends."""
    torch.ops.distca.keep_groups(names)


def any_has_batch(group_name: str, has_batch: bool) -> bool:
    """Return whether any rank has another batch. Collective, on the planning group."""
    return torch.ops.distca.any_has_batch(group_name, has_batch)


def attention_shape(group_name: str) -> list[int]:
    """Return heads_q, heads_kv, head_dim and element bytes of the last attention; 0 before any."""
    return torch.ops.distca.attention_shape(group_name)


def watch_step(group_name: str, step: int) -> None:
    """Time the attention of a step."""
    torch.ops.distca.watch_step(group_name, step)


def attention_times(group_name: str) -> list[int]:
    """Return microseconds of the timed attention and of its waits; [] while they are not known."""
    return torch.ops.distca.attention_times(group_name)


def spans(group_name: str) -> tuple[list[str], Tensor]:
    """Return phases of the timed step, and int64 [num_spans, 3]: layer, begin and end in ns."""
    return torch.ops.distca.spans(group_name)


def announce_failure(group_name: str, message: str) -> None:
    """Tell the other ranks of a session what went wrong on this one."""
    torch.ops.distca.announce_failure(group_name, message)


def name_caller(caller: int, name: str) -> None:
    """Name the module of a number, for errors. Numbers are equal on all ranks."""
    torch.ops.distca.name_caller(caller, name)


def await_plan(group_name: str, is_awaited: bool) -> None:
    """Say whether training waits for the plan that the planner thread gathers."""
    torch.ops.distca.await_plan(group_name, is_awaited)


def version() -> int:
    """Return the version of the library: 10000 major + 100 minor + patch."""
    return torch.ops.distca.version()
