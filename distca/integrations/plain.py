"""Documents for plain code that calls scaled_dot_product_attention, read from what its model is
called with: the launcher's --document-end-id and --document-positions.

The model is the outermost module that is called with a tensor to read documents from. They hold for
its forward pass and, from the moment that gradients come back to its outputs, for its backward
pass, where checkpointing calls attention again.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from distca._torch_private import NOT_BACKWARD, backward_pass, call_after_backward, pytree
from distca.integrations.boundaries import offsets_of_positions
from distca.planning.documents import Documents
from distca.planning.plan import CAUSAL
from distca.ranks import session as sessions
from distca.scope import prepare, put_in_force, require_documents

Batch = tuple[int, int]  # (rows, tokens)


class _Model:
    """The module whose forward pass runs, and what it was called with."""

    def __init__(self, end_id: int | None, positions: str | None) -> None:
        self._end_id, self._positions = end_id, positions
        self._running = False

    def call(self, call: Callable, module: nn.Module, args: tuple, kwargs: dict):
        """call(module, *args, **kwargs), of any module."""
        # In the backward pass checkpointing calls a part of the model again.
        is_inside = self._running or backward_pass() != NOT_BACKWARD
        source = None if is_inside else self._source(module, args, kwargs)
        if source is None:
            return call(module, *args, **kwargs)
        documents_and_batch = self._enter(module, source)
        try:
            outputs = call(module, *args, **kwargs)
        finally:
            self._running = False
            put_in_force(None)
        again = functools.partial(_put_in_force_backward, *documents_and_batch)
        for output in pytree.tree_leaves(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(again)
        return outputs

    def _enter(self, module: nn.Module, source: Tensor) -> tuple[Documents, Batch]:
        is_trained = module.training and torch.is_grad_enabled()
        with sessions.announced(sessions.find() if is_trained else None):
            offsets, batch = self._offsets(source)
        documents = Documents(offsets)
        prepare(documents, CAUSAL, None, is_balanced=is_trained)
        put_in_force(documents, batch)
        self._running = True
        return documents, batch

    def _source(self, module: nn.Module, args: tuple, kwargs: dict) -> Tensor | None:
        """What documents are read from, None where `module` is not called with it."""
        if self._positions is not None:
            value = _argument(module, self._positions, args, kwargs)
            return value if isinstance(value, Tensor) else None
        # A loss is called with integers, too.
        if not any(isinstance(part, nn.Embedding) for part in module.modules()):
            return None
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        return next((each for each in tensors if not each.is_floating_point()), None)

    def _offsets(self, source: Tensor) -> tuple[Tensor, Batch]:
        """Where documents begin, int64 [num_documents + 1], and the source's (rows, tokens)."""
        if source.dim() not in (1, 2):
            name = self._positions or "the tensor of token ids"
            raise ValueError(
                f"{name} has shape {list(source.shape)}; expected [tokens] or [batch, tokens], "
                "because documents are read from it"
            )
        rows = source.detach()[None] if source.dim() == 1 else source.detach()
        batch, num_tokens = rows.shape
        if self._positions is not None:
            return offsets_of_positions(rows, batch, num_tokens), (batch, num_tokens)
        ends = rows.to("cpu") == self._end_id
        if num_tokens:
            ends[:, -1] = True  # rows of a batch are documents of their own
        after = ends.flatten().nonzero()[:, 0] + 1
        return torch.nn.functional.pad(after, (1, 0)), (batch, num_tokens)


def _put_in_force_backward(documents: Documents, batch: Batch, gradients: tuple) -> None:
    """Until the backward pass ends, or comes to the outputs of another forward pass."""
    put_in_force(documents, batch)
    call_after_backward(lambda: put_in_force(None))


def _argument(module: nn.Module, name: str, args: tuple, kwargs: dict):
    """The argument `name` of a call of `module`, None where it has none."""
    if name in kwargs:
        return kwargs[name]
    while isinstance(getattr(module, "module", None), nn.Module):  # as DDP wraps
        module = module.module
    names = list(inspect.signature(module.forward).parameters)
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else None


def derive_documents(end_id: int | None, positions: str | None) -> Callable[[], None]:
    """Read documents from the arguments of every model call: from the token id that ends each
    document, or from the positions. Attention outside documents is then an error. Return a function
    that undoes this.

    In training, with gradients enabled, documents are balanced over the ranks. This is collective:
    all ranks must call their models equally often. Otherwise documents stay on this rank. If one
    rank's tensor cannot be read, the call raises ValueError on every rank of the group.
    """
    model, torchs_call = _Model(end_id, positions), nn.Module.__call__

    def call(module: nn.Module, *args, **kwargs):
        if torch.compiler.is_compiling():
            return torchs_call(module, *args, **kwargs)
        return model.call(torchs_call, module, args, kwargs)

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
