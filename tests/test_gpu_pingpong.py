"""Ping-pong on CUDA streams. Ranks may share devices."""

import itertools
import os
import random
from unittest import mock

import oracle
import pytest
import torch
from pingpong_blocks import LENGTHS, Block, block_of, crossing_step_of, step_of
from ranks import MOVE_ALWAYS, Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import distca
from distca.pingpong import pingpong
from distca.ranks import pace
from distca.ranks import session as sessions

pytestmark = pytest.mark.gpu

SIZES = {"hidden": 256, "head_dim": 64}
WINDOWS = [(-1, 0), (200, 0)]
MAX_CYCLES = 3_000_000  # of a delay: about 2 ms
SCALE = 8  # of the lengths


RANKS = {  # number of ranks, options
    "two": (2, {}),
    "four": (4, {}),
    "four, peer": (4, {"transport": "peer"}),
    "two nodes": (4, {"transport": "hybrid", "ranks_per_node": 2}),
}


@pytest.fixture(scope="module", params=RANKS)
def gpu_ranks(request):
    num_ranks, options = RANKS[request.param]
    if options and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("peer memory needs a Hopper GPU")
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started = Ranks(num_ranks, "nccl")
    started.run(open_session, options)
    yield started
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    started.stop()


def open_session(rank: int, world_size: int, options: dict) -> None:
    distca.init(options=distca.Options(**MOVE_ALWAYS, **options))
    # Measured among random delays, these would keep rows at home, and so blocks would run whole.
    pace.Pace.speeds = lambda self: []
    pace.Pace.lags = lambda self, num_tokens: []
    pingpong._pays = lambda documents: True


def ways(name: str):
    """Patch the choice between halves and whole blocks: in turns if the name says so."""
    numbers = itertools.cycle([0, 1]) if name == "every other whole" else itertools.repeat(0)
    return mock.patch.object(pingpong, "_pays", lambda _: next(numbers) == 0)


class Delayed(Block):
    """A block that waits at random places of both passes, on its own stream."""

    random = random.Random()

    def delay(self, tensor: Tensor) -> Tensor:
        def wait(_: Tensor) -> None:
            torch.cuda._sleep(self.random.choice([0, 0, 1000, MAX_CYCLES]))

        wait(tensor)
        if tensor.requires_grad:
            tensor.register_hook(wait)
        return tensor

    def attend(self, q, k, v, window, documents) -> Tensor:
        out = super().attend(self.delay(q), self.delay(k), self.delay(v), window, documents)
        return self.delay(out)

    def forward(self, x, cos, sin, documents) -> Tensor:
        x = self.delay(super().forward(self.delay(x), cos, sin, documents))
        # Free memory of this stream holds NaN, so that a late read shows.
        torch.full((2**20,), float("nan"), device=x.device)
        return x


def place(rank: int, number: int, num_ranks: int, crossing: bool = False):
    how = {"dtype": torch.bfloat16, **SIZES, "device": "cuda"}
    rotated = [LENGTHS[(each + number) % num_ranks] for each in range(num_ranks)]
    if crossing:
        pack = [SCALE * length for lengths in rotated for length in lengths]
        step = crossing_step_of(rank, num_ranks, pack, **how)
    else:
        step = step_of(rank, [SCALE * length for length in rotated[rank]], **how)
    for window in WINDOWS:
        distca.plan(step.documents, window_size=window, device="cuda", ahead=True)
    return step


def train(rank: int, world_size: int, wrap, num_steps: int, **how) -> list[Tensor]:
    """Train three consecutive blocks. Return the results and gradients of all steps."""
    blocks = [wrap(block_of(Delayed, WINDOWS, torch.bfloat16, **SIZES).cuda()) for _ in range(3)]
    results = []
    for number in range(num_steps):
        step = place(rank, number, world_size, **how)
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        x = step.x.clone().requires_grad_()
        out = x
        for block in blocks:
            out = block(out, step.cos, step.sin, step.documents)
        out.backward(step.grad)
        results += [out.detach(), x.grad, *(parameter.grad for parameter in parameters)]
        for parameter in parameters:
            parameter.grad = None
    return results


def bare(block: Block) -> torch.nn.Module:
    return block


def recomputed(use_reentrant: bool):
    def wrap(block: Block) -> torch.nn.Module:
        whole = distca.PingPong(block)

        class Recomputed(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = whole

            def forward(self, *arguments) -> Tensor:
                return checkpoint(self.block, *arguments, use_reentrant=use_reentrant)

        return Recomputed()

    return wrap


def wrapped(name: str):
    return {
        "plain": distca.PingPong,
        "every other whole": distca.PingPong,
        "crossing": distca.PingPong,
        "uneven": lambda block: distca.PingPong(block, cut=lambda each: each.num_tokens // 5),
        "border": lambda block: distca.PingPong(block, cut=pingpong.nearest_border),
        "non-reentrant": recomputed(False),
        "reentrant": recomputed(True),
    }[name]


def distances(rank: int, world_size: int, name: str) -> float:
    """Return the largest distance from the results of the bare blocks."""
    Delayed.random.seed(rank)
    how = {"num_steps": 4, "crossing": name == "crossing"}
    with ways(name):
        results = train(rank, world_size, wrapped(name), **how)
    assert sessions.find().halves, "nothing ran in halves"
    truths = train(rank, world_size, bare, **how)
    finite = all(bool(result.isfinite().all()) for result in results)
    worst = max(map(oracle.relative_error, results, truths))
    return worst if finite else float("nan")


@pytest.mark.parametrize(
    "name",
    ["plain", "every other whole", "crossing", "uneven", "border", "non-reentrant", "reentrant"],
)
def test_delays_change_nothing(gpu_ranks, name):
    errors = gpu_ranks.run(distances, name, timeout_s=200)
    assert all(worst <= 3e-2 for worst in errors), errors  # bfloat16 through six attentions


def streams_of_nodes(rank: int, world_size: int) -> dict[str, bool]:
    """Return which properties hold for the streams of both passes."""
    seen: dict[str, list[int]] = {"forward": [], "backward": [], "accumulate": []}

    class Watched(Block):
        def forward(self, x, *arguments) -> Tensor:
            seen["forward"].append(torch.cuda.current_stream().cuda_stream)
            x = x.clone()  # hooks run on the stream that made a tensor, and x is from another one
            x.register_hook(
                lambda _: seen["backward"].append(torch.cuda.current_stream().cuda_stream)
            )
            return super().forward(x, *arguments)

    block = distca.PingPong(block_of(Watched, WINDOWS, torch.bfloat16, **SIZES).cuda())
    block.scale.register_hook(
        lambda _: seen["accumulate"].append(torch.cuda.current_stream().cuda_stream)
    )
    step = place(rank, 0, world_size)
    step.run(block, step.documents)
    current = torch.cuda.current_stream().cuda_stream
    first, second = seen["forward"]
    with mock.patch.object(pingpong, "_pays", return_value=False):
        step.run(block, step.documents)
    return {
        "three streams": len({first, second, current}) == 3,
        "a whole block runs on the second's": seen["forward"] == [first, second, second],
        "backward replays them": seen["backward"] == [second, first, second],
        "gradients are on the current one": seen["accumulate"] == [current, current],
    }


def test_halves_run_on_streams_of_their_own(gpu_ranks):
    for checks in gpu_ranks.run(streams_of_nodes):
        assert all(checks.values()), checks


class Stack(torch.nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(SIZES["hidden"], SIZES["hidden"]).to(torch.bfloat16)
        blocks = [wrap(block_of(Delayed, WINDOWS, torch.bfloat16, **SIZES)) for _ in range(3)]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x, *arguments) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, *arguments)
        return x


def train_sharded(rank: int, world_size: int, wrap) -> list[Tensor]:
    Delayed.random.seed(rank)
    torch.manual_seed(0)
    model = Stack(wrap).cuda()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cuda", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for number in range(4):
        step = place(rank, number, world_size)
        out = model(step.x, step.cos, step.sin, step.documents)
        (out * step.grad).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [out.detach(), *(parameter.full_tensor().detach() for parameter in model.parameters())]


def sharded_distance(rank: int, world_size: int, name: str) -> float:
    with ways(name):
        ours = train_sharded(rank, world_size, distca.PingPong)
    theirs = train_sharded(rank, world_size, bare)
    return max(map(oracle.relative_error, ours, theirs))


@pytest.mark.parametrize("name", ["halves", "every other whole"])
def test_sharded_blocks_with_delays(gpu_ranks, name):
    errors = gpu_ranks.run(sharded_distance, name, timeout_s=200)
    assert all(worst <= 3e-2 for worst in errors), errors
