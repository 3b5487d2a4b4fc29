"""Check the parts of a transformers model that its attention layers do not control: attention of
its own, layers that mix documents, positions that do not restart.

A model's source is checked when the model is built, and its inputs before each forward pass.
"""

import functools
import inspect
import re
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distca import ops
from distca.integrations.boundaries import read_boundaries, remember
from distca.planning.documents import Documents
from distca.ranks import session as sessions

NAME = "distca"
NAMES = {NAME}  # with the names that `transformers.replace` took over
USE_ANOTHER = 'use another attn_implementation for this model, such as "sdpa" or "eager"'
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "seq_idx")
CACHES = ("past_key_values", "cache")  # the second name since transformers 5.24

# Of config.layer_types. transformers called them "attention" and "mamba", too, before 5.15.
PLAIN_LAYERS = (
    None,
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "hybrid",
)
KNOWN_LAYERS = {*PLAIN_LAYERS, "linear_attention", "conv", "hybrid_sliding", "moe", "mlp", "mamba"}

# Layers that carry a state from token to token: they cache a state, or have such a name.
CACHES_A_STATE = {"update_conv_state", "update_recurrent_state"}
MIXERS = re.compile(
    r"(Mamba2?Mixer|DeltaNet|DeltaAttention|LightningAttention|ShortConv|RecurrentBlock|Retention)$"
)
CROSS = re.compile(r"cross|encoder_attn")  # paths of attention to an encoder's states

# Layers that keep documents apart if the model is called with these keywords, as
# tests/test_transformers_hybrids.py shows with its own kernels. Others cannot be told of documents.
TOLD_OF_DOCUMENTS = {
    "BambaMixer": {"seq_idx"},
    "FalconH1Mixer": {"seq_idx"},
    "GraniteMoeHybridMambaLayer": {"seq_idx"},
    "Lfm2MoeShortConv": {"seq_idx"},
    "Lfm2ShortConv": {"seq_idx"},
    "NemotronHMamba2Mixer": {"seq_idx"},
    "OlmoHybridGatedDeltaNet": {"cu_seq_lens_q", "seq_idx"},
    "Qwen3NextGatedDeltaNet": {"cu_seq_lens_q", "seq_idx"},
    "Qwen3_5GatedDeltaNet": {"cu_seq_lens_q", "seq_idx"},
    "Qwen3_5MoeGatedDeltaNet": {"cu_seq_lens_q", "seq_idx"},
    "Zamba2MambaMixer": {"seq_idx"},
}


def check_class(model: nn.Module, name: str) -> None:
    """Raises ValueError if `model`, which is being built with attn_implementation=`name`, has its
    own code for text attention. It would get no mask and attend to all tokens."""
    kind, config = type(model), model.config
    part = getattr(config, "base_config_key", "")
    if getattr(config, "text_config", None) is not None or "vision" in part or "audio" in part:
        return  # its text model is checked separately; vision and audio towers are not causal
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):  # its first forward pass will tell
        return
    own = re.findall(r"^class (\w*Attention\w*)\(", source, re.MULTILINE)
    chosen = re.findall(r"\b(?!\w*VISION)(\w*ATTENTION_CLASSES)\[", source)
    registered = re.search(r"\bALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)", source)
    if chosen or (own and not registered):
        raise ValueError(
            f"attn_implementation is {name!r}, but {kind.__name__} has attention of its own "
            f"({(chosen or own)[0]}), which calls none of transformers' registered "
            f"implementations; {USE_ANOTHER}"
        )


def watch(model: nn.Module) -> None:
    """Checks `model` in each of its forward passes from now on."""
    if _enter not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_enter, with_kwargs=True)
        model.register_forward_hook(_leave, always_call=True)


class _Traits:
    """Properties of a model, read from its modules."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {type(module) for module in model.modules()}
        self.parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self.mixers = {_name(kind) for kind in kinds if _is_mixer(kind)}  # they carry a state
        self.is_rotary = any("Rotary" in kind.__name__ for kind in kinds)
        self.masked: set[int] = set()  # ids of configurations whose layers cannot do without a mask
        self.first_position = 0  # from which the model counts if it is given no positions
        for path, module in model.named_modules():
            config = getattr(module, "config", None)
            types = set(getattr(config, "layer_types", None) or ())
            relies_on_mask = getattr(module, "is_causal", True) is False and not CROSS.search(path)
            if config is not None and (relies_on_mask or not types <= KNOWN_LAYERS):
                self.masked.add(id(config))
            table = getattr(module, "position_embeddings", None)
            if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                self.first_position = table.padding_idx + 1  # as RoBERTa does


@functools.cache
def _is_mixer(kind: type) -> bool:
    methods = [inspect.unwrap(each) for _, each in inspect.getmembers(kind, inspect.isfunction)]
    for each in list(methods):  # of decorators that leave no __wrapped__
        cells = (cell.cell_contents for cell in each.__closure__ or ())
        methods += filter(inspect.isfunction, cells)
    caches_a_state = any(CACHES_A_STATE & set(each.__code__.co_names) for each in methods)
    return caches_a_state or MIXERS.search(_name(kind)) is not None


def _name(kind: type) -> str:
    """Returns the name of a layer's class without the subclass that FSDP2 puts over it."""
    return next(each.__name__ for each in kind.__mro__ if not each.__name__.startswith("FSDP"))


@dataclass(eq=False)
class _Pass:
    """A forward pass of a model whose attention is distca's."""

    model: nn.Module | None
    boundaries: dict[str, object]  # its arguments that may say where documents begin
    has_tokens: bool
    crosses_ranks: bool = False  # whether its documents do
    has_cache: bool = False  # whether it was given a key-value cache
    # Of the outermost pass alone, for all that it contains:
    num_calls: int = 0  # of the registered attention
    unmasked: set[int] = field(default_factory=set)
    """Ids of configurations whose layers asked for a causal mask and got none."""
    rows: dict[int, Tensor] = field(default_factory=dict)  # positions of a row, by its tokens


# Forward passes that run in this context, outermost first. A backward pass on a GPU runs on another
# thread, where there are none.
_passes: ContextVar[list["_Pass"] | None] = ContextVar("distca_passes", default=None)


def _under_way() -> list["_Pass"]:
    if _passes.get() is None:
        _passes.set([])
    return _passes.get()


_traits: WeakKeyDictionary[nn.Module, _Traits] = WeakKeyDictionary()


@torch.compiler.disable
def _enter(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Checks a forward pass before it begins. If it is called with `documents`, remembers them and
    returns its arguments without them."""
    if model.config._attn_implementation not in NAMES:
        return None
    if model not in _traits:
        _traits[model] = _Traits(model)
    traits, passes = _traits[model], _under_way()
    interrupted = [each.model is model for each in passes]  # by Ctrl-C, so that _leave did not run
    if any(interrupted):
        del passes[interrupted.index(True) :]
    arguments = {**dict(zip(traits.parameters, args, strict=False)), **kwargs}
    boundaries = {name: arguments[name] for name in BOUNDARIES if arguments.get(name) is not None}
    documents, name = kwargs.get("documents"), type(model).__name__
    crosses_ranks = getattr(documents, "crosses_ranks", False)
    has_tokens = any(arguments.get(each) is not None for each in ("input_ids", "inputs_embeds"))
    has_cache = any(arguments.get(each) is not None for each in CACHES)
    entered = _Pass(model, boundaries, has_tokens, crosses_ranks, has_cache)
    is_shared = crosses_ranks or is_balanced(model, passes[0] if passes else entered)
    with sessions.announced(open_session() if is_shared else None):
        if isinstance(documents, ValueError):  # see plan_batches
            raise documents
        if documents is not None:
            remember(boundaries, documents, *_rows_and_tokens(arguments))
        if crosses_ranks:
            _check_crossing(name, traits, documents)
        elif not passes and (traits.mixers or not traits.is_rotary):
            _check_packed(name, traits, boundaries, arguments)
    passes.append(entered)
    if documents is None:
        return None
    return args, {each: value for each, value in kwargs.items() if each != "documents"}


@torch.compiler.disable
def _leave(model: nn.Module, args: tuple, output: object) -> None:
    passes = _under_way()
    if not passes or passes[-1].model is not model:
        return
    ended = passes.pop()
    if not passes and ended.has_tokens and not ended.num_calls and output is not None:
        raise ValueError(
            f"attn_implementation is {model.config._attn_implementation!r}, but no layer of "
            f"{type(model).__name__} called it in this forward pass: its layers have no attention, "
            f"or attention of their own; {USE_ANOTHER}"
        )


def _rows_and_tokens(arguments: dict) -> tuple[int, int]:
    """Returns the shape of the batch that a model is called with; (0, 0) without tokens."""
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    return (0, 0) if tokens is None else tuple(tokens.shape[:2])


def _check_crossing(name: str, traits: _Traits, documents: Documents) -> None:
    """Raises ValueError if the model `name` cannot begin inside a document."""
    if traits.mixers:
        raise ValueError(
            f"documents is {documents}, and {', '.join(sorted(traits.mixers))} of {name} would "
            "need the state of the previous rank; expected whole documents: ranks_per_batch=1"
        )
    if not traits.is_rotary and ("position_ids" not in traits.parameters or traits.first_position):
        raise ValueError(
            f"documents is {documents}, and {name} counts positions itself or not from 0; expected "
            "whole documents: ranks_per_batch=1"
        )


def _check_packed(name: str, traits: _Traits, boundaries: dict, arguments: dict) -> None:
    """Raises ValueError unless the whole model `name` keeps documents of a packed row apart."""
    if not _is_packed(boundaries, arguments):
        return
    told = {mixer for mixer, needed in TOLD_OF_DOCUMENTS.items() if needed <= boundaries.keys()}
    untold = sorted(traits.mixers - told)
    if untold and not sessions.options_of().documents_may_mix:
        raise ValueError(
            f"{name} was given several documents in a row, and {', '.join(untold)} would carry a "
            f"state from each into the next; {_remedy(untold)}, give each document a row of its "
            "own, or say with documents_may_mix=True (--documents-may-mix) that they may mix"
        )
    if traits.mixers and "seq_idx" in boundaries:
        _check_seq_idx(boundaries, name)
    if not traits.is_rotary:  # of rotary positions only the distance matters
        _check_positions(boundaries.get("position_ids"), traits, name)


def _check_positions(positions: Tensor | None, traits: _Traits, name: str) -> None:
    if "position_ids" not in traits.parameters:
        raise ValueError(
            f"{name} was given several documents in a row, but takes no position_ids: it would "
            "count positions from each document into the next; expected one document in a row"
        )
    if positions is None:
        raise ValueError(
            f"position_ids is None, but {name} was given several documents in a row, and would "
            "count positions from each into the next; expected positions that restart with each "
            "document: DataCollatorWithFlattening(return_position_ids=True)"
        )
    first = int(positions.flatten()[0])
    if first != traits.first_position:
        raise ValueError(
            f"position_ids begin at {first}, but {name} counts from {traits.first_position}; "
            f"expected positions that restart at {traits.first_position}, and cu_seq_lens_q to "
            "say where documents begin"
        )


def _remedy(untold: list[str]) -> str:
    if not TOLD_OF_DOCUMENTS.keys() >= set(untold):
        return "they are never told of documents"
    keywords = sorted(set().union(*(TOLD_OF_DOCUMENTS[name] for name in untold)))
    return (
        f"pass {' and '.join(keywords)} to the model too, with DataCollatorWithFlattening("
        "return_flash_attn_kwargs=True, return_seq_idx=True)"
    )


def _is_packed(boundaries: dict, arguments: dict) -> bool:
    """Returns whether some row holds several documents. With padding or cached keys no row does:
    attention has a mask then."""
    rows_and_tokens = _rows_and_tokens(arguments)
    positions, mask = boundaries.get("position_ids"), arguments.get("attention_mask")
    if rows_and_tokens[1] <= 1:
        return False
    if mask is not None and not (mask.dim() == 2 and bool(mask.all())):
        return False
    if "cu_seq_lens_q" in boundaries:
        return read_boundaries(boundaries, *rows_and_tokens, "the model").is_packed
    if not isinstance(positions, Tensor):
        return False
    while positions.dim() > 2:  # several axes: the first is that of text, or time
        positions = positions[0]
    return bool(((positions[:, 1:] == 0) | (positions[:, 1:] < positions[:, :-1])).any())


def _check_seq_idx(boundaries: dict, name: str) -> None:
    seq_idx = boundaries["seq_idx"]
    num_tokens = seq_idx.shape[-1]
    offsets = read_boundaries(boundaries, seq_idx.numel() // num_tokens, num_tokens, name).offsets
    changes = torch.ones_like(seq_idx, dtype=torch.bool)
    changes[..., 1:] = seq_idx[..., 1:] != seq_idx[..., :-1]
    begins = changes.flatten().nonzero()[:, 0].cpu()
    if not torch.equal(begins, offsets[:-1].unique()):
        raise ValueError(
            f"seq_idx numbers {begins.numel()} documents in {name} and contradicts the boundaries "
            f"of {offsets.numel() - 1}; expected both of the same packing: one collator's, neither "
            "cut nor gathered after it"
        )


def open_session() -> sessions.Session | None:
    """Returns the session of the group given to distca.init, by default of all ranks. Returns None
    if distca is off or torch.distributed is not initialised."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    session = sessions.opened()
    return session if session.options.enabled else None


def outermost() -> _Pass:
    """Returns the outermost forward pass that runs, or an empty one if none runs."""
    return _under_way()[0] if _under_way() else _Pass(None, {}, has_tokens=False)


def is_balanced(module: nn.Module, outer: _Pass | None = None) -> bool:
    """Return whether ranks share the attention of `module` in the forward pass that runs, or in the
    outermost pass `outer`."""
    has_cache = (outer or outermost()).has_cache
    return sessions.is_balanced(module.training) and (torch.is_grad_enabled() or not has_cache)


def innermost_boundaries() -> dict[str, object]:
    """Returns what the innermost model that runs was told of documents, {} without one."""
    return _under_way()[-1].boundaries if _under_way() else {}


def needs_mask(config: object) -> bool:
    """Returns whether layers of `config` cannot do without their mask in the current pass."""
    return any(id(config) in _traits[each.model].masked for each in _under_way())


def boundaries_of_pass(module: nn.Module, num_tokens: int) -> dict:
    """Returns keywords for `read_boundaries` from the arguments of the model that is running, for
    its attention layer `module`, which gets none. Without such arguments a row is one document.

    Raises ValueError if the layer is recomputed in the backward pass: nothing says then which
    forward pass the recomputation belongs to.
    """
    passes, is_recomputed = _under_way(), ops.backward_pass() != ops.NOT_BACKWARD
    if not passes and not is_recomputed:
        return {}
    if not is_recomputed and module.training and torch.is_grad_enabled():
        kind = type(passes[0].model)
        former = getattr(kind, "is_gradient_checkpointing", None)
        switch = getattr(kind, "is_activation_checkpointing", former)
        is_recomputed = switch is not None and switch.fget(passes[0].model)  # it will be
    if is_recomputed:
        raise ValueError(
            f"position_ids is None and cu_seq_lens_q None in {type(module).__name__}: its model "
            "hands it no document boundaries, so they are missing when gradient checkpointing "
            "computes it again; expected no gradient checkpointing for this model"
        )
    for each in reversed(passes):
        if "cu_seq_lens_q" in each.boundaries or "position_ids" in each.boundaries:
            return each.boundaries
    return {"position_ids": passes[0].rows.setdefault(num_tokens, torch.arange(num_tokens)[None])}
