"""Core attention on packed rows."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor

from distca import ops
from distca._torch_private import not_compiled
from distca.planning.cost import check_device
from distca.planning.documents import FROM_HERE, Documents, check_documents, check_window
from distca.planning.plan import CAUSAL, Plan, group_of, local_plan
from distca.planning.step import plan
from distca.ranks import callers
from distca.ranks import session as sessions
from distca.ranks.hints import hint

FULL = (-1, -1)


Results = Tensor | tuple[Tensor, Tensor]  # out, or out and lse
Compute = Callable[..., tuple[Tensor, Tensor]]  # see attend_rows

# The documents whose calls of core_attention are redirected, and their target; None outside
# `routed`.
_route: tuple[Documents, Callable[..., Results]] | None = None


@contextlib.contextmanager
def routed(packed: Documents, route: Callable[..., Results]) -> Iterator[None]:
    """A scope in which calls of core_attention go to `route`. They must be for `packed`."""
    global _route
    previous, _route = _route, (packed, route)
    try:
        yield
    finally:
        _route = previous


def routed_documents() -> Documents | None:
    """Return the documents of a `routed` scope, or None outside."""
    return None if _route is None else _route[0]


def _plan_for(packed: Documents, window_size: tuple[int, int], q: Tensor) -> Plan:
    shared = packed._plans.get(packed.plan_key(window_size))
    if shared is not None:
        return shared if shared.layout is not None else shared.wait()
    local = packed._local_plans.get((window_size, q.device)) if not packed._plans else None
    if local is not None:
        return local
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"distca: the documents have no plan for window_size {window_size}; call "
            "distca.plan(documents, window_size=...) or enter distca.documents(documents, "
            "window_size=...) before compiled code"
        )
    check_no_capture(q, "core attention")  # as the operator does, which comes too late here
    if not packed._plans:
        _hint_at_plan()
        return local_plan(packed, window_size, q.device)
    # Planned for another window or chunks: layers of this model differ, and every rank gets here.
    return plan(packed, window_size=window_size, group=group_of(packed), device=q.device)


def _hint_at_plan() -> None:
    is_shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not is_shared or not torch.is_grad_enabled():
        return
    if sessions.options_of().enabled:
        hint(
            "documents without a plan are computed on their rank, not balanced; in training, call "
            "distca.plan(documents) once a step on every rank"
        )


@overload
def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    softmax_scale: float | None = ...,
    softcap: float | None = ...,
    window_size: tuple[int, int] = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    softmax_scale: float | None = ...,
    softcap: float | None = ...,
    window_size: tuple[int, int] = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    window_size: tuple[int, int] = CAUSAL,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Results:
    """Compute softmax(q k^T * softmax_scale) v within each document, balanced over ranks.

    q is [tokens, heads_q, head_dim], k [tokens, heads_kv, head_dim] and v [tokens, heads_kv,
    head_dim_v], with heads_q a multiple of heads_kv; k and v begin with the documents' context
    rows. v may be narrower or wider than q and k. Dtypes are bfloat16 and float16, on CPU also
    float32 and float64. `window_size` is (left, right): position p of a document sees [p - left,
    p + right], and -1 means no limit. softmax_scale defaults to head_dim ** -0.5. Returns out
    [tokens, heads_q, head_dim_v]. DTensors must be sharded on heads or replicated; each rank
    computes its own heads.

    `softcap` c replaces scaled scores s by c * tanh(s / c), as in Gemma 2, on Hopper GPUs (up
    to 1000) and on the CPU. `sinks` [heads_q] adds one logit per head to the softmax of every
    query, like the score of a key whose value is 0, as in gpt-oss. With `return_lse` it returns
    (out, lse), both differentiable. lse [tokens, heads_q] is the natural logarithm of the sum of
    exp(score) over the keys that a query sees, after scale and softcap and without sinks, in
    float32 (float64 for float64 inputs).

    Documents without a plan are computed on this rank. Differentiable once. Raises ValueError for
    bad arguments before any row is sent; in the first layer of the first step it does so on every
    rank of a planned group. Raises torch.distributed.DistBackendError if a rank of the group is
    lost, or if another rank refuses its arguments later.
    """
    check_documents(documents)
    try:
        window_size = check_window(window_size)
        _check_tensors(q, k, v)
        if not torch.compiler.is_compiling():  # numbers may be symbols there
            _check_number("softmax_scale", softmax_scale)
            _check_number("softcap", softcap)
        if sinks is not None:
            _check_sinks(sinks, q)
    except ValueError as error:
        _refuse(documents, error)
    attend = attend_rows if _route is None else _attend_by_route
    settings = (softmax_scale, softcap, window_size)
    if sinks is None:
        return attend(q, k, v, documents, *settings, return_lse)
    out, lse = attend(q, k, v, documents, *settings, True)
    share = torch.sigmoid(lse - sinks).unsqueeze(-1)  # of the softmax that falls to keys
    out = (out * share).to(out.dtype)
    return (out, lse) if return_lse else out


def _refuse(documents: Documents, error: ValueError) -> NoReturn:
    """Raise an error. The other ranks of the documents' group may not raise it, and are told."""
    with sessions.announced(sessions.find(group_of(documents)) if documents._plans else None):
        raise error


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}; expected a tensor [tokens, heads, head_dim]"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} has layout {tensor.layout}; expected a dense tensor")
        check_device(tensor.device, name)  # the operator's kernel for meta tensors checks nothing


def _check_number(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r:.80}; expected a finite number or None")


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks is {sinks!r:.80}; expected a tensor [heads of q] or None")
    are_alike = hasattr(sinks, "device_mesh") == hasattr(q, "device_mesh")  # both DTensors, or none
    is_on_device = sinks.is_floating_point() and sinks.device == q.device
    if not (are_alike and is_on_device and sinks.shape == q.shape[1:2]):
        raise ValueError(
            f"sinks is a {type(sinks).__name__} of {sinks.dtype} and shape {list(sinks.shape)} on "
            f"{sinks.device}; expected a floating-point tensor of shape {list(q.shape[1:2])}, one "
            f"logit for each head of q, on {q.device}, and a DTensor if q is one"
        )


def max_logits(
    q: Tensor,
    k: Tensor,
    documents: Documents,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = CAUSAL,
) -> Tensor:
    """Return the largest score of each query head, as QK-clip of MuonClip needs it.

    Returns [heads_q], float32 (float64 for float64 inputs): the maximum of q k^T * softmax_scale
    over this rank's queries and the keys that they see, wherever the plan computes them, before
    softcap and without sinks. It is -inf without tokens and has no gradient. Ranks do not share it:
    reduce it with torch.distributed.ReduceOp.MAX.

    This is a forward pass of its own, with the plan and arguments of core_attention, so all ranks
    of a group call it in the same layers. Call it every few steps to save time. On the CPU it is
    exact. On CUDA devices it is at most log(keys) / 2^14 too large, which is less than 0.001, for
    scores up to 45,000 in magnitude. Raises as core_attention does.
    """
    # If scores grow, their logsumexp approaches their maximum. The kernels of CUDA devices compute
    # scores relative to a rounded maximum: the rounding must stay below the largest exponent.
    sharpness = 2.0**14 if q.is_cuda else 2.0**60
    scale = sharpness * _scale_of(softmax_scale, q)
    settings = {"softmax_scale": scale, "window_size": window_size}
    with torch.no_grad():
        _, lse = core_attention(q, k, k, documents, return_lse=True, **settings)
        none = lse.new_full((1, *lse.shape[1:]), float("-inf"))
        return torch.cat([lse, none]).amax(0) / sharpness


@not_compiled
def _attend_by_route(*args) -> Results:
    return _route[1](*args)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    softmax_scale: float | None,
    softcap: float | None,
    window_size: tuple[int, int],
    return_lse: bool,
    compute: Compute | None = None,
) -> Results:
    """Compute core_attention of these rows, whatever route is in force.

    `compute(q, k, v, documents, window_size, softmax_scale, softcap)` returns out and lse of plain
    tensors. None: under the plan of the documents.
    """
    if any(type(tensor) is not Tensor for tensor in (q, k, v)):
        from torch.distributed.tensor import DTensor  # takes 0.3 s to import

        if any(isinstance(tensor, DTensor) for tensor in (q, k, v)):
            _check_distributed(q, k, v)
            local = [tensor.to_local() for tensor in (q, k, v)]
            settings = (softmax_scale, softcap, window_size, return_lse, compute)
            results = attend_rows(*local, documents, *settings)

            def distributed(rows: Tensor) -> DTensor:
                return DTensor.from_local(rows, q.device_mesh, q.placements, run_check=False)

            return tuple(map(distributed, results)) if return_lse else distributed(results)
    if documents.key_rows is not None:
        k, v = _with_prefixes(k, v, documents)
    scale = _scale_of(softmax_scale, q)
    compute = compute or _compute_under_plan
    if documents.spans is not None:
        compute = functools.partial(_compute_with_spans, compute)
    results = compute(q, k, v, documents, window_size, scale, softcap or 0.0)
    return results if return_lse else results[0]


def _scale_of(softmax_scale: float | None, q: Tensor) -> float:
    # The operator refuses q without a head_dim, so that every rank of the group hears of it.
    return softmax_scale if softmax_scale is not None else max((1, *q.shape[-1:])) ** -0.5


def _compute_under_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window_size: tuple[int, int],
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    own = _plan_for(documents, window_size, q)
    kept_rows = own.kept_rows if torch.is_grad_enabled() else (0, 0)
    caller = callers.current() if own.group_name else callers.UNKNOWN
    settings = (softmax_scale, own.group_name, *kept_rows, caller, softcap)
    out, lse, _ = ops.core_attention(q, k, v, own.layout, own.rows, *settings)
    return out, lse


def _compute_with_spans(
    compute: Compute,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    window_size: tuple[int, int],
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse where rows of spans see their whole span, too.

    A second call attends from each row of a span to its own key and those after it. Both results
    count the row's own key, so that one of its weights is taken back.
    """
    _check_spans(documents, window_size)
    settings = (softmax_scale, softcap)
    out, lse = compute(q, k, v, documents, window_size, *settings)
    rows = documents.span_rows = documents.span_rows.to(q.device)
    q, k, v = (each.index_select(0, rows) for each in (q, k, v))
    ahead, lse_ahead = compute(q, k, v, documents.spans, FROM_HERE, *settings)
    behind, lse_behind = (each.index_select(0, rows) for each in (out, lse))
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1).to(lse.dtype) for each in (k, v))
    score = (q * k).sum(-1) * softmax_scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    score = score.minimum(lse_ahead).minimum(lse_behind)  # but for rounding, it is not above them
    top = torch.maximum(lse_ahead, lse_behind).detach()
    weights = [(each - top).exp() for each in (lse_ahead, lse_behind, score)]
    total = weights[0] + weights[1] - weights[2]  # at least 1
    shares = [(each / total).unsqueeze(-1) for each in weights]
    merged = shares[0] * ahead + shares[1] * behind - shares[2] * v
    out = out.index_copy(0, rows, merged.to(out.dtype))
    return out, lse.index_copy(0, rows, top + total.log())


def _check_spans(documents: Documents, window_size: tuple[int, int]) -> None:
    left, right = window_size
    if right == 0 and (left < 0 or left >= documents.longest_span - 1):
        return
    error = ValueError(
        f"window_size is {window_size} for documents with spans of up to {documents.longest_span} "
        f"tokens; expected (-1, 0), or (W, 0) with W at least {documents.longest_span - 1}"
    )
    _refuse(documents, error)


def _with_prefixes(k: Tensor, v: Tensor, documents: Documents) -> list[Tensor]:
    """k and v with the keys of its ancestors before those of each document."""
    if not len(k) == len(v) == documents.num_tokens:
        error = ValueError(
            f"k has {len(k)} tokens, v {len(v)}; expected {documents.num_tokens}, as the "
            f"{documents} have: keys of their ancestors are added here"
        )
        _refuse(documents, error)
    documents.key_rows = documents.key_rows.to(k.device)
    return [_TakenRows.apply(each, documents.key_rows) for each in (k, v)]


class _TakenRows(torch.autograd.Function):
    """x[rows], with gradients of rows that are taken several times summed in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        sums = grad.new_zeros((ctx.num_rows, *grad.shape[1:]), dtype=dtype)
        return sums.index_add_(0, rows, grad.to(dtype)).to(grad.dtype), None


def _check_distributed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless all are DTensors that lie alike on one mesh, each of its axes
    replicating them or sharding their heads, dimension 1, into equal parts."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

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
        num_parts = 1
        for axis, placement in enumerate(tensor.placements):
            if placement not in (Shard(1), Replicate()):
                raise ValueError(
                    f"{name} has placement {placement} on {tensor.device_mesh}; expected "
                    "Replicate() or Shard(1), its heads: redistribute it, or pass this rank's "
                    f"rows, {name}.to_local()"
                )
            num_parts *= tensor.device_mesh.size(axis) if placement == Shard(1) else 1
        if tensor.dim() > 1 and tensor.shape[1] % num_parts:
            raise ValueError(
                f"{name} has {tensor.shape[1]} heads on {num_parts} tensor parallel ranks; "
                "expected a multiple, so that query heads stay with their key heads"
            )


def check_no_capture(q: Tensor, name: str, remedy: str = "") -> None:
    """Refuses a call that a CUDA graph would repeat with the documents of this step.

    The operators refuse it too, but only after the work that precedes them. Not for compiled code.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name} is captured into a CUDA graph; expected a call outside, because documents "
            f"differ from step to step, and so do their plans{remedy}"
        )
