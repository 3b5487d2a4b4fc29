"""Open and end the process groups of a session, and measure the links between its ranks."""

import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distca import _torch_private, ops
from distca.ranks import speed
from distca.ranks.links import measure
from distca.ranks.own_groups import OwnGroups, own_groups_of
from distca.ranks.peers import check_transport, choose_way
from distca.ranks.world import check_servers

_log = logging.getLogger("distca")


def measures_links(session) -> bool:
    """Return whether links are measured when the group opens, for the planner to use. On the CPU,
    measurements would vary with the machine's load, and so would plans. In deterministic mode,
    plans must not vary at all."""
    options = session.options
    on_device = session.way.device is not None or session.device_type == "cuda"
    return on_device and options.enabled and not options.deterministic


def open_groups(session) -> None:
    """Open the process groups of a session's ranks, and its transport. Collective. Raises
    ValueError on every rank for a transport or servers that they cannot use."""
    options, timeout = session.options, timedelta(seconds=session.options.timeout_s)
    ranks = list(range(session.num_ranks))

    def new_group(backend: str, timeout: timedelta = timeout, options=None) -> ProcessGroup:
        if session.own_groups is not None:
            return session.own_groups.open(ranks, backend, timeout, options)
        return dist.new_group(None, timeout, backend, pg_options=options)

    backend = session.backend  # "cpu:gloo,cuda:gloo"
    # When torch destroys a group of several devices, it warns unless one of them uses NCCL.
    if all(each.endswith(":gloo") for each in backend.split(",")):
        backend = "gloo"
    data_options, data_timeout = None, timeout
    if "nccl" in backend:
        # NCCL's timeout ends the process without naming rank and layer, so ours expires first.
        data_timeout = 2 * timeout
        # If both are ready, its kernels run before those of attention.
        data_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        _torch_private.set_timeout(data_options, data_timeout)
    session.data = new_group(backend, data_timeout, data_options)
    session.planning = session.planning or new_group("gloo")
    session.control = new_group("gloo")
    session.way = choose_way(options, backend, session.control, session.servers, _refusal(session))
    if session.way.ranks_per_node > 0:
        session.node = _new_node_group(session, timeout)
    if session.rank in (0, *session.servers) and session.servers:
        session.notices = _new_notices(session, timeout)
    _open_transport(session)


def _refusal(session) -> str:
    """Return why this rank cannot open its session, empty if it can."""
    try:
        check_transport(session.options.transport)
        check_servers(session.servers, session.num_ranks, session.options)
    except ValueError as error:
        return str(error)
    return ""


def _new_node_group(session, timeout: timedelta) -> ProcessGroup:
    size = session.way.ranks_per_node
    first = session.rank // size * size
    node = range(first, min(first + size, session.num_ranks))
    own_groups = session.own_groups or own_groups_of(session.control)
    return own_groups.open(node, "gloo", timeout)


def _new_notices(session, timeout: timedelta) -> ProcessGroup:
    # The other ranks open none, so it does not count among their groups.
    own_groups = OwnGroups(
        f"{session.group_name}/notices", session.control.get_group_store(), session.rank
    )
    group = own_groups.open((0, *sorted(session.servers)), "gloo", timeout)
    _torch_private.wait_without_limit(group)  # nobody may need servers for long
    return group


def _open_transport(session) -> None:
    options = session.options
    ops.open_session(
        *(own.group_name for own in (session.data, session.control, session.planning)),
        f"version {ops.version()} {options}"
        + f" servers {session.servers}" * bool(session.servers),
        options.timeout_s,
        options.transport if options.transport in ops.transports() else "process_group",
        session.way.device,
        int(1e9 * options.peer_memory_gb),
        "" if session.node is None else session.node.group_name,
        session.way.ranks_per_node,
        None if not session.servers else getattr(session.notices, "group_name", ""),
    )


def open_transport_again(session) -> None:
    """Open a session's transport again, so that it forgets the calls and the peer memory of a
    measurement."""
    ops.close_session(session.group_name)
    _open_transport(session)


def measure_links(session) -> None:
    """Measure the links of an open session, and on CUDA its speed of attention. Collective."""
    device_type = "cuda" if session.way.device is not None else session.device_type
    device = torch.device(device_type)
    session.links = measure(session, device)
    if session.options.attention_tflops is None and device_type == "cuda":
        session.attention_seconds = speed.measure(session, device)
    open_transport_again(session)
    for level, link in vars(session.links).items():
        if link is not None and session.rank == 0:
            _log.info("distca: links %s nodes: %s", level, link)
    if session.attention_seconds is not None and session.rank == 0:
        ms = 1e3 * session.attention_seconds
        size = (speed.NUM_ROWS, speed.HEADS_Q, speed.HEAD_DIM)
        _log.info("distca: attention of %d tokens, %d query heads of %d: %.2g ms", *size, ms)


def groups_of(session) -> list[ProcessGroup]:
    """Return the groups of a session and of its halves, those of nodes and notices left out."""
    return [own for each in session.parts for own in (each.data, each.control)] + [session.planning]


def destroy_groups(session) -> None:
    """End the process groups of a session."""
    if session.notices is not None:
        _torch_private.end_group(session.notices)
    for each in session.parts:
        if each.node is not None:
            _torch_private.end_group(each.node)
    for own in groups_of(session):
        if session.own_groups is not None:
            _torch_private.end_group(own)
        else:
            dist.destroy_process_group(own)
