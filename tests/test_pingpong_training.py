"""Ping-pong under FSDP2, activation checkpointing, autocast and torch.compile."""

import contextlib
import functools
import gc

import oracle
import pytest
import torch
from pingpong_blocks import LENGTHS, Block, Step, block_of, crossing_step_of, step_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import distca

STEPS = 3
WINDOWS = [(-1, 0), (9, 0)]


class Model(nn.Module):
    """Two blocks, each wrapped by `wrap`."""

    def __init__(self, wrap, dtype: torch.dtype) -> None:
        super().__init__()
        blocks = []
        for seed in range(2):
            torch.manual_seed(seed)
            blocks.append(Block(WINDOWS).to(dtype))
        self.blocks = nn.ModuleList(wrap(block) for block in blocks)
        torch.manual_seed(2)
        self.embedding = nn.Linear(24, 24).to(dtype)

    def forward(self, x, cos, sin, documents) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cos, sin, documents)
        return x


def bare(block: Block) -> nn.Module:
    return block


def ping_pong(block: Block) -> nn.Module:
    return distca.PingPong(block)


def checkpointed(block: Block) -> nn.Module:
    return checkpoint_wrapper(distca.PingPong(block))


class Recomputed(nn.Module):
    """A module that checkpoints its block by a function call, like models of transformers."""

    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, *arguments) -> Tensor:
        return checkpoint(self.block, *arguments, use_reentrant=self.use_reentrant)


def reentrant(block: Block) -> nn.Module:
    return Recomputed(distca.PingPong(block), True)


def non_reentrant(block: Block) -> nn.Module:
    return Recomputed(distca.PingPong(block), False)


def rotated_step(rank: int, world_size: int, number: int, dtype: torch.dtype) -> Step:
    return step_of(rank, LENGTHS[(rank + number) % world_size], dtype)


def crossing_step(rank: int, world_size: int, number: int, dtype: torch.dtype) -> Step:
    lengths = [length for each in LENGTHS[number : number + 2] for length in each]
    return crossing_step_of(rank, world_size, lengths, dtype)


def train(
    rank,
    world_size,
    wrap,
    *,
    shard=False,
    dtype=torch.float64,
    policy=None,
    autocast=False,
    draw=rotated_step,
):
    """Train steps as `draw` returns them. Return the results, then all parameters."""
    model = Model(wrap, dtype)
    if shard:
        mesh = init_device_mesh("cpu", (world_size,))
        settings = {"mesh": mesh} | ({"mp_policy": policy} if policy else {})
        for block in model.blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    results = []
    for number in range(STEPS):
        step = draw(rank, world_size, number, dtype)
        for window in WINDOWS:
            distca.plan(step.documents, window_size=window, ahead=True)
        with context:
            out = model(step.x, step.cos, step.sin, step.documents)
        (out.to(dtype) * step.grad).mean().backward()
        if not shard:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
        results.append(out.detach())
    parameters = get_model_state_dict(model) if shard else dict(model.named_parameters())
    full = [each.full_tensor() if shard else each for each in parameters.values()]
    return [*results, *(each.detach().clone() for each in full)]


def distance(rank: int, world_size: int, ours: dict, reference: dict) -> float:
    pairs = zip(train(rank, world_size, **ours), train(rank, world_size, **reference), strict=True)
    return max(oracle.relative_error(a, b) for a, b in pairs)


WRAPPED = {
    "plain": ping_pong,
    "wrapper": checkpointed,
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
}


@pytest.mark.parametrize("draw", [rotated_step, crossing_step])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_training_equals_the_bare_model(ranks, wrapped, shard, draw):
    if shard and wrapped.endswith("reentrant"):
        wrapped = "plain"
    ours = {"wrap": WRAPPED[wrapped], "shard": shard, "draw": draw}
    distances = ranks(2).run(distance, ours, {"wrap": bare, "draw": draw})
    assert max(distances) <= 1e-11, distances


def test_mixed_precision_of_fsdp(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = {"shard": True, "dtype": torch.float32, "policy": policy}
    truth = {"wrap": bare, "dtype": torch.float32}
    ours = ranks(2).run(distance, {"wrap": ping_pong, **sharded}, truth)
    theirs = ranks(2).run(distance, {"wrap": bare, **sharded}, truth)
    assert max(ours) <= 2 * max(theirs), (ours, theirs)


@pytest.mark.parametrize("wrap", [ping_pong, checkpointed])
def test_autocast(ranks, wrap):
    low = {"dtype": torch.float32, "autocast": True}
    truth = {"wrap": bare, "dtype": torch.float32}
    ours = ranks(2).run(distance, {"wrap": wrap, **low}, truth)
    theirs = ranks(2).run(distance, {"wrap": bare, **low}, truth)
    assert max(theirs) > 1e-3 and max(ours) <= 2 * max(theirs), (ours, theirs)


def state_dict_keys(rank: int, world_size: int) -> list[list[str]]:
    keys = []
    for wrap in (bare, ping_pong):
        model = Model(wrap, torch.float64)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
        keys += [list(get_model_state_dict(model)), list(model.state_dict())]
    return keys


def test_checkpoints_have_the_keys_of_the_bare_model(ranks):
    for keys in ranks(2).run(state_dict_keys):
        assert all(each == keys[0] for each in keys) and "blocks.0.qkv.1.weight" in keys[0]


class CheckpointedInside(Block):
    def forward(self, *arguments) -> Tensor:
        forward = functools.partial(super().forward, *arguments)
        return checkpoint(forward, use_reentrant=False)


def refused_inside(rank: int, world_size: int) -> str:
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    block = distca.PingPong(block_of(CheckpointedInside))
    with pytest.raises(ValueError) as refused:
        step.run(block, step.documents)
    message = str(refused.value)
    # The checkpoint ends with the error's frames. Its hooks belong to this thread, but a collection
    # of garbage may happen on another.
    del refused
    gc.collect()
    return message


def test_a_block_that_checkpoints_itself_is_refused(ranks):
    for message in ranks(2).run(refused_inside):
        assert "inside torch.utils.checkpoint; checkpoint the block that distca.PingPong" in message


def sharded_before(rank: int, world_size: int) -> str:
    block = fully_shard(block_of(), mesh=init_device_mesh("cpu", (world_size,)))
    with pytest.raises(ValueError) as refused:
        distca.PingPong(block)
    return str(refused.value)


def sharded_inside(rank: int, world_size: int) -> str:
    block = distca.PingPong(block_of())
    fully_shard(block.up, mesh=init_device_mesh("cpu", (world_size,)))
    step = step_of(rank, LENGTHS[rank])
    distca.plan(step.documents)
    with pytest.raises(ValueError) as refused:
        block(step.x, step.cos, step.sin, step.documents)
    return str(refused.value)


@pytest.mark.parametrize("when", [sharded_before, sharded_inside])
def test_a_sharded_block_is_refused(ranks, when):
    for message in ranks(2).run(when):
        assert message.endswith("is sharded; call fully_shard on what PingPong returns")


def compiled(rank: int, world_size: int, draw) -> tuple[float, bool]:
    torch._dynamo.reset()
    block, reference = distca.PingPong(block_of(windows=WINDOWS)), block_of(windows=WINDOWS)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block.compile(backend=count)
    worst = 0.0
    for number in range(2):
        step = draw(rank, world_size, number, torch.float64)
        for window in WINDOWS:
            distca.plan(step.documents, window_size=window)
        truth = step.run(reference, step.documents)
        results = step.run(block, step.documents)
        worst = max(worst, *(map(oracle.relative_error, results, truth)))
    return worst, len(graphs) >= 3


@pytest.mark.parametrize("draw", [rotated_step, crossing_step])
def test_compiled_blocks(ranks, draw):
    for worst, has_graphs in ranks(2).run(compiled, draw, timeout_s=100):
        assert worst <= 1e-11 and has_graphs
