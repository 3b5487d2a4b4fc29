"""Which ranks share attention: a process group, or a mesh whose ranks hold different data."""

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca import _torch_private
from distca.options import check

# Axes whose ranks hold the same tokens.
MODEL_AXES = ("tp", "ep", "etp", "tensor_parallel", "expert_parallel")
STAGE_AXES = ("pp", "pipeline_parallel")  # whose ranks hold other layers


_default: ProcessGroup | None = None  # the group that distca.init was given last; None: all ranks


def set_default(group: ProcessGroup | None) -> None:
    """Set the group that `resolve` returns by default."""
    global _default
    _default = group


def has_stages(group: ProcessGroup | DeviceMesh | None) -> bool:
    """Return whether `group` is a mesh whose ranks hold stages of a pipeline."""
    names = getattr(group, "mesh_dim_names", None) or ()
    return any(name in STAGE_AXES for name in names)


def resolve(group: ProcessGroup | DeviceMesh | None = None) -> ProcessGroup:
    """Return the process group that `group` stands for: itself, all ranks of a mesh, or the
    default.

    A mesh with several axes, such as the replicas and shards of HSDP, stands for all of its ranks.
    If such a mesh lacks some ranks of the run, the first call is collective over the mesh that it
    was sliced from. Raises ValueError for another type, for a mesh without this rank, for several
    axes without names, and for a mesh with a tensor or expert parallel axis: each coordinate of
    such an axis needs a group of its own.
    """
    if group is None:
        return _default if _torch_private.is_alive(_default) else dist.group.WORLD
    if isinstance(group, ProcessGroup):
        return group
    expected = "a ProcessGroup that this rank is in, a DeviceMesh or None, which is all ranks"
    check("group", group, isinstance(group, DeviceMesh), expected)
    mesh, names = group, group.mesh_dim_names
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"group is a DeviceMesh of ranks {mesh.mesh.flatten().tolist()}, and this is rank "
            f"{dist.get_rank()}; expected a mesh that this rank is in"
        )
    if mesh.ndim > 1 and names is None:
        raise ValueError(
            f"group is a DeviceMesh of shape {tuple(mesh.shape)} without mesh_dim_names; expected "
            "names, or one axis of it: the ranks that hold different tokens of one layer"
        )
    model_axes = [name for name in names or () if name in MODEL_AXES]
    if model_axes:
        data_axes = tuple(name for name in names if name not in model_axes)
        remedy = f"pass mesh[{data_axes!r}]" if data_axes else "pass the data parallel mesh"
        raise ValueError(
            f"group is a DeviceMesh of axes {names}; expected none of {model_axes}, whose ranks "
            f"share tokens: {remedy}"
        )
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return _torch_private.flat_group(mesh)
