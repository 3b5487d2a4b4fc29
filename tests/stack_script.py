"""Runs a module of a training stack in one of several CPU processes, for tests/test_stacks.py.

    torchrun ... stack_script.py distca|torch [-m distca.run flags] -m module [arguments]

"torch" leaves distca out and computes with transformers' own SDPA under the name flash_attention_2.
The last line says whether attention was balanced. What stacks expect of a machine with GPUs is
replaced: LLaMA-Factory asks whether flash-attn is installed, verl asks for devices and NCCL, and
axolotl puts the model on a CUDA device.
"""

import runpy
import sys
import types

import torch
import torch.distributed as dist
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "flash_attention_2"


def use_torchs_attention() -> None:
    transformers.AttentionInterface.register(NAME, sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    stock = transformers.PreTrainedModel._check_and_adjust_attn_implementation

    def check(model, name, *args, **kwargs) -> str:
        return name if name == NAME else stock(model, name, *args, **kwargs)

    transformers.PreTrainedModel._check_and_adjust_attn_implementation = check


class Device(types.ModuleType):
    """Answers verl's questions about a device as for a CPU."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        answers = {"mem_get_info": (1, 1), "get_device_name": "cpu", "current_device": "cpu"}
        return lambda *args, **kwargs: answers.get(name, 0)


def let_verl_run_on_cpus() -> None:
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        device_module = property(lambda self: Device("cpu"))
        current_device = communication_backend_name = lambda self: "cpu"
        set_device = synchronize = manual_seed = manual_seed_all = lambda self, *args: None

    platform_manager.set_platform(Cpu())
    init = dist.init_process_group

    def init_gloo(backend: str, **keywords) -> None:
        init("gloo", **keywords)

    dist.init_process_group = init_gloo


def let_axolotl_run_on_cpus() -> None:
    from axolotl.loaders.model import ModelLoader

    stock = ModelLoader._set_device_map_config

    def set_none(self) -> None:
        stock(self)
        del self.model_kwargs["device_map"]  # the number of a CUDA device

    ModelLoader._set_device_map_config = set_none
    torch.cuda.can_device_access_peer = lambda *args: True


def leave_out_masks() -> None:
    """Leave out axolotl's attention_mask, which numbers documents. SDPA would take it for padding.
    Without it, transformers finds documents in position_ids."""
    stock = transformers.Qwen2Model.forward

    def forward(self, *args, attention_mask=None, **keywords):
        return stock(self, *args, attention_mask=None, **keywords)

    transformers.Qwen2Model.forward = forward


def main(way: str, arguments: list[str]) -> None:
    if "llamafactory.launcher" in arguments:
        transformers.utils.is_flash_attn_2_available = lambda *args, **kwargs: True
    if "verl.trainer.sft_trainer" in arguments:
        let_verl_run_on_cpus()
    if "axolotl.cli.train" in arguments:
        let_axolotl_run_on_cpus()
        if way == "torch":
            leave_out_masks()
    if way == "torch":
        use_torchs_attention()
        if arguments[1] == "distca.run":
            arguments = arguments[arguments.index("-m", 2) :]
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    integration = sys.modules.get("distca.integrations.transformers")
    is_balanced = integration is not None and integration.latest_plan() is not None
    sys.stdout.write(f"balanced {is_balanced}\n")  # in a single write


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
