"""Passes without gradients are balanced under Options.balance_no_grad, and only then."""

import pytest
import torch
import torch.nn.functional as F
from oracle import Case, max_error
from ranks import MOVE_ALWAYS
from test_call_orders import HANG_S, broken_ranks  # noqa: F401  a fixture
from test_core_attention import WHOLE, place

import distca

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
CASE = Case(WHOLE["skewed"])


def opened(**options) -> None:
    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS, **options))


def errors_without_gradients(documents: distca.Documents, inputs: list, mode: str) -> list[float]:
    """Enter the scope of `documents` in `mode`, and compare two calls with those of this rank."""
    alone = distca.core_attention(*inputs, documents.unplanned())
    with MODES[mode](), distca.documents(documents):
        outs = [distca.core_attention(*inputs, documents) for _ in range(2)]
    return [max_error(each, alone) for each in outs]


def pass_and_train(rank: int, world_size: int, mode: str, is_balanced: bool):
    """Return the worst error of passes without gradients and of training after them, and the bytes
    that each plan of the former sends."""
    opened(balance_no_grad=is_balanced)
    documents, leaves, grad_out = place(rank, world_size, CASE)
    errors = errors_without_gradients(documents, [each.detach() for each in leaves], mode)
    by_plan = [sum(each.report().bytes_out) for each in documents._plans.values()]
    results = []
    for plans in (False, True):
        copies = [each.detach().requires_grad_() for each in leaves]
        trained = documents.unplanned()
        if plans:
            distca.plan(trained)
        out = distca.core_attention(*copies, trained)
        results.append([out, *torch.autograd.grad(out, copies, grad_out)])
    distca.close()
    errors += [max_error(*pair) for pair in zip(*results, strict=True)]
    return max(errors), by_plan


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_balanced_passes_equal_those_of_one_rank(ranks, world_size, mode):
    results = ranks(world_size).run(pass_and_train, mode, True)
    assert max(error for error, _ in results) <= 1e-12
    assert all(len(by_plan) == 1 for _, by_plan in results)
    assert sum(by_plan[0] for _, by_plan in results) > 0, "the case must move rows"


def test_by_default_passes_without_gradients_have_no_plan(ranks):
    for error, by_plan in ranks(2).run(pass_and_train, "no_grad", False):
        assert error <= 1e-12 and by_plan == []


def errors_of_drop_ins(rank: int, world_size: int) -> list[float]:
    """Compare torch's functions in the scope with those of single documents."""
    opened(balance_no_grad=True)
    documents, leaves, _ = place(rank, world_size, CASE)
    q, k, v = (each.detach().transpose(0, 1)[None] for each in leaves)
    lengths, errors = documents.cu_seqlens.diff().tolist(), []
    parts = zip(*(each.split(lengths, dim=2) for each in (q, k, v)), strict=True)
    how = {"is_causal": True, "enable_gqa": True}
    truth = torch.cat([F.scaled_dot_product_attention(*each, **how) for each in parts], dim=2)
    with torch.no_grad(), distca.documents(documents):
        out = distca.scaled_dot_product_attention(q, k, v, **how)
        errors.append(max_error(out, truth))
        errors.append(max_error(out + 1e-9, truth))
    distca.close()
    return errors


def test_drop_ins_are_balanced_and_a_difference_is_noticed(ranks):
    for error, planted in ranks(2).run(errors_of_drop_ins):
        assert error <= 1e-12 < planted


def leave_a_pass_out(rank: int, world_size: int) -> None:
    opened(balance_no_grad=True)
    documents, leaves, grad_out = place(rank, world_size, CASE)
    if rank != 1:
        errors_without_gradients(
            documents.unplanned(), [each.detach() for each in leaves], "no_grad"
        )
    for _ in range(2):
        with distca.documents(documents.unplanned()) as planned:
            distca.core_attention(*leaves, planned).backward(grad_out)


def test_a_rank_that_leaves_a_pass_out_is_an_error_everywhere(broken_ranks):  # noqa: F811
    for outcome in broken_ranks.outcomes(leave_a_pass_out, timeout_s=HANG_S):
        assert outcome.error_type in ("DistBackendError", "ValueError"), outcome
