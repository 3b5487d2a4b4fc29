"""Shapes of the operators without data, for torch.compile and fake tensors."""

import torch
from torch import Tensor
from torch.library import register_fake

from distca import _library  # noqa: F401  the operators must be there first


def _lse_of(out: Tensor) -> Tensor:
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    return out.new_empty(out.shape[:2], dtype=dtype)


def _rows_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


@register_fake("distca::core_attention")
def _(q, k, v, layout, rows, softmax_scale, group_name, num_kept_queries=0, num_kept_keys=0, **_):
    queries, keys = num_kept_queries * q.shape[1], 2 * num_kept_keys * k.shape[1]
    return _rows_like(q), _lse_of(q), q.new_empty((queries + keys) * q.shape[2])


@register_fake("distca::core_attention_backward")
def _(grad_out, q, k, v, out, lse, layout, rows, softmax_scale, group_name, kept=None, caller=-1):
    return _rows_like(q), _rows_like(k), _rows_like(v)


@register_fake("distca::attend")
def _(q, k, v, layout, rows, softmax_scale, tasks):
    return _rows_like(q), _lse_of(q)


@register_fake("distca::attend_backward")
def _(grad_out, q, k, v, out, lse, layout, rows, softmax_scale, tasks):
    return _rows_like(q), _rows_like(k), _rows_like(v)
