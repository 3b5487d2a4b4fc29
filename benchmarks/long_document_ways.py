"""Ways to compute attention of documents that cross ranks, ready to be called."""

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
    """int64: of the pack's rows, those that this rank holds."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(q, k, v) -> out of these rows."""
    shaped: Callable[[Tensor], Tensor] = same
    """From [rows, heads, head_dim] to what `attend` takes."""
    rows_of: Callable[[Tensor], Tensor] = same
    """And back."""


@contextlib.contextmanager
def variant_way(
    name: str,
    workload: Workload,
    shape: distca.AttentionShape,
    keep_inputs_gb: float,
    device: torch.device,
) -> Iterator[Way]:
    """One of training_step.py's variants."""
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
    """distca's kernel on a document of this rank's own."""
    documents = distca.Documents([0, num_tokens])
    rows = torch.arange(num_tokens, device=device)
    yield Way(rows, lambda q, k, v: distca.core_attention(q, k, v, documents))
