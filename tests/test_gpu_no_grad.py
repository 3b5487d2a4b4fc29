"""Passes without gradients on CUDA devices, under Options.balance_no_grad."""

import oracle
import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS
from test_gpu import LENGTHS, gpu_ranks, place  # noqa: F401  a fixture
from test_gpu_peer import peer_ranks  # noqa: F401  a fixture
from test_no_grad import MODES

import distca

pytestmark = pytest.mark.gpu

TRANSPORTS = {"peer_ranks": "peer", "gpu_ranks": "process_group"}


def attend(rank: int, world_size: int, case: Case, mode: str, transport: str):
    """Return this rank's results of three layers, balanced and alone, and the bytes sent."""
    distca.close()
    distca.init(options=distca.Options(transport=transport, balance_no_grad=True, **MOVE_ALWAYS))
    documents, leaves, _ = place(case, rank, world_size)
    inputs = [each.detach() for each in leaves]
    with MODES[mode](), distca.documents(documents, window_size=case.window_size):
        settings = {"window_size": case.window_size}
        outs = [distca.core_attention(*inputs, documents, **settings) for _ in range(3)]
    sent = sum(sum(each.report().bytes_out) for each in documents._plans.values())
    alone = distca.core_attention(*inputs, documents.unplanned(), **settings)
    results = [each.cpu() for each in (*outs, alone)]
    distca.close()
    distca.init(options=distca.Options(transport=transport, **MOVE_ALWAYS))  # as the fixture has it
    return results, sent


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window_size", [(-1, 0), (200, 0)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_balanced_passes_are_as_exact_as_those_of_one_rank(request, transport, window_size, mode):
    two_ranks = request.getfixturevalue(transport)(2)
    case = Case(LENGTHS[2:], 8, 2, 128, window_size, dtype=torch.bfloat16)
    per_rank = two_ranks.run(attend, case, mode, TRANSPORTS[transport])
    assert sum(sent for _, sent in per_rank) > 0, "the case must move rows"
    (truth, *_), (limit, *_) = oracle.truths_and_limits(case)
    for parts in zip(*(results for results, _ in per_rank), strict=True):
        oracle.assert_close([torch.cat(parts)], [truth], [limit])
