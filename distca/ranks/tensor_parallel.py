"""Attention of DTensors that are sharded on heads: every rank computes its own."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

HEADS = 1  # of [tokens, heads, head_dim]


def is_distributed(*tensors: Tensor) -> bool:
    """Whether any of them is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def local_heads(q: DTensor, k: DTensor, v: DTensor) -> list[Tensor]:
    """This rank's heads of q, k, v [tokens, heads, head_dim], differentiably.

    Raises ValueError unless they lie alike on one mesh, each of its axes replicating them or
    sharding their heads into equal parts.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a plain tensor beside DTensors; expected q, k and v alike: all of them "
                "DTensors on one mesh, or .to_local() of each"
            )
        if (tensor.device_mesh, tensor.placements) != (q.device_mesh, q.placements):
            raise ValueError(
                f"{name} has placements {tensor.placements} on {tensor.device_mesh}, q has "
                f"{q.placements} on {q.device_mesh}; expected equal ones: where there are fewer "
                "key heads than tensor parallel ranks, repeat them first"
            )
        _check_placements(name, tensor)
    return [tensor.to_local() for tensor in (q, k, v)]


def like(local: Tensor, q: DTensor) -> DTensor:
    """The DTensor of every rank's `local`, placed as q."""
    return DTensor.from_local(local, q.device_mesh, q.placements, run_check=False)


def _check_placements(name: str, tensor: DTensor) -> None:
    num_parts = 1
    for axis, placement in enumerate(tensor.placements):
        if placement == Shard(HEADS):
            num_parts *= tensor.device_mesh.size(axis)
        elif placement != Replicate():
            raise ValueError(
                f"{name} has placement {placement} on {tensor.device_mesh}; expected Replicate() "
                f"or Shard({HEADS}), its heads: redistribute it, or pass this rank's rows, "
                f"{name}.to_local()"
            )
    if tensor.dim() > HEADS and tensor.shape[HEADS] % num_parts:
        raise ValueError(
            f"{name} has {tensor.shape[HEADS]} heads on {num_parts} tensor parallel ranks; "
            "expected a multiple, so that query heads stay with their key heads"
        )
