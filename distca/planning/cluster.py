"""Who serves attention, how fast, within how much memory, and over which links."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distca import ops
from distca.options import Options
from distca.planning.cost import AttentionShape, measured_links
from distca.ranks.fsdp_traffic import FsdpTraffic
from distca.ranks.links import Link, Links, gather_seconds
from distca.watching.figures import FORWARD_SHARE

MAX_RANKS = 65536
MIN_KEPT_GAIN = 0.01  # of a layer's predicted seconds, if inputs are kept by default
MAX_PARTS = 4  # in which a call's rows travel, each with some of the heads
DEVICES_OF_PARTS = ("cuda",)  # on which rows travel in parts, beside compute
DEVICES_OF_MOVING_PART = ("cuda",)
# Cluster.moving_part if all rows travel through peer memory, and in all other cases. Measured on
# four H200 with 65,536 tokens each: 2 ms and 3 ms of a layer of an 8B Llama.
MOVING_PART_OF_PEER, MOVING_PART = 0.01, 0.015
LEAST_SECONDS_OF_PART = 0.5e-3  # of a part's transfers in a layer; below it, latency dominates
# Part of a layer's bytes that servers receive in the forward pass: one of the five rows that travel
# for a query (q twice, grad_out, out and dq), and one of three for a key (k and v together: twice,
# and their gradients). A slice has about as many bytes of queries as of keys.
FORWARD_DISPATCH = 0.27
DEFAULT_LINKS_GB_PER_S = {"cuda": (200.0, 50.0), "cpu": (2.0, 2.0)}  # inside, between nodes


@dataclass(frozen=True)
class Cluster:
    """The machines that a plan is for; torch.ops.distca.plan checks the fields."""

    num_ranks: int
    speeds: tuple[float, ...] | None = None
    """Relative attention speed of each rank as a server, [num_ranks]. The cost model's seconds are
    those of speed 1; 0 serves nothing. None: all 1."""
    memory_cap_bytes: int | None = None
    """Bytes of visiting rows that a server may hold for one layer: queries with their results, and
    each key once (see held_row_bytes). None: no limit."""
    rounds: int = 1
    """Number of rounds of a layer, about. Each holds no more than memory_cap_bytes."""
    kept_cap_bytes: int = 0
    """Bytes of visiting rows' q, k and v that a server may keep for one layer, from the forward to
    the backward pass."""
    kept_gain: float = 0.0
    """The smallest fraction of a layer's predicted seconds for which servers keep inputs."""
    ranks_per_node: int | None = None
    """Consecutive ranks share a node; the last may have fewer. None: one node."""
    link_bytes_per_second: float = 200e9
    """Bandwidth of each rank to the ranks of its node, in one direction."""
    node_link_bytes_per_second: float | None = None
    """Bandwidth of each rank to the ranks of other nodes, in one direction; both links work at
    once. None: as link_bytes_per_second."""

    lags: tuple[float, ...] | None = None
    """Seconds by which a layer's work outside of attention, forward and backward, takes longer than
    on the fastest rank, [num_ranks]. None: all 0."""
    hidden_part: float = 0.0
    """Seconds of a layer's transfers that other work hides, over the mean seconds of a rank's
    attention. Under ping-pong it stands for the attention of the other half: see
    hidden_by_halves."""
    hidden_seconds: float = 0.0
    """More seconds of a layer's transfers that other work hides, in both passes together. Under
    ping-pong they stand for the linear work of the other half."""
    transfer_waits: tuple[float, float] = (0.0, 0.0)
    """Seconds that a rank's transfers, if it has any, wait for other traffic: in the forward pass
    and in the backward pass."""
    link_room: tuple[float, float] = (math.inf, math.inf)
    """Seconds of a layer's linear work minus those of other traffic on the links, such as FSDP's,
    in the forward pass and in the backward pass. If the transfers of a rank take longer than its
    attention plus this time, they delay the other traffic."""
    moving_part: float = 0.0
    """Part of a layer's seconds by which the layer takes longer if any rows move. A layer's seconds
    are other_seconds plus those of a mean rank's attention."""
    other_seconds: float = 0.0
    """Seconds of a layer's work outside of attention, forward and backward. 0 if unknown."""
    num_parts: int = 1
    """Number of parts in which a call's rows travel, each with some of the heads. Visiting tasks of
    one part hide transfers of others."""
    exposed_part: float = 1.0
    """Part of a rank's transfers that travels while no visiting task runs: see parts_of."""

    def servers(self) -> Tensor:
        """Return `servers` of torch.ops.distca.plan, float64 [num_ranks, 3]: speed, memory cap in
        bytes (inf: none) and lag; empty, [0, 3], where all servers are alike and without a cap."""
        if self.speeds is None and self.memory_cap_bytes is None and self.lags is None:
            return torch.empty(0, 3, dtype=torch.float64)
        speeds = (1.0,) * self.num_ranks if self.speeds is None else self.speeds
        lags = (0.0,) * len(speeds) if self.lags is None else self.lags
        cap_bytes = math.inf if self.memory_cap_bytes is None else self.memory_cap_bytes
        servers = [[speed, cap_bytes, lag] for speed, lag in zip(speeds, lags, strict=True)]
        return torch.tensor(servers, dtype=torch.float64)

    def links(self) -> Tensor:
        """Return `links` of torch.ops.distca.plan, float64 [12]: ranks per node, bytes per second
        of a rank's link within a node and between nodes, hidden part, exposed part, waits, hidden
        seconds, room, moving part, other seconds."""
        inside, between = self.link_bytes_per_second, self.node_link_bytes_per_second
        between = inside if between is None else between
        node = self.num_ranks if self.ranks_per_node is None else self.ranks_per_node
        hidden = self.hidden_part, self.exposed_part
        waits = *self.transfer_waits, self.hidden_seconds
        moving = self.moving_part, self.other_seconds
        words = [node, inside, between, *hidden, *waits, *self.link_room, *moving]
        return torch.tensor(words, dtype=torch.float64)

    @property
    def slowest_bytes_per_second(self) -> float:
        """Bandwidth of the slowest link between two ranks."""
        inside, between = self.link_bytes_per_second, self.node_link_bytes_per_second
        is_one_node = self.ranks_per_node is None or self.ranks_per_node >= self.num_ranks
        return inside if is_one_node or between is None else min(inside, between)


def cluster_of(
    options: Options,
    num_ranks: int,
    device_type: str,
    ranks_per_node: int | None = None,
    opened_links: Links | None = None,
    kept_limit_bytes: int | None = None,
) -> Cluster:
    """Return the cluster of `num_ranks` ranks under these options. `ranks_per_node`, `opened_links`
    and `kept_limit_bytes` are measured, and used where the options do not set a value. A single
    rank, and ranks that do not balance, compute what they hold."""
    measured, opened_links = measured_links(options), opened_links or Links()
    default_inside, default_between = DEFAULT_LINKS_GB_PER_S[device_type]

    def bytes_per_second(gb_per_s: float | None, link: Link | None, default: float) -> float:
        if gb_per_s is None and link is not None:
            return link.bytes_per_second
        return 1e9 * (default if gb_per_s is None else gb_per_s)

    # If each node has one rank, only the link between nodes is measured. Use it for both.
    inside = measured.inside or opened_links.inside or measured.between or opened_links.between
    between = measured.between or opened_links.between
    links = {
        "ranks_per_node": options.ranks_per_node or ranks_per_node,
        "link_bytes_per_second": bytes_per_second(options.link_gb_per_s, inside, default_inside),
        "node_link_bytes_per_second": bytes_per_second(
            options.node_link_gb_per_s, between, default_between
        ),
    }
    if num_ranks == 1 or not options.enabled:
        return Cluster(num_ranks, **links)
    return Cluster(
        num_ranks,
        options.speeds(num_ranks),
        memory_cap_bytes(options),
        options.rounds,
        *kept_cap(options.keep_inputs_gb, kept_limit_bytes or 0),
        **links,
    )


def kept_cap(keep_inputs_gb: float | None, limit_bytes: int) -> tuple[int, float]:
    """Return Cluster.kept_cap_bytes and kept_gain for Options.keep_inputs_gb. If that is None,
    memory allows `limit_bytes`."""
    if keep_inputs_gb is None:
        return limit_bytes, MIN_KEPT_GAIN
    return int(1e9 * keep_inputs_gb), 0.0


def measures_memory(options: Options) -> bool:
    """Return whether free memory limits kept inputs. It does not in deterministic mode, in which
    equal documents get equal plans."""
    return options.keep_inputs_gb is None and options.enabled and not options.deterministic


def why_kept(
    options: Options, device_type: str, limit_bytes: int | None, are_any_kept: bool
) -> str:
    """Return PlanReport.keeping of a plan for several ranks."""
    if options.keep_inputs_gb:
        return f"limit {options.keep_inputs_gb:g} GB a rank"
    if not measures_memory(options):
        return ""
    if limit_bytes is None:
        return "memory is not known yet" if device_type == "cuda" else ""
    if limit_bytes == 0:
        return "memory is full"
    if not are_any_kept:
        return f"saves less than {MIN_KEPT_GAIN:.0%}"
    return f"limit {1e-9 * limit_bytes:.3g} GB a rank, by free memory"


def memory_cap_bytes(options: Options) -> int | None:
    return None if options.memory_cap_gb is None else max(1, int(1e9 * options.memory_cap_gb))


def key_parts_of(shape: AttentionShape, num_parts: int) -> int:
    """Return the number of parts in which key heads travel if query heads travel in num_parts."""
    _, num_key_parts = ops.head_parts(shape.heads_q, shape.heads_kv, num_parts)
    return num_key_parts


def exposed_part_of(shape: AttentionShape, num_parts: int) -> float:
    """Return the part of a layer's transfers during which no visiting task can run: the rows of the
    first part, and the results of the last. Assumes that tasks have as many keys as queries."""
    query, key = shape.row_bytes()
    return (query / num_parts + key / key_parts_of(shape, num_parts)) / (query + key)


def parts_of(shape: AttentionShape) -> dict[str, float]:
    """Return num_parts (4, 2 or 1) and exposed_part of a Cluster whose rows travel in parts."""
    num_parts, _ = ops.head_parts(shape.heads_q, shape.heads_kv, MAX_PARTS)
    return {"num_parts": num_parts, "exposed_part": exposed_part_of(shape, num_parts)}


def transfer_seconds(cluster: Cluster, loads: Tensor) -> Tensor:
    """Return the seconds of a layer's transfers from and to each rank under a plan with these
    loads, [num_ranks, 2]. Links within a node and between nodes work at once."""
    _, inside, between, *_ = cluster.links().tolist()
    to_nodes = loads[:, 4:6]
    return torch.maximum((loads[:, 2:4] - to_nodes) / inside, to_nodes / between)


def parts_worth_taking(cluster: Cluster, loads: Tensor) -> int:
    """Return the number of parts for a plan with these loads. It is less than cluster.num_parts if
    transfers are short."""
    seconds = transfer_seconds(cluster, loads).max().item()
    num_parts = cluster.num_parts
    while num_parts > 1 and seconds < num_parts * LEAST_SECONDS_OF_PART:
        num_parts //= 2
    return num_parts


def early_parts(cluster: Cluster, loads: Tensor, num_parts: int) -> Tensor:
    """Return the part of each rank's home tasks that runs while rows of visiting tasks arrive,
    [num_ranks], under a plan with these loads.

    If rows travel in n parts and arrive within D seconds, part i (from 0) arrives after
    (i + 1) D / n. If visiting tasks take V seconds and begin after E, they reach part i after
    E + i V / n. So no task waits if E is at least D / n and D - (n - 1) V / n. Times are those of
    the forward pass, in which more rows travel for the same work. Rows may come from the rank that
    sends most, so D is at least the time that this rank takes."""
    bytes_in, visiting = loads[:, 3], loads[:, 7]
    leaving, arrival = transfer_seconds(cluster, loads).unbind(1)
    arrival = torch.where(bytes_in > 0, torch.maximum(arrival, leaving.max()), 0.0)
    # Kept inputs do not travel in the backward pass, and bytes_in leaves them out.
    arrival = arrival * (1 + loads[:, 8] / bytes_in.clamp(min=1))
    arrival = FORWARD_DISPATCH * arrival + cluster.transfer_waits[0] * (bytes_in > 0)
    home = FORWARD_SHARE * (loads[:, 1] - visiting)
    early = torch.maximum(
        arrival / num_parts, arrival - (num_parts - 1) / num_parts * FORWARD_SHARE * visiting
    )
    return torch.where(home > 0, early / home, 1.0).clamp(max=1.0)


def other_work(
    cluster: Cluster, traffic: FsdpTraffic, tokens: float, flops_per_second: float
) -> dict[str, float | tuple[float, float]]:
    """Return Cluster.other_seconds and link_room for a layer with `tokens` on each rank. The
    backward pass gathers the parameters again, and has twice the linear work. Linear work is
    assumed to be as fast as attention."""
    in_node, inside, between, *_ = cluster.links().tolist()
    links = Link(0.0, inside), Link(0.0, between)
    gather, reduce = (
        float(gather_seconds(num_bytes, traffic.num_ranks, in_node, *links))
        for num_bytes in (traffic.gathered_bytes, traffic.reduced_bytes)
    )
    linear = 2 * traffic.num_params * tokens / flops_per_second
    room = linear - gather, 2 * linear - gather - reduce
    return {"other_seconds": 3 * linear, "link_room": room}


def held_row_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Return the bytes that a server holds for a visiting query row and for a visiting key row in
    one layer's backward pass.

    Query: q, grad_out, dq, lse, delta. Key: k, v, dk, dv. The forward pass holds less.
    """
    q, out, kv = shape.tensor_row_bytes()
    return 2 * q + out + 8 * shape.heads_q, 2 * kv


def input_row_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Return the bytes of inputs that a server keeps: of q for a query row, and of k and v for a
    key row."""
    q, _, kv = shape.tensor_row_bytes()
    return q, kv
