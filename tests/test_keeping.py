"""Servers keep inputs of visiting rows from the forward to the backward pass."""

import oracle
import pytest
import torch
from layout_words import numbers_of_rows
from oracle import Case
from pingpong_blocks import LENGTHS, pair_of, step_of
from ranks import MOVE_ALWAYS
from test_compile import NUM_STEPS, documents_of, train_compiled
from test_core_attention import PACKS, WHOLE, gathered, place
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import distca
from distca.planning.solver import tasks_of

ops = torch.ops.distca
CASES = {
    "whole": Case(WHOLE["skewed"]),
    "window": Case(WHOLE["skewed"], window_size=(90, 0)),
    "crossing": Case([PACKS["mixed"], [], [], []], sharded=True),
    "over all": Case([PACKS["one_over_all"], [], [], []], sharded=True),
    "full": Case(WHOLE["skewed"], window_size=(-1, -1)),
    "narrow v": Case(WHOLE["skewed"], head_dim_v=8),
    "wide v": Case([PACKS["mixed"], [], [], []], head_dim_v=40, sharded=True),
}


class KeptElements(TorchDispatchMode):
    """Records the number of elements that calls of core_attention keep."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is ops.core_attention.default:
            self.numbers.append(results[2].numel())
        return results


def open_with(**options) -> None:
    distca.close()
    distca.init(options=distca.Options(**MOVE_ALWAYS, **options))


def attend_keeping(rank, world_size, case, options):
    """Return this rank's results, its kept rows, its visiting rows, and the report."""
    open_with(**options)
    documents, leaves, grad_out = place(rank, world_size, case)
    plan = distca.plan(documents, window_size=case.window_size, shape=case.shape)
    out = distca.core_attention(*leaves, documents, window_size=case.window_size)
    out.backward(grad_out)
    visiting = [0, 0]
    if not options.get("memory_cap_gb"):
        _, rows = numbers_of_rows(plan.layout)
        visiting = [rows["visiting queries"], rows["visiting keys"]]
    report = plan.report()
    distca.close()
    results = [out.detach(), *(leaf.grad for leaf in leaves)]
    kept = ops.kept_rows(plan.layout)
    return results, kept, visiting, (report.bytes_out, report.bytes_in)


@pytest.mark.parametrize("name", CASES)
def test_all_kept_equals_the_oracle(ranks, name):
    case = CASES[name]
    per_rank = ranks(4).run(attend_keeping, case, {"keep_inputs_gb": 1.0})
    assert [kept for _, kept, _, _ in per_rank] == [visiting for _, _, visiting, _ in per_rank]
    assert any(any(kept) for _, kept, _, _ in per_rank), "no rank keeps anything"
    results = gathered([results for results, *_ in per_rank])
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def bytes_kept(case, rows) -> int:
    queries, keys = rows
    widths_of_keys = case.head_dim + (case.head_dim_v or case.head_dim)
    return (case.heads_q * queries * case.head_dim + case.heads_kv * keys * widths_of_keys) * 8


@pytest.mark.parametrize("name", CASES)
def test_some_kept_equals_the_oracle_within_the_budget(ranks, name):
    """The budget is the least that a rank with visiting rows could keep."""
    case = CASES[name]
    every = ranks(4).run(attend_keeping, case, {"keep_inputs_gb": 1.0})
    wanted = [bytes_kept(case, kept) for _, kept, _, _ in every]
    budget = min(filter(None, wanted))
    per_rank = ranks(4).run(attend_keeping, case, {"keep_inputs_gb": 1e-9 * budget + 1e-12})
    kept = [bytes_kept(case, rows) for _, rows, _, _ in per_rank]
    assert 0 < sum(kept) < sum(wanted) and max(kept) <= budget
    results = gathered([results for results, *_ in per_rank])
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def test_rounds_keep_too(ranks):
    case = Case([[900, 1, 0, 55], [37, 64, 64], [12, 80, 80]])
    cap_gb = 1e-9 * 1100 * 4 * case.heads_kv * case.head_dim * 8
    options = {"memory_cap_gb": cap_gb, "rounds": 4, "keep_inputs_gb": 1.0}
    per_rank = ranks(3).run(attend_keeping, case, options)
    assert any(any(kept) for _, kept, *_ in per_rank)
    results = gathered([results for results, *_ in per_rank])
    oracle.assert_close(results, oracle.forward_backward(case), [1e-12] * 4)


def test_reported_bytes_leave_out_kept_inputs(ranks):
    case = CASES["whole"]
    without, keeping = (
        ranks(4).run(attend_keeping, case, {"keep_inputs_gb": budget}) for budget in (0.0, 1.0)
    )
    for rank, (_, kept, _, (_, bytes_in)) in enumerate(keeping):
        assert without[rank][3][1][rank] - bytes_in[rank] == bytes_kept(case, kept)
    assert sum(without[0][3][0]) - sum(keeping[0][3][0]) == sum(
        a - b for a, b in zip(without[0][3][1], keeping[0][3][1], strict=True)
    )


def queries_unharmed(rank, world_size, case, budget):
    """Lose the inputs before the backward pass. Return which queries have finite gradients."""
    open_with(keep_inputs_gb=budget)
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents, window_size=case.window_size, shape=case.shape)
    out = distca.core_attention(*leaves, documents, window_size=case.window_size)
    for leaf in leaves:
        leaf.data.fill_(float("nan"))  # autograd does not notice, so rows sent again are NaN
    out.backward(grad_out)
    distca.close()
    return leaves[0].grad.isfinite().all(dim=(1, 2))


def test_kept_rows_do_not_travel_again(ranks):
    """Queries whose server kept their inputs have gradients, although their home lost them.

    Home tasks read the inputs again, so their gradients are NaN.
    """
    case = CASES["whole"]
    keeping = torch.cat(ranks(4).run(queries_unharmed, case, 1.0))
    without = torch.cat(ranks(4).run(queries_unharmed, case, 0.0))
    assert keeping.any() and not without.any()


def attend_otherwise(rank, world_size, case):
    """Return results without gradients, plain, and under both kinds of checkpointing."""
    open_with(keep_inputs_gb=1.0)
    documents, leaves, grad_out = place(rank, world_size, case)
    distca.plan(documents, shape=case.shape)

    def attend(*qkv):
        return distca.core_attention(*qkv, documents)

    with torch.no_grad(), KeptElements() as nothing:
        inferred = attend(*leaves)
    results = []
    for run in (
        attend,
        lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False),
        lambda *qkv: checkpoint(attend, *qkv, use_reentrant=True),
    ):
        out = run(*leaves)
        out.backward(grad_out)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    distca.close()
    return [torch.equal(inferred, results[0][0])], results, nothing.numbers


def test_checkpointing_and_inference(ranks):
    case = CASES["whole"]
    for same, results, without_gradients in ranks(4).run(attend_otherwise, case):
        assert all(same) and without_gradients == [0]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def wrong_calls(rank, world_size, case):
    open_with(keep_inputs_gb=1.0)
    documents, leaves, _ = place(rank, world_size, case)
    plan = distca.plan(documents, shape=case.shape)
    tensors = [leaf.detach() for leaf in leaves]
    share = plan.layout, plan.rows, 0.2, plan.group_name
    out, lse, _ = ops.core_attention(*tensors, *share)
    messages = []
    for call in (
        lambda: ops.core_attention(*tensors, *share, -1, 1),
        lambda: ops.core_attention_backward(out, *tensors, out, lse, *share, out.new_empty(1, 1)),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    distca.close()
    return messages


def test_wrong_numbers_are_refused(ranks):
    for messages in ranks(1).run(wrong_calls, Case([[100, 20]])):
        assert len(messages) == 2, messages
        assert "num_kept_queries is -1 and num_kept_keys 1, which is room for 0" in messages[0]
        assert "kept is torch.DoubleTensor of [1, 1] elements; expected the 0" in messages[1]


@pytest.mark.parametrize("name", ["keep_inputs_gb", "peer_memory_gb"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_options_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        distca.Options(**{name: value})


def test_tasks_of_one_document_are_kept_alike():
    pieces = torch.tensor([[0, 0, 0, 100], [1, 1, 0, 50]])
    tasks = [[1, 0, 50, 1, 0], [0, 0, 20, 1, 1], [0, 20, 100, 1, 0]]
    columns = torch.tensor(sorted(tasks))
    with pytest.raises(ValueError, match="a server keeps the inputs of all visiting tasks"):
        ops.plan_of_tasks(pieces, columns, 2, -1, 0)
    columns[:, 4] = torch.tensor([1, 1, 0])
    plan = ops.plan_of_tasks(pieces, columns, 2, -1, 0)
    assert tasks_of(plan)[:, 4].tolist() == [1, 1, 0]
    columns[:, 4] = 1  # also of the home task, which keeps nothing
    assert torch.equal(ops.plan_of_tasks(pieces, columns, 2, -1, 0), plan)
    columns[:, 4] = torch.tensor([1, 1, 0])
    plan[-1] = 1
    with pytest.raises(ValueError, match="and of no home task"):
        ops.layout(pieces, plan, 0, 0, "cpu")


def compile_keeping(rank, world_size):
    """Return the result of train_compiled, and the kept rows of its steps."""
    open_with(keep_inputs_gb=1.0)
    result = train_compiled(rank, world_size, "argument", "aot_eager")
    rows = [distca.plan(documents_of(step, rank)).kept_rows for step in range(NUM_STEPS)]
    distca.close()
    return result, rows


def test_compiles_once_for_all_documents(ranks):
    per_rank = ranks(2).run(compile_keeping)
    for result, _ in per_rank:
        assert result["worst"] <= 1e-5
        assert result["num_graphs"] <= 2
    assert len({rows for _, of_rank in per_rank for rows in of_rank}) > 5


def ping_pong_keeping(rank, world_size):
    """Return the largest error against the bare block, and the rows that each half keeps."""
    open_with(keep_inputs_gb=1.0)
    bare, block = pair_of()
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    truth = step.run(bare, step.documents)
    errors = map(oracle.relative_error, step.run(block, step.documents), truth)
    (halves,) = step.documents._halves.values()
    kept = [sum(ops.kept_rows(half._plans[half.plan_key((-1, 0))].layout)) for half in halves]
    distca.close()
    return max(errors), kept


def test_ping_pong_keeps(ranks):
    per_rank = ranks(4).run(ping_pong_keeping)
    assert max(error for error, _ in per_rank) <= 1e-12
    for half in zip(*(kept for _, kept in per_rank), strict=True):
        assert any(half)


def check_operators(rank, world_size, case):
    """Run opcheck on both passes. Return the number of elements that this rank keeps."""
    open_with(keep_inputs_gb=1.0)
    documents, leaves, grad_out = place(rank, world_size, case)
    plan = distca.plan(documents, shape=case.shape)
    share = plan.layout, plan.rows, case.head_dim**-0.5, plan.group_name
    detached = [leaf.detach() for leaf in leaves]
    out, lse, kept = ops.core_attention(*detached, *share, *plan.kept_rows)
    opcheck(ops.core_attention, (*leaves, *share, *plan.kept_rows))
    opcheck(ops.core_attention_backward, (grad_out, *detached, out, lse, *share, kept))
    distca.close()
    return kept.numel()


@pytest.mark.parametrize("head_dim_v", [8, 4])
def test_opcheck(ranks, head_dim_v):
    case = Case([[300, 20], [37]], 2, 1, head_dim=8, head_dim_v=head_dim_v)
    assert max(ranks(2).run(check_operators, case, timeout_s=60)) > 100
