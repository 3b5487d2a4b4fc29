"""The operators as torch sees them: schemas, fakes, autograd, and steps that make the whole."""

import pytest
import torch
from layout_words import numbers_of_rows
from oracle import Case
from torch.autograd.gradcheck import GradcheckError
from torch.autograd.graph import saved_tensors_hooks
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef

import distca
from distca.planning.cluster import Cluster
from distca.planning.cost import cost_tensor
from distca.planning.plan import local_plan

ops = torch.ops.distca
SKEWED = [[150, 1, 0, 55], [37]]  # rank 1 serves rows of rank 0
MASKS = [(-1, 0), (-1, -1), (20, 11)]
SCALE = 0.3
WIDTHS = [(8, 8), (16, 8), (8, 16), (192, 128)]  # head_dim of q and k, and of v


def case_for(world_size: int, **kwargs) -> Case:
    return Case(SKEWED[:world_size], **{"heads_q": 4, "heads_kv": 2, "head_dim": 8, **kwargs})


def plan_of(case: Case, rank: int, world_size: int) -> distca.Plan:
    """The rank's plan of a case; with one rank the layout that needs no group."""
    documents = (
        distca.Documents.sharded(case.all_lengths, rank, world_size)
        if case.sharded
        else distca.Documents([0, *torch.tensor(case.lengths[rank]).cumsum(0).tolist()])
    )
    if world_size == 1:
        return local_plan(documents, case.window_size, torch.device("cpu"))
    return distca.plan(documents, window_size=case.window_size)


def made_for(device_type: str, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layout of one of `num_ranks` ranks, all of which hold parts of a global pack."""
    lengths = [90, 3, 200, 1, 40]
    pieces = torch.cat(
        [distca.Documents.sharded(lengths, r, num_ranks).pieces(r) for r in range(num_ranks)]
    )
    options = distca.Options()
    shape = distca.AttentionShape(4, 2, 8, 8)
    cost, cluster = (
        cost_tensor(options, shape, "cpu"),
        Cluster(num_ranks, link_bytes_per_second=1e9),
    )
    plan, _ = ops.plan(
        *(pieces, num_ranks, -1, 0, cost, shape.row_bytes()),
        *(cluster.servers(), cluster.links(), 0.02),
    )
    layout, packed_rows = ops.layout(pieces, plan, rank, 0, device_type)
    return layout, ops.unpack_rows(layout, packed_rows)


@pytest.mark.parametrize("rank", range(4))
def test_layouts_of_all_devices_hold_the_same_tasks(rank):
    on_cpu, for_cuda = made_for("cpu", rank, 4), made_for("cuda", rank, 4)
    num_home_rows, rows = numbers_of_rows(on_cpu[0])
    num_q, num_k = rows["visiting queries"], rows["visiting keys"]
    for tasks, num_q_rows, num_k_rows in (
        ("home", num_home_rows, num_home_rows),
        ("visiting", num_q, num_k),
    ):
        q = torch.randn(num_q_rows, 4, 8, dtype=torch.float64)
        k = torch.randn(num_k_rows, 2, 8, dtype=torch.float64)
        expected = ops.attend(q, k, k, *on_cpu, SCALE, tasks)
        results = ops.attend(q, k, k, *for_cuda, SCALE, tasks)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def check_operators(rank: int, world_size: int, widths: tuple[int, int]) -> int:
    """opcheck of every operator that computes; the number of rows that this rank serves."""
    case = case_for(world_size, head_dim=widths[0], head_dim_v=widths[1])
    plan = plan_of(case, rank, world_size)
    share = plan.layout, plan.rows
    q, k, v, grad = (tensor[case.rows_of(rank)] for tensor in case.inputs())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, lse, _ = ops.core_attention(q, k, v, *share, SCALE, plan.group_name)
    _, served = numbers_of_rows(plan.layout)
    num_q, num_k = served["visiting queries"], served["visiting keys"]
    visiting = [
        torch.randn(num_q, *q.shape[1:], dtype=q.dtype),
        *(torch.randn(num_k, *each.shape[1:], dtype=k.dtype) for each in (k, v)),
    ]
    home_out, home_lse = ops.attend(q, k, v, *share, SCALE, "home")
    served_out, served_lse = ops.attend(*visiting, *share, SCALE, "visiting")
    served_leaves = [tensor.clone().requires_grad_() for tensor in visiting]
    served_grad = torch.ones_like(served_out)

    opcheck(ops.core_attention, (*leaves, *share, SCALE, plan.group_name))
    opcheck(ops.core_attention_backward, (grad, q, k, v, out, lse, *share, SCALE, plan.group_name))
    opcheck(ops.attend, (*leaves, *share, SCALE, "home"))
    opcheck(ops.attend, (*served_leaves, *share, SCALE, "visiting"))
    opcheck(ops.attend_backward, (grad, q, k, v, home_out, home_lse, *share, SCALE, "home"))
    opcheck(
        ops.attend_backward,
        (served_grad, *visiting, served_out, served_lse, *share, SCALE, "visiting"),
    )
    return num_q


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_opcheck(ranks, world_size, widths):
    served_rows = ranks(world_size).run(check_operators, widths, timeout_s=60)
    assert any(served_rows) == (world_size > 1), "with two ranks, some rows must be visiting"


@pytest.mark.parametrize("widths", [(3, 3), (3, 2), (2, 5)])
@pytest.mark.parametrize("window_size", MASKS)
def test_gradcheck(window_size, widths):
    case = Case([[5, 0, 1, 3]], 4, 2, widths[0], window_size, head_dim_v=widths[1])
    plan = plan_of(case, 0, 1)
    leaves = [tensor.requires_grad_() for tensor in case.inputs()[:3]]

    def whole(q, k, v):
        return ops.core_attention(q, k, v, plan.layout, plan.rows, SCALE, "")[0]

    def steps(q, k, v):
        return ops.attend(q, k, v, plan.layout, plan.rows, SCALE, "home")[0]

    assert torch.autograd.gradcheck(whole, leaves)
    assert torch.autograd.gradcheck(steps, leaves)


@pytest.mark.parametrize("lengths", [[], [0, 0], [5, 1]])
def test_expanded_gradients(lengths):
    """sum() hands down a gradient whose strides are all 0, also to a rank without tokens."""
    case = Case([lengths], heads_q=2, heads_kv=1, head_dim=4)
    plan = plan_of(case, 0, 1)
    grads = []
    for reduce in (torch.sum, lambda out: (out * torch.ones_like(out)).sum()):
        leaves = [tensor.requires_grad_() for tensor in case.inputs()[:3]]
        reduce(ops.core_attention(*leaves, plan.layout, plan.rows, SCALE, "")[0]).backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class WrongGradient(torch.autograd.Function):
    """The identity with a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad


def test_gradcheck_rejects_a_planted_wrong_gradient():
    case = Case([[5, 3]], heads_q=2, heads_kv=1, head_dim=3)
    plan = plan_of(case, 0, 1)
    leaves = [tensor.requires_grad_() for tensor in case.inputs()[:3]]

    def whole(q, k, v):
        q = WrongGradient.apply(q)
        return ops.core_attention(q, k, v, plan.layout, plan.rows, SCALE, "")[0]

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(whole, leaves)


@pytest.mark.parametrize("attend", ["whole", "steps"])
def test_double_backward_raises(attend):
    case = Case([[5, 3]], heads_q=2, heads_kv=1, head_dim=4)
    plan = plan_of(case, 0, 1)
    q, k, v = (tensor.requires_grad_() for tensor in case.inputs()[:3])
    if attend == "whole":
        out = ops.core_attention(q, k, v, plan.layout, plan.rows, SCALE, "")[0]
    else:
        out = ops.attend(q, k, v, plan.layout, plan.rows, SCALE, "home")[0]
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"distca::\w+_backward.*derivative|not implemented"):
        torch.autograd.grad(dq.sum(), q)


def storages(tensors) -> dict[int, int]:
    """Bytes by storage: views of one storage count once."""
    held = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return held


def saved_bytes(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes that core_attention keeps, and those of q, k, v, out, lse and the layout."""
    case = case_for(world_size)
    plan = plan_of(case, rank, world_size)
    q, k, v, grad = (tensor[case.rows_of(rank)].clone() for tensor in case.inputs())
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    saved: list[torch.Tensor] = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out, lse, _ = ops.core_attention(*leaves, plan.layout, plan.rows, SCALE, plan.group_name)
        out.backward(grad)
    allowed = storages([*leaves, out, lse, plan.layout, plan.rows])
    return sum(storages(saved).values()), sum(allowed.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_saves_no_more_than_inputs_and_results(ranks, world_size):
    for saved, allowed in ranks(world_size).run(saved_bytes):
        assert 0 < saved <= allowed


def attend_locally(plan: distca.Plan, num_tokens: int) -> torch.Tensor:
    rows = torch.randn(num_tokens, 1, 8)
    return ops.core_attention(rows, rows, rows, plan.layout, plan.rows, SCALE, "")[0]


def test_a_layout_that_was_written_is_decoded_again():
    """Calls share a decoded layout, but not beyond a write to its tensors."""
    plan = local_plan(distca.Documents([0, 3, 10]), (-1, 0), torch.device("cpu"))
    attend_locally(plan, 10)
    attend_locally(plan, 10)
    with pytest.raises(ValueError, match="layout"):
        ops.core_attention(*[torch.ones(10, 1, 8)] * 3, plan.layout[:-1], plan.rows, 1.0, "")
    plan.layout.zero_()
    with pytest.raises(ValueError, match="layout"):
        attend_locally(plan, 10)


def test_a_plan_that_is_gone_leaves_no_rows():
    """Decoded layouts keep their rows' memory no longer than until the next call."""
    plan = local_plan(distca.Documents([0, 5]), (-1, 0), torch.device("cpu"))
    attend_locally(plan, 5)
    rows = StorageWeakRef(plan.rows.untyped_storage())
    del plan
    attend_locally(local_plan(distca.Documents([0, 4]), (-1, 0), torch.device("cpu")), 4)
    assert rows.expired()
