"""Ping-pong: a block on two halves of its tokens has the results of the bare block."""

import copy
import random
from unittest import mock

import oracle
import pytest
import torch
from layout_words import num_parts
from pingpong_blocks import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    Block,
    SdpaBlock,
    VarlenBlock,
    block_of,
    documents_of,
    pair_of,
    step_of,
)
from torch import nn

import distca
from distca.pingpong import pingpong
from distca.planning import cluster, solver
from distca.planning import plan as plans
from distca.ranks import session as sessions
from distca.ranks.hiding import UNKNOWN, WorkBeforeAttention

CUTS = {
    "third": pingpong.third,
    "border": pingpong.nearest_border,
    "odd": lambda documents: min(13, documents.num_tokens),
    "first": lambda documents: min(1, documents.num_tokens),
    "none": lambda documents: 0,
    "all": lambda documents: documents.num_tokens,
    "uneven": lambda documents: documents.num_tokens * (1 + documents.num_tokens % 3) // 4,
}
WINDOWS = {
    "causal": [(-1, 0)],
    "window": [(37, 0)],
    "several": [(-1, 0), (9, 0), (-1, 0)],
}


def errors(results, truths) -> list[float]:
    return [oracle.relative_error(a, b) for a, b in zip(results, truths, strict=True)]


def halves_ran() -> bool:
    return all(half.num_plans > 0 for half in sessions.find().halves) and bool(
        sessions.find().halves
    )


def compare(rank: int, world_size: int, windows, cuts: list[str]) -> float:
    """Return the largest error of out and of all gradients, over the cuts."""
    worst = 0.0
    for name in cuts:
        bare, block = pair_of(windows=windows, cut=CUTS[name])
        step = step_of(rank, LENGTHS[rank])
        for window in dict.fromkeys(windows):
            distca.plan(step.documents, window_size=window)
        truth = step.run(bare, step.documents)
        worst = max(worst, *errors(step.run(block, step.documents), truth))
        assert halves_ran() == (world_size > 1)
    return worst


def takes_the_faster(rank: int, world_size: int) -> float:
    """Return the largest error of a block that runs whole after two steps in halves."""
    bare, block = pair_of()
    distca.close()
    worst = 0.0
    # Without the time of work before attention, there is no choice. It is measured in halves.
    for ns in (UNKNOWN, UNKNOWN, 1_000_000):
        with (
            mock.patch.object(solver, "DEVICES_OF_CHOICE", ("cpu",)),
            mock.patch.object(plans, "measures_links", lambda _: True),
            mock.patch.object(solver, "pay", lambda *_: False),
            mock.patch.object(WorkBeforeAttention, "word", lambda _, ns=ns: ns),
            mock.patch.object(pingpong, "Relay", wraps=pingpong.Relay) as relay,
        ):
            step = step_of(rank, LENGTHS[rank])
            report = distca.plan(step.documents).report()
            assert report.pays_in_halves == (ns == UNKNOWN)
            truth = step.run(bare, step.documents)
            worst = max(worst, *errors(step.run(block, step.documents), truth))
            assert relay.called == report.pays_in_halves
    return worst


def compare_in_parts(rank: int, world_size: int, options: distca.Options) -> tuple[float, set[int]]:
    """Return the largest error, and into how many parts the halves' rows were divided."""
    distca.close()  # plans of a session that has run blocks cut the halves of these, too
    ranks_per_node = distca.init(options=options).way.ranks_per_node
    with (
        mock.patch.object(solver, "DEVICES_OF_PARTS", ("cpu",)),
        mock.patch.object(cluster, "LEAST_SECONDS_OF_PART", 0.0),
    ):
        bare, block = pair_of()
        step = step_of(rank, LENGTHS[rank])
        shape = distca.AttentionShape(HEADS, KV_HEADS, HEAD_DIM)
        distca.plan(step.documents, shape=shape)
        truth = step.run(bare, step.documents)
        worst = max(errors(step.run(block, step.documents), truth))
    (halves,) = step.documents._halves.values()
    layouts = [plan.layout for half in halves for plan in half._plans.values()]
    assert all(half.way.ranks_per_node == ranks_per_node for half in sessions.find().halves)
    distca.close()
    return worst, {num_parts(layout) for layout in layouts}


def test_blocks_run_whole_if_that_is_faster(own_ranks):
    assert max(own_ranks(2).run(takes_the_faster)) <= 1e-12


@pytest.mark.parametrize("options", [{}, {"transport": "hybrid", "ranks_per_node": 2}], ids=str)
def test_rows_of_halves_travel_in_one_part(ranks, options):
    for worst, parts in ranks(4).run(compare_in_parts, distca.Options(**options)):
        assert worst <= 1e-12 and parts == {1}


EDGES = [  # by rank: no document, one token, as many tokens as features, empty documents
    [[300], [], [1], [0, 3, 0]],
    [[24], [24], [200], [1]],
    [[], [0], [90, 1], []],
    [[1], [1, 1], [1, 1, 1], [130]],
]


def compare_edges(rank: int, world_size: int) -> list[float]:
    worst_errors = []
    for lengths in EDGES:
        for cut in ("third", "border", "none", "uneven"):
            bare, block = pair_of(cut=CUTS[cut])
            step = step_of(rank, lengths[rank])
            distca.plan(step.documents)
            truth = step.run(bare, step.documents)
            worst_errors.append(max(errors(step.run(block, step.documents), truth)))
    return worst_errors


def test_edges(ranks):
    for worst_errors in ranks(4).run(compare_edges):
        assert max(worst_errors) <= 1e-12, worst_errors


def any_row(documents: distca.Documents) -> int:
    return random.Random(int(documents.cu_seqlens.sum())).randint(0, documents.num_tokens)


def compare_random(rank: int, world_size: int, seed: int) -> float:
    """Compare with the bare block on random documents, windows and cuts."""
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    windows = [(common.choice([-1, -1, 0, 1, 5, 40]), 0) for _ in range(common.randint(1, 3))]
    lengths = [own.choice([0, 1, 2, 17, 90]) for _ in range(own.randint(0, 6))]
    bare, block = pair_of(windows=windows, cut=any_row)
    step = step_of(rank, lengths)
    for window in dict.fromkeys(windows):
        distca.plan(step.documents, window_size=window)
    truth = step.run(bare, step.documents)
    return max(errors(step.run(block, step.documents), truth))


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(ranks, seed):
    worst_errors = ranks(4).run(compare_random, seed)
    assert max(worst_errors) <= 1e-12, worst_errors


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("windows", WINDOWS)
def test_equals_the_bare_block(ranks, world_size, windows):
    worst_errors = ranks(world_size).run(compare, WINDOWS[windows], list(CUTS))
    assert max(worst_errors) <= 1e-12, worst_errors


def compare_dtypes(rank: int, world_size: int) -> list[float]:
    """Return the error of ping-pong over that of the bare block, against float64, by dtype."""
    ratios = []
    for dtype in (torch.float32, torch.bfloat16):
        step = step_of(rank, LENGTHS[rank])
        distca.plan(step.documents)
        truth = step.run(block_of(), step.documents)
        bare, block = pair_of(dtype=dtype)
        low = step_of(rank, LENGTHS[rank], dtype)
        low.documents = step.documents
        reference = max(errors(low.run(bare, step.documents), truth))
        ratios.append(max(errors(low.run(block, step.documents), truth)) / reference)
    return ratios


def test_low_precision_is_as_good_as_the_bare_block(ranks):
    for ratios in ranks(2).run(compare_dtypes):
        assert max(ratios) <= 2, ratios


def compare_drop_ins(rank: int, world_size: int) -> list[float]:
    all_errors = []
    step = step_of(rank, LENGTHS[rank])
    for kind, windows in ((SdpaBlock, [(-1, 0)]), (VarlenBlock, [(-1, 0), (9, 0)])):
        bare, block = pair_of(kind, windows, split={3: None})
        batched = copy.copy(step)
        if kind is SdpaBlock:  # cos and sin stay [tokens, 1, ...]: one call mixes both shapes
            batched.x, batched.grad = step.x[None], step.grad[None]
        with distca.documents(step.documents):
            arguments = [step.documents.cu_seqlens] if kind is VarlenBlock else []
            truth = batched.run(bare, *arguments)
            all_errors += errors(batched.run(block, *arguments), truth)
    assert halves_ran()
    return all_errors


def test_drop_ins_under_documents_in_force(ranks):
    for all_errors in ranks(2).run(compare_drop_ins):
        assert max(all_errors) <= 1e-12, all_errors


class Containers(Block):
    """A block with arguments and results in containers."""

    def forward(self, x, rotary, *, documents, ids, note):
        assert note == "both halves" and rotary["sin"].shape[0] == ids.shape[1] == x.shape[0]
        out = super().forward(x, rotary["cos"], rotary["sin"], documents)
        return out, {"ids": ids + 1, "nothing": None, "rows": out[:, :2].sum(1)}


def containers(rank: int, world_size: int) -> float:
    bare, block = pair_of(Containers)
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    ids = step.documents.position_ids[None]
    results = []
    for each in (bare, block):
        out, more = each(
            step.x,
            {"cos": step.cos, "sin": step.sin},
            documents=step.documents,
            ids=ids,
            note="both halves",
        )
        assert torch.equal(more["ids"], ids + 1) and more["nothing"] is None
        results.append([out, more["rows"]])
    return max(errors(results[1], results[0]))


def test_arguments_and_results_in_containers(ranks):
    assert max(ranks(2).run(containers)) <= 1e-12


class Tables(Block):
    """A block with a table of as many rows as tokens, and one that is split in dimension 1."""

    def forward(self, x, cos, sin, documents, table, columns):
        assert table.shape[0] == documents.num_tokens and columns.shape[1] == x.shape[0]
        return super().forward(x, cos, sin, documents) + table.sum(0) + columns.sum(0)[:, None]


class Heads(Block):
    """Attention alone, on rows of heads. A single token looks like a batch of 1 in k."""

    def forward(self, q, k, documents):
        return distca.core_attention(q, k, k, documents)


def one_token(rank: int, world_size: int) -> float:
    bare, block = pair_of(Heads)
    documents = documents_of([1] if rank == 1 else [300])
    distca.plan(documents)
    q, k = (torch.randn(documents.num_tokens, heads, 8) for heads in (3, 1))
    return oracle.relative_error(block(q, k, documents), bare(q, k, documents))


def test_a_rank_with_one_token(ranks):
    assert max(ranks(2).run(one_token)) <= 1e-6


def exceptions(rank: int, world_size: int) -> float:
    bare, block = pair_of(Tables, split={4: None, "columns": 1})
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    table, columns = torch.ones(len(step.x), 24), torch.arange(2.0 * len(step.x)).view(2, -1)
    arguments = (step.x, step.cos, step.sin, step.documents, table)
    first, second = (each(*arguments, columns=columns) for each in (bare, block))
    return oracle.relative_error(second, first)


def test_exceptions_to_the_split(ranks):
    assert max(ranks(2).run(exceptions)) <= 1e-12


def full_windows(rank: int, world_size: int) -> tuple[float, str]:
    windows = [(-1, -1), (3, 4)]
    step = step_of(rank, [40, 60] if rank == 0 else [3, 3])
    for window in windows:
        distca.plan(step.documents, window_size=window)
    bare, block = pair_of(windows=windows, cut=pingpong.nearest_border)
    worst = max(errors(step.run(block, step.documents), step.run(bare, step.documents)))
    _, block = pair_of(windows=windows, cut=lambda documents: 20 - 17 * rank)  # cuts rank 0's
    try:
        step.run(block, step.documents)
    except (ValueError, RuntimeError) as error:
        return worst, str(error)
    return worst, ""


def test_full_windows_without_a_cut_document(ranks):
    first, second = ranks(2).run(full_windows, timeout_s=40)
    assert max(first[0], second[0]) <= 1e-12
    assert "row is 20, inside a document, and window_size (-1, -1)" in first[1]
    assert "rank 0" in second[1] and "inside a document" in second[1], "all ranks raise"
    ranks(2).run(start_again)


def start_again(rank: int, world_size: int) -> None:
    distca.close()


def plan_ahead(rank: int, world_size: int) -> list:
    """Train three steps. From the second on, halves have plans before the forward pass.

    Closing ends all groups.
    """
    distca.close()
    num_groups = len(torch.distributed.distributed_c10d._world.pg_names)
    bare, block = pair_of()
    events = []
    for number in range(3):
        step = step_of(rank, LENGTHS[(rank + number) % world_size])
        distca.plan(step.documents, ahead=True)
        events.append(len(step.documents._halves))
        truth = step.run(bare, step.documents)
        events.append(max(errors(step.run(block, step.documents), truth)) <= 1e-12)
    halves = sessions.find().halves
    events.append([half.num_plans for half in halves])
    distca.close()
    events.append(len(torch.distributed.distributed_c10d._world.pg_names) - num_groups)
    return events


def test_later_steps_plan_their_halves_ahead(ranks):
    expected = [0, True, 1, True, 1, True, [3, 3], 0]
    assert ranks(2).run(plan_ahead) == [expected] * 2


def documents_that_one_rank_cannot_cut(rank: int, world_size: int) -> str:
    """After a step in ping-pong, use documents that rank 1 cannot cut. Ping-pong refuses them."""
    bare, block = pair_of()
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    step.run(block, step.documents)
    documents = distca.Documents([0, 9, 70], 4) if rank == 1 else documents_of([9, 500])
    distca.plan(documents)
    num_keys = documents.num_tokens + documents.num_context_rows
    q, k = (torch.ones(rows, 2, 4) for rows in (documents.num_tokens, num_keys))
    out = distca.core_attention(q, k, k, documents)
    assert torch.allclose(out, torch.ones_like(out))
    x = torch.ones(documents.num_tokens, 24, dtype=torch.float64)
    cos = torch.ones(documents.num_tokens, 1, 4, dtype=torch.float64)
    with pytest.raises(ValueError) as refused:
        block(x, cos, cos, documents)
    distca.close()
    return str(refused.value)


def test_documents_that_one_rank_cannot_cut(ranks):
    messages = ranks(2).run(documents_that_one_rank_cannot_cut, timeout_s=60)
    assert "rank(s) [1] cannot cut their documents in two" in messages[0]
    assert "4 context rows) cannot be halved" in messages[1]


def evaluate(rank: int, world_size: int) -> float:
    bare, block = pair_of(windows=WINDOWS["several"])
    step = step_of(rank, LENGTHS[rank])
    for window in dict.fromkeys(WINDOWS["several"]):
        distca.plan(step.documents, window_size=window)
    arguments = step.x, step.cos, step.sin, step.documents
    worst = 0.0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            worst = max(worst, oracle.relative_error(block(*arguments), bare(*arguments)))
    return worst


def test_without_gradients(ranks):
    assert max(ranks(2).run(evaluate)) <= 1e-12


def runs_whole(rank: int, world_size: int) -> dict[str, bool]:
    """Return, for several documents, whether a single call of the block sees all rows."""
    seen = []

    class Watched(Block):
        def forward(self, x, cos, sin, documents=None):
            seen.append(len(x))
            return super().forward(x, cos, sin, documents)

    is_whole = {}

    def call(name: str, documents: distca.Documents) -> None:
        seen.clear()
        step = step_of(rank, documents.cu_seqlens.diff().tolist())
        _, block = pair_of(Watched)
        block(step.x, step.cos, step.sin, documents)
        is_whole[name] = seen == [len(step.x)]

    distca.close()
    balanced, unplanned, skewed = (documents_of(each) for each in ([64], [64], LENGTHS[rank]))
    distca.plan(balanced)
    distca.plan(skewed)
    call("balanced", balanced)
    call("without a plan", unplanned)
    call("skewed", skewed)
    distca.close()
    distca.init(options=distca.Options(enabled=False))
    disabled = documents_of(LENGTHS[rank])
    distca.plan(disabled)
    call("disabled", disabled)
    sharded = distca.Documents.sharded([50, 30], rank, world_size)
    distca.plan(sharded)
    call("sharded, disabled", sharded)
    distca.close()
    return is_whole


def test_runs_whole_if_no_row_travels(ranks):
    expected = dict.fromkeys(
        ["balanced", "without a plan", "disabled", "sharded, disabled"], True
    ) | {"skewed": False}
    assert ranks(2).run(runs_whole) == [expected] * 2


def no_documents(rank: int, world_size: int) -> bool:
    distca.init()
    _, block = pair_of(Plain)
    x = torch.ones(4, 24, dtype=torch.float64)
    with pytest.warns(UserWarning, match="no documents are in the block's arguments or in force"):
        block(x)
    return True


class Plain(Block):
    def forward(self, x):
        return self.down(self.up(x))


def test_warns_without_documents(ranks):
    assert all(ranks(2).run(no_documents))


def test_names_attributes_and_class_stay_those_of_the_block():
    bare, block = pair_of(windows=[(-1, 0), (5, 0)])
    model = nn.Sequential(nn.Linear(2, 2), copy.deepcopy(block))
    bare_model = nn.Sequential(nn.Linear(2, 2), bare)
    assert isinstance(block, Block) and isinstance(block, distca.PingPong)
    assert list(model.state_dict()) == list(bare_model.state_dict())
    for names in ("named_parameters", "named_modules", "named_buffers"):
        ours = [name for name, _ in getattr(model, names)()]
        assert ours == [name for name, _ in getattr(bare_model, names)()]
    bare.load_state_dict(block.state_dict())
    block.load_state_dict(bare.state_dict())
    assert block.windows == bare.windows and not block.eval().training
    assert type(block_of()) is Block, "other instances are as they were"


def learn_the_shape(rank: int, world_size: int) -> list[list[list[float]]]:
    """Return predicted loads of a plan after a step in ping-pong, and of a plan for its shape."""
    distca.close()
    distca.init()
    block = distca.PingPong(block_of())
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    step.run(block, step.documents)
    shape = distca.AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 8)
    documents = [documents_of(LENGTHS[rank]) for _ in range(2)]
    learned = distca.plan(documents[0]).report()
    expected = distca.plan(documents[1], shape=shape).report()
    return [
        [each.seconds_before, each.seconds_after, each.bytes_out, each.bytes_in]
        for each in (learned, expected)
    ]


def test_the_shape_of_attention_is_learned_from_the_halves(ranks):
    for learned, expected in ranks(2).run(learn_the_shape):
        assert learned == expected
