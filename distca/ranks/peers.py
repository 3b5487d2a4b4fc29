"""How rows travel: whether ranks of a group, or of a node, can access each other's GPU memory."""

import json
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distca import ops
from distca.options import Options, check, digest_of
from distca.ranks.links import ranks_of_a_node

_log = logging.getLogger("distca")

HOPPER = (9, 0)
MAX_TEXT_BYTES = 2048
MAX_REFUSAL, MAX_TRANSPORT = 200, 40  # characters, each of up to 6 bytes in JSON


TO_PEERS = ("auto", "peer", "hybrid")  # values of Options.transport that may use peer memory


@dataclass(frozen=True)
class Way:
    """How rows travel. Equal on all ranks, except for `device`."""

    device: int | None = None
    """Index of this rank's device if rows travel through peer memory. None: by process group."""
    ranks_per_node: int = 0
    """Number of ranks on a node if rows between nodes travel separately, by process group. 0: they
    do not."""

    @property
    def is_peer(self) -> bool:
        """Whether all rows travel through peer memory."""
        return self.device is not None and self.ranks_per_node == 0


def check_transport(transport: str) -> None:
    """Raise ValueError unless Options.transport is a known transport."""
    names = [*TO_PEERS, *ops.transports()]
    check("transport", transport, transport in names, f"one of {', '.join(names)}")


def choose_way(
    options: Options,
    backend: str,
    control: ProcessGroup,
    servers: Sequence[int] = (),
    refusal: str = "",
) -> Way:
    """Return how rows of the group travel. Collective over `control`, a group for CPU tensors.
    `refusal` is why this rank cannot open the group, empty if it can.

    Raises ValueError on every rank, with the reason, if a rank cannot open the group, or `servers`
    differ between ranks. Also, if the transport is "peer" and a rank cannot access the memory of
    all others, or if it is "hybrid", rows are on GPUs, and a rank cannot access the memory of its
    node.
    """
    rank = control.rank()
    own = {"refusal": refusal[:MAX_REFUSAL], "servers": digest_of(repr(tuple(servers)).encode())}
    members = _gather({**_describe_self(options, backend), **own}, control)
    _check_members(members, rank, refusal)
    # All ranks decide alike; opening the session compares the options.
    asked = [member["transport"] for member in members]
    transport = "peer" if "peer" in asked else asked[0]
    size = members[0]["ranks_per_node"] or ranks_of_a_node([member["host"] for member in members])
    first = rank // size * size
    node = range(len(members))[first : first + size]
    problems = [_problem(members, rank, ranks) for ranks in (range(len(members)), node)]
    everywhere, inside = (
        next((text for text in texts if text), "")
        for texts in zip(*_gather(problems, control), strict=True)
    )
    has_nodes = 1 < size < len(members)
    works_inside_only = bool(everywhere) and not inside
    is_hybrid = has_nodes and (transport == "hybrid" or (transport == "auto" and works_inside_only))
    problem = inside if is_hybrid else everywhere
    is_refused = transport == "peer" or (is_hybrid and "nccl" in backend)
    if problem and is_refused:
        raise ValueError(
            f'transport is "{transport}", but {problem}; '
            'pass transport="auto" for the fastest way that works'
        )
    way = Way(None if problem else torch.cuda.current_device(), size if is_hybrid else 0)
    if rank == 0:
        _log.info("distca: rows of core attention travel %s", _describe(way, backend, problem))
    return way


def _check_members(members: list[dict], rank: int, refusal: str) -> None:
    if refusal:
        raise ValueError(refusal)
    for other, member in enumerate(members):
        if member["refusal"]:
            raise ValueError(f"rank {other} cannot open the group: {member['refusal']}")
    others = [i for i, each in enumerate(members) if each["servers"] != members[rank]["servers"]]
    if others:
        raise ValueError(
            f"servers differ between ranks: {others} named others than rank {rank}; expected the "
            "same on all ranks"
        )


def _describe(way: Way, backend: str, problem: str) -> str:
    by_group = f"by process group ({backend})"
    inside = "through peer memory" if way.device is not None else f"{by_group}: {problem}"
    if way.ranks_per_node == 0:
        return inside
    return f"{by_group} between nodes of {way.ranks_per_node} ranks, and inside them {inside}"


def _describe_self(options: Options, backend: str) -> dict[str, str | int | None]:
    """Return what other ranks have to know about this one: `device` is the uuid of its GPU, empty
    if there is none, and `problem` is why it cannot use peer memory, empty if it can."""
    transport, problem, device = options.transport[:MAX_TRANSPORT], "", ""
    if transport not in TO_PEERS or (transport == "auto" and "nccl" not in backend):
        problem = f"transport is {transport} with {backend}"
    elif not ops.has_peer_transport():
        problem = "distca was built without its Hopper kernels"
    elif not torch.cuda.is_available():
        problem = "there is no GPU"
    else:
        device = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        if torch.cuda.get_device_capability() != HOPPER:
            problem = "its GPU is not a Hopper one (compute capability 9.0)"
    return {
        "transport": transport,
        "ranks_per_node": options.ranks_per_node,
        "host": socket.gethostname(),
        "device": device,
        "problem": problem,
    }


def _problem(members: list[dict], rank: int, others: range) -> str:
    """Return why this rank cannot access the memory of `others`; empty if it can."""
    for other in others:
        member = members[other]
        if member["problem"]:
            return f"on rank {other} {member['problem']}"
        if member["host"] != members[rank]["host"]:
            return f"ranks {rank} and {other} are on different nodes"
    own = torch.cuda.current_device()
    visible = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    for other in others:
        index = visible.get(members[other]["device"])
        if index is None:
            return f"rank {rank} does not see the GPU of rank {other} (CUDA_VISIBLE_DEVICES)"
        shares = other != rank and index == own
        if shares and members[rank]["transport"] == "auto":  # else torch decides
            return f"ranks {rank} and {other} share a GPU"
        if index != own and not torch.cuda.can_device_access_peer(own, index):
            return f"the GPUs of ranks {rank} and {other} do not reach each other's memory"
    return ""


def _gather(value: object, control: ProcessGroup) -> list:
    """Return the values of all ranks, by rank. They travel as JSON."""
    text = json.dumps(value).encode()
    own = torch.zeros(MAX_TEXT_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    gathered = own.new_empty(control.size(), MAX_TEXT_BYTES)
    dist.all_gather_into_tensor(gathered, own[None], group=control)
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in gathered]
