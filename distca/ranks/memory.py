"""Device memory for inputs that servers keep until the backward pass: the spare memory of each
rank, and a limit per layer that is equal on all ranks."""

import collections
import functools
import os
import socket

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distca import ops
from distca.options import digest_of

MARGIN = 0.05  # of a device's memory, left free for later peaks
NUM_PEAKS = 32  # latest plans whose peaks of kept inputs count
NUM_WORDS = 4  # device, its spare bytes or NOT_YET, peaks of kept bytes and of calls to come
NOT_YET = -(2**62)
UNKNOWN = [0, NOT_YET, 0, 0]

_have_stepped: set[int] = set()  # ids of optimizers that have stepped, until one steps again
_has_peaked = False  # whether a forward and a backward pass have run with optimizer state
_peaks: collections.deque[list[int]] = collections.deque(maxlen=NUM_PEAKS)  # of all groups


def _note_optimizer_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    global _has_peaked
    if not _has_peaked:
        _has_peaked = id(optimizer) in _have_stepped
        _have_stepped.add(id(optimizer))


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_note_optimizer_step)


@functools.cache
def _device_id(device: torch.device) -> int:
    """Return 63 bits that differ between devices."""
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else os.getpid()
    text = f"{socket.gethostname()} {uuid}"
    return digest_of(text.encode())


def spare_bytes(device: torch.device) -> int | None:
    """Return the bytes of a device that stay free, less a margin, when the caching allocator's
    reserved memory is at its peak. All of that peak counts as used, so this covers the peaks of
    earlier steps. Returns None on the CPU, and if the allocator does not report its memory."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    try:
        reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    except RuntimeError:
        return None
    allowed = torch.cuda.get_per_process_memory_fraction(device) * total_bytes - most
    return int(min(free_bytes - (most - reserved), allowed) - MARGIN * total_bytes)


def words(device: torch.device) -> list[int]:
    """Return this rank's NUM_WORDS words for the exchange: its spare memory, and its recent peaks
    of kept inputs. Called once per plan, on the planner thread."""
    spare = spare_bytes(device)
    if spare is None:
        return UNKNOWN
    _watch_optimizers()
    _peaks.append(ops.take_kept_peak())
    num_bytes, num_calls = map(max, zip(*_peaks, strict=True))
    return [_device_id(device), spare if _has_peaked else NOT_YET, num_bytes, num_calls]


def common_limit(words: Tensor) -> int | None:
    """Return the bytes that each rank may keep for a layer, or None if a rank cannot say yet.
    `words` [num_ranks, NUM_WORDS] are those of all ranks. Ranks on one device share its memory.

    The kept inputs of all calls at one time must fit into the spare memory plus the earlier peak of
    kept inputs. The limit is rounded down to three significant bits, so that it rarely changes.
    """
    device, spare, kept, calls = words.unbind(1)
    if (spare == NOT_YET).any():
        return None
    device = device.unique(return_inverse=True)[1]
    zeros = torch.zeros_like(spare)
    kept, calls = (zeros.index_add(0, device, each)[device] for each in (kept, calls))
    least = zeros.scatter_reduce(0, device, spare, "amin", include_self=False)[device]
    limit = int(((least + kept) // calls.clamp(min=1)).min().clamp(min=0))
    bits = max(0, limit.bit_length() - 3)
    return limit >> bits << bits
