"""Defines the Hugging Face models of `end_to_end.py`, with published dims, random weights and fewer
layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tilewright.tools.zoo import ZOO


@dataclass(frozen=True)
class Model:
    """A model to measure.

    title: its name in tables.
    results: the name of its file of results.
    model_class: the name of its class in transformers.
    config: the name of its config class, or a function that makes a config from the number of
        layers.
    cases: the cases, as in `end_to_end.py`.
    experts_per_token, experts: the numbers of experts in one layer.
    """

    title: str
    results: str
    model_class: str
    config: Callable[[int], PreTrainedConfig] | str
    cases: tuple[str, ...]
    experts_per_token: int = 1
    experts: int = 1


def llama3_8b(layers: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def llama3_70b(layers: int) -> PreTrainedConfig:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    return LlamaConfig(**llama3_8b(layers).to_dict() | sizes | {"head_dim": 128})


def qwen3_30b_a3b(layers: int) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )


def deepseek_v2_lite(layers: int) -> PreTrainedConfig:
    return DeepseekV2Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_shared_experts=2,
        n_routed_experts=64,
        routed_scaling_factor=1.0,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        v_head_dim=128,
        qk_nope_head_dim=128,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    )


def gpt_oss_20b(layers: int) -> PreTrainedConfig:
    return GptOssConfig(**{**ZOO["gpt-oss-20b"].fields, "num_hidden_layers": layers})


def gemma3_12b(layers: int) -> PreTrainedConfig:
    return Gemma3TextConfig(
        vocab_size=262208,
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=1024,
        max_position_embeddings=131072,
    )


DECODE = ("1x1", "16x1", "64x1")
WITHOUT_MASK = ("1x1-nomask", "16x1-nomask", "64x1-nomask", "1x1024-nomask")
LATENT = ("1x1", "8x1", "1x512", "8x1024")
MODELS = {
    "llama3-8b": Model(
        "Llama-3-8B",
        "llama3_8b_end_to_end",
        "LlamaForCausalLM",
        llama3_8b,
        (*DECODE, "16x1-padded", "1x1024", "8x1024-padded", *WITHOUT_MASK),
    ),
    "llama3-70b": Model(
        "Llama-3-70B", "llama3_70b_end_to_end", "LlamaForCausalLM", llama3_70b, DECODE
    ),
    "qwen3-30b-a3b": Model(
        "Qwen3-30B-A3B",
        "qwen3_30b_a3b_end_to_end",
        "Qwen3MoeForCausalLM",
        qwen3_30b_a3b,
        (*DECODE, "16x1-padded", "1x1024", "8x1024-padded", *WITHOUT_MASK),
        experts_per_token=8,
        experts=128,
    ),
    "deepseek-v2-lite": Model(
        "DeepSeek-V2-Lite",
        "deepseek_v2_lite_end_to_end",
        "DeepseekV2ForCausalLM",
        deepseek_v2_lite,
        (*DECODE, "16x1-padded", "1x1024", "8x1024", "1x4096", "1x1024-nomask", "1x4096-nocache"),
        experts_per_token=6,
        experts=64,
    ),
    "gpt-oss-20b": Model(
        "GPT-OSS-20B",
        "gpt_oss_20b_end_to_end",
        "GptOssForCausalLM",
        gpt_oss_20b,
        DECODE,
        experts_per_token=4,
        experts=32,
    ),
    "gemma3-12b": Model(
        "Gemma-3-12B", "gemma3_12b_end_to_end", "Gemma3ForCausalLM", gemma3_12b, DECODE
    ),
    "youtu": Model("Youtu", "youtu_end_to_end", "YoutuForCausalLM", "YoutuConfig", LATENT),
    "minicpm3": Model(
        "MiniCPM3-4B", "minicpm3_end_to_end", "MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT
    ),
    "glm-4.7-flash": Model(
        "GLM-4.7-Flash",
        "glm_4_7_flash_end_to_end",
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        LATENT,
        experts_per_token=4,
        experts=64,
    ),
}


def config_of(model: Model, layers: int) -> PreTrainedConfig:
    """Returns a config with the model's published dims and the given number of layers."""
    if callable(model.config):
        return model.config(layers)
    return getattr(transformers, model.config)(num_hidden_layers=layers)


def build(
    name: str, layers: int, device: str = "cuda", fields: dict[str, Any] | None = None
) -> Any:
    """Returns the model in bfloat16. Its experts use Hugging Face's `grouped_mm`.

    `fields` are fields of the config that replace the published ones.
    """
    model = MODELS[name]
    config = config_of(model, layers)
    if fields:
        config = type(config)(**config.to_dict() | fields)
    torch.manual_seed(0)
    with torch.device(device):
        experts = {"experts_implementation": "grouped_mm"} if model.experts > 1 else {}
        made = getattr(transformers, model.model_class)._from_config(
            config, dtype=torch.bfloat16, **experts
        )
    for parameter_name, parameter in made.named_parameters():
        # Some releases leave expert weights uninitialised.
        if ".experts." in parameter_name:
            parameter.data.normal_(std=0.02)
    return made.eval().requires_grad_(False)
