"""torch.compile on GPUs, while documents and plans change.

Compiled code has one graph, and CUDA graphs around core attention. Its results equal those of eager
code. Ranks share devices if there are fewer devices than ranks.
"""

import os
import random

import oracle
import pytest
import torch
import torch._inductor.config
import torch.nn as nn
from ranks import MOVE_ALWAYS, Ranks
from test_gpu_refusals import tensors_of_operators

import distca

pytestmark = pytest.mark.gpu

MODES = ("default", "reduce-overhead", "max-autotune")
HEADS, HEAD_DIM, WIDTH = (4, 2, 2), 64, 128
NUM_TOKENS = [512] * 20 + [384] * 4  # by step: reuses graphs, then needs others
LIMIT = 2e-2  # relative; attention is in bfloat16, linear layers in float32
COMPILE_TIMEOUT_S = 400


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.qkv = nn.Linear(WIDTH, sum(HEADS) * HEAD_DIM)
        self.proj = nn.Linear(HEADS[0] * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, documents):
        q, k, v = self.qkv(x).to(self.dtype).unflatten(1, (-1, HEAD_DIM)).split(HEADS, dim=1)
        out = distca.core_attention(q, k, v, documents)
        x = x + self.proj(out.flatten(1).float())
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(2))

    def forward(self, x, documents):
        for layer in self.layers:
            x = layer(x, documents)
        return x.square().mean()


def make_model(device: str) -> Model:
    torch.manual_seed(0)
    return Model(torch.float32 if device == "cpu" else torch.bfloat16).to(device)


def documents_of(step: int, rank: int) -> distca.Documents:
    """Return one long document on rank 0 in every other step, and random documents otherwise."""
    num_tokens = NUM_TOKENS[step]
    if step % 2 and rank == 0:
        return distca.Documents([0, num_tokens])
    generator = random.Random(100 * step + rank)
    cuts = sorted(generator.sample(range(1, num_tokens), generator.randint(1, 8)))
    return distca.Documents([0, *cuts, num_tokens])


def train_step(model: nn.Module, step: int, rank: int, device: str):
    """Train a step. Return loss and gradients, and the bytes that this rank sends."""
    documents = documents_of(step, rank)
    plan = distca.plan(documents, device=device)
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(NUM_TOKENS[step], WIDTH, generator=generator).to(device)
    model.zero_grad()
    loss = model(x, documents)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [loss.detach().clone(), *gradients], plan.report().bytes_out[rank]


class CountedGraphs:
    """Counts the CUDA graphs that its scope records and replays."""

    METHODS = ("capture_begin", "replay")

    def __enter__(self) -> "CountedGraphs":
        self.calls = dict.fromkeys(self.METHODS, 0)
        self._real = {name: getattr(torch.cuda.CUDAGraph, name) for name in self.METHODS}
        for name in self.METHODS:
            setattr(torch.cuda.CUDAGraph, name, self._counting(name))
        return self

    def __exit__(self, *_) -> None:
        for name, real in self._real.items():
            setattr(torch.cuda.CUDAGraph, name, real)

    def _counting(self, name: str):
        def method(graph, *args, **kwargs):
            self.calls[name] += 1
            return self._real[name](graph, *args, **kwargs)

        return method


def train_compiled(rank: int, world_size: int, mode: str, device: str) -> dict:
    """Return the errors of compiled steps against eager ones, and the numbers of graphs."""
    torch._dynamo.reset()
    eager, compiled = make_model(device), torch.compile(
        make_model(device), mode=mode, fullgraph=True
    )  # fmt: skip
    quick = {
        "compile_threads": 1,  # this process may have no children
        "force_disable_caches": True,
        "max_autotune_gemm_backends": "ATEN",
        "cpp.vec_isa_ok": False,
    }
    errors, sent = [], []
    with CountedGraphs() as graphs, torch._inductor.config.patch(quick):
        for step in range(len(NUM_TOKENS)):
            truths, bytes_out = train_step(eager, step, rank, device)
            results, _ = train_step(compiled, step, rank, device)
            errors.append(max(map(oracle.relative_error, results, truths)))
            sent.append(bytes_out)
    torch._dynamo.reset()
    return {"errors": errors, "sent": sent, **graphs.calls}


def open_session(rank: int, world_size: int, transport: str) -> None:
    distca.init(options=distca.Options(transport=transport, **MOVE_ALWAYS))


@pytest.fixture(scope="module")
def compiling_ranks():
    started: dict[int, Ranks] = {}
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

    def get(world_size: int) -> Ranks:
        is_hopper = torch.cuda.get_device_capability() == (9, 0)
        if world_size not in started:
            started[world_size] = Ranks(world_size, "nccl")
            transport = "peer" if is_hopper and world_size > 1 else "process_group"
            started[world_size].run(open_session, transport)
        return started[world_size]

    yield get
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    for processes in started.values():
        processes.stop()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_equals_eager(compiling_ranks, mode, world_size):
    ranks = compiling_ranks(world_size)
    results = ranks.run(train_compiled, mode, "cuda", timeout_s=COMPILE_TIMEOUT_S)
    sent = [bytes_out for result in results for bytes_out in result["sent"]]
    assert (world_size == 1) == (not any(sent)), "two ranks must exchange rows"
    for result in results:
        assert max(result["errors"]) < LIMIT, result
        if mode == "default":
            assert result["capture_begin"] == 0
        else:
            assert result["capture_begin"] > 0, "CUDA graphs must capture the code in between"
            assert result["replay"] >= len(NUM_TOKENS), "steps must replay the graphs"


def test_operators_refuse_a_capture():
    for name, (tensors, others) in tensors_of_operators().items():
        operator = getattr(torch.ops.distca, name)
        operator(*tensors, *others)
        torch.cuda.synchronize()
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(ValueError, match="core attention is captured into a CUDA graph"),
        ):
            operator(*tensors, *others)


@pytest.mark.parametrize("is_planned", [False, True])
def test_core_attention_refuses_a_capture(is_planned):
    """A CUDA graph would repeat the call with the documents of this step, also by the drop-in."""
    documents = distca.Documents([0, 8])
    q = torch.ones(8, 2, 64, device="cuda", dtype=torch.bfloat16)
    heads_first = q.transpose(0, 1)[None]
    if is_planned:
        distca.core_attention(q, q, q, documents)
    calls = (
        lambda: distca.core_attention(q, q, q, documents),
        lambda: distca.scaled_dot_product_attention(*[heads_first] * 3, is_causal=True),
    )
    distca.scope.put_in_force(documents)
    try:
        for call in calls:
            torch.cuda.synchronize()
            with (
                torch.cuda.graph(torch.cuda.CUDAGraph()),
                pytest.raises(ValueError, match="captured into a CUDA graph"),
            ):
                call()
    finally:
        distca.scope.put_in_force(None)
