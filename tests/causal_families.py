"""Tiny models of all families of causal language models in transformers, with random weights.

Families have the names of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES. The module also draws documents for
the models, and compares their losses and gradients.
"""

import contextlib
import copy
import functools
import inspect

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

import distca.integrations.transformers  # noqa: F401  registers attn_implementation="distca"

VOCAB_SIZE = 64

NOT_BUILT = {  # family: why no small configuration makes it a causal language model
    "gemma3n": "its vision tower needs the library timm; gemma3n_text is its language model",
    "gemma4_assistant": "it drafts from states and cache of a Gemma 4, and takes no tokens",
    "gemma4_unified_assistant": "see gemma4_assistant",
}

# Fields of configurations. Each configuration gets the fields that it has.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 16),
    "vocab_size": VOCAB_SIZE,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "type_vocab_size": 2,
    "rotary_dim": 4,
    "sliding_window": 5,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 16,
    # latent attention and its indexers
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "v_head_dim": 12,
    "index_n_heads": 2,
    "index_topk": 4,
    # recurrent layers
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups"), 1),
    "mamba_expand": 2,
    "conv_L_cache": 3,
    # towers of images
    "image_size": 16,
    "patch_size": 8,
}
OPTIONAL = ("sliding_window", "q_lora_rank", "num_key_value_heads")  # keep None if the default
DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_p", "layerdrop", "jitter_noise")

_GEMMA4 = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
_LATENT = {"num_key_value_heads": 4}
_QWEN4 = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4},
    **{"indexer_compress_ratio": 2, "hc_lowrank": 4, "ngram_vocab_size_base": 32},
    **{"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "heads_per_ngram": 2},
}
_CHUNKS = {"attention_chunk_size": 5, "floor_scale": 4, "no_rope_layers": [1, 0]}
_DOTS3 = {**_LATENT, "layer_types": ["indexed_attention", "indexed_attention"]}
_BLT_GLOBAL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_BLT_GLOBAL["intermediate_size"] = 48
_BLT = {**_BLT_GLOBAL, "vocab_size": 64}
_BLT_LOCAL = {**_BLT, "cross_attn_k": 1, "hidden_size_global": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"]}

OWN_SIZES = {
    "bailing_hybrid": {"num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        **{"encoder_hash_byte_group_vocab": 32, "encoder_hash_byte_group_size": [3]},
        **{"cross_attn_k": 1, "encoder_config": _BLT_LOCAL, "decoder_config": _BLT_LOCAL},
        **{"global_config": _BLT_GLOBAL, "patcher_config": _BLT},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32},
    },
    "deepseek_v4": {
        **{"o_groups": 2, "o_lora_rank": 8},
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dory": {
        **{"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": _WINDOWS,
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
        "text_config": _DOTS3,
    },
    "dots3_note_text": _DOTS3,
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2, **_GEMMA4},
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "kimi_linear": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        **{"linear_head_dim": 8, "linear_num_heads": 4},
    },
    "laguna": _WINDOWS,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": _CHUNKS},
    "llama4_text": _CHUNKS,
    "longcat_flash": {"ffn_hidden_size": 48, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "mellum": _WINDOWS,
    "minimax_m3_vl_text": {
        **{"index_block_size": 4, "index_topk_blocks": 2},
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "moshi": {"sliding_window": 64},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "moe_shared_expert_intermediate_size": 16},
    "prophetnet": {
        **{"num_decoder_layers": 2, "num_encoder_layers": 2},
        **{"num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4},
    },
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        **{"attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 6], "num_buckets": 2},
        **{"axial_pos_embds_dim": [16, 16], "attention_head_size": 8, "feed_forward_size": 48},
        **{"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    },
    "roc_bert": {
        **{"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
        **{"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    },
    "xlstm": {"num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["hybrid", "linear_attention", "hybrid"]},
    "zamba2": {
        **{"num_hidden_layers": 3, "n_mamba_heads": 4, "adapter_rank": 4},
        **{"layers_block_type": ["hybrid", "hybrid", "linear_attention"]},
        **{"attention_head_dim": 16, "attention_hidden_size": 64},
    },
    "zaya": {"num_experts_per_tok": 1},
}
PARTS = {  # families whose causal model has another configuration than the mapping says
    "musicgen": "MusicgenDecoderConfig",
    "musicgen_melody": "MusicgenMelodyDecoderConfig",
}


def model_of(name: str, attn_implementation: str) -> transformers.PreTrainedModel:
    """Return a model with the same weights at every call.

    They are large enough that a lost mask or boundary shows.
    """
    kind, sizes = _small_config(name)
    config = kind(**copy.deepcopy(sizes))
    torch.manual_seed(0)
    if name in PARTS:
        config._attn_implementation = attn_implementation
        model = getattr(transformers, FAMILIES[name])(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@functools.cache
def _small_config(name: str) -> tuple[type, dict]:
    """Return the configuration's class of a family, and its arguments."""
    if name in PARTS:
        kind, own = getattr(transformers, PARTS[name]), {"num_codebooks": 1}
    else:
        kind, own = CONFIG_MAPPING[name], OWN_SIZES.get(name, {})
    return kind, _small(kind, own)


def _small(kind: type, own: dict) -> dict:
    """Return arguments for configuration `kind` and for its nested configurations."""
    defaults = {}
    with contextlib.suppress(Exception):  # some have required arguments
        defaults = kind().to_dict()
    fields = {*defaults, *getattr(kind, "__dataclass_fields__", {})}
    fields -= set(getattr(kind, "attribute_map", {}))
    arguments = {field: size for field, size in SIZES.items() if field in fields}
    for field in OPTIONAL:
        if field in arguments and defaults.get(field, 0) is None:
            del arguments[field]
    for field in fields:
        if field.endswith(DROPOUTS) and isinstance(defaults.get(field), (int, float)):
            arguments[field] = type(defaults[field])()
    if {"kv_lora_rank", "num_key_value_heads"} <= fields:
        arguments.update(_LATENT)
    if "is_decoder" in fields:
        arguments["is_decoder"] = True
    arguments["use_cache"] = False
    for field, part in (getattr(kind, "sub_configs", None) or {}).items():
        default = defaults.get(field) or {}
        if default.get("model_type") in CONFIG_MAPPING:
            part = CONFIG_MAPPING[default["model_type"]]
        if inspect.isclass(part):
            arguments[field] = _small(part, own.get(field, {}))
    arguments.update(
        {
            field: value
            for field, value in own.items()
            if field not in arguments or not isinstance(arguments[field], dict)
        }
    )
    return _with_layers(arguments, defaults)


def _with_layers(arguments: dict, defaults: dict) -> dict:
    """Give the model at least one layer of each type that the family has by default."""
    number = arguments.get("num_hidden_layers", 2)
    types = arguments.get("layer_types")
    if types is None and defaults.get("layer_types"):
        kinds = list(dict.fromkeys(defaults["layer_types"]))
        types = (kinds * number)[: max(number, len(kinds))]
        arguments["layer_types"] = types
        if "num_hidden_layers" in arguments:
            arguments["num_hidden_layers"] = len(types)
    if defaults.get("mlp_layer_types"):
        kinds = list(dict.fromkeys(defaults["mlp_layer_types"]))
        number = len(types) if types else number
        arguments["mlp_layer_types"] = (kinds * number)[:number]
    return arguments


def tokens(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw (ids, labels) without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(3, VOCAB_SIZE - 4, (2, 1, num_tokens), generator=generator)
    return drawn[0], drawn[1]


def step(model, calls: list[tuple[dict, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the model on each of (keywords, labels). Return the sum of losses, and gradients."""
    model.zero_grad()
    loss = torch.zeros(())
    for keywords, labels in calls:
        logits = model(**keywords).logits.flatten(0, 1).float()
        loss = loss + F.cross_entropy(logits, labels.flatten(), reduction="sum")
    loss.backward()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    return loss.detach(), gradients


def largest_error(got: tuple[Tensor, dict], truth: tuple[Tensor, dict]) -> float:
    """Return the largest relative error of the loss and of every gradient.

    A gradient that is only rounding, as of a key's bias, is compared with a thousandth of the norm
    of all gradients.
    """
    assert got[1].keys() == truth[1].keys()
    of_all = sum(each.norm() ** 2 for each in truth[1].values()).sqrt()
    errors = [
        (got[1][name] - each).norm() / (each.norm() + 1e-3 * of_all)
        for name, each in truth[1].items()
    ]
    return max([(got[0] - truth[0]).abs() / truth[0].abs(), *errors]).item()
