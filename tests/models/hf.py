"""Tiny Hugging Face models, structurally true: two layers, random weights, deterministic.

case = build_hf("qwen3", cache="static", phase="decode")
logits = case.model(*case.args, **case.kwargs).logits
case.caches          # the (keys, values) tensors that the call writes, layer by layer
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

DIMS = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: name -> (config class, fields that differ from DIMS)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "rotary_pct": 0.25}),
}

CACHE_LENGTH = 32
PREFILL_TOKENS = 7


class HfCase(NamedTuple):
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caches: list[tuple[torch.Tensor, torch.Tensor]]


def build_hf(
    name: str,
    cache: str = "static",
    phase: str = "decode",
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **changes: Any,
) -> HfCase:
    """One of MODELS with a cache that already holds 7 tokens per sequence (phase="decode": one
    more token follows) or none ("prefill": 7 follow). `changes` are fields of the config."""
    import transformers

    class_name, fields = MODELS[name]
    fields = {**DIMS, **fields, **changes}
    fields = {field: value for field, value in fields.items() if value is not None}
    config = getattr(transformers, class_name)(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.requires_grad_(False)
    perturb_vectors(model)
    past = make_cache(transformers, config, cache, batch, dtype)
    tokens = torch.randint(3, DIMS["vocab_size"], (batch, PREFILL_TOKENS + 1))
    step = tokens[:, :PREFILL_TOKENS]
    if phase == "decode":
        with torch.no_grad():
            model(step, past_key_values=past)
        step = tokens[:, PREFILL_TOKENS:]
    caches = [(layer.keys, layer.values) for layer in past.layers if layer.is_initialized]
    return HfCase(model, (step,), {"past_key_values": past}, caches)


def perturb_vectors(model):
    """Biases start at 0 and norm weights at 1, which would hide a fusion that drops them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))


def make_cache(transformers, config, cache, batch, dtype):
    if cache == "dynamic":
        return transformers.DynamicCache(config=config)
    past = transformers.StaticCache(config=config, max_cache_len=CACHE_LENGTH)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    past.early_initialization(batch, heads, head_dim, dtype, torch.device("cpu"))
    return past
