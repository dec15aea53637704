"""Tiny Hugging Face models with the structure of real models. They have two layers and seeded
random weights.

case = build_hf("qwen3", cache="static", phase="decode")
logits = case.model(*case.args, **case.kwargs).logits
case.caches          # the (keys, values) tensors that the call writes, layer by layer
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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

# Every token uses every expert, so that no rounding changes the choice of experts.
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

#: For each name: (config class, fields that differ from DIMS).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "rotary_pct": 0.25}),
    "falcon_7b": (
        "FalconConfig",
        {"num_key_value_heads": None, "alibi": False, "new_decoder_architecture": False},
    ),
    "falcon_40b": (
        "FalconConfig",
        {
            "num_key_value_heads": None,
            "num_kv_heads": 2,
            "alibi": False,
            "new_decoder_architecture": True,
        },
    ),
    "gpt2": ("GPT2Config", {"num_key_value_heads": None}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"num_key_value_heads": None, "multi_query": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16, **_WINDOW}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        | _LOCAL_EXPERTS
        | _WINDOW,
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 32, **_EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, **_EXPERTS}),
    "mixtral": ("MixtralConfig", _LOCAL_EXPERTS),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 1,
        },
    ),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3}),
    "olmo2": ("Olmo2Config", {}),
    "cohere": ("CohereConfig", {"use_qk_norm": True}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "phi": ("PhiConfig", {}),
}

#: More models, for tests that need other weights.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {"head_dim": 16, "num_key_value_heads": 1}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
        | {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
        | {"num_key_value_heads": 4},
    ),
}

#: Encoder-decoder models. For each name: (model class, config class, fields, a batch for the
#: encoder).
ENCODER_DECODERS: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
        {"input_ids": torch.arange(3, 21).view(2, 9)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"d_model": 64, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
        | {f"{part}_layers": 2 for part in ("encoder", "decoder")}
        | {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        | {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")},
        {"input_features": torch.linspace(-1, 1, 640).view(2, 8, 40)},
    ),
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
    past_tokens: int = PREFILL_TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    prepare: Callable[[Any], None] = lambda model: None,
    **changes: Any,
) -> HfCase:
    """Returns a case of one of MODELS or MORE.

    With phase="decode", the cache already holds `past_tokens` tokens per sequence, and one more
    token follows. With "prefill", the cache is empty, and `past_tokens` tokens follow. `prepare` is
    a function that changes the new model. `changes` are fields of the config.
    """
    import transformers

    class_name, fields = (MODELS | MORE)[name]
    fields = {**DIMS, **fields, **changes}
    fields = {field: value for field, value in fields.items() if value is not None}
    config = getattr(transformers, class_name)(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.requires_grad_(False)
    perturb_vectors(model)
    prepare(model)
    past = make_cache(transformers, config, cache)
    tokens = torch.randint(3, DIMS["vocab_size"], (batch, past_tokens + 1))
    step = tokens[:, :past_tokens]
    with torch.no_grad():
        if phase == "decode" or cache == "static":
            model(step, past_key_values=past)
        if phase == "decode":
            step = tokens[:, past_tokens:]
        elif cache == "static":
            past.reset()  # the tensors stay, so that a prompt finds memory to write into
    caches = [(layer.keys, layer.values) for layer in past.layers if layer.is_initialized]
    return HfCase(model, (step,), {"past_key_values": past}, caches)


def perturb_vectors(model):
    """Changes biases and norm weights, whose initial values 0 and 1 would hide a fusion that drops
    them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))


def make_cache(transformers, config, cache):
    if cache == "dynamic":
        return transformers.DynamicCache(config=config)
    return transformers.StaticCache(config=config, max_cache_len=CACHE_LENGTH)


def build_encoder_decoder(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> HfCase:
    """Returns a decode step of one of ENCODER_DECODERS with static caches. T5's second source is
    padded. The weights have values of bfloat16 in every dtype."""
    import transformers

    class_name, config_name, fields, batch = ENCODER_DECODERS[name]
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = getattr(transformers, config_name)(vocab_size=DIMS["vocab_size"], **tokens, **fields)
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(config).bfloat16().eval()
    model.requires_grad_(False)
    perturb_vectors(model)
    model = model.to(dtype)
    batch = {n: x.bfloat16().to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    with torch.no_grad():
        encoded = model.get_encoder()(**batch)
        length = encoded.last_hidden_state.shape[1]
        caches = (
            transformers.StaticCache(config=config, max_cache_len=n) for n in (CACHE_LENGTH, length)
        )
        past = transformers.EncoderDecoderCache(*caches)
        keywords = {"encoder_outputs": encoded, "past_key_values": past}
        if name == "t5":
            keywords["attention_mask"] = torch.ones(2, length, dtype=torch.long)
            keywords["attention_mask"][1, -3:] = 0
        step = torch.randint(3, DIMS["vocab_size"], (2, PREFILL_TOKENS + 1))
        model(decoder_input_ids=step[:, :PREFILL_TOKENS], **keywords)
    keywords["decoder_input_ids"] = step[:, PREFILL_TOKENS:]
    layers = past.self_attention_cache.layers
    return HfCase(model, (), keywords, [(layer.keys, layer.values) for layer in layers])


def with_mask(case: HfCase, kind: str) -> HfCase:
    """Returns the case with an attention mask, in which the second sequence is padded on the left.

    "tensor" is a 4-D mask, as `generate()` makes it before the call. If the model has several kinds
    of layers, there is one for each kind. "padding" is a 2-D mask, from which the model makes the
    4-D mask inside. "none" stands for no mask.
    """
    from transformers.masking_utils import create_masks_for_generate

    if kind == "none":
        return case
    (step,), past = case.args, case.kwargs["past_key_values"]
    seen = torch.ones(step.shape[0], past.get_seq_length() + step.shape[1], dtype=torch.long)
    mask = seen
    if kind == "padding":
        # With a float64 mask and a softmax in fp32, a query that sees no key would be NaN.
        seen[1:, 1:3] = 0
    else:
        seen[1:, :2] = 0
        x = case.model.get_input_embeddings()(step)
        mask = create_masks_for_generate(case.model.config, x, seen, past)
    return case._replace(kwargs=case.kwargs | {"attention_mask": mask})


def in_float64(case):
    """Runs a case's model in float64 with float64 caches, which replace the case's caches."""
    model = copy.deepcopy(case.model).to(torch.float64)
    if any("experts" in module for module, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # grouped products do not support float64
    cache = case.kwargs["past_key_values"]
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    logits = model(*case.args, **case.kwargs).logits
    case.caches[:] = [(layer.keys, layer.values) for layer in cache.layers]
    return logits
