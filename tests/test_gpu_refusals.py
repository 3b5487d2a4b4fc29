"""The operators refuse bad gradients of ranks that exchange rows, and tensors on mixed devices.

Ranks may share devices.
"""

import pytest
import torch
from oracle import Case
from ranks import MOVE_ALWAYS, Ranks
from small_step import small_step
from test_hostile_gradients import CASES, unchanged

import distca
from distca.planning.plan import local_plan

pytestmark = pytest.mark.gpu

SHARDED = Case([[10, 50, 100, 1200, 30], []], sharded=True)  # both ranks send rows
BAD_RANK, HANG_S = 1, 90
CASES_ON_GPUS = ("grad_out 2-D", "lse of another dtype", "kept 2-D")


def run_case(rank: int, world_size: int, case: str, transport: str, is_first: bool) -> None:
    distca.init(options=distca.Options(transport=transport, **MOVE_ALWAYS))
    run, change, _ = CASES[case]
    step = small_step(rank, world_size, SHARDED)
    step.q, step.k, step.v = (t.detach().bfloat16().cuda() for t in (step.q, step.k, step.v))
    if not is_first:
        run(step, distca.plan(step.documents, device="cuda"), unchanged)
        torch.cuda.synchronize()
    plan = distca.plan(step.documents, device="cuda")
    run(step, plan, change if rank == BAD_RANK else unchanged)
    torch.cuda.synchronize()  # returns with invalid results, and the next call raises
    run(step, distca.plan(step.documents, device="cuda"), unchanged)


# The first launch of a kernel may wait for the device while it holds the driver's lock.
@pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("transport", ["process_group", "peer"])
@pytest.mark.parametrize("case", CASES_ON_GPUS)
def test_gradients_are_refused_before_they_are_sent(monkeypatch, case, transport, is_first):
    if transport == "peer" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    ranks = Ranks(2, "nccl")
    try:
        outcomes = ranks.outcomes(run_case, case, transport, is_first, timeout_s=HANG_S)
    finally:
        ranks.stop()
    assert outcomes[BAD_RANK].error_type == "ValueError", outcomes[BAD_RANK]
    assert CASES[case][2].split()[0] in outcomes[BAD_RANK].error
    assert f"rank {BAD_RANK}" in str(outcomes[1 - BAD_RANK].error), outcomes


def tensors_of_operators() -> dict:
    """Return tensors and other arguments of each operator, for a document on this rank."""
    plan = local_plan(distca.Documents([0, 100]), (-1, 0), torch.device("cuda"))
    share = plan.layout, plan.rows
    q = torch.ones(100, 2, 8, device="cuda", dtype=torch.bfloat16)
    lse = torch.ones(100, 2, device="cuda")
    return {
        "core_attention": ((q, q, q, *share), (1.0, "")),
        "core_attention_backward": ((q, q, q, q, q, lse, *share), (1.0, "")),
        "exchange": ((q, q, q, *share), ("",)),
        "attend": ((q, q, q, *share), (1.0, "home")),
        "attend_backward": ((q, q, q, q, q, lse, *share), (1.0, "home")),
    }


def test_one_tensor_on_another_device():
    for name, (tensors, others) in tensors_of_operators().items():
        operator = getattr(torch.ops.distca, name)
        operator(*tensors, *others)
        for i, tensor in enumerate(tensors):
            away = tensor.cpu() if tensor.is_cuda else tensor.cuda()
            with pytest.raises(ValueError, match="expected|the plan was made for"):
                operator(*tensors[:i], away, *tensors[i + 1 :], *others)
    kept = torch.empty(0, dtype=torch.bfloat16)
    tensors, others = tensors_of_operators()["core_attention_backward"]
    with pytest.raises(ValueError, match="kept is CPUBFloat16Type"):
        torch.ops.distca.core_attention_backward(*tensors, *others, kept)
