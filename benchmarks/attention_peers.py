"""Calls of distca's operators and of other libraries' attention for one case."""

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from attention_cases import Case
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PASSES = ("forward", "backward", "deterministic")
MAX_COPY_BYTES = 60e9
FLEX_LENGTHS = (8192, 32768)  # compiling takes long
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, grad_out


class Unavailable(Exception):
    """Raised if a library cannot run a case; the message is the reason."""


def same_rows(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class Runner:
    """One implementation's passes on one case, as calls that only launch kernels.

    The forward call returns out, and the backward calls return (dq, dk, dv), in the library's
    shapes. `rows_of` turns out and dq into [rows, heads, head_dim].
    """

    name: str
    calls: dict[str, Callable[[], object]]  # by PASSES
    rows_of: Callable[[Tensor], Tensor] = same_rows


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def distca_runner(case: Case, inputs: Inputs) -> Runner:
    q, k, v, grad_out = inputs
    ops, scale = torch.ops.distca, case.heads.softmax_scale
    share = case.layout, case.rows, scale, case.task_list
    out, lse = ops.attend(q, k, v, *share)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        return ops.attend_backward(grad_out, q, k, v, out, lse, *share)

    def deterministic() -> tuple[Tensor, Tensor, Tensor]:
        with deterministic_algorithms():
            return backward()

    calls = {"forward": lambda: ops.attend(q, k, v, *share)[0], "backward": backward}
    return Runner("distca", calls | {"deterministic": deterministic})


@dataclass(frozen=True)
class Varlen:
    """Arguments of varlen calls: each task is a sequence with its own keys."""

    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor  # int32
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> "Varlen":
        _, k, v, _ = inputs
        tasks, heads = case.tasks, case.heads
        # k, v, dk, dv, and dk and dv of all query heads before they are summed over a group.
        num_heads = 4 * heads.kv + (2 * heads.q if heads.q != heads.kv else 0)
        num_bytes = case.num_copied_k_rows * num_heads * heads.dim * k.element_size()
        if num_bytes > MAX_COPY_BYTES:
            raise Unavailable(
                f"a copy of the keys for each task, with gradients, takes {num_bytes / 1e9:.0f} GB"
            )
        if case.shares_keys:
            k, v = (torch.cat([x[t.k_row : t.k_row + t.num_keys] for t in tasks]) for x in (k, v))
        return cls(
            k,
            v,
            offsets([task.num_rows for task in tasks], k.device),
            offsets([task.num_keys for task in tasks], k.device),
            max(task.num_rows for task in tasks),
            max(task.num_keys for task in tasks),
        )


def offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def aten_runner(case: Case, inputs: Inputs) -> Runner:
    """Return a runner of ATen's FlashAttention-2."""
    q, _, _, grad_out = inputs
    varlen, aten = Varlen.of(case, inputs), torch.ops.aten
    lengths = (
        varlen.cu_seqlens_q,
        varlen.cu_seqlens_k,
        varlen.max_seqlen_q,
        varlen.max_seqlen_k,
    )
    tensors = (q, varlen.k, varlen.v)
    scale = case.heads.softmax_scale

    def forward() -> tuple[Tensor, ...]:
        return aten._flash_attention_forward(*tensors, *lengths, 0.0, True, False, scale=scale)

    out, lse, rng_state, unused, _ = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        return aten._flash_attention_backward(
            grad_out, *tensors, out, lse, *lengths, 0.0, True, rng_state, unused, scale=scale
        )

    return Runner("FA2 (ATen)", {"forward": lambda: forward()[0], "backward": backward})


def autograd_runner(
    name: str,
    attend: Callable,
    tensors: tuple[Tensor, ...],
    rows_of: Callable[[Tensor], Tensor],
    fixed_order: Callable | None = None,
) -> Runner:
    """Return a runner of attend(q, k, v) -> out. Its backward calls share one retained graph.

    `tensors` are q, k, v, grad_out in the library's shape. `fixed_order` is an `attend` with a
    deterministic backward pass.
    """
    *leaves, grad_out = tensors
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]

    def backward_of(function: Callable) -> Callable[[], tuple[Tensor, ...]]:
        graph = functools.cache(lambda: function(*leaves))
        return lambda: torch.autograd.grad(graph(), leaves, grad_out, retain_graph=True)

    calls = {"forward": lambda: attend(*leaves), "backward": backward_of(attend)}
    if fixed_order is not None:
        calls["deterministic"] = backward_of(fixed_order)
    return Runner(name, calls, rows_of)


def dense_inputs(case: Case, inputs: Inputs, heads_first: bool) -> tuple[Tensor, ...]:
    """Return q, k, v, grad_out as [documents, tokens, heads, head_dim], or with heads first."""
    batches = [tensor.unflatten(0, case.dense_shape) for tensor in inputs]
    return tuple(x.transpose(1, 2).contiguous() if heads_first else x for x in batches)


def cudnn_runner(case: Case, inputs: Inputs) -> Runner:
    if case.dense_shape is None:
        raise Unavailable("supports only documents of equal length")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=case.heads.softmax_scale, enable_gqa=True
            )

    tensors = dense_inputs(case, inputs, heads_first=True)
    return autograd_runner("cuDNN (torch)", attend, tensors, heads_last_rows)


def heads_last_rows(tensor: Tensor) -> Tensor:
    """Reshape [documents, heads, tokens, head_dim] to [rows, heads, head_dim]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def flex_runner(case: Case, inputs: Inputs) -> Runner:
    if case.dense_shape is None or case.dense_shape[1] not in FLEX_LENGTHS:
        raise Unavailable(f"runs only on dense cases of {FLEX_LENGTHS} tokens")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = case.dense_shape[1]
    mask = create_block_mask(
        lambda batch, head, q_idx, k_idx: q_idx >= k_idx,
        None,
        None,
        length,
        length,
        device=inputs[0].device,
    )
    attend = functools.partial(
        torch.compile(flex_attention, dynamic=False),
        block_mask=mask,
        scale=case.heads.softmax_scale,
        enable_gqa=True,
    )
    tensors = dense_inputs(case, inputs, heads_first=True)
    return autograd_runner("FlexAttention", attend, tensors, heads_last_rows)


def flash_runner(name: str, module: str, case: Case, inputs: Inputs) -> Runner:
    """Return a runner of FlashAttention-3 or -4: batches if all documents are equally long, else
    varlen."""
    library = importlib.import_module(module)
    scale = case.heads.softmax_scale
    common = {"softmax_scale": scale, "causal": True}
    if case.dense_shape is not None:
        tensors, function = dense_inputs(case, inputs, heads_first=False), library.flash_attn_func
        rows_of = functools.partial(torch.flatten, start_dim=0, end_dim=1)
    else:
        varlen = Varlen.of(case, inputs)
        tensors, function = (
            (inputs[0], varlen.k, varlen.v, inputs[3]),
            library.flash_attn_varlen_func,
        )
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        common |= {each: getattr(varlen, each) for each in names}
        rows_of = same_rows

    def attend(q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False) -> Tensor:
        result = function(q, k, v, deterministic=deterministic, **common)
        return result[0] if isinstance(result, tuple) else result

    fixed_order = functools.partial(attend, deterministic=True)
    return autograd_runner(name, attend, tensors, rows_of, fixed_order)


FLASH_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
PEERS: dict[str, Callable] = {
    "FA2": aten_runner,
    "cuDNN": cudnn_runner,
    "FlexAttention": flex_runner,
} | {name: functools.partial(flash_runner, name, FLASH_MODULES[name]) for name in FLASH_MODULES}
DEFAULT_PEERS = [name for name in PEERS if name != "FlexAttention"]  # takes long to compile


def importable_peers(names: list[str]) -> tuple[dict[str, Callable], dict[str, list]]:
    """Return makers of runners by library, and the reasons why other libraries are left out."""
    makers: dict[str, Callable] = {}
    left_out: dict[str, list] = {
        f"{name}: not in --peers": [] for name in PEERS if name not in names
    }
    for name in names:
        try:
            if name in FLASH_MODULES:
                importlib.import_module(FLASH_MODULES[name])
        except Exception as error:  # a broken build of an optional library raises anything
            left_out[f"{name}: {first_line(error)}"] = []
            continue
        makers[name] = PEERS[name]
    return makers, left_out


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
