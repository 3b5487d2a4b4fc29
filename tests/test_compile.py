"""torch.compile and activation checkpointing: same results, one graph, nothing sent twice."""

import functools
import shutil

import pytest
import torch
import torch._inductor.config
import torch.nn as nn
from profiled import ranges_of
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import distca

HEADS_Q, HEADS_KV, HEAD_DIM, WIDTH, NUM_TOKENS = 4, 2, 8, 16, 96
NUM_STEPS = 20
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("c++") is None,
    reason="inductor needs a C++ compiler, and there is none",
)


class Layer(nn.Module):
    """Projection, core attention, MLP. Documents reach attention by argument or by scope.

    In the form "lse", lse and sinks change the result. In "narrow v", v is half as wide as q.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.heads = [HEADS_Q, HEADS_KV, HEADS_KV]
        self.qkv = nn.Linear(WIDTH, sum(self.heads) * HEAD_DIM)
        if form == "lse":
            self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS_Q))
        self.proj = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, documents):
        q, k, v = self.qkv(x).unflatten(1, (-1, HEAD_DIM)).split(self.heads, dim=1)
        if self.form == "argument":
            out = distca.core_attention(q, k, v, documents)
        elif self.form == "narrow v":
            out = distca.core_attention(q, k, v[..., : HEAD_DIM // 2], documents)
            out = torch.cat([out, out], dim=-1)
        elif self.form == "lse":
            settings = {"sinks": self.sinks, "return_lse": True}
            out, lse = distca.core_attention(q, k, v, documents, **settings)
            out = out + lse.tanh()[..., None]
        else:
            q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
            out = distca.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            out = out.squeeze(0).transpose(0, 1)
        x = x + self.proj(out.flatten(1))
        return x + self.mlp(x)


class Model(nn.Module):
    """Two layers. `checkpointing` is None, "full" or "selective", which keeps core attention."""

    def __init__(self, form: str = "argument", checkpointing: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(form) for _ in range(2))
        self.checkpointing = checkpointing

    def forward(self, x, documents=None):
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x, documents)
            else:
                x = checkpoint(layer, x, documents, use_reentrant=False, **self._kept())
        return x.square().mean()

    def _kept(self) -> dict:
        if self.checkpointing == "full":
            return {}
        kept = functools.partial(create_selective_checkpoint_contexts, keep_core_attention)
        return {"context_fn": kept}


def keep_core_attention(ctx, op, *args, **kwargs):
    kept = op is torch.ops.distca.core_attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def make_model(form: str = "argument", checkpointing: str | None = None) -> Model:
    torch.manual_seed(0)
    return Model(form, checkpointing)


def lengths_of(step: int, rank: int) -> list[int]:
    """Return lengths that sum to NUM_TOKENS. They depend on step and rank; some are balanced."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if step % 5 == 4:
        return [NUM_TOKENS]
    if step % 5 == 3 and rank == 0:
        return [1] * NUM_TOKENS
    num_documents = int(torch.randint(1, 9, (), generator=generator))
    cuts = torch.randint(0, NUM_TOKENS + 1, (num_documents,), generator=generator)
    ends = torch.cat([cuts.sort().values, torch.tensor([NUM_TOKENS])])
    return ends.diff(prepend=torch.tensor([0])).tolist()


def documents_of(step: int, rank: int) -> distca.Documents:
    return distca.Documents([0, *torch.tensor(lengths_of(step, rank)).cumsum(0).tolist()])


def tokens_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7000 + 100 * step + rank)
    return torch.randn(NUM_TOKENS, WIDTH, generator=generator)


def train_step(model: nn.Module, form: str, step: int, rank: int) -> tuple[float, list, int]:
    """Train a step. Return loss, gradients and the bytes that this rank sends under its plan."""
    documents = documents_of(step, rank)
    plan = distca.plan(documents)
    model.zero_grad()
    if form != "scope":
        loss = model(tokens_of(step, rank), documents)
        loss.backward()
    else:
        with distca.documents(documents):
            loss = model(tokens_of(step, rank))
            loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return loss.item(), gradients, plan.report().bytes_out[rank]


class Backend:
    """Compiles with `name`, and counts the graphs and their calls of core attention."""

    def __init__(self, name: str) -> None:
        self._compile = torch._dynamo.lookup_backend(name)
        self.num_graphs = 0
        self.num_attention_calls: list[int] = []

    def __call__(self, graph_module, inputs):
        self.num_graphs += 1
        self.num_attention_calls.append(
            sum(
                node.target is torch.ops.distca.core_attention.default
                or node.target is torch.ops.distca.core_attention
                for node in graph_module.graph.nodes
            )
        )
        return self._compile(graph_module, inputs)


def train_compiled(rank: int, world_size: int, form: str, backend_name: str) -> dict:
    """Compare NUM_STEPS compiled steps with eager ones."""
    torch._dynamo.reset()
    if backend_name == "inductor":  # scalar kernels: probing for vector units takes half a minute
        torch._inductor.config.cpp.vec_isa_ok = False
    backend = Backend(backend_name)
    eager = make_model(form)
    compiled = torch.compile(make_model(form), backend=backend, fullgraph=True)
    worst, sent = 0.0, []
    for step in range(NUM_STEPS):
        loss, gradients, bytes_out = train_step(eager, form, step, rank)
        compiled_loss, compiled_gradients, _ = train_step(compiled, form, step, rank)
        worst = max(worst, abs(loss - compiled_loss))
        for gradient, other in zip(gradients, compiled_gradients, strict=True):
            worst = max(worst, (gradient - other).abs().max().item())
        sent.append(bytes_out)
    return {
        "worst": worst,
        "sent": sent,
        "num_graphs": backend.num_graphs,
        "num_attention_calls": backend.num_attention_calls,
    }


def plan_ahead_of_compiled_code(rank: int, world_size: int) -> tuple[float, str]:
    """Return the largest error of steps whose plans may not be ready, and the error of a step that
    must be one graph."""
    torch._dynamo.reset()
    eager, worst = make_model(), 0.0
    compiled = torch.compile(make_model(), backend="aot_eager")
    for step in range(4):
        documents, x = documents_of(step, rank), tokens_of(step, rank)
        distca.plan(documents, ahead=True)
        loss = compiled(x, documents)
        worst = max(worst, abs(loss.item() - eager(x, documents).item()))
    torch._dynamo.reset()  # it would use the graphs above
    documents = documents_of(0, rank)
    whole = torch.compile(make_model(), backend="aot_eager", fullgraph=True)
    distca.plan(documents, ahead=True)
    with pytest.raises(Exception) as refused:
        whole(tokens_of(0, rank), documents)
    return worst, str(refused.value)


def test_compiled_code_waits_for_a_plan(ranks):
    for worst, refused in ranks(2).run(plan_ahead_of_compiled_code):
        assert worst <= 1e-5
        assert "Plan._wait_outside_compiled_code" in refused


@pytest.mark.parametrize(
    "form, backend",
    [
        ("argument", "aot_eager"),
        ("scope", "aot_eager"),
        ("lse", "aot_eager"),
        ("narrow v", "aot_eager"),
        pytest.param("argument", "inductor", marks=needs_compiler),
        pytest.param("narrow v", "inductor", marks=needs_compiler),
    ],
)
def test_compiles_once_for_all_documents(ranks, form, backend):
    results = ranks(2).run(train_compiled, form, backend)
    for result in results:
        assert result["worst"] <= 1e-5
        assert result["num_graphs"] <= 2
        assert all(calls == 2 for calls in result["num_attention_calls"])
    sent = [bytes_out for result in results for bytes_out in result["sent"]]
    assert len(set(sent)) > 5, "the steps must differ in what they send"
    assert 0 in sent, "some step must send nothing"


def calls_of(profile: torch.profiler.profile) -> tuple[int, int]:
    """Return the number of forward (also recomputed) and backward calls of core attention.

    If the plan moves rows, each call is an exchange.
    """
    passes = [
        (name.split(" layer ")[0].removeprefix("distca "), count)
        for name, count in ranges_of(profile).items()
        if name.endswith(" attention")
    ]
    return tuple(
        sum(count for name, count in passes if name.endswith(direction))
        for direction in ("forward", "backward")
    )


def train_checkpointed(
    rank: int, world_size: int, form: str, checkpointing: str | None, compiled: bool
):
    """Return the gradients of one step, its calls of core attention, and the bytes it sends."""
    torch._dynamo.reset()
    model = make_model(form, checkpointing)
    if compiled:
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _, gradients, bytes_out = train_step(model, form, 0, rank)
    return gradients, *calls_of(profile), bytes_out


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing, num_forward", [("full", 4), ("selective", 2)])
@pytest.mark.parametrize("form", ["argument", "lse"])
def test_activation_checkpointing(ranks, form, checkpointing, num_forward, compiled):
    plain = ranks(2).run(train_checkpointed, form, None, False)
    results = ranks(2).run(train_checkpointed, form, checkpointing, compiled)
    for (wanted, *_), (gradients, forward, backward, _) in zip(plain, results, strict=True):
        for gradient, other in zip(gradients, wanted, strict=True):
            assert (gradient - other).abs().max().item() <= 1e-5
        assert (forward, backward) == (num_forward, 2)
    assert any(bytes_out for *_, bytes_out in results), "some rank must send rows"


def test_documents_without_a_plan_compile_in_a_scope():
    torch._dynamo.reset()
    eager = make_model("scope")
    compiled = torch.compile(make_model("scope"), backend="aot_eager", fullgraph=True)
    for step, gradients in ((0, True), (1, True), (2, False)):
        with torch.set_grad_enabled(gradients), distca.documents(documents_of(step, 0)):
            x = tokens_of(step, 0)
            assert compiled(x).item() == pytest.approx(eager(x).item(), abs=1e-5)


def test_compiled_code_without_a_plan_names_the_remedy():
    torch._dynamo.reset()
    compiled = torch.compile(make_model(), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="have no plan .* call distca.plan"):
        compiled(tokens_of(0, 0), documents_of(0, 0))


OPERATORS_OF_A_STEP = (
    "core_attention",
    "core_attention_backward",
    "exchange",
    "attend",
    "attend_backward",
    "unpack_rows",
)


@pytest.mark.parametrize("name", OPERATORS_OF_A_STEP)
def test_operators_split_cuda_graphs(name):
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.distca, name).default.tags
