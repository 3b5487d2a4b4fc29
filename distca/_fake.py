"""Shapes of the operators without data, for torch.compile and fake tensors.

Visiting rows differ from rank to rank and from plan to plan, so their number is unbacked.
"""

import torch
from torch import Tensor
from torch.library import get_ctx, register_fake

from distca import _library  # noqa: F401  the operators must be there first


def _lse_of(out: Tensor) -> Tensor:
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    return out.new_empty(out.shape[:2], dtype=dtype)


def _rows_like(tensor: Tensor, num_rows=None) -> Tensor:
    return tensor.new_empty((tensor.shape[0] if num_rows is None else num_rows, *tensor.shape[1:]))


@register_fake("distca::core_attention")
def _(q, k, v, layout, rows, softmax_scale, group_name, num_kept_queries=0, num_kept_keys=0, **_):
    queries, keys = num_kept_queries * q.shape[1], 2 * num_kept_keys * k.shape[1]
    return _rows_like(q), _lse_of(q), q.new_empty((queries + keys) * q.shape[2])


@register_fake("distca::core_attention_backward")
def _(grad_out, q, k, v, out, lse, layout, rows, softmax_scale, group_name, kept=None, caller=-1):
    return _rows_like(q), _rows_like(k), _rows_like(v)


@register_fake("distca::dispatch")
def _(q, k, v, layout, rows, group_name):
    num_q_rows, num_k_rows = get_ctx().new_dynamic_size(), get_ctx().new_dynamic_size()
    return _rows_like(q, num_q_rows), _rows_like(k, num_k_rows), _rows_like(v, num_k_rows)


@register_fake("distca::dispatch_backward")
def _(visiting_grad_q, visiting_grad_k, visiting_grad_v, layout, rows, group_name):
    num_queries, num_keys = get_ctx().new_dynamic_size(), get_ctx().new_dynamic_size()
    return (
        _rows_like(visiting_grad_q, num_queries),
        _rows_like(visiting_grad_k, num_keys),
        _rows_like(visiting_grad_v, num_keys),
    )


@register_fake("distca::attend")
def _(q, k, v, layout, rows, softmax_scale, tasks):
    return _rows_like(q), _lse_of(q)


@register_fake("distca::attend_backward")
def _(grad_out, q, k, v, out, lse, layout, rows, softmax_scale, tasks):
    return _rows_like(q), _rows_like(k), _rows_like(v)


@register_fake("distca::combine")
def _(out, lse, visiting_out, visiting_lse, layout, rows, group_name):
    return _rows_like(out), _rows_like(lse)


@register_fake("distca::combine_backward")
def _(grad_out, layout, rows, group_name):
    return _rows_like(grad_out), _rows_like(grad_out, get_ctx().new_dynamic_size())
