"""A small GPT of Megatron-Core on gloo ranks, with its own attention and with ours.

The reference is one process that runs each document alone, unpacked, with Megatron's own
DotProductAttention.
"""

import contextlib
import unittest.mock
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: F401
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor
from torch.overrides import TorchFunctionMode

import distca
import distca.integrations.megatron as integration
from distca.integrations import boundaries, megatron_batches

VOCAB_SIZE = 64
MAX_LENGTH = 512
LAYERS = 4
WINDOW = 7
# Documents of each data parallel rank, by micro-batch.
PACKS = [
    [[61, 1, 119], [5, 3]],
    [[1, 7, 31, 2], [90, 33]],
    [[3, 4], [17]],
    [[55, 20], [1, 1, 40]],
]
LATENT = {  # q and k are 24 wide, v is 16
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8},
    **{"v_head_dim": 16, "num_query_groups": 4, "rope_type": "rope", "rotary_percent": 1.0},
}
# Its DotProductAttention, which multi-latent attention can build, too.
MEGATRONS = integration._LocalAttention
# Settings of the model that change its attention.
MODELS = {
    "gpt": {},
    "windows": {"window_size": (WINDOW, 0), "window_attn_skip_freq": 2},
    "scaled": {"softmax_scale": 0.5, "apply_query_key_layer_scaling": True},
    "sinks": {"softmax_type": "learnable"},
    "off by one": {"softmax_type": "off-by-one"},
    "latent": LATENT,
}
RECOMPUTED = {
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        **{"recompute_granularity": "full", "recompute_method": "uniform"},
        "recompute_num_layers": 1,
    },
}


class _CpuMode(TorchFunctionMode):
    """Creates tensors on the CPU where Megatron asks for device="cuda"."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron run without a CUDA device: its masks, buffers, messages between stages, the
    states of CUDA's random numbers, which no test uses, and norms, which Apex or Transformer Engine
    have for sequence parallelism."""

    def norm(kind, config, hidden_size: int, eps: float = 1e-5, **others) -> torch.nn.RMSNorm:
        built = torch.nn.RMSNorm(hidden_size, eps)
        built.weight.sequence_parallel = config.sequence_parallel
        return built

    patches = [
        (WrappedTorchNorm, "__new__", norm),
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *args: None),
        (megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.zeros(0)),
        (megatron_random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
        (
            megatron_random.CudaRNGStatesTracker,
            "fork",
            lambda self, name="": contextlib.nullcontext(),
        ),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, replacement in patches:
            stack.enter_context(unittest.mock.patch.object(target, name, replacement))
        stack.enter_context(_CpuMode())
        yield


@dataclass(frozen=True)
class Way:
    """A model and how its step is distributed over ranks."""

    model: str = "gpt"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    chunks: int = 1
    """Model chunks of a pipeline stage; more than one interleaves them."""
    sequence_parallel: bool = False
    is_padded: bool = False
    """Whether padding follows each document, up to a multiple of 4 rows."""
    crosses_ranks: bool = False
    """Whether ranks hold equal runs of the documents of all of them."""
    num_rows: int = 0
    """Number of rows that padding of the last document fills; 0: micro-batches differ."""
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    recomputed: str = ""
    """What checkpointing recomputes: "core_attn" or "full"."""


@dataclass
class Result:
    errors: dict[str, float]
    """Relative errors of the loss and of the gradients of this rank's parameters."""
    bytes_moved: int
    """By a layer, over all plans of this rank's step."""
    num_plans: int
    num_without_gradients: int
    """Of these plans, made in a forward pass that checkpointing repeats later."""

    @property
    def worst_error(self) -> float:
        return max(self.errors.values())


def config_of(way: Way) -> TransformerConfig:
    latent = way.model == "latent"
    kind = MLATransformerConfig if latent else TransformerConfig
    varies = way.pipeline_parallel > 1 and way.num_rows == 0
    settings = {
        **{
            "num_layers": LAYERS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
        },
        **{"num_query_groups": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        **{"normalization": "RMSNorm", "add_bias_linear": False, "use_cpu_initialization": True},
        **{"calculate_per_token_loss": True, "bias_dropout_fusion": False},
        **{"masked_softmax_fusion": False, "attention_softmax_in_fp32": True},
        **{"gradient_accumulation_fusion": False, "multi_latent_attention": latent},
        **{"tensor_model_parallel_size": way.tensor_parallel},
        **{"sequence_parallel": way.sequence_parallel},
        **{"pipeline_model_parallel_size": way.pipeline_parallel},
        **{"pipeline_dtype": way.dtype, "variable_seq_lengths": varies},
        **{"moe_token_dispatcher_type": "alltoall"},  # the only one for variable lengths
        **{"virtual_pipeline_model_parallel_size": way.chunks if way.chunks > 1 else None},
        **{"batch_p2p_comm": True, "overlap_p2p_comm": False, "batch_p2p_sync": False},
        **{"params_dtype": way.dtype, "bf16": way.dtype == torch.bfloat16},
    }
    return kind(**{**settings, **MODELS[way.model], **RECOMPUTED.get(way.recomputed, {})})


def spec_of(way: Way, core_attention=None):
    """Return the local spec, with `core_attention` in place of DotProductAttention."""
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", multi_latent_attention=way.model == "latent"
    )
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    return spec


def build(way: Way, core_attention) -> list[GPTModel]:
    """Return this rank's model, or its chunks, with weights that depend on their names alone."""
    config = config_of(way)
    chunks = []
    for stage in range(way.chunks):
        vp_stage = stage if way.chunks > 1 else None
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = GPTModel(
            config,
            spec_of(way, core_attention),
            VOCAB_SIZE,
            MAX_LENGTH,
            pre_process=is_first,
            post_process=is_last,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        for name, weight in named_parameters(chunk).items():
            weight.data.copy_(_shard(weight, _weights(name, _whole_shape(weight))))
        chunks.append(chunk.to(way.device).train())
    return chunks


def named_parameters(chunk: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Return parameters by their names in a model that is not cut into stages."""
    parameters = {}
    for name, weight in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number)
        parameters[".".join(parts)] = weight
    return parameters


def _weights(name: str, shape: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.1 * values
    if "embedding" in name:
        return values
    # Scores far from uniform, so that a lost boundary shows.
    return values * (1.5 if "qkv" in name or "_up_proj" in name else 0.5) * shape[-1] ** -0.5


def _tensor_parallel_dim(weight: Tensor) -> int | None:
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    is_sharded = getattr(weight, "tensor_model_parallel", False)
    return weight.partition_dim if is_sharded else None


def _whole_shape(weight: Tensor) -> list[int]:
    shape, dim = list(weight.shape), _tensor_parallel_dim(weight)
    if dim is not None:
        shape[dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def _shard(weight: Tensor, whole: Tensor) -> Tensor:
    dim = _tensor_parallel_dim(weight)
    if dim is None:
        return whole
    parts = whole.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def scale_of(way: Way) -> int:
    """Return the factor for lengths in PACKS. CUDA devices count attention in tiles of 128 rows."""
    return 1 if way.device == "cpu" else 8


def tokens_of(dp_rank: int, micro_batch: int, way: Way) -> tuple[list[int], Tensor, Tensor]:
    """Return lengths, ids and labels of a rank's documents."""
    lengths = [scale_of(way) * each for each in PACKS[dp_rank][micro_batch]]
    generator = torch.Generator().manual_seed(100 * dp_rank + micro_batch)
    ids, labels = torch.randint(0, VOCAB_SIZE, (2, sum(lengths)), generator=generator)
    return lengths, ids, labels


@dataclass
class Packed:
    """A micro-batch as Megatron's loaders make it: [1, rows], with rows of padding."""

    ids: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams

    def losses(self, model: GPTModel) -> Tensor:
        """Return the losses of the last stage's rows, or another stage's hidden states."""
        return model(
            self.ids,
            self.position_ids,
            None,
            labels=self.labels,
            packed_seq_params=self.packed_seq_params,
        )

    def loss(self, model: GPTModel) -> Tensor:
        return (self.losses(model) * self.loss_mask).sum()

    @classmethod
    def of(cls, dp_rank: int, micro_batch: int, way: Way) -> "Packed":
        lengths, *rows = tokens_of(dp_rank, micro_batch, way)
        padded = [length + (-length % 4 if way.is_padded else 0) for length in lengths]
        padded[-1] += max(0, scale_of(way) * way.num_rows - sum(padded))
        rows += [torch.cat([torch.arange(length) for length in lengths]), torch.ones(len(rows[0]))]

        def laid_out(tensor: Tensor) -> Tensor:
            parts = zip(tensor.split(lengths), padded, strict=True)
            filled = [F.pad(part, (0, length - len(part))) for part, length in parts]
            return torch.cat(filled)[None].to(way.device)

        bounds = [
            F.pad(torch.tensor(each).cumsum(0), (1, 0)).int().to(way.device)
            for each in (lengths, padded)
        ]
        inside = bounds[1] if padded != lengths else None
        params = PackedSeqParams(
            "thd", bounds[0], bounds[0], inside, inside, max(padded), max(padded)
        )
        return cls(*map(laid_out, rows), params)

    @classmethod
    def run_of(cls, dp_rank: int, micro_batch: int, way: Way) -> "Packed":
        """Return a rank's run of the pack that consists of all ranks' documents."""
        num_ranks = parallel_state.get_data_parallel_world_size()
        lengths, *rows = zip(
            *(tokens_of(rank, micro_batch, way) for rank in range(num_ranks)), strict=True
        )
        ids, labels = (torch.cat(each).to(way.device) for each in rows)
        group = parallel_state.get_data_parallel_group()
        run = distca.shard_batch(ids[None], sum(lengths, []), group=group)
        mask = torch.ones_like(run.tokens, dtype=torch.float32)
        params = megatron_batches.packed_seq_params(run.documents, way.device)
        return cls(run.tokens, labels[None, run.rows], run.position_ids, mask, params)


def step(chunks: list[GPTModel], batches: list[Packed]) -> tuple[float, dict[str, Tensor]]:
    """One training step by Megatron's own schedule. Return the loss, summed over all ranks, and the
    gradients of this rank's parameters, summed over data parallel ranks."""
    losses = torch.zeros((), device=batches[0].ids.device)

    def forward_step(iterator, model):
        packed = next(iterator)
        output = packed.losses(model)

        def loss_of(output: Tensor):
            loss = (output * packed.loss_mask).sum()
            losses.add_(loss.detach())
            return loss, packed.loss_mask.sum().int(), {}

        return output, loss_of

    for chunk in chunks:
        chunk.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=batches[0].ids.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    for group in (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        dist.all_reduce(losses, group=group)
    return losses.item(), {name: each.cpu() for name, each in _gradients(chunks).items()}


def _gradients(chunks: list[GPTModel]) -> dict[str, Tensor]:
    gradients = {}
    for chunk in chunks:
        for name, weight in named_parameters(chunk).items():
            gradients[name] = weight.grad
            if getattr(weight, "sequence_parallel", False):
                dist.all_reduce(weight.grad, group=parallel_state.get_tensor_model_parallel_group())
            dist.all_reduce(weight.grad, group=parallel_state.get_data_parallel_group())
    return gradients


@contextlib.contextmanager
def parallel(way: Way) -> Iterator[None]:
    """A scope with Megatron's process groups for `way`. They end with it: ranks are in different
    numbers of them, and distca wants equal numbers."""
    opened, new_group = [], dist.new_group

    def recorded(*args, **keywords) -> dist.ProcessGroup:
        opened.append(new_group(*args, **keywords))
        return opened[-1]

    with on_cpu() if way.device == "cpu" else contextlib.nullcontext():
        with unittest.mock.patch.object(dist, "new_group", recorded):
            parallel_state.initialize_model_parallel(
                way.tensor_parallel,
                way.pipeline_parallel,
                way.chunks if way.chunks > 1 else None,
                create_gloo_process_groups=False,
            )
        if way.device != "cpu":
            megatron_random.model_parallel_cuda_manual_seed(0)
        try:
            yield
        finally:
            distca.close(parallel_state.get_data_parallel_group())
            parallel_state.destroy_model_parallel()
            for group in opened:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)


def loss_alone(model: GPTModel, dp_rank: int, micro_batch: int, way: Way) -> Tensor:
    """Return the loss of a rank's documents, each in a forward pass of its own."""
    lengths, *rows = tokens_of(dp_rank, micro_batch, way)
    rows = [each.to(way.device) for each in rows]
    loss = torch.zeros((), device=way.device)
    for ids, labels in zip(*(each.split(lengths) for each in rows), strict=True):
        positions = torch.arange(len(ids), device=way.device)[None]
        loss = loss + model(ids[None], positions, None, labels=labels[None]).sum()
    return loss


def true_step(way: Way, num_packs: int) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one process that runs each document alone."""
    alone = Way(way.model, device=way.device, dtype=way.dtype)
    with parallel(alone):
        (model,) = build(alone, MEGATRONS)
        loss = torch.zeros((), device=way.device)
        for dp_rank in range(num_packs):
            for micro_batch in range(len(PACKS[dp_rank])):
                loss = loss + loss_alone(model, dp_rank, micro_batch, way)
        loss.backward()
        parameters = named_parameters(model)
        return loss.item(), {name: each.grad.cpu() for name, each in parameters.items()}


def relative_error(got: Tensor, truth: Tensor) -> float:
    got, truth = got.double(), truth.double()
    return ((got - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def errors(got: tuple[float, dict], truth: tuple[float, dict]) -> dict[str, float]:
    """Return relative errors of the loss and of the gradients of `got`, by name."""
    of_gradients = {name: relative_error(grad, truth[1][name]) for name, grad in got[1].items()}
    return {"loss": abs(got[0] - truth[0]) / truth[0], **of_gradients}


def worst_error(got: tuple[float, dict], truth: tuple[float, dict]) -> float:
    return max(errors(got, truth).values())


@contextlib.contextmanager
def recorded_plans() -> Iterator[list]:
    """Record the plans of forward passes, and whether gradients were enabled."""
    plans, plan = [], boundaries.plan

    def recorded(*args, **keywords):
        plans.append((plan(*args, **keywords), torch.is_grad_enabled()))
        return plans[-1][0]

    with unittest.mock.patch.object(boundaries, "plan", recorded):
        yield plans


def balanced_error(
    rank: int, world_size: int, way: Way, truth: tuple[float, dict], installed: bool = False
) -> Result:
    """Compare a step of balanced attention with `truth`."""
    with parallel(way), recorded_plans() as plans:
        undo = integration.install() if installed else lambda: None
        try:
            chunks = build(way, None if installed else integration.BalancedAttention)
        finally:
            undo()
        dp_rank = parallel_state.get_data_parallel_rank()
        make = Packed.run_of if way.crosses_ranks else Packed.of
        batches = [make(dp_rank, i, way) for i in range(len(PACKS[dp_rank]))]
        got = step(chunks, batches)
        shards = {
            name: _shard(weight, truth[1][name])
            for chunk in chunks
            for name, weight in named_parameters(chunk).items()
        }
        moved = sum(sum(each.report().bytes_out) for each, _ in plans)
        have_gradients = [each for _, each in plans]
        shares = errors(got, (truth[0], shards))
        return Result(shares, moved, len(plans), have_gradients.count(False))
