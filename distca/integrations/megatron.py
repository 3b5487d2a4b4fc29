"""Core attention of Megatron-Core, balanced over its data parallel ranks.

`BalancedAttention` takes the place of DotProductAttention in a layer spec, `BalancedTEAttention`
that of TEDotProductAttention. `install` replaces both in every model that is built afterwards.
Packed sequences, PackedSeqParams with qkv_format "thd", are computed here. Megatron's own attention
computes everything else.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from distca.attention import check_no_capture, core_attention
from distca.integrations.boundaries import Boundaries, boundaries_of
from distca.options import check
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents, check_window
from distca.planning.plan import CAUSAL
from distca.ranks import session as sessions
from distca.ranks.hints import hint

CAUSAL_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal)
# Settings that change what attention computes or reports, with the reason why distca refuses them.
UNSUPPORTED = {
    "qk_clip": "the largest score of a head is not known",
    "log_max_attention_logit": "the largest score of a head is not known",
    "fp8_dot_product_attention": "attention is computed in the dtype of q, k and v",
    "fp8_multi_head_attention": "attention is computed in the dtype of q, k and v",
    "batch_invariant_mode": "the order of sums follows the plan, which differs from step to step",
}
# Settings of models that cannot train on documents that cross ranks, with the reason.
NOT_ACROSS = {
    "multi_latent_attention": "it computes positions of this rank's rows only",
    "mtp_num_layers": "its layers need tokens of other ranks",
    "is_hybrid_model": "its layers need states of other ranks",
    "experimental_attention_variant": "its layers need rows of other ranks",
}


class _Balanced:
    """What both classes add to Megatron's attention."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
        **others,
    ) -> None:
        is_causal = attention_type == "self" and attn_mask_type in CAUSAL_MASKS
        if is_causal and config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size is {config.context_parallel_size}; expected 1 with distca: "
                "documents that cross ranks replace it (distca.shard_batch over the data parallel "
                "ranks, and distca.integrations.megatron_batches.packed_seq_params)"
            )
        super().__init__(
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            softmax_scale=softmax_scale,
            pg_collection=pg_collection,
            **others,
        )
        self._is_causal, self._mask_type = is_causal, attn_mask_type
        self._window_size = _window_of(config, layer_number) if is_causal else CAUSAL
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling divides scores by the layer's number and multiplies again.
        self._softmax_scale = softmax_scale
        self._head_dim_v = others.get("v_channels")
        self._groups = pg_collection

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others,
    ) -> Tensor:
        """Compute attention as Megatron calls it: packed query [tokens, heads_q, head_dim] of this
        tensor parallel rank, key and value with heads_kv. Return [tokens, heads_q, head_dim_v];
        rows after the last document are 0.

        Training passes, also those that Megatron recomputes later, are balanced over the data
        parallel ranks, so they are collective. The first layer of a micro-batch plans it. Other
        passes stay on this rank unless Options.balance_no_grad is set. Raises ValueError for
        settings and arguments of a packed call that it would have to ignore.
        """
        mask_type = attn_mask_type or self._mask_type
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if not (self._is_causal and mask_type in CAUSAL_MASKS and is_packed) or (
            len(query) != len(key)  # keys of a cache
        ):
            if self._is_causal and self.training and not is_packed:
                hint(
                    "Megatron's attention was called without packed sequences, so it stays on its "
                    'rank; pass PackedSeqParams with qkv_format "thd" to the model'
                )
            others |= {"attention_bias": attention_bias, "packed_seq_params": packed_seq_params}
            return super().forward(
                query, key, value, attention_mask, attn_mask_type=mask_type, **others
            )
        check_no_capture(query, "attention", ": --cuda-graph-impl none")
        session = self._session()
        with sessions.announced(session):
            self._check(attention_mask, attention_bias, packed_seq_params)
            boundaries = boundaries_in(packed_seq_params)
            self._check_rows(boundaries.here, len(query))
        value = value[..., : self._head_dim_v]  # multi-latent attention pads it for packed calls
        dims = (query.shape[2], query.element_size(), value.shape[2])
        shape = AttentionShape(query.shape[1], key.shape[1], *dims)
        how = (session, self._window_size, query.device, shape)
        documents, _ = boundaries.of_pass(self, *how)
        num_padding = len(query) - documents.num_tokens
        out = core_attention(
            *(rows[: documents.num_tokens] for rows in (query, key, value)),
            documents,
            softmax_scale=self._softmax_scale,
            window_size=self._window_size,
            sinks=self._sinks(),
        )
        return F.pad(out, (0, 0, 0, 0, 0, num_padding)) if num_padding else out

    def _sinks(self) -> Tensor | None:
        if self.config.softmax_type == "vanilla":
            return None
        return self.softmax_offset.flatten()

    def _session(self) -> sessions.Session | None:
        """Return the session that shares this call, or None if it stays on this rank."""
        group = self._data_parallel_group()
        # Megatron's checkpointing runs the forward pass of a training step without gradients.
        is_recomputed = self.training and is_checkpointing()
        if not is_recomputed and not sessions.is_balanced(self.training, group):
            return None
        session = sessions.opened(group)
        return session if session.options.enabled else None

    def _data_parallel_group(self) -> ProcessGroup:
        """Return the ranks that hold other tokens of this pipeline stage and these heads."""
        group = getattr(self._groups, "dp", None)
        if group is None and parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_data_parallel_group()
        expected = "the data parallel group, or parallel_state initialised"
        check("pg_collection.dp", group, group is not None, expected)
        return group

    def _check(
        self, mask: Tensor | None, bias: Tensor | None, packed_seq_params: PackedSeqParams
    ) -> None:
        config = self.config
        for name, tensor in (("attention_mask", mask), ("attention_bias", bias)):
            if tensor is not None:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} in a packed call; expected None: the "
                    "documents are the mask"
                )
        is_dropped = self.training and self._dropout != 0.0
        expected = "0.0 with distca: --attention-dropout 0.0"
        check("attention_dropout", self._dropout, not is_dropped, expected)
        for name, reason in UNSUPPORTED.items():
            value = getattr(config, name, False)
            check(name, value, not value, f"False with distca: {reason}")
        is_promised = sessions.options_of(self._data_parallel_group()).deterministic
        expected = "False, or distca's option deterministic (--deterministic before the script)"
        is_kept = not config.deterministic_mode or is_promised
        check("deterministic_mode", config.deterministic_mode, is_kept, expected)
        size = getattr(packed_seq_params, "local_cp_size", None)
        check("packed_seq_params.local_cp_size", size, size in (None, 1), "1 with distca")

    def _check_rows(self, documents: Documents, num_rows: int) -> None:
        num_tokens, config = documents.num_tokens, self.config
        is_exact = num_tokens == num_rows or not documents.crosses_ranks
        if num_tokens > num_rows or not is_exact:
            raise ValueError(
                f"cu_seqlens_q ends at {num_tokens}, but q has {num_rows} rows; expected the "
                "boundaries of this micro-batch"
            )
        if not documents.crosses_ranks:
            return
        for name, reason in NOT_ACROSS.items():
            value = getattr(config, name, None)
            check(name, value, not value, f"none with documents that cross ranks: {reason}")


class _LocalAttention(DotProductAttention):
    """Megatron's own attention, in a form that multi-latent attention can build, too."""

    def __init__(self, *args, k_channels=None, v_channels=None, **keywords) -> None:
        super().__init__(*args, **keywords)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class BalancedAttention(_Balanced, _LocalAttention):
    """Megatron's DotProductAttention, with packed sequences balanced over data parallel ranks."""


BALANCED = {DotProductAttention: BalancedAttention}
if HAVE_TE:

    class BalancedTEAttention(_Balanced, TEDotProductAttention):
        """Transformer Engine's attention, with packed sequences balanced over data parallel
        ranks."""

    BALANCED[TEDotProductAttention] = BalancedTEAttention


def _window_of(config, layer_number: int) -> tuple[int, int]:
    skips = config.window_attn_skip_freq
    if not is_layer_window_attention(config.window_size, skips, layer_number):
        return CAUSAL
    left, right = config.window_size
    check("window_size", config.window_size, right in (0, -1), "(left, 0) in a causal layer")
    return check_window((left, 0))


def boundaries_in(packed_seq_params: PackedSeqParams) -> Boundaries:
    """Return the boundaries of packed rows. Padding inside them follows a document's own tokens,
    which do not see it, so it counts as part of the document. Raises ValueError for boundaries that
    are missing or wrong, or differ between queries and keys."""
    queries, keys = (_read(packed_seq_params, which) for which in ("q", "kv"))
    if not torch.equal(queries.offsets, keys.offsets):
        raise ValueError(
            f"cu_seqlens_kv has {keys.offsets.numel()} boundaries and differs from cu_seqlens_q "
            f"with {queries.offsets.numel()}; expected equal ones: queries see keys of their own "
            "document"
        )
    return queries


def tensor_in(packed_seq_params: PackedSeqParams, which: str) -> tuple[str, Tensor]:
    """Return name and tensor of the boundaries of queries, "q", or keys, "kv"."""
    names = (f"cu_seqlens_{which}_padded", f"cu_seqlens_{which}")
    name = next((each for each in names if getattr(packed_seq_params, each) is not None), names[1])
    tensor = getattr(packed_seq_params, name)
    check(name, tensor, isinstance(tensor, Tensor), "a tensor, [0, ..., tokens]")
    return name, tensor


def _read(packed_seq_params: PackedSeqParams, which: str) -> Boundaries:
    name, tensor = tensor_in(packed_seq_params, which)

    def read() -> Tensor:
        try:
            return Documents(tensor).cu_seqlens.to(torch.int64)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return boundaries_of(tensor, read)


def install() -> Callable[[], None]:
    """Use balanced attention in every model that is built from now on: in self-attention and
    multi-latent attention whose spec names DotProductAttention or TEDotProductAttention. Return a
    function that undoes this for later models. The launcher's --megatron calls it."""
    stock = {each: each.__init__ for each in (Attention, MultiLatentAttention)}
    for kind, init in stock.items():
        kind.__init__ = _with_balanced_submodules(init)

    def undo() -> None:
        for kind, init in stock.items():
            kind.__init__ = init

    return undo


def _with_balanced_submodules(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def init(self, config, submodules, *args, **keywords) -> None:
        spec = _balanced(submodules.core_attention)
        submodules = dataclasses.replace(submodules, core_attention=spec)
        stock(self, config, submodules, *args, **keywords)

    return init


def _balanced(spec: object) -> object:
    """Return a core attention's spec with our class in place of Megatron's, or as it is."""
    if not isinstance(spec, ModuleSpec):
        return BALANCED.get(spec, spec) if isinstance(spec, type) else spec
    module = get_module(spec)
    return dataclasses.replace(spec, module=BALANCED[module]) if module in BALANCED else spec
