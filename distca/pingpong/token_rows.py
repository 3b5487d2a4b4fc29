"""Arguments and results of a transformer block, cut in two and joined along the tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from distca._torch_private import pytree


class TokenRows:
    """A block's arguments by half, and how its results are put together."""

    def __init__(
        self, num_tokens: int, row: int, args: tuple, kwargs: dict, split: Mapping
    ) -> None:
        """Halves are rows [0, row) and [row, num_tokens). `split`: see PingPong."""
        self.num_tokens, self.row = num_tokens, row
        x = args[0] if args else next(iter(kwargs.values()), None)
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        self.dims = (0, 1)
        if isinstance(x, Tensor) and x.dim() > 2 and x.shape[0] == 1:
            self.dims = (1, 0)  # [1, tokens, ...]: dimension 1 is looked at first
        if not isinstance(x, Tensor) or self._dim(x) is None:
            raise ValueError(
                f"PingPong: the block's first argument is {shape} for documents of {num_tokens} "
                "tokens; expected [tokens, ...] or [1, tokens, ...]"
            )
        self.device = x.device
        halves = [self._halves(value, split, idx) for idx, value in enumerate(args)]
        named = {name: self._halves(value, split, name) for name, value in kwargs.items()}
        self.args = [[pair[idx] for pair in halves] for idx in range(2)]
        self.kwargs = [{name: pair[idx] for name, pair in named.items()} for idx in range(2)]

    def _dim(self, tensor: Tensor) -> int | None:
        """The dimension of tokens; None where there is none."""
        for dim in self.dims:
            if _may_be_tokens(tensor, dim) and tensor.shape[dim] == self.num_tokens:
                return dim
        return None

    def _halves(self, value: object, split: Mapping, key: int | str) -> tuple:
        leaves, spec = pytree.tree_flatten(value)
        pairs = []
        for leaf in leaves:
            dim = self._dim(leaf) if isinstance(leaf, Tensor) else None
            if key in split and isinstance(leaf, Tensor):
                dim = split[key]
            if dim is None:
                pairs.append((leaf, leaf))
                continue
            if not dim < leaf.dim() or leaf.shape[dim] != self.num_tokens:
                raise ValueError(
                    f"split[{key!r}] is {dim}, but that argument has shape {list(leaf.shape)}; "
                    f"expected the dimension of the {self.num_tokens} tokens, or None"
                )
            # One node for both halves: its backward waits for both streams before memory of the
            # inputs, which the halves read on theirs, can be used again on the current one.
            pairs.append(leaf.split([self.row, self.num_tokens - self.row], dim))
        first, second = zip(*pairs, strict=True) if pairs else ((), ())
        return pytree.tree_unflatten(first, spec), pytree.tree_unflatten(second, spec)

    def joined(self, results: list) -> object:
        """The results of both halves as those of the whole."""
        (first, spec), (second, other_spec) = (pytree.tree_flatten(result) for result in results)
        if spec != other_spec:
            raise ValueError(f"PingPong: the block returned {spec} and {other_spec} for its halves")
        return pytree.tree_unflatten(
            [self._joined(a, b) for a, b in zip(first, second, strict=True)], spec
        )

    def _joined(self, first: object, second: object) -> Tensor | None:
        if first is None and second is None:
            return None
        counts = (self.row, self.num_tokens - self.row)
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            for dim in self.dims:
                if not _may_be_tokens(first, dim) or not _may_be_tokens(second, dim):
                    continue
                if (first.shape[dim], second.shape[dim]) == counts:
                    return torch.cat([first, second], dim)
        shapes = [
            list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            for each in (first, second)
        ]
        raise ValueError(
            f"PingPong: the block returned {shapes[0]} and {shapes[1]} for {counts[0]} and "
            f"{counts[1]} tokens; expected tensors with rows of tokens, in dimension 0 or in "
            "dimension 1 behind one of size 1, or None"
        )


def _may_be_tokens(tensor: Tensor, dim: int) -> bool:
    """Dimension 0, or 1 behind one of size 1."""
    return tensor.dim() > dim and (dim == 0 or tensor.shape[0] == 1)
