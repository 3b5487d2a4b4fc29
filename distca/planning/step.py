"""Plan one step: its documents and, once a group uses halves, their halves too."""

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca.planning.cost import AttentionShape, check_device
from distca.planning.documents import Documents, check_window
from distca.planning.halves import plan_halves_ahead
from distca.planning.plan import CAUSAL, Plan, submit
from distca.ranks.session import opened


def plan(
    documents: Documents,
    *,
    window_size: tuple[int, int] = CAUSAL,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    shape: AttentionShape | None = None,
    ahead: bool = False,
) -> Plan:
    """Plan one step's attention over `group`, and attach the plan to `documents`.

    Collective: every rank calls it once per step, in the same order. `group` defaults to the group
    given to distca.init, else all ranks. `window_size` is (left, right), as in torch's varlen
    attention: (-1, 0) causal, (W, 0) sliding window, (-1, -1) full. `shape` is the attention that
    seconds and bytes are predicted for; it defaults to the last attention that ran, and before that
    to an 8B Llama. With `ahead` the call returns at once, a background thread plans, and the first
    use of the plan waits for it.

    Raises ValueError on every rank, before any row is sent, if ranks disagree on version, options,
    step or window, or if documents that cross ranks do not fit together.
    """
    window_size = check_window(window_size)
    session = opened(group)
    device = torch.device(device if device is not None else session.device_type)
    check_device(device, "the plan")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    step_plan = submit(session, documents, window_size, device, shape)
    # All ranks must do this for the same windows, wherever documents are cut on this rank.
    if session.cut is not None and window_size[1] == 0 and not documents.crosses_ranks:
        plan_halves_ahead(session, documents, window_size, device)
    return step_plan if ahead else step_plan.wait()
