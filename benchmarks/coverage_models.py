"""Builds small versions of every causal language model of transformers.

Each model has the default config of its class with small extents and few layers. It has one layer
of each kind that the default has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

HIDDEN, HEADS, HEAD_DIM, VOCAB = 64, 4, 16, 128
MAX_LAYERS = 4

#: Small extents by the name of a config's field. A field is skipped if a config does not have it,
#: or has None as its value.
EXTENTS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim"), HIDDEN),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "embedding_dim"), HIDDEN),
    **dict.fromkeys(("output_embedding_size", "attention_hidden_size", "lru_width"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_head", "dim_head"), HEAD_DIM),
    **dict.fromkeys(("attention_head_size", "attention_head_dim", "linear_head_dim"), HEAD_DIM),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "dff", "dim_ff", "d_inner", "ffn_hidden_size"), 128),
    **dict.fromkeys(("feed_forward_size", "intermediate_size_mlp", "lru_width"), 128),
    **dict.fromkeys(("dense_intermediate_size", "pronunciation_embed_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "router_hidden_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("moe_num_experts",), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("max_target_positions", "n_ctx", "context_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 16),
    **dict.fromkeys(("local_attention", "attention_window_size", "sliding_window_size"), 16),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 48),
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "adapter_rank": 8,
    "laurel_rank": 8,
    "hc_lowrank": 8,
    "rel_extent": 64,
    "d_rel": 8,
    "original_max_position_embeddings": 32,
}

#: Small numbers by the name of a config's field. A number is used if the field's default is larger
#: than 1.
FEW: dict[str, int] = {
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
}

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
LAYERS += ("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks")

_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "per_layer_config": {"01": {"head_dim": 32}},
}

# These fields differ between the layers of dots3, so the default config has no single value.
_DOTS3 = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 40}
_DOTS3 |= {"qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 40}

#: Fields of models for which the rules above are not enough. "skip" says why a model is left out.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "skip": "a model of bytes that consists of four models, and does not take the inputs of a "
        "causal language model"
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "cpmant": {"prompt_length": 2},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"skip": "a composite around dots3_note_text"},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
        **_DOTS3,
        "per_layer_config": {1: _DOTS3 | {"num_attention_heads": 2, "num_key_value_heads": 2}},
    },
    "emu3": {"skip": "a composite around emu3_text_model"},
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 4}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"activation_sparsity_pattern": [0.95, 0.0] * 2, "intermediate_size": [128] * 4},
    "gemma4_assistant": {"skip": "a draft model, which has no cache of its own"},
    "gemma4_unified_assistant": {"skip": "a draft model, which has no cache of its own"},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "git": {"skip": "a composite of a vision tower and a decoder"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mllama": {"skip": "a composite around mllama_text_model"},
    "musicgen": {"skip": "a decoder of audio codes"},
    "musicgen_melody": {"skip": "a decoder of audio codes"},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {"skip": "a composite of a vision and an audio tower and phi3"},
    "qwen4_exp": {"skip": "a composite around qwen4_exp_text"},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"embedding_dim": 256, "hidden_size": 256, "num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48]},
    "zamba": {"num_hidden_layers": 3, "attention_head_dim": 32, "attention_hidden_size": 128}
    | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
}

#: Models that mix float32 and bfloat16 in ways that fail in eager PyTorch.
FLOAT32 = ("inkling2_text", "reformer", "xlnet")

BERT_LIKE = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False}


class NotSwept(Exception):
    """Raised for a class of the mapping that is no decoder by itself. The message says why."""


def small_config(name: str) -> PreTrainedConfig:
    """Returns the small config of a model type. Raises NotSwept."""
    given = EXCEPTIONS.get(name, {})
    if "skip" in given:
        raise NotSwept(given["skip"])
    default = CONFIG_MAPPING[name]()
    text = default.get_text_config(decoder=True)
    if type(text) is not type(default):
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(default)]
        if cls.config_class is not type(text):
            raise NotSwept(f"a composite around {text.model_type}")
        default = text
    return type(default)(**(small_fields(default) | given))


def small_fields(default: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of a small config that differ from those of the default."""
    names = {field.name for field in dataclasses.fields(default)} - {"per_layer_config"}
    fields: dict[str, Any] = {}
    for name in names:
        value = _value(default, name)
        if name == "head_dim":
            fields[name] = HEAD_DIM
        elif type(value) is int and value > 0:
            if name in EXTENTS:
                fields[name] = EXTENTS[name]
            elif name in FEW:
                fields[name] = min(value, FEW[name])
        if type(value) is bool and name in BERT_LIKE:
            fields[name] = BERT_LIKE[name]
    heads = {_value(default, n) for n in ("num_attention_heads", "n_heads", "n_head")}
    for kv_heads in ("num_key_value_heads", "num_kv_heads"):
        if kv_heads in fields and _value(default, kv_heads) in heads:
            fields[kv_heads] = HEADS
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(default, token, None) is not None:
            fields[token] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}[token]
    return fields | _layers(default, names)


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Returns a field of a config. Returns None if the field is missing or differs between
    layers."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _layers(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Returns the fields that depend on the layers: one layer of each kind, at least two layers.

    They include every list that has an entry for each layer.
    """
    count = getattr(default, "num_hidden_layers", None)
    if count is None:
        return {name: 2 for name in LAYERS if name in names}
    lists = {
        name: list(value)
        for name in names
        if isinstance(value := _value(default, name), (list, tuple))
        and len(value) == count
        and len(set(map(str, value))) < max(count, 2)
    }
    kinds: dict[Any, int] = {}
    for layer in range(count):
        kinds.setdefault(tuple(str(lists[name][layer]) for name in sorted(lists)), layer)
    chosen = sorted(kinds.values())[:MAX_LAYERS]
    if len(chosen) == 1:
        chosen = [chosen[0], chosen[0]]
    fields: dict[str, Any] = {name: len(chosen) for name in LAYERS if name in names}
    return fields | {name: [value[layer] for layer in chosen] for name, value in lists.items()}


def small_model(name: str, seed: int = 0) -> Any:
    """Returns a small model of a type in bfloat16, with random weights, norms and biases.

    Raises NotSwept.
    """
    config = small_config(name)
    dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=dtype).eval()
    model.requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in parameter_name:
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))
        elif parameter.is_floating_point():
            # With the default's standard deviation, the scores of the experts are nearly equal.
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model
