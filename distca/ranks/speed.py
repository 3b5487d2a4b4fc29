"""Measures how fast ranks compute attention, for plans that weigh it against transfers."""

import torch

from distca import ops
from distca.ranks.links import BEFORE_STEPS, HEAD_DIM, HEADS_KV, HEADS_Q, largest, seconds_of

NUM_ROWS = 8192  # of a causal document with HEADS_Q query heads and HEADS_KV key heads of HEAD_DIM


def measure(session, device: torch.device) -> float:
    """Return the seconds of a document of NUM_ROWS rows in bfloat16, forward and backward, on the
    slowest rank of an open session, to two significant digits. Collective."""
    q, k, v = (
        torch.randn(NUM_ROWS, heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    )
    pieces, tasks = torch.tensor([[0, 0, 0, NUM_ROWS]]), torch.tensor([[0, 0, NUM_ROWS, 0]])
    plan = ops.plan_of_tasks(pieces, tasks, 1, -1, 0)
    layout, packed_rows = ops.layout(pieces, plan, 0, BEFORE_STEPS, device.type)
    share = layout, ops.unpack_rows(layout, packed_rows.to(device)), HEAD_DIM**-0.5, "home"

    def call() -> None:
        out, lse = ops.attend(q, k, v, *share)
        ops.attend_backward(q, q, k, v, out, lse, *share)

    return float(f"{largest(session, seconds_of(call, device)):.2g}")
