"""Tests `load_modelopt`: checkpoints of ModelOpt compute the numbers that their codes stand for,
and are fused."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", reason="it loads the models")

import transformers
from transformers import CompileConfig

from tests.agreement import ALLOWANCE, relative_error
from tests.found import codes_of, misses_of, patterns_in
from tests.models import modelopt
from tests.models.modelopt import ALGORITHMS, E2M1, E4M3, decoded
from tests.models.shipped import SIZES, dense, step_of
from tilewright.compiler import load_modelopt, lower, reports
from tilewright.tools.paged_cache import PagedCache, kv_scales

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EVERYTHING = {"qkv_cache": 2, "cache_attention": 2, "linear_activation": 2, "linear_residual": 4}
#: Formats that do not round activations.
WEIGHT_ONLY = ("fp8_pb_wo", "W4A16_NVFP4")
PATH = "model.layers.0.self_attn.k_proj"


def tensors_of(state, path):
    prefix = f"{path}."
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def nearest(x, numbers):
    """Returns the nearest of these magnitudes, with the sign of x."""
    near = (x.abs().unsqueeze(-1) - numbers).abs().argmin(-1)
    return numbers[near] * x.sign()


def rounded(x, stored):
    """Returns activations in float64, rounded as a format rounds them."""
    x = x.double()
    if "weight_scale_2" in stored and "input_scale" in stored:
        groups, factor = x.unflatten(-1, (-1, 16)), stored["input_scale"].double()
        scale = (groups.abs().amax(-1, keepdim=True) / (6 * factor)).to(E4M3).double() * factor
        return (nearest(groups / scale, E2M1.double()) * scale).flatten(-2)
    if "input_scale" in stored:
        scale = stored["input_scale"].double()
    elif stored["weight_scale"].dim() == 1:
        scale = x.abs().amax(-1, keepdim=True) / 448
    else:
        return x
    return (x / scale).clamp(-448, 448).float().to(E4M3).double() * scale


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_linears_compute_what_their_codes_stand_for(algorithm, tmp_path):
    state = modelopt.write(dense("llama"), tmp_path, algorithm)
    model = load_modelopt(tmp_path)
    for path in (PATH, "model.layers.1.mlp.down_proj"):
        linear, stored = model.get_submodule(path), tensors_of(state, path)
        weight = decoded(stored)
        assert relative_error(linear.weight_of_codes(torch.float32), weight) < 2.0**-23
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
        exact = rounded(x, stored) @ weight.t()
        assert relative_error(linear(x), exact) < 2.0**-18
        # In bfloat16, some activations lie in the middle between two codes and may become either
        # code.
        half = x.bfloat16()
        assert relative_error(linear(half), rounded(half, stored) @ weight.t()) < 2.0**-6
        assert linear(x[:0]).shape == (0, weight.shape[0])
    dense_names = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    assert dense_names == ["lm_head"]


def as_decoded(kind, state):
    """Returns the dense model in float64, with the weights that the codes stand for."""
    model = dense(kind).double()
    for name, parameter in model.named_parameters():
        path = name.removesuffix(".weight")
        stored = tensors_of(state, path)
        parameter.data.copy_(decoded(stored) if "weight_scale" in stored else state[name])
    return model


@pytest.mark.parametrize("algorithm", WEIGHT_ONLY)
def test_fused_logits_are_no_further_from_float64(algorithm, tmp_path):
    state = modelopt.write(dense("llama"), tmp_path, algorithm)
    model, best = load_modelopt(tmp_path), as_decoded("llama", state)
    inputs = step_of(best)
    for cache in (layer for layer in inputs["past_key_values"].layers):
        cache.keys, cache.values = cache.keys.bfloat16().double(), cache.values.bfloat16().double()
    exact, eager = best(**inputs).logits, model(**step_of(model)).logits
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    fused = compiled(**step_of(model)).logits
    assert dict(Counter(patterns_in(reports()[-1], *EVERYTHING))) == EVERYTHING
    ours, theirs = relative_error(fused, exact), relative_error(eager, exact)
    assert ours <= theirs + ALLOWANCE[torch.bfloat16]


# Of the formats that round activations, one rounds by tensor and one by group. The report treats
# other formats in the same way.
@pytest.mark.parametrize("algorithm", [*WEIGHT_ONLY, "FP8", "NVFP4", "mixed"])
def test_experts_are_fused_or_told(algorithm, tmp_path):
    modelopt.write(dense("qwen3_moe"), tmp_path, algorithm)
    model = load_modelopt(tmp_path)
    lowered = lower(model, (), step_of(model))
    found = Counter(patterns_in(lowered, "moe", "grouped_gemm", "qkv_cache", "linear_residual"))
    both = {"qkv_cache": 2, "linear_residual": 2, "moe_router": 2}
    if algorithm in WEIGHT_ONLY:
        assert found == both | {"moe": 2}
        assert misses_of(lowered, "moe") == []
    else:
        assert found == both | {"grouped_gemm": 4}
        assert codes_of(lowered, "moe") == {"ACTIVATION_FORMAT"}
    assert not lowered.census.unaccounted


@pytest.mark.parametrize(
    ("algorithm", "apart"),
    [(name, False) for name in ALGORITHMS] + [(n, True) for n in ALGORITHMS if "NVFP4" in n],
)
def test_experts_compute_what_their_codes_stand_for(algorithm, apart, tmp_path):
    path = "model.layers.0.mlp.experts"
    name = f"{path}.1.up_proj.weight_scale_2"
    changes = {name: torch.tensor(1e-4)} if apart else {}
    state = modelopt.write(dense("qwen3_moe"), tmp_path, algorithm, changes=changes)
    experts = load_modelopt(tmp_path).get_submodule(path)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 256, generator=generator)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(6)])
    weights = torch.rand(6, 2, generator=generator)
    exact = torch.zeros(6, 256, dtype=torch.float64)
    for token, slot in ((token, slot) for token in range(6) for slot in range(2)):
        own = f"{path}.{int(index[token, slot])}"
        gate, up, down = (tensors_of(state, f"{own}.{p}_proj") for p in ("gate", "up", "down"))
        row = x[token : token + 1]
        gated = torch.nn.functional.silu(rounded(row, gate) @ decoded(gate).t())
        h = (gated * (rounded(row, up) @ decoded(up).t())).float()
        exact[token] += weights[token, slot] * (rounded(h, down) @ decoded(down).t())[0]
    assert relative_error(experts(x, index, weights), exact) < 2.0**-14


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "shards"), [("both", 3), ("hf_quant_config.json", 1), ("config.json", 3)]
)
def test_files_are_read_as_they_are_exported(where, shards, tmp_path):
    stated = where != "hf_quant_config.json"
    modelopt.write(dense("llama"), tmp_path, "NVFP4", shards=shards, stated=stated)
    if where == "config.json":
        (tmp_path / "hf_quant_config.json").unlink()
    model = load_modelopt(tmp_path, dtype=torch.float16)
    assert model.lm_head.weight.dtype == torch.float16
    linear = model.get_submodule(PATH)
    assert linear.weight.dtype == torch.uint8
    assert linear.weight_scale.dtype == E4M3
    assert linear.weight_scale_2.dtype == linear.input_scale.dtype == torch.float32
    if where == "config.json":  # all three cases must give the same result
        lowered = lower(model, (), step_of(model))
        assert dict(Counter(patterns_in(lowered, *EVERYTHING))) == EVERYTHING


def test_layers_may_have_formats_of_their_own(tmp_path):
    modelopt.write(dense("llama"), tmp_path, "mixed", skipped=("lm_head", "layers.1.mlp.down_proj"))
    model = load_modelopt(tmp_path)
    kinds = Counter(type(module).__name__ for module in model.modules())
    assert (kinds["Float8"], kinds["Float4"], kinds["Linear"]) == (8, 5, 2)


def test_activations_are_scaled_before_they_are_rounded(tmp_path):
    before = torch.linspace(0.5, 2, 256).bfloat16()
    changes = {f"{PATH}.pre_quant_scale": before}
    state = modelopt.write(dense("llama"), tmp_path, "NVFP4_AWQ", changes=changes)
    linear, stored = load_modelopt(tmp_path).get_submodule(PATH), tensors_of(state, PATH)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    exact = rounded(x * before.float(), stored) @ decoded(stored).t()
    assert relative_error(linear(x), exact) < 2.0**-18


def test_scales_of_keys_and_values_are_handed_on(tmp_path):
    """The scales of keys and values go from the file to `generate()`, whose pages are 8-bit
    floats."""
    modelopt.write(dense("llama"), tmp_path, "FP8", kv_scales=True)
    model = load_modelopt(tmp_path)
    scales = kv_scales(model)
    expected = [(modelopt.K_SCALE * f, modelopt.V_SCALE * f) for f in (1, 1.5)]
    found = [tuple(float(scale) for scale in scales[layer]) for layer in range(2)]
    assert found == [pytest.approx(pair) for pair in expected]
    how = CompileConfig(backend="tilewright", mode=None, options={"inner": "eager"})
    how._compile_all_devices = True
    prompt = torch.arange(1, 8)[None]
    cache = PagedCache(model.config, page_size=4, dtype=E4M3, scales=scales)
    length = {"max_new_tokens": 2, "do_sample": False}
    model.generate(prompt, past_key_values=cache, compile_config=how, **length)
    step = reports()[-1]
    assert [m.shapes["cache"] for m in step.matches if m.pattern == "cache_attention"] == [
        "float8_e4m3fn"
    ] * 2
    assert dict(Counter(patterns_in(step, *EVERYTHING))) == EVERYTHING


ONE_SHARD = "model-00001-of-00001.safetensors"
REFUSED = {
    "another dtype": (
        {f"{PATH}.weight": torch.zeros(128, 256, dtype=E4M3)},
        rf"{ONE_SHARD}: {PATH}.weight: expected torch.uint8 \[128, 128\], got torch.float8_e4m3fn",
    ),
    "another shape": (
        {f"{PATH}.weight_scale": torch.ones(128, 8).to(E4M3)},
        rf"{PATH}.weight_scale: expected a float \[128, 16\], got torch.float8_e4m3fn \[128, 8\]",
    ),
    "no factor": (
        {f"{PATH}.weight_scale_2": None},
        rf"{PATH}.weight_scale: expected {PATH}.weight_scale_2 beside it, got none",
    ),
    "no scale of activations": (
        {f"{PATH}.input_scale": None},
        rf"{PATH}.weight_scale: expected {PATH}.input_scale beside it, got none",
    ),
    "codes without scales": (
        {f"{PATH}.{name}": None for name in ("weight_scale", "weight_scale_2", "input_scale")},
        rf"{PATH}.weight: expected {PATH}.weight_scale beside codes, got none",
    ),
    "no linear": (
        {"model.norm.weight_scale": torch.ones(1)},
        "expected an nn.Linear of the model at model.norm, got LlamaRMSNorm",
    ),
    "no module": (
        {"model.layers.7.self_attn.k_proj.k_scale": torch.ones(1)},
        "k_scale: expected a module of the model at model.layers.7.self_attn.k_proj, got none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_as_the_format_has_it_is_told(name, tmp_path):
    changes, words = REFUSED[name]
    modelopt.write(dense("llama"), tmp_path, "NVFP4", changes=changes)
    with pytest.raises(ValueError, match=words):
        load_modelopt(tmp_path)


def test_algorithms_that_are_not_read_are_told(tmp_path):
    modelopt.write(dense("llama"), tmp_path, "NVFP4")
    file = tmp_path / "hf_quant_config.json"
    found = json.loads(file.read_text())
    found["quantization"]["quant_algo"] = "W4A8_AWQ"
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"quant_algo of .*: expected one of FP8.*, got W4A8_AWQ"):
        load_modelopt(tmp_path)


def test_a_checkpoint_of_another_kind_is_told(tmp_path):
    dense("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected hf_quant_config.json with a quant_algo"):
        load_modelopt(tmp_path)


def test_experts_of_which_some_have_no_codes_are_told(tmp_path):
    skipped = (
        "lm_head",
        "mlp.gate",
        *(f"layers.0.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")),
    )
    modelopt.write(dense("qwen3_moe"), tmp_path, "NVFP4", skipped=skipped)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts: expected codes of its experts"):
        load_modelopt(tmp_path)


@pytest.mark.parametrize(
    ("own", "tensor", "words"),
    [
        ("input_scale", torch.tensor(0.5), "input_scale of gate_proj and up_proj: expected one"),
        ("pre_quant_scale", torch.ones(256), "experts: expected .*, got pre_quant_scale"),
    ],
)
def test_experts_that_the_op_would_round_otherwise_are_told(own, tensor, words, tmp_path):
    name = f"model.layers.0.mlp.experts.1.up_proj.{own}"
    modelopt.write(dense("qwen3_moe"), tmp_path, "NVFP4", changes={name: tensor})
    with pytest.raises(ValueError, match=words):
        load_modelopt(tmp_path)


def test_biases_have_the_models_dtype(tmp_path):
    config = transformers.Qwen2Config(**SIZES)
    model = transformers.Qwen2ForCausalLM(config).bfloat16().eval()
    model.model.layers[0].self_attn.k_proj.bias.data.uniform_(-1, 1)
    state = modelopt.write(model, tmp_path, "FP8")
    linear = load_modelopt(tmp_path, dtype=torch.float16).get_submodule(PATH)
    stored, x = tensors_of(state, PATH), torch.randn(3, 256).half()
    exact = rounded(x, stored) @ decoded(stored).t() + stored["bias"].double()
    assert relative_error(linear(x), exact) < 2.0**-9
