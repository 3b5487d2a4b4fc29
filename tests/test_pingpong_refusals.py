"""Calls and blocks that ping-pong refuses. If one rank refuses, all ranks raise an error."""

import pytest
import torch
from pingpong_blocks import LENGTHS, Block, block_of, documents_of, pair_of, step_of

import distca
from distca.pingpong.pingpong import third
from distca.planning.step import plan_halves


def start_again(rank: int, world_size: int) -> None:
    distca.close()


def call_errors(rank: int, world_size: int) -> dict[str, str]:
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    sharded = distca.Documents.sharded([50, 31], rank, world_size)
    distca.plan(sharded)
    other = documents_of(LENGTHS[rank])
    x, rest = step.x, (step.cos, step.sin)

    class Results(Block):
        def forward(self, x, cos, sin, documents, result):
            return result(x)

    class Others(Block):
        def attend(self, q, k, v, window, documents):
            return distca.core_attention(q, k, v, other, window_size=window)

    def message(kind, *arguments, **keywords) -> str:
        _, block = pair_of(kind, **keywords)
        with pytest.raises((ValueError, RuntimeError)) as refused:
            block(*arguments)
        return str(refused.value)

    documents, lengths = step.documents, iter((1, 2))
    return {
        "sharded": message(Block, x, *rest, sharded),
        "two": message(Block, x, *rest, [documents, other]),
        "others": message(Others, x, *rest, documents),
        "x": message(Block, x[1:], *rest, documents),
        "batch": message(Block, x[None, None], *rest, documents),
        "nothing": message(Block, documents),
        "split": message(Block, x, *rest, documents, split={1: 2}),
        "row": message(Results, x, *rest, documents, lambda x: x.sum()),
        "kinds": message(Results, x, *rest, documents, lambda x: (x,) * next(lengths)),
        "text": message(Results, x, *rest, documents, lambda x: "text"),
    }


def test_bad_calls_are_refused(ranks):
    parts = {
        "sharded": "cross ranks in one run for each; expected two, as distca.shard_batch(",
        "two": "among the arguments; expected one",
        "others": "in a PingPong block of",
        "x": "the block's first argument is [282, 24] for documents of 283 tokens; expected",
        "batch": "expected [tokens, ...] or [1, tokens, ...]",
        "nothing": "the block's first argument is Documents for documents of 283",
        "split": "split[1] is 2, but that argument has shape [283, 1, 4]",
        "row": "the block returned [] and [] for 94 and 189 tokens",
        "kinds": "for its halves",
        "text": "the block returned str and str for",
    }
    messages = ranks(2).run(call_errors)[0]
    for name, part in parts.items():
        assert part in messages[name], name
    ranks(2).run(start_again)


def uneven_calls(rank: int, world_size: int) -> str:
    step = step_of(0, LENGTHS[0])  # equal on both ranks, so that both raise the same error

    class Uneven(Block):
        def forward(self, x, cos, sin, documents):
            return super().forward(x, cos, sin, documents) if len(x) == 94 else x

    distca.plan(documents_of(LENGTHS[rank]))
    lengths = LENGTHS[0] if rank == 0 else [283]
    step.documents = documents_of(lengths)
    distca.plan(step.documents)
    _, block = pair_of(Uneven)
    with pytest.raises(RuntimeError) as refused:
        block(step.x, step.cos, step.sin, step.documents)
    return str(refused.value)


def test_halves_that_differ_in_calls_are_noticed(ranks):
    for message in ranks(2).run(uneven_calls):
        assert "attention 1 times for its first half and 0 times for its second" in message


def bad_cut(rank: int, world_size: int) -> str:
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    _, block = pair_of(cut=lambda documents: 5 if rank == 0 else 1000)
    with pytest.raises((ValueError, RuntimeError)) as refused:
        block(step.x, step.cos, step.sin, step.documents)
    return str(refused.value)


def test_a_cut_outside_the_rows_is_an_error_on_all_ranks(ranks):
    first, second = ranks(2).run(bad_cut, timeout_s=40)
    assert "cut is 1000 for Documents(3 whole pieces, 80 tokens); expected 0 to 80" in second
    assert "rank 1" in first and "cut is 1000" in first
    ranks(2).run(start_again)


def plan_while_the_other_cuts(rank: int, world_size: int) -> str:
    distca.close()
    distca.init(options=distca.Options(timeout_s=5))
    documents, causal = documents_of(LENGTHS[rank]), (-1, 0)
    on = {"window_size": causal, "device": torch.device("cpu")}
    distca.plan(documents)
    for half in plan_halves(documents, cut=third, **on):
        half._plans[half.plan_key(causal)].wait()
    with pytest.raises(ValueError) as refused:
        if rank == 0:
            half = plan_halves(documents, cut=lambda documents: 1, **on)[0]
            half._plans[half.plan_key(causal)].wait()
        else:
            distca.plan(documents_of(LENGTHS[rank]))
    return str(refused.value)


def test_ranks_that_plan_and_cut_at_the_same_time_disagree(ranks):
    for message in ranks(2).run(plan_while_the_other_cuts, timeout_s=40):
        assert "ranks disagree on the plan, nothing was sent: step: -" in message
    ranks(2).run(start_again)


def test_blocks_that_cannot_be_wrapped():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    with pytest.raises(ValueError, match="is checkpointed; checkpoint the block that"):
        distca.PingPong(checkpoint_wrapper(block_of()))
    block = block_of()
    block.up = checkpoint_wrapper(block.up)
    with pytest.raises(ValueError, match="block Block, up is checkpointed"):
        distca.PingPong(block)
    assert type(block) is Block
    with pytest.raises(ValueError, match="block Block is a PingPong already"):
        distca.PingPong(distca.PingPong(block_of()))
    block = block_of()
    block.compile()
    with pytest.raises(ValueError, match="is compiled; compile what PingPong returns"):
        distca.PingPong(block)
    block = block_of()
    block.forward = lambda x: x
    with pytest.raises(ValueError, match="a forward of its own instance"):
        distca.PingPong(block)
    with pytest.raises(ValueError, match="expected a module"):
        distca.PingPong(len)


def refuse_on_one_rank(rank: int, world_size: int, what: str) -> None:
    """Rank 1 cuts at half a row, or passes a token less. Without timeout_s, the others would wait
    for its call."""
    is_wrong = rank == 1
    cut = (lambda documents: 0.5) if is_wrong and what == "cut" else third
    _, block = pair_of(cut=cut)
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    x = step.x[1:] if is_wrong and what == "x" else step.x
    block(x, step.cos, step.sin, step.documents)


@pytest.mark.parametrize("what, error", [("cut", "cut is 0.5 for"), ("x", "first argument is [")])
def test_all_ranks_hear_what_one_rank_refuses(fresh_ranks, what, error):
    outcomes = fresh_ranks.outcomes(refuse_on_one_rank, what, timeout_s=30)
    assert outcomes[1].error_type == "ValueError"
    for outcome in outcomes:
        assert error in outcome.error and outcome.seconds < 10, outcome
        assert outcome.rank == 1 or "rank 1 failed" in outcome.error, outcome
