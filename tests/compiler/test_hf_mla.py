"""Tests Hugging Face models with latent attention: every layer is fused, and no result is less
accurate than eager's against float64.

The models run without a cache and with each kind of cache.
"""

import copy
from collections import Counter

import pytest
import torch

from tests.agreement import assert_no_worse, assert_untouched
from tests.found import matches_of, misses_of, patterns_in
from tilewright.compiler import lower, reports

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")

import transformers

from tests.models.hf import DIMS, perturb_vectors

MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
}
# Each token uses all experts, because a rounding must not decide which experts a token gets.
EXPERTS = {
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
# One layer is enough here. The tests of several steps check that all layers are fused.
LAYERS, LENGTH, TOKENS = 1, 32, 7
FIELDS = DIMS | MLA | EXPERTS | {"num_hidden_layers": LAYERS}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
}

#: For each name: (config class, fields).
MODELS = {
    "v2": ("DeepseekV2Config", {}),
    "v2_lite": ("DeepseekV2Config", {"q_lora_rank": None, "rope_parameters": YARN}),
    "v3": ("DeepseekV3Config", {"rope_parameters": YARN}),
    "v3_half_rope": ("DeepseekV3Config", {"rope_interleave": False}),
    "v3_bias": ("DeepseekV3Config", {"attention_bias": True}),
}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def built(name, cache, phase, **changes):
    """Returns (model, arguments, keywords, the tensors that the call writes)."""
    config_class, fields = MODELS[name]
    config = getattr(transformers, config_class)(**FIELDS | fields | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    perturb_vectors(model)
    tokens = torch.randint(3, DIMS["vocab_size"], (2, TOKENS + 1))
    prompt, step = tokens[:, :TOKENS], tokens[:, TOKENS:]
    if cache == "none":
        return model, (prompt,), {"use_cache": False}, []
    if cache == "dynamic":
        past = transformers.DynamicCache(config=config)
    else:
        past = transformers.StaticCache(config=config, max_cache_len=LENGTH)
    model(prompt, past_key_values=past)
    if phase == "prefill" and cache == "static":
        past.reset()
        step = prompt
    written = [t for layer in past.layers for t in (layer.keys, layer.values)]
    return model, (step,), {"past_key_values": past}, written if cache == "static" else []


def in_float64(model, args, kwargs):
    """Returns (logits, caches) of the model in float64."""
    exact = copy.deepcopy(model).to(torch.float64)
    exact.set_experts_implementation("eager")  # grouped products do not support float64
    layers = kwargs["past_key_values"].layers if "past_key_values" in kwargs else []
    for layer in layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    logits = exact(*args, **kwargs).logits
    return logits, [t for layer in layers for t in (layer.keys, layer.values)]


CASES = [(name, "static", "prefill", None) for name in MODELS]
CASES += [(name, "static", "decode", None) for name in ("v2_lite", "v3")]
CASES += [(name, "none", "prefill", None) for name in ("v2_lite", "v3")]
# Only one case has sizes as symbols, because tracing with symbols takes three times as long.
CASES += [("v2", "static", "prefill", True)]


@pytest.mark.parametrize(("name", "cache", "phase", "dynamic"), CASES)
def test_every_layer_is_fused_and_right(name, cache, phase, dynamic):
    ours, eager, exact = (built(name, cache, phase) for _ in range(3))
    before = [t.clone() for t in ours[3]]
    expected = eager[0](*eager[1], **eager[2]).logits
    reference, exact_caches = in_float64(*exact[:3])
    compiled = torch.compile(
        ours[0], backend="tilewright", dynamic=dynamic, options={"inner": "eager"}
    )
    logits = compiled(*ours[1], **ours[2]).logits
    found = reports()[-1]
    patterns = patterns_in(found, "mla", "qkv")
    stores = ["mla_latent_store"] * LAYERS * (cache == "static")
    assert patterns == stores + ["mla_prefill"] * LAYERS, misses_of(found, "mla", "qkv")
    assert misses_of(found, "mla", "qkv") == []
    masks = {m.shapes["mask"] for m in matches_of(found, "mla_prefill")}
    assert masks == {"causal" if cache == "none" else "causal by position"}
    assert_no_worse(logits, expected, reference, f"{name} logits")
    for i, old in enumerate(before):
        what = f"{name} layer {i // 2} cache {i % 2}"
        assert_no_worse(ours[3][i], eager[3][i], exact_caches[i], what)
        assert_untouched(old, ours[3][i], exact_caches[i], what)


def test_a_growing_cache_is_attended_fused_and_named():
    ours, eager = (built("v2", "dynamic", "decode") for _ in range(2))
    compiled = torch.compile(ours[0], backend="tilewright", options={"inner": "eager"})
    logits = compiled(*ours[1], **ours[2]).logits
    expected = eager[0](*eager[1], **eager[2]).logits
    found = reports()[-1]
    assert patterns_in(found, "mla", "qkv") == ["mla_prefill"] * LAYERS
    assert [m.code for m in misses_of(found, "mla", "qkv")] == ["GROWING_CACHE"]
    torch.testing.assert_close(logits, expected, rtol=0.1, atol=0.03)


def test_padding_is_a_mask_that_is_read():
    """The batch is padded. The data decide which keys are padding, so the op gets the mask tensor
    as it is."""
    model, args, _, _ = built("v3", "none", "prefill")
    padding = torch.ones(2, TOKENS, dtype=torch.int64)
    padding[1, :3] = 0
    keywords = {"use_cache": False, "attention_mask": padding}
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(*args, **keywords).logits
    expected = model(*args, **keywords).logits
    assert {m.shapes["mask"] for m in matches_of(reports()[-1], "mla", "qkv")} == {
        "causal and tensor"
    }
    seen = padding.bool()
    torch.testing.assert_close(logits[seen], expected[seen], rtol=0.1, atol=0.03)


def test_several_steps_on_one_cache():
    """Decoding continues where the last step wrote. One compilation serves all steps."""
    ours, eager = (built("v3", "static", "decode", num_hidden_layers=2) for _ in range(2))
    compiled = torch.compile(ours[0], backend="tilewright", options={"inner": "eager"})
    for step in range(4):
        token = torch.full((2, 1), 3 + step)
        a = compiled(token, **ours[2]).logits
        b = eager[0](token, **eager[2]).logits
        assert (a.float() - b.float()).abs().max() < 0.05
    (report,) = reports()
    found = Counter(patterns_in(report, "mla", "qkv"))
    assert found == {"mla_latent_store": 2, "mla_prefill": 2}


def test_inductor_gives_the_same_as_eager():
    case = ("v3", "static", "prefill")
    ours, eager, exact = (built(*case) for _ in range(3))
    expected = eager[0](*eager[1], **eager[2]).logits
    reference, _ = in_float64(*exact[:3])
    logits = torch.compile(ours[0], backend="tilewright")(*ours[1], **ours[2]).logits
    assert patterns_in(reports()[-1], "mla", "qkv") == [
        "mla_latent_store",
        "mla_prefill",
    ]
    assert_no_worse(logits, expected, reference, "logits")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_spelled_out_is_fused_too(attention):
    model, args, keywords, _ = built("v3", "static", "prefill")
    model.set_attn_implementation(attention)
    found = lower(model, args, keywords)
    assert patterns_in(found, "mla_prefill") == ["mla_prefill"] * LAYERS, misses_of(found, "mla")
