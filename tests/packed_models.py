"""Tiny models of transformers and packed batches for them, for tests on gloo ranks.

The reference is the same model on single documents with eager attention.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import distca.integrations.transformers  # noqa: F401  registers attn_implementation="distca"

VOCAB_SIZE = 61
WINDOW = 7
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # scores far from uniform, so that a lost boundary shows
    "attn_implementation": "distca",
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_LATENT = {  # q and k are 24 wide, of which rotary embeddings take head_dim
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "head_dim": 8},
}
CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 40},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"sliding_window": WINDOW, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 40},
    ),
    "llama4": (  # two dense layers of chunks and a full one, whose queries depend on positions
        transformers.Llama4TextConfig,
        {
            **{"attention_chunk_size": 6, "floor_scale": 4, "no_rope_layers": [1, 0, 1]},
            **{"intermediate_size_mlp": 48, "moe_layers": []},
        },
    ),
    "gpt_oss": (  # one expert, so that gradients of the router are 0 and not rounding
        transformers.GptOssConfig,
        {
            **{"sliding_window": WINDOW, "layer_types": LAYER_TYPES},
            **{"num_local_experts": 1, "num_experts_per_tok": 1},
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {**_LATENT, "v_head_dim": 16, "q_lora_rank": 12, "n_group": 2, "topk_group": 1},
    ),
    "kimi": (  # with v wider than q and k
        transformers.DeepseekV3Config,
        {**_LATENT, "v_head_dim": 40, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "phimoe": (  # its mask has a window, which its layers do not pass on
        transformers.PhimoeConfig,
        {"sliding_window": WINDOW, "num_local_experts": 2, "router_jitter_noise": 0.0},
    ),
}
LENGTHS = [[61, 1, 219], [1, 7, 30, 2], [3], [150, 33]]  # by rank, of unequal sums


def model_of(name: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    kind, own = CONFIGS[name]
    config = kind(**{**SIZES, **own, **changes})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def with_attention(model: transformers.PreTrainedModel, name: str):
    """Return a copy of the model with another attention implementation."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    return other


@dataclass
class Packed:
    """Documents in one row."""

    lengths: list[int]
    ids: Tensor
    labels: Tensor
    position_ids: Tensor

    @classmethod
    def of(cls, lengths: list[int], seed: int = 0) -> "Packed":
        generator = torch.Generator().manual_seed(seed)
        shape = (2, 1, sum(lengths))
        ids, labels = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
        return cls(lengths, ids, labels, torch.cat([torch.arange(n) for n in lengths])[None])

    @property
    def cu_seqlens(self) -> Tensor:
        return F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0)).to(torch.int32)

    def keywords(self, boundaries: str = "position_ids") -> dict:
        """Return the keywords that a collator passes to the model."""
        if boundaries == "position_ids":
            return {"input_ids": self.ids, "position_ids": self.position_ids}
        longest = max(self.lengths, default=0)
        return {
            "input_ids": self.ids,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
            **({"position_ids": self.position_ids} if boundaries == "both" else {}),
        }

    def loss(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), reduction="sum")


def true_logits(model: transformers.PreTrainedModel, packed: Packed) -> Tensor:
    """Return the logits of single documents with eager attention."""
    eager = with_attention(model, "eager")
    return torch.cat([eager(ids).logits for ids in packed.ids.split(packed.lengths, dim=1)], dim=1)


def step(model, packed: Packed, boundaries: str = "position_ids") -> tuple[Tensor, dict]:
    """Return the loss, and gradients by parameter name."""
    model.zero_grad()
    loss = packed.loss(model(**packed.keywords(boundaries)).logits)
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def true_step(model, packed: Packed) -> tuple[Tensor, dict]:
    """Return the loss and gradients of single documents with eager attention."""
    eager = with_attention(model, "eager")
    eager.zero_grad()
    loss = torch.zeros(())
    for ids, labels in zip(
        *(each.split(packed.lengths, dim=1) for each in (packed.ids, packed.labels)), strict=True
    ):
        logits = eager(input_ids=ids).logits
        loss = loss + F.cross_entropy(logits[0], labels[0], reduction="sum")
    loss.backward()
    return loss.detach(), gradients(eager)


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def worst_error(got: tuple[Tensor, dict], truth: tuple[Tensor, dict]) -> float:
    """Return the largest relative error of the loss and of all gradients."""
    errors = [relative_error(got[0], truth[0])]
    errors += [relative_error(got[1][name], truth[1][name]) for name in truth[1]]
    return max(errors)
