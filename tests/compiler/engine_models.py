"""Tiny models and requests for tests of continuous batching."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from tilewright.compiler.serving import BatchingConfig

VOCABULARY, NEW, WINDOW, PAGE = 61, 10, 8, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2}
#: For each model: its class, the fields that differ from the common ones, and the attention that
#: its `generate()` uses.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("Llama", {}, "sdpa"),
    "Qwen3": ("Qwen3", HEADS, "sdpa"),
    "Qwen3Moe": (
        "Qwen3Moe",
        HEADS | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": []},
        "sdpa",
    ),
    "Gemma3": ("Gemma3", HEADS | SLIDING, "sdpa"),
    "Gemma2": ("Gemma2", HEADS | SLIDING | {"attn_logit_softcapping": 2.0}, "eager"),
    "GptOss": (
        "GptOss",
        HEADS
        | SLIDING
        | EXPERTS
        | {"num_local_experts": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "eager",
    ),
    "DeepseekV3": (
        "DeepseekV3",
        {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        | {"v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 2}
        | {"topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1}
        | EXPERTS
        | {"moe_intermediate_size": 16},
        "sdpa",
    ),
    "DeepseekV2": (
        "DeepseekV2",
        {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
        | {"v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2},
        "sdpa",
    ),
    "Mistral": ("Mistral", {"sliding_window": WINDOW}, "sdpa"),  # no layer sees all keys
}
#: Sizes of models for which the kernels use their smallest tiles.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
#: For tests in which a second layer would run the same code as the first.
ONE_LAYER = {"num_hidden_layers": 1}
#: Lengths of prompts: one token, whole pages, whole pages and one token, several chunks, and more
#: than a table holds.
LENGTHS = (5, 1, 40, 16, 150, 3, 17, 64, 9, 70)


@functools.cache
def built(name: str) -> Any:
    """Returns a tiny model. Its weights are so large that its tokens differ from each other."""
    return made(name)


def made(name: str, sizes: Mapping[str, Any] | None = None) -> Any:
    """Makes a tiny model. sizes: configuration fields that replace the usual ones."""
    torch.manual_seed(0)
    kind, settings, attention = MODELS[name]
    text = "Text" if kind == "Gemma3" else ""
    fields = SIZES | settings
    fields |= {field: size for field, size in (sizes or {}).items() if field in fields}
    config = getattr(transformers, f"{kind}{text}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.set_attn_implementation(attention)
    return model


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Makes prompts of these lengths. The last two share their first tokens if they are long
    enough."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    made[-1][:32] = made[4][:32] if len(made) > 4 else made[-1][:32]
    return made


@functools.cache
def generated(name: str, lengths: tuple[int, ...] = LENGTHS, new: int = NEW) -> list[list[int]]:
    """Returns the new tokens of a tiny model's `generate()`, one request after another."""
    return generated_by(built(name), lengths, new)


def generated_by(model: Any, lengths: tuple[int, ...], new: int = NEW) -> list[list[int]]:
    """Returns the new tokens of a model's `generate()`, one request after another."""
    how = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None}
    return [
        model.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist()
        for ids in prompts(lengths)
    ]


def greedy(**settings: Any) -> GenerationConfig:
    """Returns the settings of greedy search that never ends early."""
    plain = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**plain | settings)


#: The settings of a small engine: steps of at most 48 tokens and 5 requests, and block tables of 12
#: pages.
SMALL = {
    "page_size": PAGE,
    "num_blocks": 80,
    "max_batch_tokens": 48,
    "max_requests_per_batch": 5,
    "max_blocks_per_request": 12,
    "max_memory_percent": 0.02,
    "q_padding_interval_size": 48,
    "kv_padding_interval_size": 64,
}
#: The settings of an engine whose pages are tiles of keys. Its memory holds 640 tokens, as in the
#: tests on a CPU.
ENGINE = SMALL | {"page_size": 16, "num_blocks": 40, "max_blocks_per_request": 8}


def plain(**settings: Any) -> BatchingConfig:
    """Returns settings of a small engine whose steps are not compiled."""
    config = BatchingConfig(**SMALL | settings)
    config.varlen_compile_config = config.decode_compile_config = None
    return config
