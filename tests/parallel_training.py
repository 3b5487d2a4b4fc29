"""One training step of a small Llama on four gloo ranks, under every kind of parallelism.

The reference is the same step in one process, document by document with torch's attention.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distca
from distca.integrations.fsdp import gather_after_attention

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama import Llama, LlamaConfig, WholeDocuments, torch_attention  # noqa: E402

SIZES = {"vocab_size": 61, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
PACKS = [[200, 1, 24], [7, 50, 3], [31], [90, 15, 2, 2, 14]]  # a step's documents
NUM_RANKS = 4


@dataclass(frozen=True)
class Way:
    """A distribution of the step over the ranks."""

    axes: dict[str, int]
    """Sizes of the mesh's axes. "tp" is tensor parallel; all others are data parallel."""
    uses_dtensors: bool = False
    """Whether attention gets DTensors instead of local heads."""
    is_sharded: bool = False
    """Whether the step is one global pack whose documents cross ranks."""
    offloads: bool = False
    dtype: torch.dtype = torch.float32
    gathers_after_attention: bool = False
    has_halves: bool = False
    """Whether blocks run in ping-pong."""


WAYS = {
    "data parallel 4": Way({"dp": 4}),
    "tensor parallel 2": Way({"dp": 2, "tp": 2}),
    "tensor parallel 2, DTensors": Way({"dp": 2, "tp": 2}, uses_dtensors=True),
    "tensor parallel 2, ping-pong": Way({"dp": 2, "tp": 2}, has_halves=True),
    "documents across 2, tensor parallel 2, ping-pong": Way(
        {"dp": 2, "tp": 2}, is_sharded=True, has_halves=True
    ),
    "hybrid sharding": Way({"dp_replicate": 2, "dp_shard": 2}),
    "hybrid sharding, tensor parallel 2": Way({"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    "documents across 4": Way({"dp": 4}, is_sharded=True),
    "documents across 2, tensor parallel 2": Way({"dp": 2, "tp": 2}, is_sharded=True),
    "gathers after attention": Way({"dp": 4}, gathers_after_attention=True),
    "offload": Way({"dp": 4}, offloads=True),
    "offload, bfloat16": Way({"dp_replicate": 2, "dp_shard": 2}, False, True, True, torch.bfloat16),
}


@dataclass
class Result:
    loss: float
    gradients: dict[str, Tensor]
    place: int
    """Data parallel rank."""
    layout: list[int]
    bytes_moved: int


def build(core_attention) -> Llama:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**SIZES, ffn=48), core_attention)
    with torch.no_grad():
        for block in model.blocks:  # scores far from uniform, so that a lost boundary shows
            for linear in (block.attention.wq, block.attention.wk):
                linear.weight.mul_(30)
    return model


def tokens_of(packs: list[list[int]]) -> list[Tensor]:
    """Return the tokens of each pack. They do not depend on how documents are packed."""
    generator = torch.Generator().manual_seed(1)
    total = sum(map(sum, PACKS))
    stream = torch.randint(0, SIZES["vocab_size"], (total,), generator=generator)
    return list(stream.split([sum(pack) for pack in packs]))


def labels_of(tokens: Tensor, lengths: list[int]) -> Tensor:
    labels = [F.pad(document[1:], (0, 1), value=-100) for document in tokens.split(lengths)]
    return torch.cat(labels)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def true_step(dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, Tensor]]:
    model = build(lambda q, k, v, packed: torch_attention(q.to(dtype), k.to(dtype), v, packed))
    lengths = [length for pack in PACKS for length in pack]
    (tokens,) = tokens_of([lengths])
    documents = WholeDocuments.of(lengths, torch.device("cpu"))
    labels = labels_of(tokens, lengths)
    computed = model.to(dtype)
    logits = computed(tokens, documents.position_ids, documents)
    loss = loss_sum(logits, labels) / (labels >= 0).sum()
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters()}


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    plan = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}
    plan = {f"attention.{name}": style for name, style in plan.items()}
    plan |= {"attention.wo": RowwiseParallel(), "ffn.w2": RowwiseParallel()}
    plan |= {"ffn.w1": ColwiseParallel(), "ffn.w3": ColwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def on_dtensors(mesh: DeviceMesh):
    def attend(q: Tensor, k: Tensor, v: Tensor, documents: distca.Documents) -> Tensor:
        whole = [DTensor.from_local(each, mesh, [Shard(1)]) for each in (q, k, v)]
        out = distca.core_attention(*whole, documents)
        assert isinstance(out, DTensor) and out.shape == whole[0].shape
        return out.to_local()

    return attend


def parallel_model(way: Way, mesh: DeviceMesh, data_mesh: DeviceMesh) -> nn.Module:
    attend = on_dtensors(mesh["tp"]) if way.uses_dtensors else distca.core_attention
    model = build(attend)
    if way.has_halves:
        for block in model.blocks:
            distca.PingPong(block)
    if "tp" in way.axes:
        tensor_parallel(model, mesh["tp"])
    keywords = {"mesh": data_mesh}
    if way.offloads:
        keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if way.dtype != torch.float32:
        keywords["mp_policy"] = MixedPrecisionPolicy(way.dtype, torch.float32)
    for block in model.blocks:
        fully_shard(block, **keywords)
    fully_shard(model, **keywords)
    if way.gathers_after_attention:
        gather_after_attention(model)
    return model


def train_step(rank: int, world_size: int, name: str) -> Result:
    way = WAYS[name]
    mesh = init_device_mesh("cpu", tuple(way.axes.values()), mesh_dim_names=tuple(way.axes))
    data_axes = tuple(axis for axis in way.axes if axis != "tp")
    data_mesh = mesh[data_axes] if "tp" in way.axes else mesh
    session = distca.init(data_mesh)
    try:
        return _step(way, parallel_model(way, mesh, data_mesh), session)
    finally:
        distca.close()


def _step(way: Way, model: nn.Module, session) -> Result:
    num_packs = NUM_RANKS // session.num_ranks
    if way.is_sharded:
        lengths = [length for pack in PACKS for length in pack]
        runs = 2 if way.has_halves else 1
        run = distca.shard_batch(tokens_of([lengths])[0], lengths, runs=runs)
        tokens, labels, documents, scale = run.tokens, run.labels, run.documents, run.loss_scale
        positions = run.position_ids
    else:
        first = session.rank * num_packs
        mine = PACKS[first : first + num_packs]
        tokens = torch.cat(tokens_of(PACKS)[first : first + num_packs])
        lengths = [length for pack in mine for length in pack]
        labels = labels_of(tokens, lengths)
        documents = distca.Documents([0, *torch.tensor(lengths).cumsum(0).tolist()])
        scale = session.num_ranks / sum(length - 1 for pack in PACKS for length in pack)
        positions = documents.position_ids
    plan = distca.plan(documents)
    loss = loss_sum(model(tokens, positions, documents), labels) * scale
    assert documents._halves or not way.has_halves
    loss.backward()
    total = loss.detach() / session.num_ranks
    dist.all_reduce(total, group=session.group)
    gradients = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    layout, moved = plan.layout.tolist(), sum(plan.report().bytes_out)
    return Result(total.item(), gradients, session.rank, layout, moved)
