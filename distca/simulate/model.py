"""Shapes of models: parameters, FLOPs and bytes of a decoder in Llama's style."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from distca.planning.cost import AttentionShape

ELEMENT_BYTES = 2  # bfloat16
GRADIENT_BYTES = 4  # float32, reduced and kept
OPTIMIZER_BYTES = 12  # float32 weights and Adam's two moments
BACKWARD_OVER_FORWARD = 2.0  # of linear work: gradients of inputs and of weights


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Raises ValueError naming the field that is wrong."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and (type(value) is not int or value < 1):
                raise ValueError(f"model {field.name} is {value!r}; expected an integer above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model kv_heads is {self.kv_heads}; expected a divisor of heads = {self.heads}"
            )

    @property
    def layer_params(self) -> int:
        """wq, wk, wv, wo and SwiGLU's three matrices."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (heads + 3 * self.ffn)

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + 2 * self.vocab * self.hidden

    @property
    def linear_flops(self) -> float:
        """Forward, of one token and layer; the head's spread over the layers."""
        return 2.0 * (self.layer_params + self.vocab * self.hidden / self.layers)

    @property
    def elementwise_bytes(self) -> float:
        """Read and written by everything between matrices, forward, of one token and layer: two
        norms, two residual sums, RoPE, SiLU and its product, each by itself."""
        norms_and_sums = (2 * 2 + 2 * 3) * self.hidden
        rope = 2 * (self.heads + self.kv_heads) * self.head_dim
        return ELEMENT_BYTES * (norms_and_sums + rope + (2 + 3) * self.ffn)

    @property
    def activation_bytes(self) -> float:
        """Kept for backward, of one token and layer: input and output of both norms, q, k, v, out
        and lse of attention, four rows of the feed-forward."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        rows = 4 * self.hidden + heads + 4 * self.ffn
        return ELEMENT_BYTES * rows + 4 * self.heads

    def attention(self, tp: int) -> AttentionShape:
        """Heads of one rank; key heads are repeated where there are fewer than ranks."""
        if self.heads % tp:
            raise ValueError(f"tp is {tp}; expected a divisor of heads = {self.heads}")
        return AttentionShape(
            self.heads // tp, max(1, self.kv_heads // tp), self.head_dim, ELEMENT_BYTES
        )

    @classmethod
    def load(cls, path: Path) -> "ModelShape":
        """From a JSON object of this class's fields; raises ValueError naming the file."""
        try:
            content = json.loads(path.read_text())
            return cls(**{"name": path.stem, **content})
        except (OSError, ValueError, TypeError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{path}: {error}; expected a JSON object of {names}") from error

    def changed(self, layers: int | None, vocab: int | None) -> "ModelShape":
        return replace(self, layers=layers or self.layers, vocab=vocab or self.vocab)


PRESETS = {
    # Llama 3 8B and 70B, CodeLlama 34B.
    "8B": ModelShape(
        name="8B", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
        vocab=128256,
    ),
    "34B": ModelShape(
        name="34B", layers=48, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=22016,
        vocab=32016,
    ),
    "70B": ModelShape(
        name="70B", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672,
        vocab=128256,
    ),
}  # fmt: skip
