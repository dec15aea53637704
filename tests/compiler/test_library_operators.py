"""Tests operators of quantisation libraries, which are declared by default.

Stand-ins with the schemas and the arithmetic of the hub's kernels are called from modules of
transformers.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers.integrations.finegrained_fp8")

import transformers
from transformers.integrations import finegrained_fp8 as library

from tests.agreement import assert_no_worse
from tests.found import matches_of, misses_of, patterns_in
from tests.library_layers import (
    HEAD_DIM,
    Attention,
    Mlp,
    assert_attention_no_worse,
    attention_args,
    run,
)
from tests.models import finegrained
from tests.models.shipped import dense, step_of
from tilewright.compiler import _compat, declare, lower, reports
from tilewright.compiler.quantised.operators import OPERATORS, block_dynamic
from tilewright.compiler.report.traffic import fixed_nodes
from tilewright.compiler.rewrite import declared

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "kernel")

HIDDEN = 256


@pytest.fixture
def kernel(monkeypatch):
    """Loads the stand-ins in place of the hub's kernels. After the test, no declaration is left."""
    monkeypatch.setattr(library, "_FINEGRAINED_FP8", finegrained.KERNEL)
    yield
    declared._DECLARED.clear()


def inputs(tokens=3):
    generator = torch.Generator().manual_seed(1)
    return attention_args(torch.randn(tokens, HIDDEN, generator=generator).bfloat16())


def of_projections(**options):
    return Attention(partial(finegrained.linear, **options), HIDDEN)


FORMS = {
    "block": {},
    "bias": {"bias": True},
    "tensor": {"block_size": None},
    "static": {"activation_scheme": "static"},
    "ue8m0": {"scale_fmt": "ue8m0"},
}


def attention(form):
    model = of_projections(**FORMS[form])
    for module in (model.q, model.k, model.v):
        if module.activation_scale is not None:
            module.activation_scale = nn.Parameter(torch.tensor(0.01), requires_grad=False)
    if form == "static":
        model.k.activation_scale = model.v.activation_scale = model.q.activation_scale
    return model


def exactly(module, x):
    """Computes a linear as the library does, but without rounding after the codes."""
    by_block = [module.block_size] if module.block_size else []
    scale = module.activation_scale
    arguments = (x, module.weight, module.weight_scale_inv, *([] if scale is None else [scale]))
    op = finegrained.block_static if scale is not None else finegrained.block_dynamic
    op = op if module.block_size else finegrained.tensor_dynamic
    y = op(*arguments, *by_block, torch.float64)
    return y if module.bias is None else y + module.bias.double()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_projections_are_fused_with_the_codes_of_the_activation(form, tokens):
    model, args = attention(form), inputs(tokens)
    ours, eager = run(model, *args)
    (site,) = matches_of(reports()[-1], "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", "fp8")
    exact = {name: exactly(getattr(model, name), args[0]) for name in "qkv"}
    assert_attention_no_worse(ours, eager, exact)


@pytest.mark.parametrize("tokens", [1, 5])
def test_an_mlp_for_few_tokens_is_fused_and_no_worse(tokens):
    model = Mlp(finegrained.linear, HIDDEN, 512)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    (actual, _), (eager, _) = run(model, x)
    found = patterns_in(reports()[-1], "mlp")
    assert Counter(found) == {"linear_activation": 1, "linear_residual": 1, "round_rows": 2}
    assert not misses_of(reports()[-1], "mlp")
    h = F.silu(exactly(model.gate, x)) * exactly(model.up, x)
    assert_no_worse(actual, eager, x.double() + exactly(model.down, h), "mlp")


def test_the_last_block_of_rows_may_be_a_part_of_one():
    """The last block may have fewer rows: 192 rows have two scales, one for 128 rows and one for 64
    rows."""
    model = Mlp(finegrained.linear, HIDDEN, 512)
    model.gate, model.up = (finegrained.linear(192, HIDDEN, seed) for seed in (3, 4))
    model.forward = lambda x: F.silu(model.gate(x)) * model.up(x)
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    (actual, _), (eager, _) = run(model, x)
    assert sorted(patterns_in(reports()[-1], "mlp")) == ["linear_activation", "round_rows"]
    exact = F.silu(exactly(model.gate, x)) * exactly(model.up, x)
    assert_no_worse(actual, eager, exact, "rows")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_models_are_fused(kind):
    model = finegrained.quantised(dense(kind))
    eager = model(**step_of(model)).logits
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(**step_of(model)).logits
    report = reports()[-1]
    assert Counter(m.pattern for m in report.matches) == {
        "qkv_cache": 2,
        "cache_attention": 2,
        "linear_activation": 2,
        "linear_residual": 4,
        "round_rows": 8,
    }
    assert report.misses == ()
    torch.testing.assert_close(logits, eager, rtol=0.05, atol=0.05)


MIXTURE = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 128, "q_lora_rank": None,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128,
    "first_k_dense_replace": 0, "n_shared_experts": 1, "max_position_embeddings": 64,
}  # fmt: skip


def mixture(experts, fields=MIXTURE, config="Qwen3MoeConfig", **options):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**fields), dtype=torch.bfloat16
    )
    return finegrained.quantised(made, experts, **options)


def routes(tokens=6, chosen=2):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.rand(tokens, 4, generator=generator).softmax(-1).topk(chosen)
    return x, ids, weights.bfloat16()


def exact_experts(module, x, ids, weights):
    """Computes one expert after the other in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    up, down = (
        finegrained.decoded(getattr(module, n), getattr(module, f"{n}_scale_inv"))
        for n in ("gate_up_proj", "down_proj")
    )
    for token, (experts, factors) in enumerate(zip(ids, weights, strict=True)):
        for expert, factor in zip(experts.tolist(), factors.double(), strict=True):
            gate, value = (finegrained.rounded(x[token], 128) @ up[expert].T).chunk(2)
            h = F.silu(gate) * value
            out[token] += finegrained.rounded(h, 128) @ down[expert].T * factor
    return out


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_are_fused_with_activations_rounded_by_blocks(experts, scale_fmt):
    module = mixture(experts, scale_fmt=scale_fmt).model.layers[0].mlp.experts
    args = routes()
    (actual, _), (eager, _) = run(module, *args)
    (site,) = matches_of(reports()[-1], "fused_moe")
    assert (site.shapes["weights"], site.shapes["activations"]) == ("fp8", "fp8")
    assert_no_worse(actual, eager, exact_experts(module, *args), experts)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_routes_to_experts_on_other_devices_are_as_they_are(experts):
    """Some ids are E or more. The operator leaves their rows undefined, and the model fills
    them."""
    module = mixture(experts).model.layers[0].mlp.experts
    module._is_expert_parallel = True
    x, ids, weights = routes()
    ids = torch.where(ids == 3, 4, ids)
    weights = torch.where(ids == 4, 0, weights)
    (actual, _), (eager, _) = run(module, x, ids, weights)
    exact = exact_experts(module, x, ids.clamp(max=3), weights)
    assert_no_worse(actual, eager, exact, experts)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_latents_of_codes_are_fused(experts):
    model = mixture(experts, DEEPSEEK, "DeepseekV3Config")
    tokens = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    call = {"use_cache": False}
    eager = model(tokens, **call).logits
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(tokens, **call).logits
    report = reports()[-1]
    found = Counter(m.pattern for m in report.matches)
    assert found["mla_prefill"] == found["moe"] == found["linear_activation"] == 1
    assert matches_of(report, "mla")[0].shapes["latents"] == "fp8"
    torch.testing.assert_close(logits, eager, rtol=0.05, atol=0.05)


def test_a_call_whose_last_view_a_match_absorbs_is_put_back():
    """The last view of a call is absorbed by a match. The query's product runs as it was, and the
    op rotates its result."""
    model = mixture("grouped_mm", DEEPSEEK, "DeepseekV3Config")
    tokens = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    lowered = lower(model, (tokens,), {"use_cache": False}, patterns=["-coded_linear"])
    (graph,) = (report.after.graph for report in lowered.graphs)
    (fused,) = [node for node in graph.nodes if "mla_prefill" in str(node.target)]
    assert fused.kwargs["rope_on"] == "q"
    calls = [node for node in graph.nodes if "w8a8_block_dynamic_fp8" in str(node.target)]
    made = [user.meta["example_value"] for call in calls for user in call.users]
    assert (10, 512) in [one.shape for one in made if isinstance(one, torch.Tensor)]
    assert lowered.census.unaccounted == ()


def computed_scales(lowered):
    """Returns the nodes of the rewritten graph that compute numbers from stored scales alone, as
    every call would do again."""
    (graph,) = (report.after.graph for report in lowered.graphs)
    scales = {node for node in graph.nodes if node.op == "placeholder" and "scale" in node.name}
    assert scales
    stored = {key for node in scales for key in _compat.storages_of(node)}
    made = []
    fixed = fixed_nodes(graph)
    for node in graph.nodes:
        if node in fixed and scales.intersection(node.all_input_nodes):
            scales.add(node)
            made += [node.name] * (not stored.issuperset(_compat.storages_of(node)))
    return made


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_no_call_computes_scales_again(scale_fmt):
    """Latents have 192 rows, which are one and a half blocks."""
    model = mixture("grouped_mm", DEEPSEEK, "DeepseekV3Config", scale_fmt=scale_fmt)
    lowered = lower(model, (torch.tensor([[3, 7]]),), {"use_cache": False})
    assert {site.pattern for site in lowered.matches} >= {"mla_prefill", "moe", "coded_linear"}
    assert computed_scales(lowered) == []


def test_no_call_computes_the_scales_of_projections_again():
    lowered = lower(attention("ue8m0"), inputs())
    assert matches_of(lowered, "qkv")
    assert computed_scales(lowered) == []


# --- products of codes that the graph makes -------------------------------------------------------


@torch.library.custom_op("fbgemm::f8f8bf16_rowwise", mutates_args=())
def by_rows(
    XQ: torch.Tensor,
    WQ: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    x, w = XQ.double() * x_scale.double()[:, None], WQ.double() * w_scale.double()[:, None]
    return finegrained.product(x, w, torch.bfloat16)


by_rows.register_fake(lambda XQ, WQ, *scales: XQ.new_empty(len(XQ), len(WQ), dtype=torch.bfloat16))


class OfCodes(Attention):
    """The activation is rounded once, for all three projections."""

    def forward(self, x, slots, k_cache, v_cache):
        scale = x.float().abs().amax(-1).clamp(1e-4) / 448
        codes = (x.float() / scale[:, None]).to(torch.float8_e4m3fn)
        rows = (
            m.weight_scale_inv[0, 0].expand(len(m.weight)).contiguous() for m in self.children()
        )
        q, k, v = (
            by_rows(codes, m.weight, scale, own).unflatten(-1, (-1, HEAD_DIM))
            for m, own in zip((self.q, self.k, self.v), rows, strict=True)
        )
        k_cache.view(-1, 2, HEAD_DIM)[slots] = k
        v_cache.view(-1, 2, HEAD_DIM)[slots] = v
        return q * 2


def test_products_of_codes_are_fused():
    made, expected = run(OfCodes(finegrained.linear, HIDDEN), *inputs())
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
    for a, b in zip((made[0], *made[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


# --- what is not fused ----------------------------------------------------------------------------


def test_calls_that_no_pattern_took_run_as_before():
    model, args = attention("block"), inputs()
    (graph,) = lower(model, args, patterns=["moe"]).graphs
    assert str(graph.before.graph) == str(graph.after.graph)
    torch._dynamo.reset()
    made, expected = run(model, *args, patterns=["moe"])
    for a, b in zip((made[0], *made[1]), (expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)


def test_another_static_scale_for_k_is_another_activation():
    model = attention("static")
    model.k.activation_scale = nn.Parameter(torch.tensor(0.02), requires_grad=False)
    report = lower(model, inputs())
    assert not [m for m in report.matches if m.pattern == "qkv_cache"]
    assert misses_of(report, "qkv")


def test_blocks_of_other_sizes_are_a_miss_and_run():
    model, args = of_projections(block_size=[64, 64]), inputs()
    made, expected = run(model, *args)
    report = reports()[-1]
    assert patterns_in(report, "qkv") == ["cache_store"]
    (miss,) = {m.code: m for m in report.misses if m.pattern == "declare"}.values()
    assert miss.code == "DECLARED_FORM"
    for a, b in zip((made[0], *made[1]), (expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("called", ["mxfp_dynamic_matmul", "w4a8_mx_dynamic_fp4_matmul"])
def test_scales_of_32_columns_are_told(called):
    @torch.library.custom_op(f"_finegrained_fp8_abc5678::{called}", mutates_args=())
    def gemm(A: torch.Tensor, B: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        return A.new_zeros(len(A), len(B))

    gemm.register_fake(lambda A, B, Bs: A.new_empty(len(A), len(B)))
    codes = nn.Parameter(torch.zeros(128, HIDDEN // 2, dtype=torch.int8), requires_grad=False)
    scale = torch.ones(128, HIDDEN // 32).to(torch.float8_e8m0fnu)
    report = lower(lambda x: gemm(x, codes, scale) * 2, (torch.randn(2, HIDDEN).bfloat16(),))
    (miss,) = misses_of(report, "declare")
    assert miss.is_lost
    assert "here 32 columns share one, for activations too (MX)" in miss.message
    assert "dequantize=True" in miss.hint


def test_a_build_whose_arguments_differ_is_named():
    name = "_finegrained_fp8_0123456::w8a8_block_dynamic_fp8_matmul"

    @torch.library.custom_op(name, mutates_args=())
    def gemm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right.t()

    gemm.register_fake(lambda left, right: left.new_empty(len(left), len(right)))

    def call(x, w):
        return gemm(x, w) * 2

    (miss,) = misses_of(lower(call, (torch.randn(2, 64), torch.randn(64, 64))), "declare")
    assert miss.code == "DECLARED_FORM"
    assert "takes other arguments" in miss.message


def test_what_a_user_declares_comes_first():
    seen = []

    def mine(A, B, Bs, block_size, output_dtype=None):
        seen.append(1)
        return block_dynamic(A, B, Bs, block_size, output_dtype)

    name = "finegrained_fp8::w8a8_block_dynamic_fp8_matmul"
    assert name in OPERATORS
    declare(name, mine)
    report = lower(attention("block"), inputs())
    assert seen
    assert patterns_in(report, "qkv") == ["qkv_cache"]


def test_a_divisor_held_to_a_number_that_matters_is_another_rounding():
    """A bound on the divisor that is large enough to matter is another rounding: scales below the
    bound would be multiplied as they are, but divided by the bound."""

    def grouped(A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype=None):
        blocks = A.float().unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1, keepdim=True) / 448
        codes = (blocks / scale.clamp(min=1e-3)).to(torch.float8_e4m3fn)
        rows = (codes.float() * scale).flatten(-2).to(A.dtype)
        spread = Bs.repeat_interleave(128, -2).repeat_interleave(128, -1)
        weight = (B.float() * spread).to(A.dtype)
        return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)

    declare("finegrained_fp8::w8a8_block_dynamic_fp8_matmul_grouped", grouped)
    module = mixture("grouped_mm").model.layers[0].mlp.experts
    report = lower(module, routes())
    assert not [m for m in report.matches if m.pattern == "moe"]
    assert {m.code for m in misses_of(report, "fused_moe")} == {"ACTIVATION_FORMAT"}


def test_a_copy_of_a_model_is_fused_alike():
    model = copy.deepcopy(attention("block"))
    assert patterns_in(lower(model, inputs()), "qkv") == ["qkv_cache"]
