"""Ranks that disagree raise an error with ranks and difference, before anything is sent.

Every rank raises within 5 s, and the group still works afterwards. These groups are in their first
step, before which no rank has announced its calls; test_agreement.py has later steps.
"""

import contextlib

import oracle
import pytest
import torch
from layout_words import HEADER_WORDS, MAX_WORDS, STEP, numbers_of_rows
from oracle import Case
from ranks import Outcome, Ranks
from small_step import SHARDED, WHOLE, Step, small_step

import distca
from distca import ops
from distca.ranks import session as sessions

LIMIT_S = 5.0
HANG_S = 30  # the longest that a test waits for ranks that should have failed


def errors_of(outcomes: list[Outcome], error_type: str) -> list[str]:
    """Assert that all ranks raised `error_type` in time, and return their messages."""
    for outcome in outcomes:
        assert outcome.error_type == error_type, f"rank {outcome.rank}: {outcome}"
        assert outcome.seconds < LIMIT_S, f"rank {outcome.rank} took {outcome.seconds:.1f} s"
    return [outcome.error for outcome in outcomes]


def attend(rank: int, world_size: int, case: Case) -> torch.Tensor:
    step = small_step(rank, world_size, case)
    distca.plan(step.documents)
    return step.attend().detach()


def assert_group_works(ranks: Ranks) -> None:
    results = torch.cat(ranks.run(attend, WHOLE, timeout_s=HANG_S))
    truth = oracle.forward_backward(WHOLE)[0]
    assert oracle.relative_error(results, truth) < 1e-5


def first_step(rank: int, world_size: int, case: Case = WHOLE) -> Step:
    """Return a step of a group that no rank has used."""
    distca.close()
    return small_step(rank, world_size, case)


# Each function changes the arguments of core_attention on rank 1 only.
def _fewer_heads(step):
    step.q = step.q[:, :2]


def _other_head_dim(step):
    step.q, step.k, step.v = (tensor[..., :8] for tensor in (step.q, step.k, step.v))


def _other_width_of_v(step):
    step.v = step.v[..., :8]


def _other_dtype(step):
    step.q, step.k, step.v = (tensor.double() for tensor in (step.q, step.k, step.v))


ATTENTION_DIFFERENCES = {
    "heads_q: 2 on rank 1, 4 on ranks 0 2": _fewer_heads,
    "head_dim: 8 on rank 1, 24 on ranks 0 2": _other_head_dim,
    "v's head_dim: 8 on rank 1, 24 on ranks 0 2": _other_width_of_v,
    "dtype: Float on ranks 0 2, Double on rank 1": _other_dtype,
    "softmax_scale: ": None,
}


def attend_differently(rank: int, world_size: int, difference: str, num_good_layers: int):
    """Attend differently on rank 1, after layers in which the ranks agreed under this plan."""
    step = first_step(rank, world_size)
    distca.plan(step.documents)
    for _ in range(num_good_layers):
        step.attend(softmax_scale=0.25)
    change = ATTENTION_DIFFERENCES[difference]
    if rank == 1 and change is not None:
        change(step)
    step.attend(softmax_scale=0.5 if rank == 1 and change is None else 0.25)


def attend_with_other_places(rank: int, world_size: int, change: int) -> torch.Tensor:
    """Run attention with a layout for peer memory.

    Rank 1 changes a word that must be equal on all ranks.
    """
    step = first_step(rank, world_size, SHARDED)
    plan = distca.plan(step.documents)
    solution = plan.solution()
    layouts = [
        torch.ops.distca.layout(
            solution.pieces, solution.encoded, other, plan.layout[STEP].item(), "cuda"
        )
        for other in range(world_size)
    ]
    rows = [numbers_of_rows(layout)[1] for layout, _ in layouts]
    most = [max(row[name] for row in rows) for name in rows[0]]
    layout, packed_rows = layouts[rank]
    words = layout.tolist()
    assert words[HEADER_WORDS : HEADER_WORDS + MAX_WORDS] == most
    layout[HEADER_WORDS] += change if rank == 1 else 0
    plan.rows = torch.ops.distca.unpack_rows(layout, packed_rows)
    plan.layout = layout
    return step.attend().detach()


def test_ranks_disagree_on_where_rows_go(ranks):
    results = torch.cat(ranks(3).run(attend_with_other_places, 0, timeout_s=HANG_S))
    truth = oracle.forward_backward(SHARDED)[0]
    assert oracle.relative_error(results, truth) < 1e-5
    outcomes = ranks(3).outcomes(attend_with_other_places, 1, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert "ranks disagree on core attention, nothing was sent" in message
        assert "plan" in message


@pytest.mark.parametrize("difference", ATTENTION_DIFFERENCES)
def test_ranks_disagree_on_core_attention(ranks, difference):
    outcomes = ranks(3).outcomes(attend_differently, difference, 0, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert "ranks disagree on core attention, nothing was sent" in message
        assert difference in message
        assert "same model" in message
    assert_group_works(ranks(3))


def test_ranks_disagree_in_a_later_layer(fresh_ranks):
    outcomes = fresh_ranks.outcomes(
        attend_differently, "heads_q: 2 on rank 1, 4 on ranks 0 2", 2, timeout_s=HANG_S
    )
    assert all(outcome.error for outcome in outcomes), outcomes
    assert all(outcome.seconds < LIMIT_S for outcome in outcomes), outcomes
    assert any("heads" in outcome.error for outcome in outcomes), outcomes
    assert all("rank 1" in outcomes[rank].error for rank in (0, 2)), outcomes


def plan_differently(rank: int, world_size: int, what: str):
    step = small_step(rank, world_size)
    session = distca.init()
    real_version = ops.version
    window_size = (-1, 0)
    try:
        if rank == 1 and what == "options":
            session.options = distca.Options(tolerance=0.5)
        elif rank == 1 and what == "step":
            session.num_plans += 1
        elif rank == 1 and what == "distca version":
            ops.version = lambda: 99
        elif rank == 1:
            window_size = (7, 0) if what == "window_left" else (-1, -1)
        distca.plan(step.documents, window_size=window_size)
    finally:
        if rank == 1:
            session.options = distca.Options()
            ops.version = real_version
            session.num_plans -= what == "step"


@pytest.mark.parametrize(
    "what", ["options", "step", "distca version", "window_left", "window_right"]
)
def test_ranks_disagree_on_the_plan(ranks, what):
    outcomes = ranks(3).outcomes(plan_differently, what, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert "ranks disagree on the plan, nothing was sent" in message
        assert f"{what}: " in message
        assert "on ranks [0, 2]" in message and "on ranks [1]" in message
        assert "same version" in message
    assert_group_works(ranks(3))


def use_plans_of_two_steps(rank: int, world_size: int):
    first, second = first_step(rank, world_size), small_step(rank, world_size)
    distca.plan(first.documents)
    distca.plan(second.documents)
    (first if rank == 1 else second).attend()


def test_ranks_use_plans_of_different_steps(ranks):
    outcomes = ranks(3).outcomes(use_plans_of_two_steps, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert "step: " in message and "on rank 1" in message and "on ranks 0 2" in message
    assert_group_works(ranks(3))


PACK = {"lengths": [100, 800], "world_size": 3, "spans": [(200, 500)]}  # runs of 300 tokens
OTHER_PACK = ("ranks disagree on pack 0", "ranks [0, 2] and ranks [1] differ")
WRONG_PACKS = {  # what rank 1 passes instead, and parts of the error
    "overlap": ({"rank": 0}, ("pieces: document ", "rank", "overlap positions")),
    "gap": ({"rank": 2}, ("pieces: document ", "rank", "no rank holds positions [200, 500)")),
    "lengths": ({"lengths": [100, 1100]}, OTHER_PACK),
    "ends of documents": ({"lengths": [100, 700, 100]}, OTHER_PACK),
    "world size": ({"world_size": 4}, OTHER_PACK),
    "ends of spans": ({"spans": [(200, 600)]}, OTHER_PACK),
}


def plan_wrong_pack(rank: int, world_size: int, what: str):
    changes = WRONG_PACKS[what][0] if rank == 1 else {}
    distca.plan(distca.Documents.sharded(**{**PACK, "rank": rank, **changes}))


@pytest.mark.parametrize("what", WRONG_PACKS)
def test_ranks_disagree_on_a_pack(ranks, what):
    outcomes = ranks(3).outcomes(plan_wrong_pack, what, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert all(part in message for part in WRONG_PACKS[what][1]), message
    assert_group_works(ranks(3))


def plan_part_of_a_pack(rank: int, world_size: int):
    distca.plan(distca.Documents.sharded([90], rank, world_size + 1))


def test_a_rank_of_a_pack_is_missing(ranks):
    outcomes = ranks(3).outcomes(plan_part_of_a_pack, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert (
            "world_size is 4" in message and "ranks [0, 1, 2] of the group share pack 0" in message
        )
    assert_group_works(ranks(3))


def attend_with_refused_arguments(rank: int, world_size: int, refused_rank, num_good_layers: int):
    step = first_step(rank, world_size)
    distca.plan(step.documents)
    for _ in range(num_good_layers):
        step.attend()
    if refused_rank in (rank, "all"):
        step.q = step.q[1:]
    step.attend()


def test_tokens_and_documents_disagree_on_one_rank(ranks):
    outcomes = ranks(3).outcomes(attend_with_refused_arguments, 1, 0, timeout_s=HANG_S)
    messages = errors_of(outcomes, "ValueError")
    assert "q has 4 tokens, but the documents of this rank have 5" in messages[1]
    assert "cu_seqlens" in messages[1]
    for rank in (0, 2):
        assert "refused on rank(s) 1; nothing was sent" in messages[rank]
    assert_group_works(ranks(3))


def test_tokens_and_documents_disagree_on_all_ranks(ranks):
    outcomes = ranks(3).outcomes(attend_with_refused_arguments, "all", 0, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert "tokens, but the documents of this rank have" in message
    assert_group_works(ranks(3))


def test_tokens_and_documents_disagree_in_a_later_layer(fresh_ranks):
    outcomes = fresh_ranks.outcomes(attend_with_refused_arguments, 1, 1, timeout_s=HANG_S)
    assert all(outcome.error for outcome in outcomes), outcomes
    assert all(outcome.seconds < LIMIT_S for outcome in outcomes), outcomes
    assert outcomes[1].error_type == "ValueError"
    assert "q has 4 tokens, but the documents of this rank have 5" in outcomes[1].error
    assert all("rank 1" in outcomes[rank].error for rank in (0, 2)), outcomes


REFUSED_IN_PYTHON = {  # what rank 1 does, and its error
    "window_size is (-2, 0)": lambda step: step.attend(window_size=(-2, 0)),
    "softmax_scale is 'a'": lambda step: step.attend(softmax_scale="a"),
    "sinks is 1.0": lambda step: step.attend(sinks=1.0),
    "k is on meta": lambda step: distca.core_attention(
        step.q, step.k.to("meta"), step.v, step.documents
    ),
    "window_size is (0, -5)": lambda step: distca.plan(step.documents, window_size=(0, -5)),
    "the plan is on meta": lambda step: distca.plan(step.documents, device="meta"),
    "the plan is on 'nowhere'": lambda step: distca.plan(step.documents, device="nowhere"),
    "shape is (2, 2, 8)": lambda step: distca.plan(step.documents, shape=(2, 2, 8)),
}


def refuse_on_one_rank(rank: int, world_size: int, error: str):
    step = first_step(rank, world_size)
    distca.plan(step.documents)
    if rank == 1:
        REFUSED_IN_PYTHON[error](step)
    distca.plan(step.documents)
    step.attend()


@pytest.mark.parametrize("error", REFUSED_IN_PYTHON)
def test_all_ranks_hear_what_one_rank_refuses(fresh_ranks, error):
    outcomes = fresh_ranks.outcomes(refuse_on_one_rank, error, timeout_s=HANG_S)
    assert all(outcome.seconds < LIMIT_S for outcome in outcomes), outcomes
    assert outcomes[1].error_type == "ValueError"
    for outcome in outcomes:
        assert error in outcome.error, outcome
        assert outcome.rank == 1 or "rank 1 failed" in outcome.error, outcome


def fail_after_refusal(rank: int, world_size: int):
    """Survive a refused call, and then meet the failure of another rank."""
    with contextlib.suppress(ValueError):
        attend_with_refused_arguments(rank, world_size, 1, 0)
    attend(rank, world_size, WHOLE)
    if rank == 2:
        torch.ops.distca.announce_failure(distca.init().group_name, "this is the failure")
        return ""
    with pytest.raises(torch.distributed.DistBackendError) as lost:
        attend(rank, world_size, WHOLE)
    return str(lost.value)


def test_an_error_that_the_group_survived_is_not_reported_again(fresh_ranks):
    outcomes = fresh_ranks.outcomes(fail_after_refusal, timeout_s=HANG_S)
    for rank in (0, 1):
        assert "rank 2 failed: this is the failure" in outcomes[rank].result, outcomes
        assert "tokens" not in outcomes[rank].result, outcomes
        assert "rank 1 failed" not in outcomes[rank].result, outcomes


def enter_with_balance_disabled_on_one_rank(rank: int, world_size: int):
    distca.init(options=distca.Options(enabled=rank != 1, timeout_s=20))
    step = small_step(rank, world_size)
    with distca.documents(step.documents):
        distca.varlen_attention(
            step.q, step.k, step.v, step.documents.cu_seqlens, step.documents.cu_seqlens, 0, 0
        )


def test_ranks_disagree_on_whether_to_balance(fresh_ranks):
    outcomes = fresh_ranks.outcomes(enter_with_balance_disabled_on_one_rank, timeout_s=HANG_S)
    for message in errors_of(outcomes, "ValueError"):
        assert "options" in message and "1" in message


def open_and_close(rank: int, world_size: int) -> torch.Tensor:
    options = distca.Options(tolerance=0.1)
    first = distca.init(options=options)
    assert distca.init() is first and distca.init(options=options) is first
    with pytest.raises(ValueError, match=r"opened with .*distca.close\(group\)"):
        distca.init(options=distca.Options(tolerance=0.2))
    step = small_step(rank, world_size, SHARDED)
    distca.plan(step.documents)
    distca.close()
    distca.close()
    assert sessions.find() is None
    with pytest.raises(ValueError, match=r"no session for process group .*distca\.init\(group\)"):
        step.attend()
    distca.init(options=distca.Options(tolerance=0.2))
    return attend(rank, world_size, SHARDED)


def test_init_twice_close_twice_and_open_again(fresh_ranks):
    results = torch.cat(fresh_ranks.run(open_and_close, timeout_s=HANG_S))
    truth = oracle.forward_backward(SHARDED)[0]
    assert oracle.relative_error(results, truth) < 1e-5


def plan_disabled(rank: int, world_size: int) -> tuple[torch.Tensor, list[int]]:
    distca.init(options=distca.Options(enabled=False))
    step = small_step(rank, world_size)
    plan = distca.plan(step.documents)
    return step.attend().detach(), plan.report().bytes_out


def test_a_disabled_group_computes_at_home(fresh_ranks):
    results = fresh_ranks.run(plan_disabled, timeout_s=HANG_S)
    assert all(bytes_out == [0, 0, 0] for _, bytes_out in results)
    truth = oracle.forward_backward(WHOLE)[0]
    assert oracle.relative_error(torch.cat([out for out, _ in results]), truth) < 1e-5
