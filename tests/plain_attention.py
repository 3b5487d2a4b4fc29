"""Attention over a task list by the operators under test, and a reference with limits on errors.

The reference computes one masked matrix of scores per document.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from task_lists import Part, TaskList
from torch import Tensor

ops = torch.ops.distca
FP32_NOISE = 2.0**-22  # of sums whose terms cancel, relative to the largest term


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Heads(NamedTuple):
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int | None = None  # None: as head_dim

    @property
    def scale(self) -> float:
        """Return a scale other than the default, so that ignoring the argument shows."""
        return 0.7 * self.head_dim**-0.5


def random_inputs(tasks: TaskList, heads: Heads, dtype: torch.dtype, seed: int = 0) -> Inputs:
    generator = torch.Generator(tasks.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=tasks.device).to(dtype)

    head_dim_v = heads.head_dim_v or heads.head_dim
    return Inputs(
        normal(tasks.num_q_rows, heads.heads_q, heads.head_dim),
        normal(tasks.num_k_rows, heads.heads_kv, heads.head_dim),
        normal(tasks.num_k_rows, heads.heads_kv, head_dim_v),
        normal(tasks.num_q_rows, heads.heads_q, head_dim_v),
    )


@contextmanager
def deterministic_mode(enabled: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def poison(device: torch.device) -> None:
    """Fill free memory with NaN, so that elements that an operator never wrote show."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    sizes = [2**20] * 16 + [2**21] * 32 + [2**29]  # small blocks, gaps between live ones, the rest
    held = [torch.full((size // 4,), float("nan"), device=device) for size in sizes]
    del held


def attend(tasks: TaskList, inputs: Inputs, scale: float, deterministic: bool = False) -> Results:
    q, k, v, grad_out = inputs
    share = (tasks.layout, tasks.rows, scale, tasks.name)
    with deterministic_mode(deterministic):
        poison(q.device)
        out, lse = ops.attend(q, k, v, *share)
        poison(q.device)
        grads = ops.attend_backward(grad_out, q, k, v, out, lse, *share)
    return Results(out, lse, *grads)


def visible(part: Part, window_size: tuple[int, int]) -> Tensor:
    """Return the mask of visible keys, bool [queries, keys]."""
    left, right = window_size
    behind = part.q_positions[:, None] - part.k_positions[None, :]
    mask = torch.ones_like(behind, dtype=torch.bool)
    if left >= 0:
        mask &= behind <= left
    if right >= 0:
        mask &= -behind <= right
    return mask


def plain(
    tasks: TaskList,
    inputs: Inputs,
    scale: float,
    dtype: torch.dtype,
    softmax_dtype: torch.dtype | None = None,
) -> Results:
    """Compute attention in `dtype`, with scores and softmax in `softmax_dtype`.

    Rows without a task are 0.
    """
    softmax_dtype = softmax_dtype or dtype
    q, k, v, grad_out = (tensor.to(dtype) for tensor in inputs)
    lse = torch.zeros(q.shape[:2], dtype=softmax_dtype, device=q.device)
    zeros = [torch.zeros_like(tensor) for tensor in (grad_out, q, k, v)]
    results = Results(zeros[0], lse, *zeros[1:])
    for part in tasks.served:
        rows = (part.q_rows, part.k_rows, part.k_rows)
        leaves = [x[at].requires_grad_() for x, at in zip((q, k, v), rows, strict=True)]
        mask = visible(part, tasks.window_size)
        scores = _scores(*leaves[:2], scale, softmax_dtype).masked_fill(~mask, float("-inf"))
        of_document = _softmax if softmax_dtype == dtype else _softmax_of_kernels
        out, part_lse = of_document(scores, leaves[2], grad_out[part.q_rows])
        results.out[part.q_rows] = out.detach().flatten(1, 2)
        results.lse[part.q_rows] = part_lse.detach().flatten(0, 1).t()
        for grad, at, leaf in zip((results.dq, results.dk, results.dv), rows, leaves, strict=True):
            grad[at] = leaf.grad
    return results


def _scores(q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scores [heads_kv, group, queries, keys]."""
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
    return torch.einsum("qhgd,khd->hgqk", grouped, k.to(dtype)) * scale


def _softmax(scores: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [queries, heads_kv, group, head_dim] and lse, after out's backward pass."""
    out = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v)
    out.backward(grad_out.view_as(out))
    return out, scores.detach().logsumexp(-1)


def _softmax_of_kernels(scores: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same, but take lse's gradient from the rounded `out`, as kernels do."""
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.detach().unsqueeze(-1)).exp()
    out = torch.einsum("hgqk,khd->qhgd", probabilities.to(v.dtype), v)
    grad = grad_out.view_as(out)
    delta = (out.detach().to(lse.dtype) * grad).sum(-1).permute(1, 2, 0)
    torch.autograd.backward([out, lse], [grad, -delta])
    return out, lse


class Outside(AssertionError):
    """Raised if a result is farther from the truth than its limit."""


@dataclass
class Reference:
    """Results in float64, and limits on errors.

    A limit is twice the error of plain attention in the inputs' dtype, plus the rounding of the
    truth to that dtype. Each block of rows of a document has its own limit, because late rows of a
    long document are means over many keys: otherwise a missing key would hide behind the errors of
    the first rows.
    """

    tasks: TaskList
    truth: Results
    limits: dict[str, Tensor]  # float64 [blocks]
    lse_limit: float

    def check(self, results: Results) -> None:
        for name, limit in self.limits.items():
            block = self._block(name)
            result, truth = getattr(results, name), getattr(self.truth, name)
            if result.shape != truth.shape:
                raise Outside(f"{name} has shape {result.shape}, not {truth.shape}")
            served = block >= 0
            if not result[served].isfinite().all():
                raise Outside(f"{name} is not finite in rows {_first(result, block)}")
            error = _by_block((result.double() - truth).abs(), block, limit.numel())
            excess = error - limit
            if (excess > 0).any():
                worst = int(excess.argmax())
                rows = (block == worst).nonzero()[[0, -1], 0].tolist()
                raise Outside(
                    f"{name}, rows {rows[0]} to {rows[1]} of one document: error "
                    f"{error[worst]:.3e}, limit {limit[worst]:.3e}"
                )
            self._check_rows_of_no_task(name, result, ~served)
        served = self.tasks.q_block >= 0
        difference = (results.lse.double() - self.truth.lse)[served].abs()
        if not (difference <= self.lse_limit).all():
            raise Outside(f"lse: error {difference.max():.3e}, limit {self.lse_limit:.3e}")

    def _block(self, name: str) -> Tensor:
        return self.tasks.q_block if name in ("out", "dq") else self.tasks.k_block

    def _check_rows_of_no_task(self, name: str, result: Tensor, rows: Tensor) -> None:
        if (result[rows] != 0).any():
            raise Outside(f"{name} is not 0 in rows of no task")


def reference(
    tasks: TaskList, inputs: Inputs, scale: float, softmax_dtype: torch.dtype | None = None
) -> Reference:
    """Compute the reference.

    Pass `softmax_dtype` if scores are too large for the precision of the inputs' dtype.
    """
    truth = plain(tasks, inputs, scale, torch.float64)
    in_dtype = plain(tasks, inputs, scale, inputs.q.dtype, softmax_dtype)
    largest_score = float(truth.lse.abs().max()) if truth.lse.numel() else 0.0
    noise = FP32_NOISE * (1 if softmax_dtype is None else 1 + largest_score)
    limits = {}
    for name, floor in _floors(inputs, scale, noise).items():
        block = tasks.q_block if name in ("out", "dq") else tasks.k_block
        num_blocks = int(block.max()) + 1 if block.numel() else 0
        exact, rounded = getattr(truth, name), getattr(in_dtype, name)
        error = _by_block((rounded.double() - exact).abs(), block, num_blocks)
        # A result next to a tie may round the other way: half a unit of the largest value.
        unit = torch.finfo(rounded.dtype).eps
        rounding = unit * _by_block(exact.abs(), block, num_blocks) / 2
        limits[name] = 2 * error + rounding + floor
    # An error of lse scales the probabilities of its row. The limit is a tenth of bfloat16's
    # rounding plus the fp32 rounding of large scores.
    return Reference(tasks, truth, limits, 2e-4 + 2.0**-17 * largest_score)


def _floors(inputs: Inputs, scale: float, noise: float) -> dict[str, float]:
    """Return the noise of fp32 sums where plain attention is exact, as in dq = 0 of one key."""
    if min(tensor.numel() for tensor in inputs) == 0:
        return dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    largest = Inputs(*(float(tensor.abs().max()) for tensor in inputs))
    norm_v, norm_grad = (float(x.float().norm(dim=-1).max()) for x in (inputs.v, inputs.grad_out))
    of_scores = noise * norm_v * norm_grad * abs(scale)
    return {
        "out": noise * largest.v,
        "dq": of_scores * largest.k,
        "dk": of_scores * largest.q,
        "dv": noise * largest.grad_out,
    }


def _by_block(error: Tensor, block: Tensor, num_blocks: int) -> Tensor:
    """Return the largest error of each block."""
    largest = torch.zeros(num_blocks, dtype=torch.float64, device=error.device)
    served = block >= 0
    return largest.scatter_reduce(0, block[served], error[served].amax((1, 2)), "amax")


def _first(result: Tensor, block: Tensor) -> list[int]:
    bad = ~result.isfinite().flatten(1).all(1) & (block >= 0)
    return bad.nonzero()[:3, 0].tolist()
