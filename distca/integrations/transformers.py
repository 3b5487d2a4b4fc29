"""attn_implementation="distca" for models of transformers, registered by importing this module.

In training, core attention of packed documents is balanced over ranks. Evaluation and generation
stay on their rank: documents are computed here, and what documents cannot express (a key-value
cache, padding, bidirectional layers) by torch's own attention under transformers' own mask.
"""

import functools
from collections.abc import Callable

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from distca.attention import FULL, routed_documents
from distca.integrations import models
from distca.integrations.boundaries import PACK, Boundaries, chunks_of, read_boundaries
from distca.integrations.models import NAME, open_session
from distca.options import check
from distca.pingpong.pingpong import PingPong, third
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

from distca.integrations.transformers_calls import (  # noqa: E402
    Call,
    autocast,
    check_keywords,
    check_layer_type,
    check_model,
    chunk_size_of,
    has_boundaries,
    why_balanced,
    window_of,
)
from distca.integrations.transformers_masks import (  # noqa: E402
    check_own_mask,
    forward_mask,
    reason_of,
)

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
    check_keywords(module, dropout, kwargs)
    call = Call(module, *autocast(query, key, value), scaling, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_shared = models.is_balanced(module) or models.outermost().crosses_ranks
    if not is_causal and not has_boundaries(call):
        is_shared = False
    attend = _attend_balanced if is_shared else _attend_here
    return attend(call, attention_mask, is_causal), None


def _attend_here(call: Call, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Compute attention on this rank alone, under any mask that transformers builds."""
    if mask is not None:
        if mask.dim() != 4:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}; expected None or [batch, 1 or "
                f"heads, {call.num_tokens}, {call.key.shape[2]}], as transformers makes it of "
                "padding"
            )
        check_own_mask(call.module, mask)
    packed = call.keywords.get("cu_seq_lens_q") is not None
    if mask is None and call.key.shape[2] == call.num_tokens and (is_causal or packed):
        window_size = window_of(call.module, call.keywords) if is_causal else FULL
        boundaries, chunk_size = call.boundaries(), chunk_size_of(call.module)
        is_torchs = window_size == CAUSAL and chunk_size is None and call.is_plain
        if boundaries.is_packed or not is_torchs:
            return call.attend(chunks_of(boundaries.here, chunk_size), window_size)
    if not call.is_plain:
        check_layer_type(call.module)  # DeepSeek-V4's compressed layers write biases to the mask
        return _attend_to_matrix(call, mask, is_causal)
    rows = (call.query, call.key, call.value, mask)
    how = {"scaling": call.scaling, "is_causal": is_causal}
    return sdpa_attention_forward(call.module, *rows, **how)[0]


def _attend_to_matrix(call: Call, mask: Tensor | None, is_causal: bool) -> Tensor:
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


def _attend_balanced(call: Call, mask: Tensor | None, is_causal: bool) -> Tensor:
    check_model(call, is_causal)
    window_size, session = window_of(call.module, call.keywords), open_session()
    chunk_size = chunk_size_of(call.module)
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
    window_size, chunk_size = window_of(layer.self_attn, None), chunk_size_of(layer.self_attn)
    how = (session, window_size, hidden.device, None, chunk_size)
    return _documents_of_pass(boundaries, layer, *how)


def _check_batch(call: Call, mask: Tensor | None) -> None:
    """Raise ValueError for what may be wrong on one rank only."""
    if mask is not None:
        check_own_mask(call.module, mask)
        reason = reason_of(mask)
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} {why_balanced(call.module)} ({reason}); "
            f"expected None, because documents are the mask: {PACK}"
        )
    if call.key.shape[2] != call.num_tokens:
        raise ValueError(
            f"key has {call.key.shape[2]} tokens, query {call.num_tokens}, "
            f"{why_balanced(call.module)}; expected as many: set use_cache=False and pass no "
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
