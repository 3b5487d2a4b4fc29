"""torchtitan's small Llama on gloo ranks, with its own varlen attention and with our overrides.

The kernel of its varlen attention has no CPU version, so torch's attention by document replaces it.
"""

import contextlib
import copy
import types
import unittest.mock
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from profiled import ranges_of
from recorded import recorded_plans
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_mask

if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    # torchtitan 0.3.0 imports this name, but uses it only for FSDP over several ranks under its
    # backend spmd_types, which no test runs.
    torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed import parallel_dims, utils  # noqa: E402
from torchtitan.models.common import attention as titan  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.gpt_oss import model_registry  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

import distca  # noqa: E402
import distca.integrations.torchtitan as integration  # noqa: E402

PREFIX = "distca.integrations.torchtitan."
OVERRIDES = [PREFIX + name for name in ("varlen_attention", "selective_checkpoint", "metrics")]
SEQ_LEN = 128
LENGTHS = [[[128], [100, 1, 27]], [[3] * 42 + [2], [60, 68]]]  # by rank and row of the batch


class InFloat32(types.ModuleType):
    """torch with float32 as bfloat16. torchtitan's attention casts to it, too coarse to compare."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str):
        return getattr(torch, name)


def by_document(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **others):
    """Stand in for torch's varlen_attn, with lse [heads, tokens], by causal scores by document."""
    assert window_size[1] == 0 and torch.equal(cu_seq_q, cu_seq_k)
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    lengths = cu_seq_q.diff().tolist()
    outs, lses = [], []
    for rows in zip(*(each.split(lengths) for each in (q, k, v)), strict=True):
        q_part, k_part, v_part = (each.transpose(0, 1) for each in rows)
        scores = q_part @ k_part.transpose(1, 2) * (scale or q.shape[2] ** -0.5)
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        if window_size[0] >= 0:
            hidden |= torch.ones_like(hidden).tril(-window_size[0] - 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        outs.append((scores.softmax(-1) @ v_part).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    out = torch.cat(outs)
    return (out, torch.cat(lses, 1)) if others.get("return_aux") else out


def by_mask(q, k, v, *, block_mask, scale, return_aux, score_mod, **others):
    """Stand in for torch's flex_attention, which has no backward pass on CPUs."""
    assert score_mod is None
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    shape = (len(q), None, q.shape[2], k.shape[2])
    scores = scores.masked_fill(
        ~create_mask(block_mask.mask_mod, *shape, device="cpu"), float("-inf")
    )
    return scores.softmax(-1) @ v, types.SimpleNamespace(lse=scores.logsumexp(-1))


def own_flex_attention():
    """Let torchtitan's flex attention run on CPUs."""

    def create(*args, separate_full_blocks, **kwargs):  # torch 2.11 has none
        return titan.create_block_mask(*args, **kwargs)

    stack, flex = contextlib.ExitStack(), staticmethod(by_mask)
    stack.enter_context(unittest.mock.patch.object(titan, "_compiled_create_block_mask", create))
    stack.enter_context(
        unittest.mock.patch.object(titan.FlexAttention, "_compiled_flex_attn", flex)
    )
    return stack


def trainer_config(overrides: list[str], config=None, num_layers: int = 2):
    config = config or config_registry.llama3_debugmodel_varlen_attn()
    config.training.seq_len = SEQ_LEN
    config.model_spec = copy.deepcopy(config.model_spec)
    config.model_spec.model.layers = config.model_spec.model.layers[:num_layers]
    config.model_spec.model.update_from_config(config=config)
    if overrides:
        apply_overrides(OverrideConfig(imports=overrides), config)
    return config


def build(overrides: list[str], config=None, num_layers: int = 2) -> tuple[nn.Module, object]:
    """Return the model and its trainer's configuration. Overrides do not change the weights."""
    config = trainer_config(overrides, config, num_layers)
    model = config.model_spec.model.build()
    torch.manual_seed(0)
    model.init_states()
    with torch.no_grad():  # scores far from uniform, so that a lost boundary shows
        for layer in model.layers.values():
            layer.attention.qkv_linear.wqkv.weight.mul_(5)
    return model.train(), config


@dataclass
class Batch:
    tokens: Tensor
    labels: Tensor
    positions: Tensor

    @classmethod
    def of(cls, rows: list[list[int]], seed: int) -> "Batch":
        generator = torch.Generator().manual_seed(seed)
        tokens, labels = torch.randint(0, 2048, (2, len(rows), SEQ_LEN), generator=generator)
        positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in rows]
        return cls(tokens, labels, torch.stack(positions))

    def loss(self, model: nn.Module) -> Tensor:
        masks = model.get_attention_masks(self.positions)
        logits = model(self.tokens, self.positions, masks)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return F.cross_entropy(logits.flatten(0, 1).float(), self.labels.flatten())


def step(model: nn.Module, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = batch.loss(model)
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    by_name = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        name = name.replace("_checkpoint_wrapped_module.", "")
        by_name[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return by_name


def own_step(batch: Batch, num_layers: int = 2) -> tuple[float, dict[str, Tensor]]:
    """Run a step with torchtitan's own varlen attention module."""
    kept = titan.varlen_attn, titan.torch
    titan.varlen_attn, titan.torch = by_document, InFloat32("torch")
    try:
        return step(build([], num_layers=num_layers)[0], batch)
    finally:
        titan.varlen_attn, titan.torch = kept


def worst_error(got: tuple[float, dict], truth: tuple[float, dict]) -> float:
    errors = [abs(got[0] - truth[0]) / truth[0]]
    for name, grad in truth[1].items():
        errors.append(((got[1][name] - grad).norm() / grad.norm()).item())
    return max(errors)


def flex_error(rank: int, world_size: int, ping_pong: bool) -> tuple[float, float]:
    """Return the worst error of a Llama with flex attention, and the megabytes that moved."""
    distca.close()
    entry = (PREFIX + "attention", {"ping_pong": ping_pong})
    with unittest.mock.patch.object(Decoder, "__init__", Decoder.__init__):
        model, _ = build([entry, *OVERRIDES[1:]], config_registry.llama3_debugmodel())
    model.parallelize(mesh_of(world_size, 1, "spmd_types"))
    batch = Batch.of(LENGTHS[rank][:1], seed=rank)
    integration.recent_figures()
    results = step(model, batch)
    moved = integration.recent_figures()["moved_mb"]
    with own_flex_attention():
        truth = step(build([], config_registry.llama3_debugmodel())[0], batch)
    distca.close()
    return worst_error(results, truth), moved


def gpt_oss_error(rank: int, world_size: int, attn_backend: str) -> float:
    """Return the worst error of out and gradients of gpt-oss's attention, with sliding windows.

    The truth is torchtitan's own attention. Experts, which have no CPU version in float32, are left
    out.
    """
    distca.init()
    config = model_registry("debugmodel", attn_backend=attn_backend).model.layers[0].attention
    config.sliding_window_size = 16
    if attn_backend == "varlen":
        config.inner_attention.window_size = (15, 0)
    batch = Batch.of(LENGTHS[rank], seed=rank)
    masks = create_varlen_metadata_for_document(batch.positions)
    x = torch.randn(*batch.tokens.shape, config.dim, generator=torch.Generator().manual_seed(rank))

    def run(config, masks) -> tuple[float, dict[str, Tensor]]:
        module = config.build().train()
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.2)
        loss = module(x, masks, batch.positions).square().sum()
        loss.backward()
        return loss.item(), gradients(module)

    ours = run(integration.attention(config), masks)
    if attn_backend == "flex":
        mask_mods = [
            titan.get_efficient_causal_mask_mod_for_packed_document(batch.positions),
            titan.get_sliding_window_mask_mod(16),
        ]
        shape = (len(batch.positions), None, SEQ_LEN, SEQ_LEN)
        masks = titan.create_block_mask(and_masks(*mask_mods), *shape, device="cpu")
    with (
        own_flex_attention(),
        unittest.mock.patch.object(titan, "varlen_attn", by_document),
        unittest.mock.patch.object(titan, "torch", InFloat32("torch")),
    ):
        truth = run(config, masks)
    assert truth[1]["sinks"].norm() > 0
    return worst_error(ours, truth)


def mesh_of(dp: int, tp: int, backend: str, pp: int = 1) -> parallel_dims.ParallelDims:
    """Return torchtitan's meshes on the CPU."""
    parallel_dims.device_type = "cpu"
    utils.set_spmd_backend(backend)
    dims = parallel_dims.ParallelDims(1, dp, 1, tp, pp, 1, pp * dp * tp, backend)
    dims.build_mesh()
    return dims


def num_exchanges(run) -> int:
    """Count the exchanges of attention that `run` starts, by the profiler's ranges."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(count for name, count in ranges_of(profile).items() if name.endswith("dispatch"))


def overridden_error(rank: int, world_size: int, tp: int, backend: str) -> tuple[float, float]:
    """Return the worst error of loss and gradients, and the megabytes that the plan moved."""
    dp = world_size // tp
    dims = mesh_of(dp, tp, backend)
    model, _ = build(OVERRIDES)
    model.parallelize(dims)
    place = rank // tp
    batch = Batch.of(LENGTHS[place % 2], seed=place)
    integration.recent_figures()
    error = worst_error(step(model, batch), own_step(batch))
    moved = integration.recent_figures().get("moved_mb", 0.0)
    distca.close()
    return error, moved


def exchanges_with_checkpointing(rank: int, world_size: int, overrides: list[str]):
    """Return the number of exchanges of a step under selective checkpointing, and its error."""
    distca.init()
    model, config = build(overrides)
    config.activation_checkpoint.build(dump_folder="").apply(model)
    batch = Batch.of(LENGTHS[rank], seed=rank)
    steps = []
    count = num_exchanges(lambda: steps.append(step(model, batch)))
    dist.barrier()
    return count, worst_error(steps[0], own_step(batch))


def build_in_halves() -> tuple[nn.Module, object]:
    entry = (OVERRIDES[0], {"ping_pong": True})
    with unittest.mock.patch.object(Decoder, "__init__", Decoder.__init__):
        model, config = build([entry, *OVERRIDES[1:]])
    assert all(isinstance(block, distca.PingPong) for block in model.layers.values())
    return model, config


def ping_pong_error(rank: int, world_size: int, backend: str, checkpoint: bool):
    """Return the worst error of two steps in ping-pong, and the number of plans of each half."""
    distca.close()
    model, config = build_in_halves()
    model.parallelize(mesh_of(world_size, 1, backend))
    if checkpoint:
        config.activation_checkpoint.build(dump_folder="").apply(model)
    errors = []
    for seed in range(2):
        batch = Batch.of(LENGTHS[rank][:1], seed=10 * seed + rank)
        errors.append(worst_error(step(model, batch), own_step(batch)))
    num_plans = [half.num_plans for half in distca.init().halves]
    distca.close()
    return max(errors), num_plans


class RowLoader(BaseDataLoader):
    """Whole rows of documents, the same on all ranks of one data parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_batches: int = 1
        num_rows: int = 2
        bad_rank: int | None = None

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others) -> None:
        self.config, self.dp_rank = config, dp_rank

    @staticmethod
    def batch(seed: int, dp_rank: int, num_rows: int = 2) -> Batch:
        return Batch.of(LENGTHS[dp_rank][-num_rows:], seed=10 * seed + dp_rank)

    def __iter__(self):
        for seed in range(self.config.num_batches):
            batch = self.batch(seed, self.dp_rank, self.config.num_rows)
            if self.dp_rank == self.config.bad_rank:
                batch.positions[0, 5] = 99
            yield {"input": batch.tokens, "positions": batch.positions}, batch.labels

    def state_dict(self) -> dict:
        return {"dp_rank": self.dp_rank}

    def load_state_dict(self, state_dict: dict) -> None:
        self.dp_rank = state_dict["dp_rank"]


def loader_of(rank: int, world_size: int, ranks_per_batch: int, **rows) -> BaseDataLoader:
    """Return RowLoader(**rows) under the override `batches`."""
    config = trainer_config([])
    config.dataloader = RowLoader.Config(**rows)
    entry = (integration.BATCHES, {"ranks_per_batch": ranks_per_batch})
    apply_overrides(OverrideConfig(imports=[entry]), config)
    return config.dataloader.build(dp_world_size=world_size, dp_rank=rank, seq_len=SEQ_LEN)


def own_masks():
    """Restore, at the end, the masks that torchtitan makes."""
    return unittest.mock.patch.object(Decoder, "get_attention_masks", Decoder.get_attention_masks)


def own_steps(num_batches: int, num_packs: int, num_rows: int) -> list[tuple[float, dict]]:
    """Run a step on the batches of all packs together, with torchtitan's own attention."""
    steps = []
    for seed in range(num_batches):
        packs = [RowLoader.batch(seed, pack, num_rows) for pack in range(num_packs)]
        names = ("tokens", "labels", "positions")
        whole = Batch(*(torch.cat([getattr(pack, name) for pack in packs]) for name in names))
        steps.append(own_step(whole))
    return steps


def shared_steps(
    rank: int,
    world_size: int,
    ranks_per_batch: int,
    num_rows: int,
    backend: str,
    ping_pong: bool = False,
) -> tuple[float, list[bool], float]:
    """Train on runs of three batches. Return the worst error of losses and gradients, whether each
    plan was made ahead, and the megabytes that plans moved."""
    distca.close()
    model, _ = build_in_halves() if ping_pong else build(OVERRIDES)
    model.parallelize(mesh_of(world_size, 1, backend))
    num_packs = world_size // ranks_per_batch
    truth = own_steps(3, num_packs, num_rows)
    evaluation = RowLoader.batch(0, rank % 2)
    true_evaluation = own_step(evaluation)[0]
    integration.recent_figures()
    errors = []
    with own_masks(), recorded_plans() as are_ahead:
        loader = loader_of(rank, world_size, ranks_per_batch, num_batches=3, num_rows=num_rows)
        for (inputs, labels), true_step in zip(loader, truth, strict=True):
            model.zero_grad()
            masks = model.get_attention_masks(inputs["positions"])
            logits = model(inputs["input"], inputs["positions"], masks).flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            loss = loss / (SEQ_LEN * num_rows * num_packs)
            loss.backward()
            summed = {"loss": loss.detach(), **gradients(model)}
            for each in summed.values():
                dist.all_reduce(each)
            errors.append(worst_error((summed.pop("loss").item(), summed), true_step))
        with torch.no_grad():
            errors.append(abs(evaluation.loss(model.eval()).item() / true_evaluation - 1))
    moved = integration.recent_figures()["moved_mb"]
    distca.close()
    return max(errors), are_ahead, moved


def step_on_a_bad_batch(rank: int, world_size: int) -> None:
    """Take a step where the positions of the last rank's batch jump."""
    distca.close()
    model, _ = build(OVERRIDES)
    model.parallelize(mesh_of(world_size, 1, "partial_dtensor"))
    with own_masks():
        ((inputs, _),) = loader_of(rank, world_size, 1, bad_rank=world_size - 1)
        masks = model.get_attention_masks(inputs["positions"])
        model(inputs["input"], inputs["positions"], masks)
