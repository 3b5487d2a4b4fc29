"""Overrides for torchtitan: balanced attention in place of its own, no core edits.

    --override.imports distca.integrations.torchtitan.attention,\
distca.integrations.torchtitan.selective_checkpoint,distca.integrations.torchtitan.metrics

`attention` balances flex and varlen attention over the ranks of the "batch" mesh, and
`varlen_attention` only the latter, without claiming the modules around it. With
{"ping_pong": true}, blocks run on two halves of their tokens. `selective_checkpoint` keeps
attention's results, so that nothing is sent again when a block is recomputed. `metrics` adds
distca's figures to torchtitan's metrics.
"""

import collections
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import metadata

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.runtime import get_partition_spec
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import attention as titan
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from distca import ops
from distca.attention import check_no_capture, core_attention, routed_documents
from distca.integrations.boundaries import Boundaries, read_boundaries
from distca.pingpong.pingpong import PingPong
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents, check_window
from distca.planning.plan_report import PlanReport
from distca.ranks import session as sessions
from distca.ranks.hints import hint


def _titans(name: str, later: str) -> type:
    """Return a class by its name in torchtitan 0.3.0, or by the name that later versions give
    it."""
    cls = getattr(titan, later, getattr(titan, name, None))
    if cls is None:
        raise ImportError(
            f"distca: torchtitan is {metadata.version('torchtitan')}, without the {name} "
            "that 0.3.0 has: pip install torchtitan==0.3.0"
        )
    return cls


VarlenAttention = _titans("VarlenAttention", "VarlenInnerAttention")
FlexAttention = _titans("FlexAttention", "FlexInnerAttention")
VarlenMetadata = _titans("VarlenMetadata", "VarlenAttentionMetadata")
BaseAttention = _titans("BaseAttention", "BaseAttention")

MAX_KEPT_PLANS = 1024
MODULE = "distca.integrations.torchtitan"
BATCHES = MODULE + "_batches.batches"

recent_reports: collections.deque[Callable[[], PlanReport]] = collections.deque(
    maxlen=MAX_KEPT_PLANS
)
"""Functions that return the reports of the plans since the last log."""


class BalancedAttention(VarlenAttention):
    """torchtitan's varlen attention, balanced over ranks in training. Without data parallelism, and
    in evaluation without Options.balance_no_grad, it stays on this rank."""

    is_in_use = False  # whether this process has built an instance
    runs = 1  # of a shared batch on each rank; two if blocks run in halves
    axes = ["batch"]  # names of the torchtitan meshes whose ranks share attention

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        ping_pong: bool = False

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's loads another kernel
        BalancedAttention.is_in_use = True
        BalancedAttention.runs = 2 if config.ping_pong else 1
        self.window_size, self.in_halves = check_window(config.window_size), config.ping_pong
        self._is_parallelized = False
        self._group: ProcessGroup | None = None

    def parallelize(self, parallel_dims) -> None:
        """Takes the group of ranks that hold different tokens. Collective over it."""
        if parallel_dims.cp_enabled:
            raise ValueError(
                f"context_parallel_degree is {parallel_dims.cp}; expected 1 with distca, which "
                "cuts sequences itself: --parallelism.context_parallel_degree 1 --override.imports "
                f'{BATCHES}={{"ranks_per_batch": {parallel_dims.cp}}}'
            )
        if self.in_halves and parallel_dims.tp_enabled:
            raise ValueError(
                f"ping_pong is True and tensor_parallel_degree is {parallel_dims.tp}; expected "
                "only one of them: with sequence parallelism, a block gets only part of its tokens"
            )
        session = open_session(parallel_dims)
        if session is not None:
            self._group = session.group
        self._is_parallelized = True
        super().parallelize(parallel_dims)

    @torch.compiler.disable(
        reason="the documents of a step are planned in Python: leave 'model' out of "
        "--compile.components"
    )
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks=None,
        attention_metadata=None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others,
    ) -> Tensor:
        """Compute attention as torchtitan calls it: q [batch, tokens, heads, head_dim], out like q,
        and the documents that its VarlenMetadata names. With out_transform, return
        out_transform(out, lse), with lse [batch, tokens, heads]; gpt-oss applies its attention
        sinks this way. Raises ValueError for arguments that it would have to ignore, in a CUDA
        graph, and if boundaries do not fit the batch.
        """
        check_no_capture(q_BLNH, "attention", ": --training.disable_cuda_graphs")
        names = sorted(name for name, value in others.items() if value is not None)
        if names:
            raise ValueError(
                f"{names[0]} is given to {type(self).__name__}; expected None: for other changes "
                "to scores, use torchtitan's own attention"
            )
        packing = attention_metadata if attention_metadata is not None else attention_masks
        with spmd.no_typecheck():
            out, lse = self._attend(packing, (q_BLNH, k_BLNH, v_BLNH), scale)
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            local, spec = spmd.get_local_type(q_BLNH), get_partition_spec(q_BLNH)
            spmd.assert_type(out, local, spec)
            spmd.assert_type(lse, local, spec and spmd.PartitionSpec(*spec[:3]))
        return out if out_transform is None else out_transform(out, lse)

    def _attend(self, packing, inputs: tuple[Tensor, ...], scale: float | None) -> tuple:
        batch_and_tokens, session = inputs[0].shape[:2], self._session()
        q, k, v = (  # in the dtype that torchtitan casts to
            each.bfloat16() if each.is_cuda and each.dtype != torch.float16 else each
            for each in (tensor.flatten(0, 1) for tensor in inputs)
        )
        documents = routed_documents()  # of a block in ping-pong
        if documents is None:
            with sessions.announced(session):
                boundaries = boundaries_of_metadata(packing, batch_and_tokens)
            dims = (q.shape[2], q.element_size(), v.shape[2])
            shape = AttentionShape(q.shape[1], k.shape[1], *dims)
            how = (session, self.window_size, q.device, shape)
            documents = _documents_of_pass(boundaries, self, *how)
        settings = {"softmax_scale": scale, "window_size": self.window_size}
        out, lse = core_attention(q, k, v, documents, **settings, return_lse=True)
        out = out.unflatten(0, batch_and_tokens).to(inputs[0].dtype)
        return out, lse.unflatten(0, batch_and_tokens)

    def documents_of_block(self, args: tuple, kwargs: dict) -> Documents | None:
        """Return the documents of a block's call in training. The first call of a forward pass
        plans them."""
        session = self._session()
        if session is None:
            return None
        values = [*args, *kwargs.values()]  # x, attention_masks, positions
        with sessions.announced(session):
            if len(values[0]) != 1 or values[2] is None:
                raise ValueError(
                    f"a block in ping-pong is called with shape {list(values[0].shape)} and "
                    f"positions of type {type(values[2]).__name__}; expected one row with "
                    "positions: --training.local_batch_size 1"
                )
            boundaries = boundaries_of_metadata(values[1], values[0].shape[:2])
        return _documents_of_pass(boundaries, self, session, self.window_size, values[0].device)

    def _session(self) -> sessions.Session | None:
        """Return the session that shares this call, or None if it stays on this rank."""
        if not sessions.is_balanced(self.training, self._group):
            return None
        if self._is_parallelized:
            session = None if self._group is None else sessions.opened(self._group)
        else:
            session = sessions.find()
            if session is None and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"{type(self).__name__} was not parallelized, so it knows no group; add "
                    "the override distca.integrations.torchtitan.metrics, or call "
                    "distca.init(group) first"
                )
        return session if session is not None and session.options.enabled else None


def open_session(parallel_dims) -> sessions.Session | None:
    """Open the session of the ranks along BalancedAttention.axes. Return None if this rank is the
    only one. Collective over the group."""
    mesh = parallel_dims.get_activated_mesh(BalancedAttention.axes)
    return None if mesh is None else sessions.init(mesh)


def boundaries_of_metadata(packing, shape: tuple[int, int]) -> Boundaries:
    """Return the document boundaries in the metadata that a model creates for a batch of this
    shape, [rows, tokens]. Raises ValueError for masks, and for metadata that does not fit the
    batch."""
    if not isinstance(packing, VarlenMetadata):
        raise ValueError(
            f"attention metadata is a {type(packing).__name__}; expected VarlenMetadata, which "
            "models create if all their layers have balanced attention"
        )
    keywords = {"cu_seq_lens_q": packing.cu_seq_q, "cu_seq_lens_k": packing.cu_seq_k}
    return read_boundaries(keywords, *shape, BalancedAttention.__name__)


def _documents_of_pass(boundaries: Boundaries, *how) -> Documents:
    documents, new_plan = boundaries.of_pass(*how)
    if new_plan is not None:
        recent_reports.append(new_plan.report)
    return documents


_stock_init = Decoder.__init__


def init_in_halves(model: Decoder, config: Decoder.Config) -> None:
    """Replace Decoder.__init__. Put blocks whose attention has `ping_pong` into ping-pong."""
    _stock_init(model, config)
    for block in model.layers.values():
        attention = getattr(getattr(block, "attention", None), "inner_attention", None)
        if isinstance(attention, BalancedAttention) and attention.in_halves:
            PingPong(block, split={1: None, "attention_masks": None}, find=_documents_of_block)


def _documents_of_block(block: nn.Module, args: tuple, kwargs: dict) -> Documents | None:
    return block.attention.inner_attention.documents_of_block(args, kwargs)


class SavingAC(SelectiveAC):
    """Selective checkpointing that keeps attention's results: recomputing would send rows again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {ops.CORE_ATTENTION}


class BalanceMetrics(MetricsProcessor):
    """torchtitan's metrics and, under distca/, means over the plans since the last log."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, *, parallel_dims, **kwargs) -> None:
        open_session(parallel_dims)  # models without parallelize do not open one
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None) -> None:
        ours = recent_figures()
        if not BalancedAttention.is_in_use:
            hint(f"the model has no layer with {MODULE}.attention, so nothing is balanced")
        if ours:
            distcas = {f"distca/{name}": value for name, value in ours.items()}
            extra_metrics = {**distcas, **(extra_metrics or {})}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if ours:
            logger.info(
                f"distca: imbalance {ours['imbalance_before']:.3f} -> {ours['imbalance_after']:.3f}"
                f"  {ours['moved_mb']:.1f} MB a layer  plan {ours['plan_ms']:.1f} ms, "
                f"waited {ours['waited_ms']:.1f} ms"
            )


def recent_figures() -> dict[str, float]:
    """Return the means of PlanReport.figures() over the plans since the last call; {} if nothing
    was balanced."""
    figures = [report().figures() for report in recent_reports]
    recent_reports.clear()
    names = figures[0] if figures else ()
    return {name: statistics.fmean(each[name] for each in figures) for name in names}


@override(target=VarlenAttention.Config, exact=True, description="distca: balanced attention")
def varlen_attention(
    config: VarlenAttention.Config, ping_pong: bool = False
) -> BalancedAttention.Config:
    """Use BalancedAttention. With `ping_pong`, run blocks on two halves of their tokens."""
    if ping_pong:  # an override of blocks would conflict with this one, which is inside them
        Decoder.__init__ = init_in_halves
    return derive(config, BalancedAttention.Config, ping_pong=ping_pong)


@override(target=BaseAttention.Config, description="distca: balanced attention")
def attention(config: BaseAttention.Config, ping_pong: bool = False) -> BaseAttention.Config:
    """Use BalancedAttention in place of flex or varlen attention.

    Flex attention's windows are in its masks, and their sizes in the configuration around it.
    Raises ValueError for other attention, and for windows that it cannot read.
    """
    inner = config.inner_attention
    if type(inner) is FlexAttention.Config:
        inner = derive(inner, VarlenAttention.Config, window_size=_window_of(config))
    elif type(inner) is not VarlenAttention.Config:
        raise ValueError(
            f"inner_attention is {type(inner).__qualname__}; expected that of "
            'attn_backend="flex" or "varlen"'
        )
    return replace(config, inner_attention=varlen_attention(inner, ping_pong))


def _window_of(config: BaseAttention.Config) -> tuple[int, int]:
    """Return the window of a layer with flex attention: sliding_window_size keys, including the
    query's own."""
    size = getattr(config, "sliding_window_size", None)
    named = {each.name: getattr(config, each.name) for each in fields(config)}
    others = [name for name in named if "window" in name and named[name] not in (None, size)]
    if others:
        raise ValueError(
            f"{others[0]} is {named[others[0]]} in {type(config).__qualname__}; expected None or "
            'sliding_window_size: use a model with attn_backend="varlen"'
        )
    return (-1, 0) if size is None else (size - 1, 0)


@override(target=SelectiveAC.Config, exact=True, description="distca: keeps attention's results")
def selective_checkpoint(config: SelectiveAC.Config) -> SavingAC.Config:
    """Use SavingAC."""
    return derive(config, SavingAC.Config)


@override(target=MetricsProcessor.Config, exact=True, description="distca: what was balanced")
def metrics(config: MetricsProcessor.Config) -> BalanceMetrics.Config:
    """Use BalanceMetrics."""
    return derive(config, BalanceMetrics.Config)
