"""The masks that models of transformers ask for: none for packed documents, otherwise sdpa's."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import sdpa_mask

from distca.integrations import models
from distca.integrations.models import USE_ANOTHER

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


def reason_of(mask: Tensor) -> str:
    """Return why documents do not express `mask`."""
    return _mask_reasons.get(mask, "given by the caller")


def check_own_mask(module: nn.Module, mask: Tensor) -> None:
    """Raises ValueError if a layer derived a mask from the model's, which distca left out."""
    is_left_out = id(getattr(module, "config", None)) in models.outermost().unmasked
    if mask not in _mask_reasons and is_left_out:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and was made by "
            f"{type(module).__name__} itself; expected None for packed documents, which are "
            f"the mask: {USE_ANOTHER}"
        )


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
