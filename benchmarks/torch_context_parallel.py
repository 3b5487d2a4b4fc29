"""torch's context_parallel over SDPA as a way for one document."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_peers import Unavailable, first_line, heads_last_rows
from context_parallel import rows_of
from long_document_ways import Way
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Workload

BACKENDS = {
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
}
NUM_TRIAL_TOKENS = 256  # per rank


def attend_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with fewer key heads than query heads; tensors are [1, heads, tokens, head_dim]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with keys and values repeated for every query head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def heads_first(rows: Tensor) -> Tensor:
    """Reshape [rows, heads, head_dim] to [1, heads, rows, head_dim]."""
    return rows.transpose(0, 1).contiguous().unsqueeze(0)


def takes_grouped_heads(heads: tuple[int, int], head_dim: int, device: torch.device) -> bool:
    """Return whether a forward and backward pass of a short document succeeds."""
    leaves = [
        torch.randn(1, num_heads, NUM_TRIAL_TOKENS, head_dim, device=device).bfloat16()
        for num_heads in (heads[0], *[heads[1]] * 2)
    ]
    try:
        out = attend_grouped(*(leaf.requires_grad_() for leaf in leaves))
        torch.autograd.grad(out.sum(), leaves)
    except Exception:  # any layer below may refuse it
        return False
    return True


@contextlib.contextmanager
def torch_way(
    name: str, workload: Workload, heads: tuple[int, int], head_dim: int, device: torch.device
) -> Iterator[Way]:
    """Open torch's way, balanced by head and tail shards. Raises Unavailable if it cannot run."""
    from torch.distributed.tensor.experimental import context_parallel

    if device.type != "cuda":
        raise Unavailable("these kernels need CUDA")
    lengths, num_ranks = workload.lengths(0), dist.get_world_size()
    if len(lengths) > 1 or lengths[0] % (2 * num_ranks):
        raise Unavailable("needs one document whose length is a multiple of 2 x ranks")
    rows = torch.from_numpy(rows_of(np.array(lengths), dist.get_rank(), num_ranks)).to(device)
    mesh = init_device_mesh(device.type, (num_ranks,))
    # context_parallel needs a buffer to cut.
    positions = torch.arange(lengths[0], device=device).unsqueeze(0)
    failure = None
    with (
        sdpa_kernel(BACKENDS[name]),
        context_parallel(mesh, buffers=[positions], buffer_seq_dims=[1]),
    ):
        try:
            is_grouped = takes_grouped_heads(heads, head_dim, device)
            attend = attend_grouped if is_grouped else attend_repeated
            yield Way(rows, attend, heads_first, heads_last_rows)
        except Exception as error:  # context_parallel restores SDPA only on a regular exit
            failure = error
    if failure is not None:
        raise Unavailable(first_line(failure)) from failure
