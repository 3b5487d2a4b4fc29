"""Naive attention in float64 in one process, and comparisons of results with it."""

from dataclasses import dataclass

import torch
from torch import Tensor

import distca


@dataclass
class Case:
    """A global pack of documents and its distribution over ranks."""

    lengths: list[list[int]]
    """Document lengths by rank; a rank may have none. With `sharded`, they form one pack."""
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 24
    window_size: tuple[int, int] = (-1, 0)
    sharded: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0
    qk_size: float = 1.0
    """Standard deviation of q and k."""
    grad_out_size: float = 1.0
    softcap: float | None = None
    head_dim_v: int | None = None
    """head_dim of v, out and grad_out. None: as head_dim."""

    @property
    def shape(self) -> distca.AttentionShape:
        dims = (self.head_dim, self.dtype.itemsize, self.head_dim_v)
        return distca.AttentionShape(self.heads_q, self.heads_kv, *dims)

    @property
    def all_lengths(self) -> list[int]:
        return [length for held in self.lengths for length in held]

    @property
    def num_tokens(self) -> int:
        return sum(self.all_lengths)

    def rows_of(self, rank: int) -> slice:
        """Return the rank's rows of the global pack."""
        world_size = len(self.lengths)
        if self.sharded:
            total = self.num_tokens
            return slice(total * rank // world_size, total * (rank + 1) // world_size)
        first = sum(sum(held) for held in self.lengths[:rank])
        return slice(first, first + sum(self.lengths[rank]))

    def inputs(self) -> list[Tensor]:
        """Draw q, k, v, grad_out of the whole pack, equal on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads_q, self.heads_kv, self.heads_kv, self.heads_q)
        sizes = (self.qk_size, self.qk_size, 1.0, self.grad_out_size)
        width_v = self.shape.head_dim_v
        widths = (self.head_dim, self.head_dim, width_v, width_v)
        shapes = [(self.num_tokens, *each) for each in zip(heads, widths, strict=True)]
        return [
            (size * torch.randn(*shape, dtype=torch.float64, generator=generator)).to(self.dtype)
            for size, shape in zip(sizes, shapes, strict=True)
        ]


def scores_of(
    q: Tensor, k: Tensor, window_size: tuple[int, int], softcap: float | None = None
) -> Tensor:
    """Return [heads, queries, keys] of one document, -inf where a query does not see the key."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.shape[0], device=q.device)
    behind = position[:, None] - position[None, :]
    left, right = window_size
    visible = torch.ones_like(behind, dtype=torch.bool)
    if left >= 0:
        visible &= behind <= left
    if right >= 0:
        visible &= -behind <= right
    return scores.masked_fill(~visible, float("-inf"))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: tuple[int, int],
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend in one document with its whole score matrix; q, k, v are [tokens, heads, head_dim].

    Return out and lse [tokens, heads].
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scores_of(q, k, window_size, softcap)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).t()


def forward_backward(
    case: Case, dtype: torch.dtype = torch.float64, grad_lse: Tensor | None = None
) -> list[Tensor]:
    """Compute out, dq, dk, dv of the whole pack in `dtype`, document by document.

    `grad_lse` adds to the gradients, and lse to the end of the results. A GPU, if there is one,
    computes them in seconds instead of a minute.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, grad_out = (tensor.to(device, dtype) for tensor in case.inputs())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    parts = [tensor.split(case.all_lengths) for tensor in leaves]
    documents = zip(*parts, strict=True)
    results = [attention(*document, case.window_size, case.softcap) for document in documents]
    out, lse = (torch.cat(each) for each in zip(*results, strict=True))
    if grad_lse is None:
        out.backward(grad_out)
    else:
        torch.autograd.backward([out, lse], [grad_out, grad_lse.to(grad_out)])
    results = [out.detach(), *(leaf.grad for leaf in leaves), lse.detach()]
    return [result.cpu() for result in (results if grad_lse is not None else results[:-1])]


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return ||result - truth|| / ||truth||, which is 0 for empty tensors and may be NaN.

    Inputs have a standard deviation of 1. If the truth is nearly 0 everywhere, as dq of a single
    key, the error is relative to 1e-3 per element.
    """
    if truth.numel() == 0:
        return 0.0
    difference = (result.double() - truth.double()).norm()
    return (difference / truth.double().norm().clamp_min(1e-3 * truth.numel() ** 0.5)).item()


def truths_and_limits(case: Case) -> tuple[list[Tensor], list[float]]:
    """Return exact results, and twice the errors of plain attention in the case's dtype."""
    truths, reference = forward_backward(case), forward_backward(case, case.dtype)
    return truths, [2 * relative_error(r, t) for r, t in zip(reference, truths, strict=True)]


def max_error(result: Tensor, truth: Tensor) -> float:
    return (result.double() - truth.double()).abs().max().item() if truth.numel() else 0.0


def assert_close(results: list[Tensor], truths: list[Tensor], limits: list[float]) -> None:
    """Assert that every relative error is at most its limit; NaN fails."""
    for name, result, truth, limit in zip(
        ("out", "dq", "dk", "dv", "lse")[: len(truths)], results, truths, limits, strict=True
    ):
        assert result.shape == truth.shape, f"{name} has shape {result.shape}, not {truth.shape}"
        error = relative_error(result, truth)
        assert error <= limit, f"{name}: relative error {error:.3e}, limit {limit:.1e}"
