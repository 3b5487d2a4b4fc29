"""Private names of PyTorch that distca needs, all in one place.

They may change with any release. The tests cover them on PyTorch 2.11, and on the CPU also on 2.12
to 2.15. Look here first when a new release breaks distca.
"""

import inspect
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

__all__ = ["CheckpointWrapper", "pytree"]

# Return a number for the backward pass that runs on this thread, NOT_BACKWARD outside one.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
NOT_BACKWARD = -1

# Call a function without arguments when the backward pass that runs ends.
call_after_backward = torch.autograd.Variable._execution_engine.queue_callback

# Keep torch.compile out of a function, as torch.compiler.disable does, but without loading the
# compiler: that would add 0.4 s to the import of distca.
not_compiled = torch._disable_dynamo


def checkpoint_hooks() -> object:
    """Return what tells the innermost checkpoint around this call from others, None outside any."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or "_checkpoint_hook" not in getattr(hooks[0], "__qualname__", ""):
        return None
    return hooks[0]


def has_dispatch_mode() -> bool:
    """Return whether something sees the operators that run, as selective checkpointing does."""
    return torch._C._len_torch_dispatch_stack() > 0


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tell torch.compile that the size of a dimension changes from call to call. Does nothing
    unless the program has loaded torch.compile."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_alive(group: ProcessGroup | None) -> bool:
    """Return whether a process group exists and has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def release() -> tuple[int, ...]:
    """Return the major and the minor version of PyTorch."""
    return tuple(int(each) for each in torch.__version__.split(".")[:2])


def flat_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return one process group of all ranks of a mesh of several axes. Collective at first."""
    return mesh._flatten().get_group()


def new_group(
    store: dist.Store,
    name: str,
    rank: int,
    num_ranks: int,
    backend: str,
    timeout: timedelta,
    nccl_options: "dist.ProcessGroupNCCL.Options | None" = None,
) -> ProcessGroup:
    """Open a process group beside the default group, of ranks that meet in `store`. Only C++ knows
    it by its name. `backend` is as for torch.distributed.init_process_group."""
    store = dist.PrefixStore(f"{name}/", store)
    group = dist.ProcessGroup(store, rank, num_ranks)
    by_device = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    kinds, opened = dist.ProcessGroup.BackendType, {}
    group._set_default_backend(kinds.NCCL if "nccl" in by_device.values() else kinds.GLOO)
    for device, each in by_device.items():
        place = (dist.PrefixStore(f"{each}/", store), rank, num_ranks)
        if each == "nccl":
            set_timeout(nccl_options, timeout)
            nccl_options.group_name = name
            nccl_options.global_ranks_in_group = list(range(num_ranks))
            opened[each] = dist.ProcessGroupNCCL(*place, nccl_options)
        elif each not in opened:
            opened[each] = dist.ProcessGroupGloo(*place, timeout)
        group._register_backend(torch.device(device), getattr(kinds, each.upper()), opened[each])
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    return group


def wait_without_limit(group: ProcessGroup) -> None:
    """Take the timeout from a gloo group for CPU tensors, once it is open."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(days=1000))


def end_group(group: ProcessGroup) -> None:
    """End a group of `new_group`."""
    torch._C._distributed_c10d._unregister_process_group(group.group_name)
    group.shutdown()


def sharded_layers() -> list[tuple[int, int, int, int]]:
    """Return (number of parameters, bytes gathered, bytes of gradients, number of ranks that share
    it) for each innermost module that `fully_shard` has sharded in this process. With tensor
    parallelism, the figures are those of this rank's part."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    modules = [reference() for reference in _module_state_mapping.keyrefs()]
    layers = []
    for module in modules:
        if not isinstance(module, fsdp.FSDPModule):
            continue
        inner = (isinstance(each, fsdp.FSDPModule) for each in module.modules())
        groups = _parameter_groups(module)
        if groups and sum(inner) == 1:
            layers.append(_traffic_of(groups))
    return layers


def _parameter_groups(module) -> list:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # PyTorch 2.12: it may have several
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _traffic_of(groups: list) -> tuple[int, int, int, int]:
    num_params = gathered_bytes = reduced_bytes = 0
    for each in (parameter for group in groups for parameter in group.fsdp_params):
        numel, sharded, policy = each._orig_size.numel(), each.sharded_param, each.mp_policy
        dtype = policy.param_dtype or sharded.dtype
        num_params += numel
        gathered_bytes += numel * dtype.itemsize
        if sharded.requires_grad:
            reduced_bytes += numel * (policy.reduce_dtype or dtype).itemsize
    num_ranks = max(getattr(group.mesh_info, "shard_mesh_size", 1) for group in groups)
    return num_params, gathered_bytes, reduced_bytes, num_ranks


def set_timeout(options: "dist.ProcessGroupNCCL.Options", timeout: timedelta) -> None:
    """Set the timeout of a group that is opened with these options."""
    options._timeout = timeout


# The rest of this file is for distca/integrations/pipelining.py, which calls the methods of stages
# pass by pass. If a release changes what these methods expect, a stage may silently compute wrong
# gradients. So distca refuses releases newer than this one, the newest on which tests ran stages.
NEWEST_WITH_STAGES = (2, 15)


def check_stages() -> None:
    """Raise ValueError if PyTorch is newer than NEWEST_WITH_STAGES."""
    if release() > NEWEST_WITH_STAGES:
        newest = ".".join(map(str, NEWEST_WITH_STAGES))
        raise ValueError(
            f"torch is {torch.__version__}, but stages of a pipeline can share attention only up "
            f"to torch {newest}; expected a newer distca, an older torch, or one of torch's own "
            'schedules with distca.init(mesh["dp"])'
        )


def initialize_stages(
    schedule, args: tuple, kwargs: dict, target: object, loss_kwargs: dict | None
) -> None:
    """Make a schedule prepare the shapes and transfers of its stages for a step. Collective in the
    first step, and at each change between training and evaluation. From PyTorch 2.12 on, the
    schedule runs the stages and the loss on the arguments of a micro-batch."""
    arguments = {"args": args, "kwargs": kwargs, "target": target, "loss_kwargs": loss_kwargs}
    parameters = inspect.signature(schedule._initialize_stages).parameters
    schedule._initialize_stages(**{name: arguments[name] for name in parameters})


def stage_inputs(stage) -> list[torch.Tensor]:
    """Return zeros like the inputs of an initialised stage."""
    is_oldest = hasattr(stage, "inputs_meta")  # PyTorch 2.11
    inputs = stage.inputs_meta if is_oldest else stage._stage_meta.inputs
    return [torch.zeros(each.shape, dtype=each.dtype, device=stage.device) for each in inputs]


def drop_other_inputs(stage, micro_batch: int) -> None:
    """Drop non-tensor inputs of a forward pass from the cache of a stage. Stages of PyTorch 2.11
    cannot split a backward pass with such inputs."""
    if hasattr(stage, "fwd_cache"):  # before PyTorch 2.15
        outputs, inputs = stage.fwd_cache[micro_batch]
        stage.fwd_cache[micro_batch] = outputs, [each for each in inputs if torch.is_tensor(each)]


def parts_of(schedule) -> tuple[list, int, Callable]:
    """Return the stages, the number of micro-batches and the loss function of a schedule."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return stages, schedule._n_microbatches, schedule._loss_fn
