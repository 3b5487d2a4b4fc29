"""Check attention of a few documents against matrix products, with limits on the error."""

from dataclasses import dataclass

import torch
from attention_cases import Case
from torch import Tensor

MAX_SCORES = 1 << 26  # of one block of query rows
BLOCK_ROWS = 32  # rows with one limit: late rows of a document are small, and so are their errors
LSE_LIMIT = 1e-3
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Sample:
    """A document and a key head of a case, with the query heads that read it."""

    q_rows: slice
    k_rows: slice
    q_heads: slice
    kv_head: int
    positions: Tensor  # [query rows], position in the document, on the CPU

    @classmethod
    def of(cls, case: Case, document: int, kv_head: int) -> "Sample":
        tasks = case.documents[document]
        positions = [torch.arange(t.num_keys - t.num_rows, t.num_keys) for t in tasks]
        group = case.heads.q // case.heads.kv
        return cls(
            slice(tasks[0].q_row, tasks[-1].q_row + tasks[-1].num_rows),
            slice(tasks[0].k_row, tasks[0].k_row + tasks[-1].num_keys),
            slice(kv_head * group, (kv_head + 1) * group),
            kv_head,
            torch.cat(positions),
        )

    def queries(self, tensor: Tensor) -> Tensor:
        """Return the sample's part of q or out: [query rows, heads of the group, ...]."""
        return tensor[self.q_rows, self.q_heads]

    def keys(self, tensor: Tensor) -> Tensor:
        """Return the sample's part of k or v: [key rows, head_dim]."""
        return tensor[self.k_rows, self.kv_head]


def samples_of(case: Case) -> list[Sample]:
    """Return samples of the first, longest and last document, and the first and last key head."""
    documents = case.documents
    longest = max(range(len(documents)), key=lambda idx: documents[idx][-1].num_keys)
    chosen = sorted({0, longest, len(documents) - 1})
    heads = [0, case.heads.kv - 1]
    if len(chosen) == 1:
        return [Sample.of(case, chosen[0], head) for head in heads]
    return [Sample.of(case, document, heads[i % 2]) for i, document in enumerate(chosen)]


@dataclass(frozen=True)
class Result:
    """Results of a sample in float32, where value_dim is the head_dim of v."""

    out: Tensor  # [rows, group, value_dim]
    dq: Tensor  # [rows, group, head_dim]
    dk: Tensor  # [keys, head_dim]
    dv: Tensor  # [keys, value_dim]
    lse: Tensor  # [rows, group]

    def named(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES}


def reference(sample: Sample, inputs: tuple[Tensor, ...], scale: float, dtype: torch.dtype):
    """Compute the sample's Result with matrices in `dtype` and sums over row blocks in float32."""
    all_q, all_k, all_v, all_grad = inputs
    k, v = sample.keys(all_k).to(dtype), sample.keys(all_v).to(dtype)
    q, grad_out = sample.queries(all_q).to(dtype), sample.queries(all_grad).to(dtype)
    num_rows, group, _ = q.shape
    dk, dv = (torch.zeros(tensor.shape, device=k.device) for tensor in (k, v))
    parts = []
    block = max(1, MAX_SCORES // (group * k.shape[0]))
    for begin in range(0, num_rows, block):
        positions = sample.positions[begin : begin + block]
        num_keys = int(positions.max()) + 1
        hidden = torch.arange(num_keys, device=k.device) > positions.to(k.device)[:, None]
        # [rows * group, ...], so that one product serves all heads of the group.
        q_rows, grad_rows = (
            tensor[begin : begin + block].flatten(end_dim=1) for tensor in (q, grad_out)
        )
        keys, values = k[:num_keys], v[:num_keys]
        hidden = hidden.repeat_interleave(group, dim=0)
        scores = ((q_rows @ keys.T) * scale).float().masked_fill_(hidden, float("-inf"))
        lse = scores.logsumexp(-1)
        probabilities = (scores - lse[:, None]).exp_().to(dtype)
        del scores
        out = probabilities @ values
        delta = (out.float() * grad_rows.float()).sum(-1, keepdim=True)
        grad_scores = (grad_rows @ values.T).float().sub_(delta).mul_(probabilities).to(dtype)
        dv[:num_keys] += probabilities.T @ grad_rows
        dk[:num_keys] += (grad_scores.T @ q_rows).float() * scale
        dq = (grad_scores @ keys).float() * scale
        parts.append([rows.unflatten(0, (-1, group)) for rows in (out.float(), dq, lse)])
    out, dq, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Result(out, dq, dk, dv, lse)


def block_maxima(tensor: Tensor) -> Tensor:
    """Return the largest magnitude of every BLOCK_ROWS rows, or NaN if they contain a NaN."""
    return torch.stack([rows.abs().max() for rows in tensor.split(BLOCK_ROWS)])


class Checker:
    """Checks results of a case against references that it computes once."""

    def __init__(self, case: Case, inputs: tuple[Tensor, ...]) -> None:
        self._truths = []  # (sample, truth, limits by name)
        scale, dtype = case.heads.softmax_scale, inputs[0].dtype
        for sample in samples_of(case):
            truth = reference(sample, inputs, scale, torch.float32)
            rough = reference(sample, inputs, scale, dtype).named()
            limits = {
                name: 2 * block_maxima(rough[name] - exact)
                + block_maxima(exact.to(dtype).float() - exact)
                for name, exact in truth.named().items()
            }
            self._truths.append((sample, truth, limits))

    def lse_errors(self, lse: Tensor) -> list[str]:
        """Describe the errors of lse [rows, heads]."""
        lines = []
        for sample, truth, _ in self._truths:
            error = (sample.queries(lse) - truth.lse).abs().max().item()
            if not error <= LSE_LIMIT:
                lines.append(f"lse: error {error:.3e}, limit {LSE_LIMIT:.0e}, {where(sample)}")
        return lines

    def errors(self, **results: Tensor) -> list[str]:
        """Describe the errors of results, named as in NAMES, in one line each."""
        lines = []
        for sample, truth, limits in self._truths:
            for name, tensor in results.items():
                rows = sample.queries(tensor) if name in ("out", "dq") else sample.keys(tensor)
                errors = block_maxima(rows.float() - truth.named()[name])
                bad = ~(errors <= limits[name])
                if bad.any():
                    block = int(bad.nonzero()[0])
                    lines.append(
                        f"{name}: error {errors[block]:.3e}, limit {limits[name][block]:.3e} in "
                        f"rows from {block * BLOCK_ROWS}, {int(bad.sum())} of {bad.numel()} blocks "
                        f"wrong, {where(sample)}"
                    )
        return lines


def where(sample: Sample) -> str:
    return f"document at key row {sample.k_rows.start}, key head {sample.kv_head}"


def relative_difference(result: Tensor, other: Tensor) -> float:
    return ((result.float() - other.float()).norm() / other.float().norm()).item()
