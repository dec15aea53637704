"""Tests unmodified Hugging Face models: every layer is fused, and no result is less accurate than
eager's against float64."""

import pytest
import torch

from tests.agreement import assert_no_worse, assert_untouched
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tilewright.compiler import lower, reports

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")

from tests.models.hf import MODELS, build_hf, in_float64, with_mask

LAYERS = 2


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


#: Models whose experts are fused, too, in every layer.
SPARSE = ("gpt_oss", "qwen2_moe", "qwen3_moe", "mixtral")

#: Models whose layers begin with an RMS norm that only q, k and v read.
NORMED = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "gpt_oss", "qwen2_moe",
    "qwen3_moe", "mixtral", "llama4", "granite", "glm4",
)  # fmt: skip

#: Models whose layers begin with a layer norm that only q, k and v read.
LAYER_NORMED = ("gpt_neox", "falcon_40b", "gpt2", "gpt_bigcode", "starcoder2")

#: Models whose second layer differs from the first, by a sliding window or by having no rotation.
UNLIKE_LAYERS = ("gemma2", "gemma3", "gpt_oss", "llama4")

#: Cases with sizes as symbols. The models have one layer, because tracing takes three times as
#: long. The cases cover norms of rows, and windows.
DYNAMIC = ("olmo2", "gemma3")


#: Models that also run with masks. The attention of the other models is the same. The first four
#: have windows, sinks or chunks.
MASKED = {
    "gemma2": "padding",
    "gemma3": "tensor",
    "gpt_oss": "tensor",
    "llama4": "tensor",
    "llama": "tensor",
    "cohere": "padding",
}


def cases():
    """Returns (name, mask, phase, dynamic) of each case.

    Every model runs in one phase without a mask. The models of MASKED also run in the other phase,
    with one mask. Every mask occurs in both phases. A model of both MASKED and DYNAMIC has symbolic
    sizes without a mask, and static sizes with one.
    """
    for number, name in enumerate(MODELS):
        one, other = ("prefill", "decode") if number % 2 else ("decode", "prefill")
        if name not in DYNAMIC or name not in MASKED:
            yield name, "none", one, None
        if name in MASKED:
            yield name, MASKED[name], other, None
    yield from ((name, "none", "prefill", True) for name in DYNAMIC)


@pytest.mark.parametrize(("name", "mask", "phase", "dynamic"), cases())
def test_every_layer_is_fused_and_right(name, mask, phase, dynamic, monkeypatch):
    # Kernels normalise a single token. A batch here has more tokens, so the op's reference computes
    # the norm.
    monkeypatch.setattr("tilewright.codegen.qkv.plan.MOST_NORMED_TOKENS", 16)
    layers = LAYERS if name in UNLIKE_LAYERS or name == "llama" else 1
    ours, eager, exact = (
        with_mask(build_hf(name, cache="static", phase=phase, num_hidden_layers=layers), mask)
        for _ in range(3)
    )
    before = [tuple(t.clone() for t in pair) for pair in ours.caches]
    expected = eager.model(*eager.args, **eager.kwargs).logits
    reference = in_float64(exact)
    compiled = torch.compile(
        ours.model,
        backend="tilewright",
        fullgraph=True,
        dynamic=dynamic,
        options={"inner": "eager"},
    )
    logits = compiled(*ours.args, **ours.kwargs).logits
    found = reports()[-1]
    fused = ["cache_attention"] * layers + ["moe"] * layers * (name in SPARSE)
    fused += ["qkv_cache"] * layers
    missed = misses_of(found, "attention", "fused_moe", "qkv")
    assert sorted(patterns_in(found, "attention", "fused_moe", "qkv")) == fused, missed
    assert missed == []
    normed = {site.shapes.get("input_norm") for site in matches_of(found, "qkv")}
    kind = "rms" if name in NORMED else "layer" if name in LAYER_NORMED else None
    assert normed == {None if dynamic else kind}
    assert_no_worse(logits, expected, reference, f"{name} logits")
    for layer in range(layers):
        for part in range(2):
            what = f"{name} layer {layer} cache {part}"
            a, b = ours.caches[layer][part], eager.caches[layer][part]
            c = exact.caches[layer][part]
            assert_no_worse(a, b, c, what)
            assert_untouched(before[layer][part], a, c, what)


@pytest.mark.parametrize(
    ("name", "kind"), [("gpt_neox", "layer"), ("starcoder2", "layer"), ("cohere", None)]
)
def test_a_layer_norm_is_part_of_both_linears_of_one_token(name, kind):
    """With one token, a layer norm becomes a part of both linears that read it, in every layer. If
    attention and MLP share one norm, the norm stays in the graph."""
    ours, eager, exact = (build_hf(name, cache="static", batch=1) for _ in range(3))
    expected, reference = eager.model(*eager.args, **eager.kwargs).logits, in_float64(exact)
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(*ours.args, **ours.kwargs).logits
    found = reports()[-1]
    projections, linears = (matches_of(found, p) for p in ("qkv_cache", "linear_activation"))
    assert [site.shapes.get("input_norm") for site in projections] == [kind] * LAYERS
    assert [site.shapes["norm"] for site in linears] == [kind or "no"] * LAYERS
    assert_no_worse(logits, expected, reference, "logits")


@pytest.mark.parametrize(("name", "phase"), [("llama", "prefill"), ("gpt2", "decode")])
def test_a_growing_cache_gets_one_miss_that_says_what_to_do(name, phase):
    case = build_hf(name, cache="dynamic", phase=phase)
    lowered = lower(case.model, case.args, case.kwargs)
    assert matches_of(lowered, "qkv") == []
    (miss,) = misses_of(lowered, "qkv")
    assert miss.code == "GROWING_CACHE"
    assert miss.count == 2 * LAYERS
    assert "static cache" in miss.hint


def test_inductor_gives_the_same_as_eager():
    ours, eager, exact = (build_hf("llama", cache="static", phase="decode") for _ in range(3))
    expected = eager.model(*eager.args, **eager.kwargs).logits
    reference = in_float64(exact)
    compiled = torch.compile(ours.model, backend="tilewright")
    logits = compiled(*ours.args, **ours.kwargs).logits
    assert len(matches_of(reports()[-1], "qkv")) == LAYERS
    assert_no_worse(logits, expected, reference, "logits")
    for layer in range(LAYERS):
        for a, b, c in zip(*(x.caches[layer] for x in (ours, eager, exact)), strict=True):
            assert_no_worse(a, b, c, f"layer {layer}")
    lengths = [
        [layer.cumulative_length.item() for layer in x.kwargs["past_key_values"].layers]
        for x in (ours, eager)
    ]
    assert lengths[0] == lengths[1]


def test_several_steps_on_one_cache():
    """Decoding continues where the last step wrote. Positions advance, and one compilation serves
    all steps."""
    ours, eager = (build_hf("qwen3", cache="static", phase="decode") for _ in range(2))
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    for step in range(4):
        token = torch.full_like(ours.args[0], 3 + step) if ours.args else None
        args = (token,) if token is not None else ()
        a = compiled(*args, **ours.kwargs).logits
        b = eager.model(*args, **eager.kwargs).logits
        assert (a.float() - b.float()).abs().max() < 0.05
    (report,) = reports()
    assert patterns_in(report, "qkv") == ["qkv_cache"] * LAYERS
    assert len(matches_of(report, "cache_attention")) == LAYERS


def test_a_cache_made_inside_the_call_is_missed_by_name():
    from transformers import StaticCache

    case = build_hf("llama", cache="static", phase="prefill")
    fresh = StaticCache(config=case.model.config, max_cache_len=32)
    lowered = lower(case.model, case.args, case.kwargs | {"past_key_values": fresh})
    (miss,) = misses_of(lowered, "qkv")
    assert (miss.code, miss.count) == ("FRESH_CACHE", 2 * LAYERS)
    assert "early_initialization" in miss.hint


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_window_that_is_full_moves_and_is_named(name):
    """The layer with a sliding window rolls its cache. The layer with full attention is fused."""
    ours, eager = (build_hf(name, past_tokens=20) for _ in range(2))
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(*ours.args, **ours.kwargs).logits
    expected = eager.model(*eager.args, **eager.kwargs).logits
    found = reports()[-1]
    attention = [m.scope for m in matches_of(found, "qkv_cache")]
    assert attention == ["model.layers.1.self_attn"]
    assert codes_of(found, "qkv") == {"MOVED_CACHE"}
    assert all(m.scope == "model.layers.0.self_attn" for m in misses_of(found, "qkv"))
    assert (logits.float() - expected.float()).abs().max() < 0.05
    for pair in zip(ours.caches[0], eager.caches[0], strict=True):
        assert torch.equal(*pair)
