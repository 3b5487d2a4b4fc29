"""One layer's attention as transformers asks for it, and what distca supports of it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distca.attention import check_no_capture, core_attention, routed_documents
from distca.integrations import models
from distca.integrations.boundaries import Boundaries, read_boundaries
from distca.integrations.models import BOUNDARIES, NAME, PLAIN_LAYERS, USE_ANOTHER
from distca.options import check
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.plan import CAUSAL

# How configurations name the dropout of attention.
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
# Keywords that change what attention computes, with their meaning. None of them is supported.
UNSUPPORTED = {
    "sinks": "attention sinks of each query",
    "position_bias": "a bias on scores",
    "head_mask": "masked heads",
    "indices": "chosen keys by query",
    "block_indices": "chosen blocks of keys by query",
    "block_table": "a paged key-value cache",
    "cache": "a paged key-value cache",
    "output_attentions": "attention weights, which are never formed",
}


@dataclass(frozen=True)
class Call:
    """One layer's attention."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    keywords: dict

    @property
    def num_tokens(self) -> int:
        """Of one row of the batch."""
        return self.query.shape[2]

    @property
    def sinks(self) -> Tensor | None:
        return self.keywords.get("s_aux")

    @property
    def softcap(self) -> float | None:
        return self.keywords.get("softcap")

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention supports these scores."""
        return self.sinks is None and self.softcap is None

    @property
    def shape(self) -> AttentionShape:
        heads = (self.query.shape[1], self.key.shape[1])
        dims = (self.query.shape[3], self.query.element_size(), self.value.shape[3])
        return AttentionShape(*heads, *dims)

    def boundaries(self) -> Boundaries:
        keywords = self.keywords
        if all(keywords.get(each) is None for each in ("cu_seq_lens_q", "position_ids")):
            keywords = models.boundaries_of_pass(self.module, self.num_tokens)
        rows = (self.query.shape[0], self.num_tokens)
        return read_boundaries(keywords, *rows, type(self.module).__name__)

    def attend(self, documents: Documents, window_size: tuple[int, int]) -> Tensor:
        """Returns [batch, tokens, heads_q, head_dim of value]."""
        q, k, v = (
            each.transpose(1, 2).flatten(0, 1) for each in (self.query, self.key, self.value)
        )
        if is_tuned_by_position(self.module):
            q = (q * self._temperature(documents)).to(q.dtype)
        settings = {"softcap": self.softcap, "sinks": self.sinks, "window_size": window_size}
        out = core_attention(q, k, v, documents, softmax_scale=self.scaling, **settings)
        return out.unflatten(0, (len(self.query), self.num_tokens))

    def _temperature(self, documents: Documents) -> Tensor:
        """Returns [rows, 1, 1]: Llama 4's factor of queries by their position in the document, over
        the factor by their position in the row, which the layer has applied."""
        module = self.module
        in_row = torch.arange(self.num_tokens).repeat(len(self.query))
        factors = (
            module.attn_scale * torch.log1p((each.float() + 1).div(module.floor_scale).floor()) + 1
            for each in (documents.position_ids, in_row)
        )
        return torch.div(*factors).to(self.query.device, non_blocking=True)[:, None, None]


def check_keywords(module: nn.Module, dropout: float, keywords: dict) -> None:
    """Raise ValueError for arguments that would change the result and are not supported."""
    for name, meaning in UNSUPPORTED.items():
        value = keywords.get(name)
        if value is not None and value is not False:
            shown = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{name} is {shown:.80} in {type(module).__name__} ({meaning}); "
                f"expected None under attn_implementation={NAME!r}: {USE_ANOTHER}"
            )
    if dropout != 0.0:
        config = getattr(module, "config", None)
        named = (name for name in DROPOUTS if getattr(config, name, None) == dropout)
        raise ValueError(
            f"dropout is {dropout} in {type(module).__name__}; expected 0.0 under "
            f"attn_implementation={NAME!r}: set config.{next(named, DROPOUTS[0])} = 0.0"
        )


def check_model(call: Call, is_causal: bool) -> None:
    """Raise ValueError for what is alike on all ranks, because they train the same model."""
    name = type(call.module).__name__
    if not is_causal:
        raise ValueError(
            f"is_causal is False in {name}, which is told of documents; expected causal attention "
            f"{why_balanced(call.module)}, or no boundaries: {USE_ANOTHER}; by part of the model: "
            f'{{"text_config": "{NAME}", "vision_config": "sdpa"}}'
        )
    for argument in ("query", "key", "value"):
        if isinstance(getattr(call, argument), DTensor):
            raise ValueError(
                f"{argument} is a DTensor in {name}; expected this rank's own heads: .to_local()"
            )
    if routed_documents() is not None and is_tuned_by_position(call.module):
        raise ValueError(
            f"attn_temperature_tuning is True in {name} in ping-pong, whose halves count positions "
            "from 0; expected False, or the model without ping_pong"
        )
    check_no_capture(call.query, name)
    check_layer_type(call.module)


def check_layer_type(module: nn.Module) -> None:
    """Raise ValueError for a layer that is more than attention to documents."""
    layer_type = type_of_layer(module)
    if layer_type not in PLAIN_LAYERS:
        raise ValueError(
            f"layer_types[{module.layer_idx}] is {layer_type!r} in {type(module).__name__}; "
            f"expected one of {PLAIN_LAYERS[1:]}: {USE_ANOTHER}"
        )


def why_balanced(module: nn.Module) -> str:
    """Return why the call of `module` is balanced."""
    is_trained = module.training and torch.is_grad_enabled()
    return "in training" if is_trained else "under balance_no_grad"


def type_of_layer(module: nn.Module) -> str | None:
    """Return the layer's entry in `layer_types` of its configuration, if it has one."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    # -1 in layers that are used in several places (Zamba 2)
    is_known = types is not None and index is not None and 0 <= index < len(types)
    return types[index] if is_known else None


def window_of(module: nn.Module, keywords: dict | None) -> tuple[int, int]:
    """Return the causal window (left, right) that `module` passes in `keywords`, or that of its
    configuration if `keywords` is None, because it has not been called yet. If it then asks for
    another window, that window is planned, too."""
    width = getattr(module, "sliding_window", None)
    config, layer_type = getattr(module, "config", None), type_of_layer(module)
    if keywords is not None and "sliding_window" in keywords:
        width = keywords["sliding_window"]
    elif layer_type == "sliding_attention":
        width = config.sliding_window
    elif width is None and layer_type is None:
        width = getattr(config, "sliding_window", None) or None
        # Some models window their mask and tell the layers nothing; others ignore the setting.
        if keywords is not None and width is not None:
            raise ValueError(
                f"config.sliding_window is {width}, but {type(module).__name__} passes no "
                f"sliding_window to its attention; set it to None or {USE_ANOTHER}"
            )
    if width is None:
        return CAUSAL
    check("sliding_window", width, width >= 1, "at least 1, the query itself")
    return (int(width) - 1, 0)


def chunk_size_of(module: nn.Module) -> int | None:
    """Return the number of tokens of a chunk, for layers whose tokens see their chunk only."""
    is_chunked = type_of_layer(module) == "chunked_attention"
    return module.config.attention_chunk_size if is_chunked else None


def is_tuned_by_position(module: nn.Module) -> bool:
    """Return whether the layer scales queries by their position in the row, as Llama 4 does."""
    return getattr(module, "attn_temperature_tuning", False) and not module.use_rope


def has_boundaries(call: Call) -> bool:
    """Return whether rows of the batch may hold several documents, or a half of them."""
    boundaries = {**call.keywords, **models.innermost_boundaries()}
    is_told = any(boundaries.get(name) is not None for name in BOUNDARIES)
    return is_told or routed_documents() is not None


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for scaled_dot_product_attention: rotary embeddings may be float32."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)
