"""Hugging Face mixtures of experts: every sparse layer fused, however the experts are computed."""

import copy

import pytest
import torch

from tests.agreement import assert_no_worse
from tilewright.compiler import reports

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")

import transformers

from tests.models.hf import DIMS

MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32}
DEEPSEEK = DIMS | MLA | ROUTED | {"v_head_dim": 16, "num_key_value_heads": 4, "topk_group": 1}

#: name -> (config class, fields, sparse layers); the first layer of DeepSeek's is dense.
MODELS = {
    "mixtral": ("MixtralConfig", DIMS | {"num_local_experts": 4}, 2),
    "deepseek_v2": ("DeepseekV2Config", DEEPSEEK | {"n_group": 1, "first_k_dense_replace": 1}, 1),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | {"n_group": 2, "first_k_dense_replace": 1}, 1),
}


def built(name, experts):
    config_class, fields, _ = MODELS[name]
    config = getattr(transformers, config_class)(**fields, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    return model.to(torch.bfloat16).eval()


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_every_sparse_layer_is_fused_and_right(name, experts):
    torch._dynamo.reset()
    model = built(name, experts)
    tokens = torch.arange(7)[None] * 11 % DIMS["vocab_size"]
    with torch.no_grad():
        eager = model(tokens, use_cache=False).logits
        compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
        logits = compiled(tokens, use_cache=False).logits
        chosen = [m for m in reports()[-1].matches if m.pattern == "moe"]
        exact = copy.deepcopy(model).to(torch.float64)
        exact.set_experts_implementation("eager")
        reference = exact(tokens, use_cache=False).logits
    assert len(chosen) == MODELS[name][2], reports()[-1].misses
    assert_no_worse(logits, eager, reference, name)


def test_token_counts_are_symbols():
    torch._dynamo.reset()
    model = built("mixtral", "grouped_mm")
    compiled = torch.compile(model, backend="tilewright", dynamic=True, options={"inner": "eager"})
    with torch.no_grad():
        for count in (5, 9):
            tokens = torch.arange(count)[None] * 11 % DIMS["vocab_size"]
            logits = compiled(tokens, use_cache=False).logits
            torch.testing.assert_close(
                logits, model(tokens, use_cache=False).logits, rtol=0.1, atol=0.02
            )
    assert {m.pattern for m in reports()[-1].matches} == {"moe"}
