"""Hints at what distca is not doing."""

import functools
import logging

import torch.distributed as dist

_log = logging.getLogger("distca")


@functools.cache
def hint(text: str) -> None:
    """Log a text once, on the first rank; before and after torch.distributed, of each node."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if is_initialized else dist.get_node_local_rank(0)) == 0:
        _log.warning("distca: %s", text)
