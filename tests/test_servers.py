"""Ranks that serve attention without a model: results, order of calls, kept inputs, errors."""

import time
from dataclasses import dataclass, replace

import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import distca
from distca.planning import serving
from distca.planning.step import plan_halves

LIMIT = 1e-12
CAUSAL, SLIDING = (-1, 0), (40, 0)


@dataclass(frozen=True)
class Run:
    """Layers of attention, whose results are added, over some micro-batches."""

    servers: tuple[int, ...]
    cases: tuple[Case, ...]
    """A micro-batch each, by ranks that train."""
    windows: tuple[tuple[int, int], ...] = (CAUSAL, SLIDING, CAUSAL)
    options: distca.Options = distca.Options(**MOVE_ALWAYS)
    is_checkpointed: bool = False
    is_compiled: bool = False
    ahead: bool = False
    device: str = "cpu"


def close(rank: int, world_size: int) -> None:
    distca.close()


@pytest.fixture(scope="module", autouse=True)
def closed_sessions(ranks):
    """Close the session that tests of another file left open, which has no servers."""
    ranks(4).run(close)


def documents_of(case: Case, place: tuple[int, int]) -> distca.Documents:
    if case.sharded:
        return distca.Documents.sharded(case.all_lengths, *place)
    return distca.Documents([0, *torch.tensor(case.lengths[place[0]]).cumsum(0).tolist()])


def train(rank: int, world_size: int, run: Run) -> tuple | None:
    """Return the results of each case, and each rank's bytes of the first plan."""
    session = distca.init(None, run.options, servers=run.servers)
    if rank in run.servers:
        distca.serve()
        return None
    place = session.place()
    packed = [documents_of(case, place) for case in run.cases]
    plans = [
        distca.plan(documents, window_size=window, ahead=run.ahead)
        for documents in packed
        for window in dict.fromkeys(run.windows)
    ]
    attend = distca.core_attention
    if run.is_compiled:
        for plan in plans:
            plan.wait()
        attend = torch.compile(attend, backend="aot_eager", dynamic=True)
    leaves, outs = [], []
    for case, documents in zip(run.cases, packed, strict=True):
        rows = case.rows_of(place[0])
        inputs = [tensor[rows].to(run.device, copy=True) for tensor in case.inputs()[:3]]
        leaves.append([tensor.requires_grad_() for tensor in inputs])
        outs.append(0.0)
        for window in run.windows:
            arguments = {"window_size": window}
            if run.is_checkpointed:
                out = checkpoint(
                    attend,
                    *leaves[-1],
                    documents,
                    **arguments,
                    use_reentrant=False,
                )
            else:
                out = attend(*leaves[-1], documents, **arguments)
            outs[-1] = outs[-1] + out
    for case, out in zip(run.cases, outs, strict=True):
        out.backward(case.inputs()[3][case.rows_of(place[0])].to(run.device))
    results = [
        [tensor.detach().cpu() for tensor in (out, *(leaf.grad for leaf in each))]
        for out, each in zip(outs, leaves, strict=True)
    ]
    report = plans[0].report()
    distca.close()
    return results, report.bytes_in


def truth_of(case: Case, windows: tuple) -> list[Tensor]:
    each = [oracle.forward_backward(replace(case, window_size=window)) for window in windows]
    return [sum(parts) for parts in zip(*each, strict=True)]


def worst_error(results: list, run: Run) -> float:
    """Return the largest difference from one process, of results by rank."""
    trained = [result for result in results if result is not None]
    errors = []
    for idx, case in enumerate(run.cases):
        truths = truth_of(case, run.windows)
        parts = zip(*(result[0][idx] for result in trained), strict=True)
        wholes = [torch.cat(each) for each in parts]
        errors += [
            oracle.max_error(whole, truth) for whole, truth in zip(wholes, truths, strict=True)
        ]
    return max(errors)


WHOLE_3 = Case([[300, 11], [5], [7, 2]])
WHOLE_2 = Case([[300, 11], [5]])
EMPTY_3 = Case([[], [411, 3], [7]], seed=1)
EMPTY_2 = Case([[], [411, 3]], seed=1)
ACROSS_3 = Case([[10, 50], [100, 400], [30]], sharded=True)
ACROSS_2 = Case([[10, 50, 100], [400, 30]], sharded=True)
KEEPING = distca.Options(**MOVE_ALWAYS, keep_inputs_gb=1.0)
RUNS = {
    "whole": Run((3,), (WHOLE_3,)),
    "across": Run((3,), (ACROSS_3,)),
    "whole, 2 + 2": Run((1, 3), (WHOLE_2,)),
    "across, 2 + 2": Run((1, 3), (ACROSS_2,)),
    "checkpointed": Run((3,), (WHOLE_3,), is_checkpointed=True),
    "accumulated, ahead": Run((3,), (WHOLE_3, ACROSS_3), ahead=True),
    "without tokens on rank 0": Run((3,), (EMPTY_3, WHOLE_3), ahead=True),
    "without tokens, 2 + 2": Run((2, 3), (EMPTY_2, ACROSS_2)),
    "kept": Run((3,), (WHOLE_3, ACROSS_3), options=KEEPING),
    "kept, checkpointed": Run((3,), (ACROSS_3, WHOLE_3), options=KEEPING, is_checkpointed=True),
    "kept, compiled": Run((3,), (ACROSS_3, WHOLE_3), options=KEEPING, is_compiled=True),
    "dedicated": Run((3,), (ACROSS_3,), options=replace(KEEPING, server_speeds="0*3,1")),
    "rounds": Run((3,), (WHOLE_3,), options=replace(KEEPING, memory_cap_gb=6e-3, rounds=3)),
    "narrow v": Run((3,), (replace(WHOLE_3, head_dim_v=8), replace(ACROSS_3, head_dim_v=8))),
    "wide v, kept": Run((1, 3), (replace(ACROSS_2, head_dim_v=40),), options=KEEPING),
    "hybrid": Run(
        (1, 3), (WHOLE_2,), options=replace(KEEPING, transport="hybrid", ranks_per_node=2)
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_results_equal_those_of_one_process(ranks, name):
    run = RUNS[name]
    results = ranks(4).run(train, run)
    assert worst_error(results, run) < LIMIT
    bytes_in = next(result[1] for result in results if result is not None)
    assert all(bytes_in[server] > 0 for server in run.servers)
    results[0][0][-1][1][:1] += 2 * LIMIT  # a planted error
    assert worst_error(results, run) >= LIMIT


def shape_of_plan(rank: int, world_size: int) -> bool | None:
    """Return whether a plan is for the shape that the ranks with a model name."""
    session = distca.init(None, KEEPING, servers=(3,))
    if rank == 3:
        distca.serve()
        return None
    shape = distca.AttentionShape(4, 2, 24, 8, 16)
    plan = distca.plan(documents_of(WHOLE_3, session.place()), shape=shape)
    is_named = plan.solution().shape == shape
    distca.close()
    return is_named


def test_servers_are_told_of_the_shape(ranks):
    """Ranks that name different shapes plan for the default."""
    assert ranks(4).run(shape_of_plan) == [True] * 3 + [None]


def attend_to_chunks(rank: int, world_size: int) -> list[Tensor] | None:
    """Return results of a layer of whole documents, and one of chunks."""
    if world_size > 1:
        distca.init(options=distca.Options(**MOVE_ALWAYS), servers=(3,))
    if rank == 3:
        distca.serve()
        return None
    torch.manual_seed(rank)
    documents = distca.Documents([0, 300 if rank == 0 else 7])
    leaves = [
        torch.randn(documents.num_tokens, 2, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    out = sum(distca.core_attention(*leaves, each) for each in (documents, documents.chunked(100)))
    out.square().sum().backward()
    if world_size > 1:
        distca.close()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_servers_take_part_in_plans_of_chunks(ranks):
    served, alone = ranks(4).run(attend_to_chunks)[0], attend_to_chunks(0, 1)
    assert max(map(oracle.max_error, served, alone)) < LIMIT


def call_with_refusals(rank: int, world_size: int, refusing: int) -> list:
    """Return what each of three steps came to: a refusal, a number of heads that ranks do not
    share, and results."""
    session = distca.init(None, KEEPING, servers=(3,))
    if rank == 3:
        distca.serve()
        return []
    place, outcomes = session.place(), []
    rows = ACROSS_3.rows_of(place[0])
    q, k, v = (tensor[rows] for tensor in ACROSS_3.inputs()[:3])
    other_k = {"refused": k[:, :, :3], "different": k[:, :1], "right": k}
    for name, theirs in other_k.items():
        documents = documents_of(ACROSS_3, place)
        distca.plan(documents)
        try:
            own_k = theirs if rank == refusing else k
            outcomes.append(distca.core_attention(q, own_k, v[:, : own_k.shape[1]], documents))
        except ValueError as error:
            outcomes.append(f"{name}: {error}")
    distca.close()
    return outcomes


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_server_goes_on_after_a_call_that_all_ranks_refuse(ranks, refusing):
    outcomes = ranks(4).run(call_with_refusals, refusing)[:3]
    for rank, (refused, different, _) in enumerate(outcomes):
        expected = "expected one head_dim" if rank == refusing else f"refused on rank(s) {refusing}"
        assert expected in refused, refused
        assert "heads_kv: 1 on rank" in different and "2 on ranks" in different, different
    truth = oracle.forward_backward(ACROSS_3)[0]
    assert oracle.max_error(torch.cat([out for *_, out in outcomes]), truth) < LIMIT


NUM_STEPS = 4


def keep_inputs(rank: int, world_size: int) -> list[int] | None:
    """Return how many calls' inputs the server holds, after each notice."""
    session = distca.init(None, KEEPING, servers=(3,))
    if rank == 3:
        held = []

        class Server(serving._Server):
            def follow(self, notice):
                goes_on = super().follow(notice)
                held.append(len(self._kept))
                return goes_on

        serving._Server = Server
        distca.serve()
        return held
    for _ in range(NUM_STEPS):
        documents = documents_of(ACROSS_3, session.place())
        distca.plan(documents)
        q, k, v, grad = (tensor[ACROSS_3.rows_of(rank)] for tensor in ACROSS_3.inputs())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        outs = [distca.core_attention(*leaves, documents) for _ in range(3)]
        distca.core_attention(*leaves, documents)  # without a backward pass
        with torch.no_grad():
            distca.core_attention(*leaves, documents)
        for out in outs:  # the first call first
            out.backward(grad, retain_graph=True)
        outs[0].backward(grad)
        del out, outs
    distca.close()
    return None


def test_a_server_forgets_inputs_that_nobody_needs(own_ranks):
    held = own_ranks(4).run(keep_inputs)[3]
    assert max(held) in (3, 4), held
    assert held[-1] == 0, held


def copy_saved_tensors(rank: int, world_size: int, options: distca.Options) -> None:
    session = distca.init(None, options, servers=(3,))
    if rank == 3:
        distca.serve()
        return
    documents = documents_of(ACROSS_3, session.place())
    distca.plan(documents)
    q, k, v, grad = (tensor[ACROSS_3.rows_of(rank)] for tensor in ACROSS_3.inputs())
    try:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            out = distca.core_attention(q.requires_grad_(), k, v, documents)
        out.backward(grad)
    finally:
        distca.close()


def test_copies_of_kept_inputs_are_refused(own_ranks):
    own_ranks(4).run(copy_saved_tensors, replace(KEEPING, keep_inputs_gb=0.0))
    outcomes = own_ranks(4).outcomes(copy_saved_tensors, KEEPING)
    remedy = "servers need that very tensor: set keep_inputs_gb to 0"
    assert all(remedy in outcome.error for outcome in outcomes), outcomes


def train_in_pairs(rank: int, world_size: int) -> list:
    """Return results of a rank that trains beside a server, in one of two groups."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    session = distca.init(pairs[rank // 2], KEEPING, servers=(1,))
    if session.rank == 1:
        distca.serve()
        return []
    case = replace(ACROSS_2, lengths=[ACROSS_2.all_lengths], seed=rank)
    documents = documents_of(case, session.place())
    plan = distca.plan(documents)
    assert plan.report().bytes_in[1] > 0
    *leaves, grad = case.inputs()
    out = distca.core_attention(*(leaf.requires_grad_() for leaf in leaves), documents)
    out.backward(grad)
    distca.close()
    truths = oracle.forward_backward(case)
    results = [out, *(leaf.grad for leaf in leaves)]
    return [oracle.max_error(*each) for each in zip(results, truths, strict=True)]


def test_each_group_has_servers_of_its_own(own_ranks):
    errors = own_ranks(4).run(train_in_pairs)
    assert [len(each) for each in errors] == [4, 0, 4, 0]
    assert max(max(each, default=0) for each in errors) < LIMIT


def train_uneven(rank: int, world_size: int) -> int | None:
    session = distca.init(None, KEEPING, servers=(3,))
    if rank == 3:
        distca.serve()
        return None
    batches = [torch.randn(50 + rank, 2, 8, requires_grad=True) for _ in range(2 * rank)]
    num_steps = 0
    for batch in distca.join(batches, lambda: torch.randn(0, 2, 8, requires_grad=True)):
        documents = distca.Documents([0, len(batch)])
        distca.plan(documents, ahead=True)
        distca.core_attention(batch, batch, batch, documents).sum().backward()
        num_steps += 1
    session.planner.join(0)
    distca.close()
    return num_steps


def test_servers_take_part_in_join(ranks):
    assert ranks(4).run(train_uneven) == [4, 4, 4, None]


TIMEOUT_S = 2.0


def pause(rank: int, world_size: int) -> None:
    session = distca.init(None, replace(KEEPING, timeout_s=TIMEOUT_S), servers=(3,))
    if rank == 3:
        distca.serve()
        return
    for seconds in (2 * TIMEOUT_S, 0):
        documents = documents_of(ACROSS_3, session.place())
        distca.plan(documents)
        distca.core_attention(
            *(tensor[ACROSS_3.rows_of(rank)] for tensor in ACROSS_3.inputs()[:3]), documents
        )
        time.sleep(seconds)
    distca.close()


def test_a_server_waits_longer_than_the_timeout(ranks):
    ranks(4).run(pause)


def shard(rank: int, world_size: int) -> tuple | None:
    distca.init(None, servers=(1,))
    if rank == 1:
        distca.serve()
        return None
    batch = distca.shard_batch(torch.arange(12), [7, 5])
    distca.close()
    return batch.tokens.tolist(), batch.loss_scale


def test_packs_are_cut_over_the_ranks_that_train(ranks):
    runs = ranks(4).run(shard)
    tokens = [list(range(first, first + 4)) for first in (0, 4, 8)]
    assert [run and run[0] for run in runs] == [tokens[0], None, *tokens[1:]]
    assert runs[0][1] == 3 / 10


def misuse(rank: int, world_size: int) -> list[str]:
    """Return the errors of this rank, which all come before ranks communicate."""
    errors = []

    def refused(function, *args, **keywords) -> None:
        try:
            function(*args, **keywords)
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("no error")

    refused(distca.serve)
    for servers in ((0,), (4,), (3, 3), (1.0,)):
        refused(distca.init, None, servers=servers)
    refused(distca.init, None, distca.Options(enabled=False), servers=(3,))
    refused(distca.init, None, distca.Options(server_speeds="1*3,0"), servers=(2, 3))
    distca.init(None, servers=(3,))
    refused(distca.init, None, servers=(2,))
    if rank == 3:
        distca.serve()
        return errors
    refused(distca.serve)
    documents = distca.Documents([0, 4])
    refused(plan_halves, documents, lambda documents: 2, CAUSAL, torch.device("cpu"))
    distca.close()
    return errors


WRONG = [
    "distca.serve: the group is not open",
    "servers is (0,); expected ranks from 1 to 3, each once",
    "servers is (4,); expected ranks from 1 to 3",
    "servers is (3, 3); expected ranks from 1 to 3",
    "servers is (1.0,); expected ranks from 1 to 3",
    "under enabled False rank(s) [3] compute nothing: the ranks that hold tokens would compute all",
    "under server_speeds '1*3,0' rank(s) [3] compute nothing",
    "servers is (2,), but this group was opened with (3,)",
]


def test_misuse_is_refused(ranks):
    errors = ranks(4).run(misuse)
    for rank in range(4):
        serves = f"distca.serve: this is rank {rank}, and its servers are (3,)"
        with_pingpong = "servers is (3,); expected none with distca.PingPong"
        expected = WRONG if rank == 3 else [*WRONG, serves, with_pingpong]
        pairs = zip(errors[rank], expected, strict=True)
        assert [(error, part) for error, part in pairs if part not in error] == []


def plan_on_a_server(rank: int, world_size: int) -> None:
    distca.init(None, servers=(3,))
    try:
        distca.plan(distca.Documents([0, 5]))
    finally:
        distca.close()


def test_a_server_that_plans_is_named_on_all_ranks(own_ranks):
    outcomes = own_ranks(4).outcomes(plan_on_a_server)
    remedy = "rank is 3; expected a rank that trains, one of [0, 1, 2]; servers call distca.serve"
    assert all(remedy in outcome.error for outcome in outcomes), outcomes


def serve_wrongly(rank: int, world_size: int) -> None:
    session = distca.init(None, servers=(3,))
    if rank == 3:
        serving._Server.follow = lambda self, notice: {}["layers.417.weight"]
        distca.serve()
    try:
        for _ in range(2):
            documents = documents_of(ACROSS_3, session.place())
            distca.plan(documents)
    finally:
        distca.close()


def test_an_error_of_a_server_is_raised_on_all_ranks():
    processes = Ranks(4)
    try:
        outcomes = processes.outcomes(serve_wrongly)
    finally:
        processes.stop()
    assert outcomes[3].error_type == "KeyError"
    message = "rank 3 failed: KeyError: 'layers.417.weight'"
    assert all(message in outcome.error for outcome in outcomes[:3]), outcomes


def test_reports_count_servers_apart():
    report = distca.PlanReport(
        [2.0, 4.0, 0.0], [0.0, 1.0, 3.0], [0] * 3, [0] * 3, 1.0, 0.0, servers=[2], idle=[0]
    )
    assert (report.imbalance_before, report.imbalance_after) == (4 / 3, 1.5)
    assert replace(report, servers=[], idle=[]).imbalance_after == 9 / 4
