"""What is simulated: model, machine, how ranks are divided, how many tokens each holds."""

import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from distca.options import Options
from distca.planning.cluster import kept_cap
from distca.planning.cost import AttentionShape
from distca.simulate.machine import BACKWARD, FORWARD, Machine, TableCost, TileCost

MAX_RANKS = 65536
SHARDINGS = ("fsdp", "zero1")
ELEMENT_BYTES = 2  # bfloat16
GRADIENT_BYTES = 4  # float32, reduced and kept
OPTIMIZER_BYTES = 12  # float32 weights and Adam's two moments
LINEAR_BACKWARD_OVER_FORWARD = 2.0  # gradients of inputs and of weights


@dataclass(frozen=True)
class ModelShape:
    """A decoder in Llama's style. Raises ValueError naming the field that is wrong."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    v_head_dim: int | None = None  # of v and out; None: as head_dim

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name, value in vars(self).items():
            if name != "name" and (type(value) is not int or value < 1):
                raise ValueError(f"model {name} is {value!r}; expected an integer above 0")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model kv_heads is {self.kv_heads}; expected a divisor of heads = {self.heads}"
            )

    @property
    def _row_elements(self) -> int:
        """q, k, v and out of one token."""
        return (self.heads + self.kv_heads) * (self.head_dim + self.v_head_dim)

    @property
    def layer_params(self) -> int:
        """wq, wk, wv, wo and SwiGLU's three matrices."""
        return self.hidden * (self._row_elements + 3 * self.ffn)

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.edge_params

    @property
    def edge_params(self) -> int:
        """Parameters of embedding and head."""
        return 2 * self.vocab * self.hidden

    @property
    def share_before_attention(self) -> float:
        """Share of wq, wk and wv in a layer's linear work."""
        qkv = self._row_elements - self.heads * self.v_head_dim
        return self.hidden * qkv / self.layer_params

    @property
    def linear_flops(self) -> float:
        """Forward, of one token and layer; the head's spread over the layers."""
        return 2.0 * (self.layer_params + self.vocab * self.hidden / self.layers)

    @property
    def elementwise_bytes(self) -> float:
        """Read and written by everything between matrices, forward, of one token and layer: two
        norms, two residual sums, RoPE, SiLU and its product, each by itself."""
        norms_and_sums = (2 * 2 + 2 * 3) * self.hidden
        return ELEMENT_BYTES * (norms_and_sums + self._row_elements + (2 + 3) * self.ffn)

    @property
    def activation_bytes(self) -> float:
        """Kept for backward, of one token and layer: input and output of both norms, q, k, v, out
        and lse of attention, four rows of the feed-forward."""
        rows = 4 * self.hidden + self._row_elements + 4 * self.ffn
        return ELEMENT_BYTES * rows + 4 * self.heads

    def attention(self, tp: int) -> AttentionShape:
        """Heads of one rank; key heads are repeated where there are fewer than ranks."""
        if self.heads % tp:
            raise ValueError(f"tp is {tp}; expected a divisor of heads = {self.heads}")
        heads = (self.heads // tp, max(1, self.kv_heads // tp))
        return AttentionShape(*heads, self.head_dim, ELEMENT_BYTES, self.v_head_dim)

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
        asked = {"layers": layers, "vocab": vocab}
        return replace(self, **{name: value for name, value in asked.items() if value is not None})


PRESETS = {  # Llama 3 8B and 70B, CodeLlama 34B
    name: ModelShape(name, *sizes)
    for name, *sizes in (
        # layers, hidden, heads, kv_heads, head_dim, ffn, vocab
        ("8B", 32, 4096, 32, 8, 128, 14336, 128256),
        ("34B", 48, 8192, 64, 8, 128, 22016, 32016),
        ("70B", 80, 8192, 64, 8, 128, 28672, 128256),
    )
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Raises ValueError naming the field that is wrong. Fields with a docstring are flags."""

    model: ModelShape
    machine: Machine = field(default_factory=Machine)
    ranks: int = 8
    """GPUs: dp * cp * tp * pp."""
    tp: int = 1
    """Tensor parallel GPUs of a group."""
    pp: int = 1
    """Pipeline stages."""
    servers: int = 0
    """Number of additional GPUs that run no model and only compute attention."""
    tokens: int = 65536
    """Tokens of a group (the tp GPUs of one tensor parallel group) in one micro-batch."""
    context: int | None = None
    """Longest document; packs have max(tokens, context) tokens. None: same as tokens."""
    micro_batches: int | None = None
    """Micro-batches of a step. None: 1, or 2 * pp with pipelines."""
    cp: int | None = None
    """Groups that share a pack in systems with context parallelism. None: the best for each."""
    recompute: bool = False
    """Repeat every block's forward pass, exchanges included, in its backward pass."""
    sharding: str | None = None
    """fsdp or zero1. None: fsdp, or zero1 with pipelines."""
    tolerance: float = Options.tolerance
    """Excess of the slowest server over the mean that the planner leaves alone."""
    keep_inputs_gb: float | None = None
    """Memory for the q, k and v of visiting rows that a server keeps in one layer for the backward
    pass, in 1e9 bytes. None: what memory allows, if a layer is then at least 1 % faster."""

    def __post_init__(self) -> None:
        has_stages = self.pp != 1
        for name, default in (
            ("context", self.tokens),
            ("micro_batches", 2 * self.pp if has_stages else 1),
            ("sharding", "zero1" if has_stages else "fsdp"),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("ranks", "tp", "pp", "tokens", "context", "micro_batches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; expected an integer above 0")
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding is {self.sharding!r}; expected one of {SHARDINGS}")
        if self.keep_inputs_gb is not None and not 0 <= self.keep_inputs_gb < math.inf:
            raise ValueError(f"keep_inputs_gb is {self.keep_inputs_gb}; expected 0 or more")
        self._check_division()
        self._check_servers()
        self.model.attention(self.tp)

    def _check_division(self) -> None:
        if self.ranks > MAX_RANKS or self.ranks % (self.tp * self.pp):
            raise ValueError(
                f"ranks is {self.ranks}; expected a multiple of tp * pp = {self.tp * self.pp}, at "
                f"most {MAX_RANKS}"
            )
        if self.model.layers % self.pp:
            raise ValueError(
                f"pp is {self.pp}; expected a divisor of the model's {self.model.layers} layers"
            )
        if self.pack_tokens % self.tokens:
            raise ValueError(
                f"context is {self.context}; above tokens it has to be a multiple of them "
                f"({self.tokens})"
            )
        if self.groups % self.least_cp:
            raise ValueError(
                f"a pack of {self.pack_tokens} tokens lies on {self.least_cp} groups of "
                f"{self.tokens}; {self.ranks} ranks with tp {self.tp} and pp {self.pp} are "
                f"{self.groups} groups a stage, which is no multiple"
            )
        if self.cp is not None and (self.cp % self.least_cp or self.groups % self.cp):
            raise ValueError(
                f"cp is {self.cp}; expected a multiple of {self.least_cp} (context / tokens) that "
                f"divides the {self.groups} groups of a stage"
            )

    def _check_servers(self) -> None:
        value = self.servers
        is_multiple = type(value) is int and value >= 0 and value % self.tp == 0
        if not is_multiple or (value > 0 and self.pp > 1):
            raise ValueError(
                f"servers is {value!r}; expected a multiple of tp = {self.tp}, or 0 if pp > 1 "
                f"(pp is {self.pp})"
            )

    @property
    def groups(self) -> int:
        """Tensor parallel groups of one pipeline stage."""
        return self.ranks // (self.tp * self.pp)

    @property
    def pack_tokens(self) -> int:
        return max(self.tokens, self.context)

    @property
    def least_cp(self) -> int:
        return self.pack_tokens // self.tokens

    @property
    def packs(self) -> int:
        """Of one micro-batch."""
        return self.groups // self.least_cp

    @property
    def groups_per_node(self) -> int:
        return max(1, self.machine.gpus_per_node // self.tp)

    @property
    def stage_layers(self) -> int:
        return self.model.layers // self.pp

    @property
    def pool(self) -> "Scenario":
        """This scenario with the ranks of all stages, in stage order, as those of one stage."""
        model = replace(self.model, layers=self.stage_layers)
        return replace(self, model=model, pp=1, cp=None, keep_inputs_gb=0.0)

    @property
    def with_servers(self) -> "Scenario":
        """This scenario with the servers as its last ranks. Servers hold no packs, so the
        number of ranks need not be a multiple of the ranks that hold a pack."""
        ranks = self.ranks + self.servers
        return replace(self, ranks=ranks, servers=0, cp=None, context=self.tokens)

    @property
    def live_layers(self) -> int:
        """Number of layers, counted once per micro-batch in flight, whose activations the first
        stage holds for the backward pass in 1F1B."""
        return self.stage_layers * min(self.micro_batches, self.pp)

    @property
    def step_tokens(self) -> int:
        """Of all ranks."""
        return self.groups * self.micro_batches * self.tokens

    @property
    def attention_shape(self) -> AttentionShape:
        """Of one rank."""
        return self.model.attention(self.tp)

    def attention_cost(self) -> TileCost | TableCost:
        if self.machine.calibration is not None:
            return TableCost(self.machine.calibration, self.attention_shape)
        return TileCost(self.machine, self.attention_shape)

    def linear_seconds(self, tokens):
        """(forward, backward) of one layer and rank, for `tokens` of its group."""
        machine, model = self.machine, self.model
        if machine.linear_seconds_per_token is not None:
            both = machine.linear_seconds_per_token / self.stage_layers
            forward = both / (1 + LINEAR_BACKWARD_OVER_FORWARD)
        else:
            matmul = model.linear_flops / (machine.matmul_tflops * 1e12)
            elementwise = model.elementwise_bytes / (machine.memory_tb_per_s * 1e12)
            forward = (matmul + elementwise) / self.tp
        return forward * tokens, LINEAR_BACKWARD_OVER_FORWARD * forward * tokens

    def tensor_parallel_seconds(self, tokens):
        """Of one layer and pass: two all-reduces of the group's activations."""
        if self.tp == 1:
            return 0.0 * tokens
        machine = self.machine
        num_bytes = ELEMENT_BYTES * self.model.hidden * tokens
        link = machine.inside if self.tp <= machine.gpus_per_node else machine.between
        one_way = (self.tp - 1) / self.tp * num_bytes / link.bytes_per_second
        return 2 * 2 * one_way + 2 * link.latency_s

    def seconds_around_attention(self, pass_idx: int) -> tuple[float, float]:
        """Return the seconds of a layer's linear work and all-reduces: those on attention's input
        side, and the others. One of the four halves of all-reduces is on the input side."""
        linear = float(self.linear_seconds(self.tokens)[pass_idx])
        reduce = float(self.tensor_parallel_seconds(self.tokens))
        share = self.model.share_before_attention
        return share * linear + reduce / 4, (1 - share) * linear + 3 * reduce / 4

    def seconds_before_attention(self) -> float:
        """Return the seconds of a layer's linear work and all-reduces on attention's input side, of
        both passes together."""
        return sum(self.seconds_around_attention(each)[0] for each in (FORWARD, BACKWARD))

    @property
    def stage_params(self) -> float:
        """Of one rank, before sharding."""
        return self.model.params / (self.pp * self.tp)

    def state_bytes(self) -> float:
        """Weights, gradients, optimizer of one rank. fsdp: everything sharded over the stage's
        groups, two layers gathered, one layer's gradients whole. zero1: the optimizer sharded."""
        if self.sharding == "zero1":
            kept = (ELEMENT_BYTES + GRADIENT_BYTES) * self.stage_params
            return kept + OPTIMIZER_BYTES * self.stage_params / self.groups
        layer = self.model.layer_params / self.tp
        sharded = (OPTIMIZER_BYTES + GRADIENT_BYTES) * self.stage_params / self.groups
        return sharded + (2 * ELEMENT_BYTES + GRADIENT_BYTES) * layer

    def token_bytes(self) -> float:
        """Activations of one token of the group on one rank, all layers of its stage."""
        kept = self.model.activation_bytes
        if self.recompute:
            kept = ELEMENT_BYTES * self.model.hidden
        return kept * self.stage_layers / self.tp

    def repeated_bytes(self) -> float:
        """What one token of the group needs besides while a recomputed layer runs backward."""
        return self.model.activation_bytes / self.tp if self.recompute else 0.0

    @property
    def kept_cap(self) -> tuple[int, float]:
        """Cluster.kept_cap_bytes and kept_gain of a server."""
        free = self._room_for_tokens() - self.tokens * self._live_token_bytes()
        return kept_cap(self.keep_inputs_gb, int(max(0.0, free) / self.live_layers))

    @property
    def kept_cap_bytes(self) -> int:
        """Of inputs that a server may keep in one layer."""
        return self.kept_cap[0]

    def most_tokens(self, workspace_bytes: float = 0.0) -> float:
        """Of a group's micro-batch, in the memory that may be used, when each needs
        `workspace_bytes` beside its activations; never less than `tokens`."""
        per_token = self._live_token_bytes() + workspace_bytes
        return max(float(self.tokens), self._room_for_tokens() / per_token)

    def _room_for_tokens(self) -> float:
        """Bytes of one rank that its state leaves."""
        return self.machine.usable_bytes - self.state_bytes()

    def _live_token_bytes(self) -> float:
        """What one token of the group needs on one rank at the peak, workspace left out."""
        kept = self.token_bytes() * self.live_layers / self.stage_layers
        return kept + self.repeated_bytes()
