"""Hints about what distca does not do."""

import functools
import logging

import torch.distributed as dist

_log = logging.getLogger("distca")


@functools.cache
def hint(text: str) -> None:
    """Log a text once, on rank 0; without an initialised torch.distributed, once on each node."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if is_initialized else dist.get_node_local_rank(0)) == 0:
        _log.warning("distca: %s", text)
