"""Tests Hugging Face mixtures of experts: the router and the sparse layer are fused, whichever way
the experts are computed.

The tests cover prompts and decode steps, and token counts as numbers and as symbols. No result is
less accurate.
"""

import copy
import functools

import pytest
import torch

from tests.agreement import assert_no_worse
from tests.found import matches_of, misses_of, patterns_in
from tilewright.compiler import reports

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")

import transformers

from tests.models.hf import DIMS, perturb_vectors

ROUTED = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "hidden_size": 32, "vocab_size": 64}
BASE = DIMS | ROUTED | {"intermediate_size": 32}
QWEN = {"num_experts": 4, "moe_intermediate_size": 32}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
DEEPSEEK = BASE | MLA | {
    "first_k_dense_replace": 0, "n_routed_experts": 4, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
BEHIND_A_DENSE_LAYER = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

#: For each name: (config class, fields). Each model has one sparse layer, so that the routing of a
#: token does not depend on a fused layer. GLM's sparse layer follows a dense layer.
MODELS = {
    "mixtral": ("MixtralConfig", BASE | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", BASE | QWEN | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", BASE | QWEN | {"head_dim": 16}),
    "gpt_oss": (
        "GptOssConfig",
        BASE | ROPE | {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"]},
    ),
    "deepseek_v2": ("DeepseekV2Config", DEEPSEEK | {"n_group": 1}),
    "deepseek_v2_groups": (
        "DeepseekV2Config",
        DEEPSEEK | {"n_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | {"n_group": 2}),
    "glm4_moe": (
        "Glm4MoeConfig",
        DEEPSEEK | BEHIND_A_DENSE_LAYER | {"n_group": 1, "head_dim": 8},
    ),
    "olmoe": ("OlmoeConfig", BASE | {"num_experts": 4}),
}
BATCH, PROMPT, CACHE = 2, 5, 8


def built(name, experts):
    config_class, fields = MODELS[name]
    config = getattr(transformers, config_class)(**fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=experts, dtype=torch.bfloat16
    ).eval()
    model.requires_grad_(False)
    perturb_vectors(model)
    return model


def steps(model, call):
    """Returns the logits of a prompt without a cache, and the logits of a decode step after the
    same prompt. `call` computes both, and the prompt before the decode step runs eagerly."""
    tokens = torch.randint(3, 60, (BATCH, PROMPT + 1), generator=torch.Generator().manual_seed(1))
    cache = transformers.StaticCache(config=model.config, max_cache_len=CACHE)
    with torch.no_grad():
        model(tokens[:, :PROMPT], past_key_values=cache)
        prompt = call(tokens[:, :PROMPT], use_cache=False).logits
        return prompt, call(tokens[:, PROMPT:], past_key_values=cache).logits


def layer_steps(call, dtype):
    """Returns the results of the sparse layer for the activations of a prompt and of a decode
    step."""
    torch.manual_seed(1)
    inputs = [torch.randn(BATCH, tokens, BASE["hidden_size"]).bfloat16() for tokens in (PROMPT, 1)]
    results = [call(x.to(dtype)) for x in inputs]
    return [result[0] if isinstance(result, tuple) else result for result in results]


def in_float64(model):
    """Returns a copy that computes one expert after the other."""
    exact = copy.deepcopy(model).to(torch.float64)
    exact.set_experts_implementation("eager")
    return exact


@functools.cache
def uncompiled(name, experts):
    """Returns the eager results in bfloat16 and in float64."""
    model = built(name, experts)
    exact = in_float64(model)
    return steps(model, model), steps(exact, exact)


def assert_fused(latest, dynamic=False):
    """Checks that the sparse layer and its router are fused in the graph of the prompt and in the
    graph of the decode step."""
    found = [patterns_in(report, "fused_moe").count("moe") for report in latest]
    assert found == [1, 1], [m for report in latest for m in misses_of(report, "fused_moe")]
    for report in latest:
        assert patterns_in(report, "moe_router") == ["moe_router"], misses_of(report, "moe_router")
        assert matches_of(report, "moe_router")[0].shapes["logits"] == "computed"
    tokens = matches_of(latest[0], "fused_moe")[-1].shapes["x"]
    assert tokens == f"bfloat16[{'T' if dynamic else BATCH * PROMPT},{BASE['hidden_size']}]"


def assert_right(name, *results):
    for what, (fused, eager, exact) in zip(
        ("prompt", "decode"), zip(*results, strict=True), strict=True
    ):
        assert_no_worse(fused, eager, exact, f"{name} {what}")


#: Models that are traced as a whole. Among them are models with softmax and with sigmoid scores,
#: with and without shared experts, and one whose sparse layer follows a dense layer. For the other
#: models, only the sparse layer is traced.
WHOLE = ("mixtral", "gpt_oss", "glm4_moe")


@pytest.mark.parametrize("name", WHOLE)
def test_the_sparse_layer_is_fused_and_right(name):
    torch._dynamo.reset()
    model = built(name, "grouped_mm")
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    logits = steps(model, compiled)
    assert_fused(reports()[-2:])
    assert_right(name, logits, *uncompiled(name, "grouped_mm"))


# The models that are not in WHOLE differ from them in the router.
CASES = [(name, "batched_mm", False) for name in ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")]
CASES += [(name, "grouped_mm", False) for name in MODELS if name not in WHOLE]
# Cases with sizes as symbols, for each kind of router and of product.
CASES += [(name, "grouped_mm", True) for name in ("qwen2_moe", "gpt_oss", "deepseek_v3")]
CASES += [("mixtral", "batched_mm", True)]


@pytest.mark.parametrize(("name", "experts", "dynamic"), CASES)
def test_a_layer_alone_is_fused_and_right(name, experts, dynamic):
    torch._dynamo.reset()
    model = built(name, experts)
    layer, exact = (m.model.layers[-1].mlp for m in (model, in_float64(model)))
    compiled = torch.compile(
        layer, backend="tilewright", dynamic=dynamic, options={"inner": "eager"}
    )
    with torch.no_grad():
        fused, eager = (layer_steps(call, torch.bfloat16) for call in (compiled, layer))
        reference = layer_steps(exact, torch.float64)
    assert_fused(reports()[-2:], dynamic)
    assert_right(name, fused, eager, reference)


def test_float16_with_transformers_own_grouped_product_is_fused_too():
    """torch's grouped_mm does not support float16 under compilation. transformers has its own
    operator for this case."""
    torch._dynamo.reset()
    model = built("mixtral", "grouped_mm").half()
    exact = in_float64(model)
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    results = zip(*(steps(m, c) for m, c in ((model, compiled), (model, model), (exact, exact))),
                  strict=True)  # fmt: skip
    for fused, eager, reference in results:
        assert_no_worse(fused, eager, reference, "mixtral in float16")
    assert [m.op for m in matches_of(reports()[-1], "fused_moe")].count("fused_moe") == 1
