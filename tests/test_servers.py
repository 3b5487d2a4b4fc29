"""Ranks that serve attention without a model: results, order of calls, kept inputs, errors."""

from dataclasses import dataclass, replace

import oracle
import pytest
import torch
from oracle import Case
from ranks import FAST_LINKS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import distca

LIMIT = 1e-12
CAUSAL, SLIDING = (-1, 0), (40, 0)


@dataclass(frozen=True)
class Run:
    """Layers of attention, whose results are added, over some micro-batches."""

    servers: tuple[int, ...]
    cases: tuple[Case, ...]
    """A micro-batch each, by ranks that train."""
    windows: tuple[tuple[int, int], ...] = (CAUSAL, SLIDING, CAUSAL)
    options: distca.Options = distca.Options(**FAST_LINKS)
    is_checkpointed: bool = False
    ahead: bool = False


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
    leaves, outs = [], []
    for case, documents in zip(run.cases, packed, strict=True):
        rows = case.rows_of(place[0])
        leaves.append([tensor[rows].clone().requires_grad_() for tensor in case.inputs()[:3]])
        outs.append(0.0)
        for window in run.windows:
            arguments = {"window_size": window}
            if run.is_checkpointed:
                out = checkpoint(
                    distca.core_attention,
                    *leaves[-1],
                    documents,
                    **arguments,
                    use_reentrant=False,
                )
            else:
                out = distca.core_attention(*leaves[-1], documents, **arguments)
            outs[-1] = outs[-1] + out
    for case, out in zip(run.cases, outs, strict=True):
        out.backward(case.inputs()[3][case.rows_of(place[0])])
    results = [
        [out.detach(), *(leaf.grad for leaf in each)]
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
KEEPING = distca.Options(**FAST_LINKS, keep_inputs_gb=1.0)
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
    "dedicated": Run((3,), (ACROSS_3,), options=replace(KEEPING, server_speeds="0*3,1")),
    "rounds": Run((3,), (WHOLE_3,), options=replace(KEEPING, memory_cap_gb=6e-3, rounds=3)),
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
