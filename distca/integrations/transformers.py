"""attn_implementation="distca" for models of transformers, registered by importing this module.

In training, core attention of packed documents is balanced over ranks. Evaluation and generation
stay on their rank: documents are computed here, and what documents cannot express (a key-value
cache, padding, bidirectional layers) by torch's own attention under transformers' own mask.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.attention import FULL, check_no_capture, core_attention, routed_documents
from distca.integrations import models
from distca.integrations.boundaries import PACK, Boundaries, chunks_of, read_boundaries
from distca.integrations.models import (
    BOUNDARIES,
    NAME,
    PLAIN_LAYERS,
    USE_ANOTHER,
    open_session,
)
from distca.options import check
from distca.pingpong.pingpong import PingPong, third
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.plan import CAUSAL, Plan
from distca.ranks import session as sessions

OLDEST_TRANSFORMERS = "5.5.3"
if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
    raise ImportError(
        f"distca: transformers is {transformers.__version__}; expected {OLDEST_TRANSFORMERS} or "
        "newer: pip install --upgrade transformers"
    )
if Version(transformers.__version__) < Version("5.17"):  # layers of older releases ignore seq_idx
    models.TOLD_OF_DOCUMENTS.clear()

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

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

# What transformers.masking_utils makes causal masks of windows, chunks and packed documents from.
PLAIN_MASKS = {
    "causal_mask_function",
    "sliding_window_overlay",
    "chunked_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "and_masks",
}

_mask_reasons = WeakTensorKeyDictionary()  # masks that we made: why documents do not express them
_latest_plan: Plan | None = None


def latest_plan() -> Plan | None:
    """Return the plan of this rank's latest training pass, whose `report()` says what was balanced.
    Return None before the first pass, and if nothing is balanced."""
    return _latest_plan


@torch.compiler.disable
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: query [batch, heads_q, tokens, head_dim], key and
    value with heads_kv heads, not repeated. Return ([batch, tokens, heads_q, head_dim], None).

    `cu_seq_lens_q` gives the documents of the batch * tokens rows. Without it, documents begin
    where `position_ids` [1 or batch, tokens] are 0. A layer that gets neither uses its model's.
    `sliding_window` is the number of keys that a query sees, itself included. `s_aux` [heads_q] are
    attention sinks, and `softcap` caps scores. While `module` trains with gradients, the call is
    balanced over ranks and collective, and the first layer of a forward pass plans it. Other passes
    without a key-value cache are balanced under Options.balance_no_grad. Otherwise the call stays
    on this rank. So does bidirectional attention in a model that is told of no documents, such as a
    vision tower: ranks may run it different numbers of times.

    Raises ValueError for arguments that it would have to ignore: dropout, a bias, and if balanced
    masks, padding, bidirectional attention of packed documents, keys of a cache, and boundaries
    that are missing or contradict each other.
    """
    models.outermost().num_calls += 1
    _check_keywords(module, dropout, kwargs)
    call = _Call(module, *_autocast(query, key, value), scaling, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_shared = models.is_balanced(module) or models.outermost().crosses_ranks
    if not is_causal and not _has_boundaries(call):
        is_shared = False
    attend = _attend_balanced if is_shared else _attend_here
    return attend(call, attention_mask, is_causal), None


@torch.compiler.disable
def forward_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Tensor | None:
    """Return the mask of a forward pass that transformers asks for. It is None if documents,
    causality and window say it all, otherwise sdpa's boolean mask [batch, 1, q_length, kv_length].
    """
    parts = set(_parts(mask_function)) if mask_function is not None else set()
    unknown = parts - PLAIN_MASKS
    if "chunked_attention" not in (getattr(kwargs.get("config"), "layer_types", None) or ()):
        unknown |= parts & {"chunked_overlay"}  # layers do not say which of them have chunks
    # For packed documents transformers asks for a mask that may not be skipped. They need none.
    may_skip = "packed_sequence_mask_function" in parts or kwargs.get("allow_is_causal_skip", True)
    num_padding = 0 if attention_mask is None else int((~attention_mask.bool()).sum())
    if unknown:
        reason = f"transformers asks for {', '.join(sorted(unknown))}"
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    elif num_padding:
        reason = f"{num_padding} of {attention_mask.numel()} tokens are padding"
    elif q_length != kv_length or kv_offset != 0 or q_offset != 0:
        reason = f"{q_length} queries see {kv_length} keys: a key-value cache"
    elif models.needs_mask(kwargs.get("config")) or not may_skip:
        reason = "the model's layers read their mask, or choose keys by it"
        kwargs.update(allow_is_causal_skip=False)
    else:
        models.outermost().unmasked.add(id(kwargs.get("config")))
        return None
    if mask_function is not None:
        kwargs["mask_function"] = mask_function
    lengths = (batch_size, q_length, kv_length, q_offset, kv_offset)
    mask = sdpa_mask(*lengths, attention_mask=attention_mask, **kwargs)
    if mask is not None:
        _mask_reasons[mask] = reason
    return mask


def _parts(function: Callable) -> Iterator[str]:
    """Yield the names of the functions that a mask function consists of."""
    name = getattr(function, "__qualname__", type(function).__name__)
    ours = getattr(function, "__module__", "") == "transformers.masking_utils"
    yield name.split(".")[0] if ours else f"{function.__module__}.{name}"
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for inner in content if isinstance(content, tuple) else (content,):
            if callable(inner) and not isinstance(inner, Tensor):
                yield from _parts(inner)


def _check_keywords(module: nn.Module, dropout: float, keywords: dict) -> None:
    for name, meaning in UNSUPPORTED.items():
        value = keywords.get(name)
        if value is not None and value is not False:
            shown = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{name} is {shown:.80} in {type(module).__name__} ({meaning}); "
                f"expected None under attn_implementation={NAME!r}: {USE_ANOTHER}"
            )
    if dropout != 0.0:
        raise ValueError(
            f"dropout is {dropout} in {type(module).__name__}; expected 0.0 under "
            f"attn_implementation={NAME!r}: set config.attention_dropout = 0.0"
        )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for scaled_dot_product_attention: rotary embeddings may be float32."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(each if each.dtype == torch.float64 else each.to(dtype) for each in tensors)


@dataclass(frozen=True)
class _Call:
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
        if _is_tuned_by_position(self.module):
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


def _layer_type(module: nn.Module) -> str | None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    # -1 in layers that are used in several places (Zamba 2)
    is_known = types is not None and index is not None and 0 <= index < len(types)
    return types[index] if is_known else None


def _window_of(module: nn.Module, keywords: dict | None) -> tuple[int, int]:
    """Return the causal window (left, right) that `module` passes in `keywords`, or that of its
    configuration if `keywords` is None, because it has not been called yet. If it then asks for
    another window, that window is planned, too."""
    width = getattr(module, "sliding_window", None)
    config, layer_type = getattr(module, "config", None), _layer_type(module)
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


def _is_tuned_by_position(module: nn.Module) -> bool:
    return getattr(module, "attn_temperature_tuning", False) and not module.use_rope


def _chunk_size_of(module: nn.Module) -> int | None:
    is_chunked = _layer_type(module) == "chunked_attention"
    return module.config.attention_chunk_size if is_chunked else None


def _has_boundaries(call: _Call) -> bool:
    """Return whether rows of the batch may hold several documents, or a half of them."""
    boundaries = {**call.keywords, **models.innermost_boundaries()}
    is_told = any(boundaries.get(name) is not None for name in BOUNDARIES)
    return is_told or routed_documents() is not None


def _attend_here(call: _Call, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Compute attention on this rank alone, under any mask that transformers builds."""
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}; expected None or [batch, 1 or "
                f"heads, {call.num_tokens}, {call.key.shape[2]}], as transformers makes it of "
                "padding"
            )
        _check_own_mask(call, mask)
    packed = call.keywords.get("cu_seq_lens_q") is not None
    if mask is None and call.key.shape[2] == call.num_tokens and (is_causal or packed):
        window_size = _window_of(call.module, call.keywords) if is_causal else FULL
        boundaries, chunk_size = call.boundaries(), _chunk_size_of(call.module)
        is_torchs = window_size == CAUSAL and chunk_size is None and call.is_plain
        if boundaries.is_packed or not is_torchs:
            return call.attend(chunks_of(boundaries.here, chunk_size), window_size)
    if not call.is_plain:
        _check_layer_type(call.module)  # DeepSeek-V4's compressed layers write biases to the mask
        return _attend_to_matrix(call, mask, is_causal)
    rows = (call.query, call.key, call.value, mask)
    how = {"scaling": call.scaling, "is_causal": is_causal}
    return sdpa_attention_forward(call.module, *rows, **how)[0]


def _attend_to_matrix(call: _Call, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Compute attention from the whole matrix of scores, with softcap and sinks."""
    num_groups = call.query.shape[1] // call.key.shape[1]
    key, value = (each.repeat_interleave(num_groups, 1) for each in (call.key, call.value))
    scale = call.query.shape[3] ** -0.5 if call.scaling is None else call.scaling
    scores = call.query @ key.transpose(2, 3) * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is None and is_causal and call.num_tokens > 1:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if call.sinks is not None:
        column = call.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


def _check_own_mask(call: _Call, mask: Tensor) -> None:
    """Raises ValueError if a layer derived a mask from the model's, which distca left out."""
    is_left_out = id(getattr(call.module, "config", None)) in models.outermost().unmasked
    if mask not in _mask_reasons and is_left_out:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and was made by "
            f"{type(call.module).__name__} itself; expected None for packed documents, which are "
            f"the mask: {USE_ANOTHER}"
        )


def _attend_balanced(call: _Call, mask: Tensor | None, is_causal: bool) -> Tensor:
    _check_model(call, is_causal)
    window_size, session = _window_of(call.module, call.keywords), open_session()
    chunk_size = _chunk_size_of(call.module)
    in_halves = routed_documents()  # of a layer in ping-pong
    with sessions.announced(session):
        _check_batch(call, mask)
        boundaries = call.boundaries() if in_halves is None else None
        if boundaries is not None:
            chunks_of(boundaries.here, chunk_size)  # not all documents have chunks
    if boundaries is None:
        return call.attend(in_halves, window_size)
    how = (session, window_size, call.query.device, call.shape, chunk_size)
    return call.attend(_documents_of_pass(boundaries, call.module, *how), window_size)


def _documents_of_pass(boundaries: Boundaries, *how) -> Documents:
    global _latest_plan
    documents, new_plan = boundaries.of_pass(*how)
    _latest_plan = new_plan or _latest_plan
    return documents


def ping_pong(
    model: transformers.PreTrainedModel, *, cut: Callable[[Documents], int] = third
) -> transformers.PreTrainedModel:
    """Make the decoder layers of `model` run on two halves of the tokens in training, as
    `distca.PingPong` describes, and return the model. Call this before it is sharded or compiled.
    Gradient checkpointing may be enabled before or after. Each batch must be one packed row. Sets
    config.use_cache to False, because a cache would hand keys of the first half to the second.

    Raises ValueError for a model without decoder layers that have a `self_attn`.
    """
    names = set(model._no_split_modules or ())
    layers = [part for part in model.modules() if type(part).__name__ in names]
    layers = [layer for layer in layers if hasattr(layer, "self_attn")]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no decoder layers that distca knows: none of "
            f"{sorted(names)} has a self_attn; use distca.PingPong on its layers"
        )
    boundaries = {"cu_seq_lens_q": None, "cu_seq_lens_k": None, "attention_mask": None}
    for layer in layers:
        PingPong(layer, cut=cut, split=boundaries, find=_documents_of_layer)
        layer.self_attn.config.use_cache = False
    return model


def ping_pong_built_models() -> None:
    """Apply `ping_pong` to every model that is built from now on with attn_implementation="distca",
    or with a name that `replace` took over. If `ping_pong` refuses a model, building it raises the
    error."""
    stock = transformers.PreTrainedModel.post_init

    @functools.wraps(stock)
    def post_init(model: transformers.PreTrainedModel) -> None:
        stock(model)
        has_layers = any(isinstance(part, PingPong) for part in model.modules())
        if model.config._attn_implementation in models.NAMES and not has_layers:
            ping_pong(model)

    transformers.PreTrainedModel.post_init = post_init


def _documents_of_layer(layer: nn.Module, args: tuple, kwargs: dict) -> Documents | None:
    """Return the documents of a decoder layer's balanced call. The first call of a forward pass
    plans them."""
    # Opening a session is collective, and a rank may evaluate alone.
    session = open_session() if models.is_balanced(layer) else None
    if session is None:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    with sessions.announced(session):
        if hidden.shape[0] != 1:
            raise ValueError(
                f"hidden_states has shape {list(hidden.shape)} in ping-pong; expected one row: "
                f"{PACK}"
            )
        boundaries = read_boundaries(kwargs, 1, hidden.shape[1], type(layer).__name__)
    window_size, chunk_size = _window_of(layer.self_attn, None), _chunk_size_of(layer.self_attn)
    how = (session, window_size, hidden.device, None, chunk_size)
    return _documents_of_pass(boundaries, layer, *how)


def _check_model(call: _Call, is_causal: bool) -> None:
    """Raise ValueError for what is alike on all ranks, because they train the same model."""
    name = type(call.module).__name__
    if not is_causal:
        raise ValueError(
            f"is_causal is False in {name}, which is told of documents; expected causal attention "
            f"{_mode(call.module)}, or no boundaries: {USE_ANOTHER}; by part of the model: "
            f'{{"text_config": "{NAME}", "vision_config": "sdpa"}}'
        )
    for argument in ("query", "key", "value"):
        if isinstance(getattr(call, argument), DTensor):
            raise ValueError(
                f"{argument} is a DTensor in {name}; expected this rank's own heads: .to_local()"
            )
    if routed_documents() is not None and _is_tuned_by_position(call.module):
        raise ValueError(
            f"attn_temperature_tuning is True in {name} in ping-pong, whose halves count positions "
            "from 0; expected False, or the model without ping_pong"
        )
    check_no_capture(call.query, name)
    _check_layer_type(call.module)


def _check_layer_type(module: nn.Module) -> None:
    layer_type = _layer_type(module)
    if layer_type not in PLAIN_LAYERS:
        raise ValueError(
            f"layer_types[{module.layer_idx}] is {layer_type!r} in {type(module).__name__}; "
            f"expected one of {PLAIN_LAYERS[1:]}: {USE_ANOTHER}"
        )


def _mode(module: nn.Module) -> str:
    """Return why the call of `module` is balanced."""
    is_trained = module.training and torch.is_grad_enabled()
    return "in training" if is_trained else "under balance_no_grad"


def _check_batch(call: _Call, mask: Tensor | None) -> None:
    """Raise ValueError for what may be wrong on one rank only."""
    if mask is not None:
        _check_own_mask(call, mask)
        reason = _mask_reasons.get(mask, "given by the caller")
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} {_mode(call.module)} ({reason}); "
            f"expected None, because documents are the mask: {PACK}"
        )
    if call.key.shape[2] != call.num_tokens:
        raise ValueError(
            f"key has {call.key.shape[2]} tokens, query {call.num_tokens}, "
            f"{_mode(call.module)}; expected as many: set use_cache=False and pass no "
            "key-value cache or encoder states"
        )


def replace(name: str) -> Callable[[], None]:
    """Serve models that ask for transformers' attention implementation `name` as if they asked for
    "distca", and return a function that undoes this. It is for frameworks that insist on a name,
    mostly "flash_attention_2". Models keep the name in their configuration, and nothing asks for
    flash-attn any more. Call it before models are built.

    Raises ValueError for a name that transformers does not know, or that was replaced before.
    """
    ours = {
        transformers.AttentionInterface: attention_forward,
        transformers.AttentionMaskInterface: forward_mask,
    }
    theirs = {kind: kind().get(name) for kind in ours}
    others = sorted(set.intersection(*(set(kind()) for kind in ours)) - models.NAMES)
    check("name", name, name in others, f"one of {others}")

    def register(functions: dict) -> None:
        for kind, function in functions.items():
            kind.register(name, function)

    def undo() -> None:
        models.NAMES.discard(name)
        register(theirs)

    register(ours)
    models.NAMES.add(name)
    return undo


_stock_adjust = transformers.PreTrainedModel._check_and_adjust_attn_implementation
_stock_correct = transformers.PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_stock_adjust)
def _adjust(model: nn.Module, requested: str | None, *args, **kwargs) -> str:
    """Keeps transformers from loading flash-attn, or a kernel in its place, for our names."""
    if requested in models.NAMES:
        return model.get_correct_attn_implementation(requested)
    return _stock_adjust(model, requested, *args, **kwargs)


@functools.wraps(_stock_correct)
def _correct(model: nn.Module, requested: str | None, *args, **kwargs) -> str:
    """Checks a model for our names when it is built and when its implementation is set."""
    name = requested
    if requested not in models.NAMES:
        name = _stock_correct(model, requested, *args, **kwargs)
    if name in models.NAMES:
        models.check_class(model, name)
        models.watch(model)
    return name


# transformers has no registry for such checks. A model with attention of its own never calls ours.
transformers.PreTrainedModel._check_and_adjust_attn_implementation = _adjust
transformers.PreTrainedModel.get_correct_attn_implementation = _correct
transformers.AttentionInterface.register(NAME, attention_forward)
transformers.AttentionMaskInterface.register(NAME, forward_mask)
