"""A transport from outside the library carries the rows of attention."""

import extension
import oracle
import pytest
import torch
from oracle import Case

import distca

CASES = {
    "whole documents": Case([[150, 1, 0, 55], [37], [9]], heads_q=4, heads_kv=2, head_dim=8),
    "crossing": Case([[150, 1, 0, 55], [37], [9]], 4, 2, 8, sharded=True),
}


def attend(rank: int, world_size: int, case: Case, options: dict) -> tuple[list, int, list]:
    """Return (results, rounds that the added transport began, visiting inputs that were kept)."""
    extension.load()
    torch.ops.distca_tests.add_mailbox()
    distca.close()
    distca.init(options=distca.Options(**options))
    before = torch.ops.distca_tests.mailbox_rounds()
    q, k, v, grad_out = (tensor[case.rows_of(rank)] for tensor in case.inputs())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    documents = (
        distca.Documents.sharded(case.all_lengths, rank, world_size)
        if case.sharded
        else distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    )
    plan = distca.plan(documents)
    out = distca.core_attention(*leaves, documents)
    out.backward(grad_out)
    num_rounds = torch.ops.distca_tests.mailbox_rounds() - before
    kept = torch.ops.distca.kept_rows(plan.layout)
    distca.close()
    return [out.detach(), *(leaf.grad for leaf in leaves)], num_rounds, kept


@pytest.mark.usefixtures("test_extension")
@pytest.mark.parametrize("keep_inputs_gb", [0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_an_added_transport_equals_the_oracle(ranks, name, keep_inputs_gb):
    case = CASES[name]
    options = {"transport": "mailbox", "keep_inputs_gb": keep_inputs_gb}
    results, num_rounds, kept = zip(*ranks(3).run(attend, case, options), strict=True)
    assert num_rounds == (2, 2, 2), "a round of the forward pass and one of the backward pass"
    assert any(map(any, kept)) == (keep_inputs_gb > 0)
    joined = [torch.cat(parts) for parts in zip(*results, strict=True)]
    oracle.assert_close(joined, oracle.forward_backward(case), [1e-12] * 4)


def open_unknown(rank: int, world_size: int) -> str:
    distca.close()
    with pytest.raises(ValueError) as refused:
        distca.init(options=distca.Options(transport="pigeon"))
    return str(refused.value)


def test_an_unknown_transport_is_refused(ranks):
    for error in ranks(2).run(open_unknown):
        assert error.startswith("transport is 'pigeon'; expected one of auto, peer, ")
        assert "process_group" in error
