"""Latency and bandwidth of a process group's all-to-all, inside a node and between nodes."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.calibrate.timing import ProgressBar, median_seconds
from distca.planning.cost import Link, Links
from distca.planning.exchange import node

KIB = 1024
SMALLEST = 64 * KIB  # message of a rank
REPEATS = 10
BUDGET_S = 1.0  # of one size
LEVELS = ("inside", "between")


def nodes_of_ranks(device: torch.device) -> list[int]:
    """By rank, a number that ranks of one host name share. Collective."""
    own = torch.tensor([node()], device=device)
    nodes = own.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(nodes, own)
    return torch.unique(nodes.cpu(), return_inverse=True)[1].tolist()


def measure(
    device: torch.device, message_bytes: Sequence[int], bar: ProgressBar, nodes: Sequence[int]
) -> Links:
    """Collective over all ranks, which get equal results. `nodes` says which ranks share one. A
    step of the bar for each size and level."""
    own, links = nodes[dist.get_rank()], {}
    for level in LEVELS:
        is_peer = [(node == own) == (level == "inside") for node in nodes]
        is_peer[dist.get_rank()] = False
        most_peers = int(_largest(float(sum(is_peer)), device))
        sizes, seconds = [], []
        for num_bytes in message_bytes:
            bar.advance(f"all-to-all {level} nodes, {num_bytes // KIB} KiB")
            if most_peers > 0:
                per_peer = num_bytes // most_peers
                sizes.append(per_peer * most_peers)
                seconds.append(_exchange_seconds(is_peer, per_peer, device))
        links[level] = fit(sizes, seconds) if sizes else None
    return Links(**links)


def _exchange_seconds(is_peer: list[bool], per_peer: int, device: torch.device) -> float:
    """Of the slowest rank."""
    splits = [per_peer * peer for peer in is_peer]
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, splits, splits)

    # All ranks make equally many calls, so the number must not follow from a rank's own clock.
    first_s = _largest(median_seconds(exchange, device, repeats=1, budget_s=float("inf")), device)
    repeats = max(1, min(REPEATS, int(BUDGET_S / first_s)))
    return _largest(median_seconds(exchange, device, repeats, budget_s=float("inf")), device)


def _largest(value: float, device: torch.device) -> float:
    """Of all ranks' values; they wait for each other."""
    values = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.item()


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Least squares of latency + bytes / bandwidth, errors relative to the seconds, so that small
    messages count as much as large ones. A negative latency becomes 0."""
    num_bytes, times = np.array(sizes, dtype=np.float64), np.array(seconds)
    terms = np.stack([np.ones_like(times), num_bytes], axis=1) / times[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)
    if latency < 0 or len(times) == 1:
        latency, per_byte = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
    if per_byte <= 0:  # noise: larger messages took no longer
        latency, per_byte = 0.0, float(times[-1] / num_bytes[-1])
    return Link(float(latency), 1 / float(per_byte))
