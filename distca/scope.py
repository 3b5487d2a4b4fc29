"""Documents in force, and drop-ins for torch's attention that work on them."""

import contextlib
import inspect
import weakref
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import AuxRequest
from torch.nn.attention.varlen import varlen_attn as _torch_varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary

from distca.attention import FULL, core_attention
from distca.planning.documents import Documents, check_documents, check_window
from distca.planning.plan import CAUSAL, local_plan
from distca.planning.step import plan
from distca.ranks import session as sessions
from distca.ranks.hints import hint

_torch_sdpa = F.scaled_dot_product_attention  # taken before the launcher may replace it
# torch 2.11 shares keys among heads without asking.
_asks_for_gqa = "enable_gqa" in inspect.signature(_torch_varlen_attn).parameters


# What is in force, None outside: the documents, and (rows, tokens) of the tensor that they were
# read from, if they were.
_in_force: tuple[Documents | None, tuple[int, int] | None] = (None, None)
_missing: str | None = None  # why scaled_dot_product_attention without documents is an error
_is_patched = False  # by the launcher: torch's function is ours


@contextlib.contextmanager
def documents(
    packed: Documents,
    *,
    window_size: tuple[int, int] = CAUSAL,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Iterator[Documents]:
    """Open a scope in which scaled_dot_product_attention and varlen_attention work on `packed`.

    If torch.distributed runs, and gradients are enabled or Options.balance_no_grad is set, the step
    is planned over `group` unless it has a plan already (collective). Otherwise attention stays on
    this rank. With activation checkpointing, keep the backward pass inside the scope. Scopes nest,
    and hold for all threads.
    """
    check_documents(packed)
    is_balanced = sessions.is_balanced(True, group)
    prepare(packed, check_window(window_size), group, is_balanced=is_balanced)
    previous = _in_force
    put_in_force(packed)
    try:
        yield packed
    finally:
        put_in_force(*previous)


def prepare(
    packed: Documents,
    window_size: tuple[int, int],
    group: ProcessGroup | DeviceMesh | None,
    *,
    is_balanced: bool,
) -> None:
    """Make a missing plan, for all ranks (collective) or for this one, and wait for all plans."""
    if is_balanced and packed.plan_key(window_size) not in packed._plans:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and sessions.opened(group).options.enabled:
            plan(packed, window_size=window_size, group=group)
    if not packed._plans and not packed.crosses_ranks:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        local_plan(packed, window_size, device)  # compiled code cannot make it
    for each in packed._plans.values():
        each.wait()


def put_in_force(packed: Documents | None, batch: tuple[int, int] | None = None) -> None:
    """Put documents in force, as `distca.documents` does on entry and exit. Calls of
    scaled_dot_product_attention must have the shape `batch`, (rows, tokens); None: any."""
    global _in_force
    _in_force = packed, batch


def patch_torch() -> None:
    """Replace torch's scaled_dot_product_attention in this process."""
    global _is_patched
    F.scaled_dot_product_attention = scaled_dot_product_attention
    _is_patched = True


def require_documents(reason: str | None) -> None:
    """Let scaled_dot_product_attention outside documents raise an error that says `reason`. None:
    let it be torch's function again."""
    global _missing
    _missing = reason


def documents_in_force() -> Documents | None:
    """Return the documents in force, or None."""
    return _in_force[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for torch.nn.functional.scaled_dot_product_attention. Inside
    `with distca.documents(...)` it works within each document and is balanced.

    query is [batch, heads_q, tokens, head_dim], and its batch * tokens rows are the documents' rows
    in order. value may have another head_dim, as in torch. is_causal=False is full attention within
    each document. Inside the scope it raises ValueError for attn_mask, dropout_p, or another number
    of rows: boundaries are never dropped.
    Outside the scope it is torch's own function.
    """
    packed, batch = _in_force
    if packed is None:
        if _missing is not None:
            raise ValueError(f"no documents are in force: {_missing}")
        if _is_patched and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            hint(
                "scaled_dot_product_attention was called outside distca.documents, where "
                "--patch-sdpa leaves it to torch: nothing is balanced there; pass "
                "--document-end-id or --document-positions, or enter distca.documents"
            )
        return _torch_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _check_sdpa(query, key, value, attn_mask, dropout_p, enable_gqa, batch)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = core_attention(
        q, k, v, packed, softmax_scale=scale, window_size=CAUSAL if is_causal else FULL
    )
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _check_sdpa(query, key, value, attn_mask, dropout_p, enable_gqa, batch) -> None:
    if attn_mask is not None:
        raise ValueError(
            f"attn_mask of shape {list(attn_mask.shape)} under distca.documents; expected None: "
            "the documents are the mask (is_causal=True for causal)"
        )
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p is {dropout_p} under distca.documents; expected 0.0")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} under distca.documents; expected "
                "[batch, heads, tokens, head_dim]"
            )
    rows = (query.shape[0], query.shape[2])
    if batch not in (None, rows):
        raise ValueError(
            f"query has {rows[0]} rows of {rows[1]} tokens, but the documents were read from a "
            f"tensor of {batch[0]} rows of {batch[1]} tokens; expected equal shapes"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} tokens, key {key.shape[2]}, under distca.documents; "
            "expected equal numbers (self-attention over packed rows)"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads, key {key.shape[1]}; pass enable_gqa=True"
        )


_compared = WeakTensorKeyDictionary()  # boundaries: their version, and the documents they match


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = FULL,
    enable_gqa: bool = False,
    **others,
) -> Tensor | tuple[Tensor, Tensor]:
    """Drop-in for torch.nn.attention.varlen.varlen_attn, balanced inside
    `with distca.documents(...)`.

    query is [tokens, heads_q, head_dim]. With return_aux.lse it returns (out, lse), where lse is
    [heads_q, tokens] as in torch, and differentiable. key and value may have fewer heads, with or
    without enable_gqa. `others` are arguments of newer versions of torch, such as block_table.
    Inside the scope it raises ValueError for these, and if boundaries differ from those of the
    documents. Outside the scope it is torch's own function.
    """
    packed, _ = _in_force
    if packed is None:
        rows = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
        keywords = {"return_aux": return_aux, "scale": scale, "window_size": window_size}
        if _asks_for_gqa:
            keywords["enable_gqa"] = enable_gqa
        return _torch_varlen_attn(*rows, **keywords, **others)
    for name, value_of_other in others.items():
        if value_of_other is not None:
            raise ValueError(
                f"{name} is a {type(value_of_other).__name__} under distca.documents; expected "
                "None: distca computes training on packed documents, and has no key-value cache"
            )
    if cu_seq_k is None:
        raise ValueError("cu_seq_k is None under distca.documents; expected cu_seq_q")
    _check_boundaries(packed, cu_seq_q, "cu_seq_q")
    if cu_seq_k is not cu_seq_q:
        _check_boundaries(packed, cu_seq_k, "cu_seq_k")
    how = {"softmax_scale": scale, "window_size": window_size}
    if return_aux is None or not return_aux.lse:
        return core_attention(query, key, value, packed, **how)
    out, lse = core_attention(query, key, value, packed, **how, return_lse=True)
    return out, lse.t()


def _check_boundaries(packed: Documents, cu_seqlens: Tensor, name: str) -> None:
    """Compares once until the tensor changes in place: the comparison waits for the device."""
    if torch.compiler.is_compiling():
        return
    # Inference tensors do not count their changes, so they are compared at every call.
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    known_version, known_documents = _compared.get(cu_seqlens, (None, None))
    if version is not None and known_version == version and known_documents() is packed:
        return
    expected = packed.cu_seqlens
    offsets = cu_seqlens.detach().cpu()
    if offsets.shape != expected.shape or not (offsets == expected).all():
        raise ValueError(
            f"{name} has {offsets.numel()} boundaries up to {offsets.flatten()[-1:].tolist()}, but "
            f"the documents in force have {expected.numel()} up to {expected[-1:].tolist()}; enter "
            "distca.documents with the same packing"
        )
    _compared[cu_seqlens] = (version, weakref.ref(packed))
