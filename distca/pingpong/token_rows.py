"""Arguments and results of a transformer block, cut in two and joined along the tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from distca._torch_private import pytree


class TokenRows:
    """Splits a block's arguments into those of two halves, and joins the results of the halves."""

    def __init__(
        self, num_tokens: int, row: int, args: tuple, kwargs: dict, split: Mapping
    ) -> None:
        """Halves are rows [0, row) and [row, num_tokens). `split`: see PingPong."""
        self.num_tokens, self.row = num_tokens, row
        x = args[0] if args else next(iter(kwargs.values()), None)
        is_batch = isinstance(x, Tensor) and x.dim() > 2 and x.shape[0] == 1
        self.dims = (1, 0) if is_batch else (0, 1)  # the order to look at them
        dim = self._dim(x) if isinstance(x, Tensor) else None
        if dim is None:
            raise ValueError(
                f"PingPong: the block's first argument is {_shape(x)} for documents of "
                f"{num_tokens} tokens; expected [tokens, ...] or [1, tokens, ...]"
            )
        self.dims = (dim, 1 - dim)  # a single token may look like a batch of 1 in other arguments
        self.device = x.device
        halves = [self._halves(value, split, idx) for idx, value in enumerate(args)]
        named = {name: self._halves(value, split, name) for name, value in kwargs.items()}
        self.args = [[pair[idx] for pair in halves] for idx in range(2)]
        self.kwargs = [{name: pair[idx] for name, pair in named.items()} for idx in range(2)]

    def _dim(self, tensor: Tensor) -> int | None:
        """Return the dimension of tokens, or None if there is none."""
        sizes = ((dim, _num_rows(tensor, dim)) for dim in self.dims)
        return next((dim for dim, num_rows in sizes if num_rows == self.num_tokens), None)

    def _halves(self, value: object, split: Mapping, key: int | str) -> tuple:
        leaves, spec = pytree.tree_flatten(value)
        pairs = []
        for leaf in leaves:
            dim = None
            if isinstance(leaf, Tensor):
                dim = split[key] if key in split else self._dim(leaf)
            if dim is None:
                pairs.append((leaf, leaf))
                continue
            if not dim < leaf.dim() or leaf.shape[dim] != self.num_tokens:
                raise ValueError(
                    f"split[{key!r}] is {dim}, but that argument has shape {list(leaf.shape)}; "
                    f"expected the dimension of the {self.num_tokens} tokens, or None"
                )
            # One node for both halves. The halves read the inputs on their own streams. The
            # backward pass of this node waits for both before the current stream can use the memory
            # of the inputs again.
            pairs.append(leaf.split([self.row, self.num_tokens - self.row], dim))
        first, second = zip(*pairs, strict=True) if pairs else ((), ())
        return pytree.tree_unflatten(first, spec), pytree.tree_unflatten(second, spec)

    def joined(self, results: list) -> object:
        """Return the results of the whole block from those of both halves."""
        (first, spec), (second, other_spec) = (pytree.tree_flatten(result) for result in results)
        if spec != other_spec:
            raise ValueError(f"PingPong: the block returned {spec} and {other_spec} for its halves")
        return pytree.tree_unflatten(list(map(self._joined, first, second)), spec)

    def _joined(self, first: object, second: object) -> Tensor | None:
        if first is None and second is None:
            return None
        counts = (self.row, self.num_tokens - self.row)
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            for dim in self.dims:
                if (_num_rows(first, dim), _num_rows(second, dim)) == counts:
                    return torch.cat([first, second], dim)
        raise ValueError(
            f"PingPong: the block returned {_shape(first)} and {_shape(second)} for {counts[0]} "
            f"and {counts[1]} tokens; expected tensors with rows of tokens, in dimension 0 or in "
            "dimension 1 behind one of size 1, or None"
        )


def _num_rows(tensor: Tensor, dim: int) -> int | None:
    """Return the size of a dimension that may be that of tokens: dimension 0, or dimension 1 behind
    one of size 1. None for other dimensions."""
    may_be_tokens = tensor.dim() > dim and (dim == 0 or tensor.shape[0] == 1)
    return tensor.shape[dim] if may_be_tokens else None


def _shape(value: object) -> list[int] | str:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__
