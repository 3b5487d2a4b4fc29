"""One small attention layer per rank, for tests of errors and failures."""

from dataclasses import dataclass

import torch
from oracle import Case
from torch import Tensor

import distca

WHOLE = Case([[300, 11], [5], [7]], dtype=torch.float32)
# Every pair of ranks exchanges rows.
SHARDED = Case([[10, 50, 100, 1200, 30], [], []], dtype=torch.float32, sharded=True)


@dataclass
class Step:
    """This rank's documents, without a plan, and its rows of q, k, v."""

    documents: distca.Documents
    q: Tensor
    k: Tensor
    v: Tensor

    def attend(self, **arguments) -> Tensor:
        return distca.core_attention(self.q, self.k, self.v, self.documents, **arguments)


def small_step(rank: int, world_size: int, case: Case = WHOLE) -> Step:
    documents = (
        distca.Documents.sharded(case.all_lengths, rank, world_size)
        if case.sharded
        else distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    )
    rows = case.rows_of(rank)
    q, k, v = (tensor[rows].clone().requires_grad_() for tensor in case.inputs()[:3])
    return Step(documents, q, k, v)
