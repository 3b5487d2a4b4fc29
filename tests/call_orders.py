"""Training in which one rank's attention calls differ from those of the others.

The tests check that ranks notice this before a row of one call serves another. Every rank runs
`train`: steps of a few layers, where each layer is a module that calls attention on its own rows.
In one step rank VICTIM makes different calls.
"""

import time
from collections.abc import Callable, Iterator

import torch
from oracle import Case
from ranks import MOVE_ALWAYS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distca

VICTIM = 1
NUM_LAYERS = 4
WRONG_LAYER = 2
WRONG_STEP = 1
NUM_STEPS = 200  # more than ranks need to notice
TIMEOUT_S = 60.0  # much longer than LIMIT_S
LIMIT_S = 10.0

ORDER = tuple(range(NUM_LAYERS))
ORDERS = {"swapped": (0, 2, 1, 3), "skipped": (0, 1, 3), "repeated": (0, 1, 2, 2, 3)}
WAYS = (
    *ORDERS,
    "recomputed alone",
    "backward skipped",
    "no gradient",
    "detached",
    "backward twice",
    "plan twice",
    "other window",
    "exception caught",
)
SHARDED = Case([[10, 50, 100, 1200, 30], [], []], dtype=torch.float32, sharded=True)


class Layer(nn.Module):
    """A layer that runs attention on its own parameters q, k, v."""

    def __init__(self, case: Case, index: int, rank: int, device: str) -> None:
        super().__init__()
        rows = case.rows_of(rank)
        self.whole = [tensor * (1 + index) for tensor in case.inputs()]
        self.own = rows
        self.q, self.k, self.v = (
            nn.Parameter(tensor[rows].to(device=device, copy=True)) for tensor in self.whole[:3]
        )
        self.grad_out = self.whole[3][rows].to(device)

    def forward(self, documents: distca.Documents, window_size=(-1, 0)) -> Tensor:
        return distca.core_attention(self.q, self.k, self.v, documents, window_size=window_size)

    def expected(self, documents: distca.Documents) -> list[Tensor]:
        """Return out, dq, dk, dv of this rank's rows, computed on this rank alone."""
        leaves = [tensor.clone().requires_grad_() for tensor in self.whole[:3]]
        out = distca.core_attention(*leaves, documents)
        out.backward(self.whole[3])
        return [tensor.detach()[self.own] for tensor in (out, *(leaf.grad for leaf in leaves))]


class Model(nn.Module):
    def __init__(self, case: Case, rank: int, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(case, index, rank, device) for index in ORDER)


def close_enough(result: Tensor, expected: Tensor) -> bool:
    """Return whether each row is right or NaN. A NaN row marks a result as invalid."""
    result = result.detach().cpu().double().flatten(1)
    expected = expected.cpu().double().flatten(1)
    size = expected.norm(dim=1)  # a document's first query has no gradient
    error = (result - expected).norm(dim=1) / size.clamp(min=float(size.mean()))
    return bool((error.isnan() | (error < 0.05)).all())


def calls_of(way: str, model: Model, documents: distca.Documents) -> Iterator[tuple[int, Tensor]]:
    """Yield (layer, out) for each call of one step's forward pass."""
    for index in ORDERS.get(way, ORDER):
        layer = model.layers[index]
        wrong = index == WRONG_LAYER
        if wrong and way == "exception caught":
            raise FloatingPointError("the loss is not finite")
        if wrong and way == "plan twice":
            distca.plan(documents, device=layer.q.device)
        for leaf in (layer.q, layer.k, layer.v):
            leaf.requires_grad_(not (wrong and way == "no gradient"))
        if wrong and way == "recomputed alone":
            yield index, checkpoint(layer, documents, use_reentrant=False)
        elif wrong and way == "other window":
            yield index, layer(documents, (64, 0))
        else:
            yield index, layer(documents)


def run_step(way: str, model: Model, documents: distca.Documents, outs: list) -> None:
    try:
        for index, out in calls_of(way, model, documents):
            outs.append((index, out))
    except FloatingPointError:
        return
    if way == "backward skipped":
        return
    loss = 0.0
    for index, out in outs:
        skipped = index == WRONG_LAYER and way in ("detached", "no gradient")
        loss = loss + ((out.detach() if skipped else out) * model.layers[index].grad_out).sum()
    if way == "backward twice":
        loss.backward(retain_graph=True)
    loss.backward()


def warm_up(rank: int, world_size: int) -> None:
    """Do what takes time on first use, so that it does not count towards the time limit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.ones(1, device=device, requires_grad=True)
    checkpoint(torch.neg, one, use_reentrant=False)  # imports torch._dynamo
    torch.distributed.barrier()


def train(
    rank: int, world_size: int, way: str, case: Case = SHARDED, device: str = "cpu", **options
) -> None:
    """Train until distca raises. Check all results that it returned before, then raise again."""
    distca.init(options=distca.Options(timeout_s=TIMEOUT_S, **MOVE_ALWAYS, **options))
    model = Model(case, rank, device)
    whole = distca.Documents([0, *torch.tensor(case.all_lengths).cumsum(0).tolist()])
    expected = [layer.expected(whole) for layer in model.layers]
    synchronize: Callable = torch.cuda.synchronize if device != "cpu" else lambda: None
    for step in range(NUM_STEPS):
        if step == WRONG_STEP:
            began = time.monotonic()
        is_wrong = step == WRONG_STEP and rank == VICTIM
        documents = distca.Documents.sharded(case.all_lengths, rank, world_size)
        model.zero_grad()
        outs: list[tuple[int, Tensor]] = []
        try:
            distca.plan(documents, device=device)
            run_step(way if is_wrong else "", model, documents, outs)
            synchronize()
        except Exception:
            assert step >= WRONG_STEP and time.monotonic() - began < LIMIT_S, "late"
            check_outs(outs, expected, is_wrong)
            raise
        check_outs(outs, expected, is_wrong)
        if not is_wrong:
            for layer, (_, *gradients) in zip(model.layers, expected, strict=True):
                for leaf, gradient in zip((layer.q, layer.k, layer.v), gradients, strict=True):
                    assert close_enough(leaf.grad, gradient), "a gradient is wrong"


def check_outs(outs: list, expected: list[list[Tensor]], is_wrong: bool) -> None:
    for index, out in outs:
        assert close_enough(out, expected[index][0]) or is_wrong, f"out of layer {index} is wrong"


def use_groups(rank: int, world_size: int, order_of_victim: tuple[int, int]) -> None:
    """Run a layer in each of two groups of all ranks, in the order that VICTIM gets."""
    groups = [torch.distributed.new_group(range(world_size)) for _ in range(2)]
    for group in groups:
        distca.init(group, distca.Options(timeout_s=TIMEOUT_S, **MOVE_ALWAYS))
    model = Model(SHARDED, rank, "cpu")
    plans = [distca.Documents.sharded(SHARDED.all_lengths, rank, world_size) for _ in groups]
    for documents, group in zip(plans, groups, strict=True):
        distca.plan(documents, group=group)
    for index in order_of_victim if rank == VICTIM else (0, 1):
        model.layers[index](plans[index])
