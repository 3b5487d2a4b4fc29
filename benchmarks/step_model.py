"""The Llama of examples/ under FSDP2, for the benchmarks that train."""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distca
from distca.integrations.fsdp import gather_after_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from llama import CoreAttention, Llama, LlamaConfig, WholeDocuments, torch_attention  # noqa: E402

__all__ = ["CoreAttention", "WholeDocuments", "torch_attention"]


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keep-inputs-gb", type=float, help="distca's option of this name")


def check_device(args: argparse.Namespace) -> None:
    """Raise ValueError if --device is cuda, the default, and this machine has no CUDA device."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and torch finds no CUDA device; pass --device cpu")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    add_attention_arguments(parser)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")


def attention_shape(args: argparse.Namespace, device: torch.device) -> distca.AttentionShape:
    element_bytes = dtype_of(device).itemsize
    return distca.AttentionShape(args.heads, args.kv_heads, args.head_dim, element_bytes)


def linear_length(args: argparse.Namespace) -> float:
    """Return the length of a causal document for which a block's attention takes as many FLOPs as
    its linear layers."""
    width = args.heads * args.head_dim
    parameters = args.hidden * (2 * (args.heads + args.kv_heads) * args.head_dim + 3 * args.ffn)
    return (parameters + args.vocab * args.hidden / args.layers) / width


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def new_model(
    args: argparse.Namespace, device: torch.device, core_attention: CoreAttention
) -> Llama:
    """Return the model with its initial weights, not sharded."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        ffn=args.ffn,
        recompute=args.checkpoint,
    )
    with device:
        return Llama(config, core_attention)


def mixed_precision(device: torch.device) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype_of(device), reduce_dtype=torch.float32)


def build_model(
    args: argparse.Namespace,
    device: torch.device,
    core_attention: CoreAttention,
    ping_pong: bool,
    group: dist.ProcessGroup | None = None,
) -> Llama:
    """Return the model, sharded over `group` (default: all ranks)."""
    model, precision = new_model(args, device, core_attention), mixed_precision(device)
    if group is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    else:
        mesh = DeviceMesh.from_group(group, device.type)
    for block in model.blocks:
        if ping_pong:
            block = distca.PingPong(block)  # the same module, of another class
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    gather_after_attention(model)  # no difference for variants that move no rows
    return model
