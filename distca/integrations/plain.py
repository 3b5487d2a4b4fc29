"""Documents for plain code that calls scaled_dot_product_attention, read from the arguments of its
model: the launcher's --document-end-id and --document-positions.

The model is the outermost module that is called with a tensor to read documents from. The documents
hold for its forward pass and, from the moment that gradients come back to its outputs, for its
backward pass, where checkpointing calls attention again.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from distca._torch_private import NOT_BACKWARD, backward_pass, call_after_backward, pytree
from distca.integrations.boundaries import MAX_UNMARKED, FirstBatches, offsets_of_positions
from distca.planning.documents import Documents
from distca.planning.plan import CAUSAL
from distca.ranks import session as sessions
from distca.scope import prepare, put_in_force, require_documents

Batch = tuple[int, int]  # (rows, tokens)


def derive_documents(end_id: int | None, positions: str | None) -> Callable[[], None]:
    """Read documents from the arguments of every model call: from the token id that ends each
    document, or from the positions. Attention outside documents is then an error. Return a function
    that undoes this.

    In training, with gradients enabled, and everywhere under Options.balance_no_grad, documents are
    balanced over the ranks. This is collective: all ranks must call their models equally often.
    Otherwise documents stay on this rank. If the tensor of a rank cannot be read, the call raises
    ValueError on every rank of the group.
    """
    torchs_call, is_running = nn.Module.__call__, False
    first = FirstBatches(
        f"token {end_id} (--document-end-id) is not in the first {MAX_UNMARKED} training batches, "
        "so each of their rows is one document; pass the id that the tokenizer ends documents with"
    )

    def call(module: nn.Module, *args, **kwargs):
        nonlocal is_running
        if torch.compiler.is_compiling():
            return torchs_call(module, *args, **kwargs)
        # In the backward pass checkpointing calls a part of the model again.
        is_inside = is_running or backward_pass() != NOT_BACKWARD
        source = None if is_inside else _source(positions, module, args, kwargs)
        if source is None:
            return torchs_call(module, *args, **kwargs)
        documents, batch = _enter(module, source, end_id, positions, first)
        is_running = True
        try:
            outputs = torchs_call(module, *args, **kwargs)
        finally:
            is_running = False
            put_in_force(None)
        again = functools.partial(_put_in_force_backward, documents, batch)
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(again)
        return outputs

    nn.Module.__call__ = call  # hooks of all modules are not given keyword arguments
    flag = "--document-end-id" if positions is None else "--document-positions"
    require_documents(
        f"{flag} is given, but no model that calls attention was called with a tensor to read them "
        "from; enter distca.documents, or leave the flag out"
    )

    def end() -> None:
        require_documents(None)
        put_in_force(None)
        nn.Module.__call__ = torchs_call

    return end


def _source(positions: str | None, module: nn.Module, args: tuple, kwargs: dict) -> Tensor | None:
    """Return the tensor to read documents from, or None if `module` is called without one."""
    if positions is None:
        # A loss is called with integers, too.
        if not any(isinstance(part, nn.Embedding) for part in module.modules()):
            return None
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        return next((each for each in tensors if not each.is_floating_point()), None)
    value = kwargs.get(positions)
    if positions not in kwargs:
        while isinstance(getattr(module, "module", None), nn.Module):  # as DDP wraps
            module = module.module
        names = inspect.signature(module.forward).parameters
        value = dict(zip(names, args, strict=False)).get(positions)
    return value if isinstance(value, Tensor) else None


def _enter(
    module: nn.Module,
    source: Tensor,
    end_id: int | None,
    positions: str | None,
    first: FirstBatches,
) -> tuple[Documents, Batch]:
    """Put the documents that `source` describes in force. Return them and their batch."""
    is_balanced = sessions.is_balanced(module.training)
    with sessions.announced(sessions.find() if is_balanced else None):
        if source.dim() not in (1, 2):
            name = positions or "the tensor of token ids"
            raise ValueError(
                f"{name} has shape {list(source.shape)}; expected [tokens] or [batch, tokens], "
                "because documents are read from it"
            )
        rows = source.detach()[None] if source.dim() == 1 else source.detach()
        batch = tuple(rows.shape)
        if positions is not None:
            offsets = offsets_of_positions(rows, *batch)
        else:
            ends = rows.to("cpu") == end_id
            if is_balanced:
                first.see(bool(ends.any()))
            ends[:, -1:] = True  # rows of a batch are documents of their own
            offsets = torch.nn.functional.pad(ends.flatten().nonzero()[:, 0] + 1, (1, 0))
    documents = Documents(offsets)
    prepare(documents, CAUSAL, None, is_balanced=is_balanced)
    put_in_force(documents, batch)
    return documents, batch


def _put_in_force_backward(documents: Documents, batch: Batch, gradients: tuple) -> None:
    """Put documents in force until the backward pass ends or reaches another forward pass."""
    put_in_force(documents, batch)
    call_after_backward(lambda: put_in_force(None))
