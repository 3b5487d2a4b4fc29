"""Whether the ranks of a group reach each other's GPU memory."""

import json
import logging
import socket

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distca import ops
from distca.options import check

_log = logging.getLogger("distca")

HOPPER = (9, 0)
MAX_TEXT_BYTES = 1024


def check_transport(transport: str) -> None:
    """Raise ValueError unless Options.transport is a known transport."""
    names = ["auto", "peer", *ops.transports()]
    check("transport", transport, transport in names, f"one of {', '.join(names)}")


def choose_device(transport: str, backend: str, control: ProcessGroup) -> int | None:
    """Index of this rank's device if rows go to other ranks' memory, None if by process group.

    Collective over `control`, a group for CPU tensors. `transport` is that of Options. Raises
    ValueError on every rank, with the reason, where it is "peer" and some rank cannot.
    """
    members = _gather(_describe_self(transport, backend), control)
    problems = _gather(_problem(members, dist.get_rank(control)), control)
    problem = next((text for text in problems if text), "")
    if problem and any(member["transport"] == "peer" for member in members):
        raise ValueError(
            f'transport is "peer", but {problem}; pass transport="auto" to use the process group'
        )
    if dist.get_rank(control) == 0:
        way = f"by process group ({backend}): {problem}" if problem else "through peer memory"
        _log.info("distca: rows of core attention travel %s", way)
    return None if problem else torch.cuda.current_device()


def _describe_self(transport: str, backend: str) -> dict[str, str]:
    """What the other ranks have to know of this one: `device` is the uuid of its GPU, empty where
    there is none, and `problem` why it cannot take part, empty where it can."""
    problem, device = "", ""
    if transport not in ("auto", "peer") or (transport == "auto" and "nccl" not in backend):
        problem = f"transport is {transport} with {backend}"
    elif not ops.has_peer_transport():
        problem = "distca was built without its Hopper kernels"
    elif not torch.cuda.is_available():
        problem = "there is no GPU"
    else:
        device = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if torch.cuda.get_device_capability() != HOPPER:
            problem = "its GPU is not a Hopper one (compute capability 9.0)"
    host = socket.gethostname()
    return {"transport": transport, "host": host, "device": device, "problem": problem}


def _problem(members: list[dict[str, str]], rank: int) -> str:
    """Why not all ranks reach each other, as this rank sees it; empty if they do."""
    for other, member in enumerate(members):
        if member["problem"]:
            return f"on rank {other} {member['problem']}"
        if member["host"] != members[rank]["host"]:
            return f"ranks {rank} and {other} are on different nodes"
    own = torch.cuda.current_device()
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    for other, member in enumerate(members):
        index = visible.get(member["device"])
        if index is None:
            return f"rank {rank} does not see the GPU of rank {other} (CUDA_VISIBLE_DEVICES)"
        shares = other != rank and index == own
        if shares and members[rank]["transport"] != "peer":  # then torch decides
            return f"ranks {rank} and {other} share a GPU"
        if index != own and not torch.cuda.can_device_access_peer(own, index):
            return f"the GPUs of ranks {rank} and {other} do not reach each other's memory"
    return ""


def _gather(value: object, control: ProcessGroup) -> list:
    """What each rank passed, as JSON."""
    text = json.dumps(value).encode()
    own = torch.zeros(MAX_TEXT_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = own.new_empty(dist.get_world_size(control), MAX_TEXT_BYTES)
    dist.all_gather_into_tensor(gathered, own[None], group=control)
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in gathered]
