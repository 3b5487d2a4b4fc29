"""Ways to compute attention of documents that cross ranks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from step_variants import VARIANTS
from torch import Tensor
from workloads import Workload

import distca


def same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Way:
    rows: Tensor
    """int64: indices of this rank's rows in the pack."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Computes out from q, k, v of these rows."""
    shaped: Callable[[Tensor], Tensor] = same
    """Turns [rows, heads, head_dim] into the shape that `attend` expects."""
    rows_of: Callable[[Tensor], Tensor] = same
    """Turns that shape back into [rows, heads, head_dim]."""


@contextlib.contextmanager
def variant_way(
    name: str,
    workload: Workload,
    shape: distca.AttentionShape,
    keep_inputs_gb: float | None,
    device: torch.device,
) -> Iterator[Way]:
    """Open a variant of training_step.py as a way."""
    variant, group = VARIANTS[name], dist.new_group()
    if variant.transport is not None:
        options = distca.Options(transport=variant.transport, keep_inputs_gb=keep_inputs_gb)
        distca.init(options=options)
    share = variant.share(workload, 0, group, device)
    if variant.transport is not None:
        distca.plan(share.documents, device=device, shape=shape)
    yield Way(share.rows, lambda q, k, v: variant.core_attention(q, k, v, share.documents))
    distca.close()
    dist.destroy_process_group(group)


@contextlib.contextmanager
def alone_way(num_tokens: int, device: torch.device) -> Iterator[Way]:
    """Open a way that runs distca's kernel on this rank's own document."""
    documents = distca.Documents([0, num_tokens])
    rows = torch.arange(num_tokens, device=device)
    yield Way(rows, lambda q, k, v: distca.core_attention(q, k, v, documents))
