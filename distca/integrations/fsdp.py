"""FSDP2 beside rows of attention: both use the links between ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distca import ops
from distca.options import check
from distca.ranks import session as sessions


class _AllGather:
    """Runs FSDP's own all-gather once the results of the latest attention are home."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        for session in sessions.all_open():
            ops.await_results(session.group_name)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def gather_after_attention(model: nn.Module) -> None:
    """Let FSDP2 gather the parameters of the next layer after the attention of this one.

    FSDP2 starts to gather the parameters of the next layer when a layer begins. Attention begins
    soon after, and its rows then share the links with the gather. After this call, the gather
    starts when the results of attention are home, and runs beside the rest of the layer. Losses do
    not change. Call it after `fully_shard`, on every rank. It replaces the all-gathers that
    `FSDPModule.set_custom_all_gather` set before.

    Raises ValueError if no module of `model` is sharded by `fully_shard`.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    check("model", type(model).__name__, len(sharded) > 0, "a model sharded by fully_shard")
    for module in sharded:
        module.set_custom_all_gather(_AllGather())
