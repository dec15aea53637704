"""Tests models with quantised weights that are built from a configuration alone. The same sites are
fused as in loaded models."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache

import pytest
import torch

pytest.importorskip("transformers", reason="it builds the models")

import transformers

from tests.models import gptq_modules, shipped
from tilewright.compiler import lower, prepare
from tilewright.compiler.quantised.coded_linear import CodedLinear
from tilewright.compiler.quantised.unloaded import METHODS, put_codes
from tilewright.compiler.report.savings import savings_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

INT4 = {"bits": 4, "group_size": 64, "desc_act": False}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUPS = "int4 codes in groups of 64"
NVFP4 = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
#: For each case: the model, the contents of its config.json, the format in words, and the bytes of
#: a weight's number (of its code, and of its share of scales and zeros).
STATED = {
    "fp8": ("llama", FP8, "fp8 codes in blocks of 128 x 128", 1.0, 4 / 128**2),
    "fp8-moe": ("qwen3_moe", FP8, "fp8 codes in blocks of 128 x 128", 1.0, 4 / 128**2),
    "gptq": ("llama", {"quant_method": "gptq", **INT4}, GROUPS, 0.5, 2.5 / 64),
    "awq": ("llama", {"quant_method": "awq", **INT4}, GROUPS, 0.5, 2.5 / 64),
    "nf4": ("llama", {"quant_method": "bitsandbytes", **NF4}, "nf4 codes in groups of 64", 0.5,
            4 / 64),
    "nvfp4": ("llama", NVFP4, "nvfp4 codes in groups of 16", 0.5, 1 / 16),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, "mxfp4 codes in groups of 32", 0.5, 1 / 32),
}  # fmt: skip


def model_of(kind, dtype=torch.bfloat16, **changes):
    config, fields = shipped.CONFIGS[kind]
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            config(**shipped.SIZES | fields | changes), dtype=dtype
        )
    return made.eval().requires_grad_(False)


def step(model):
    """Runs a decode step of one sequence on the meta device."""
    config = model.config
    with torch.device("meta"):
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        heads, width = config.num_key_value_heads, config.head_dim
        cache.early_initialization(1, heads, width, model.dtype, torch.device("meta"))
        ids = torch.zeros(1, 1, dtype=torch.int64)
    return lower(model, (ids,), {"past_key_values": cache}, target="sm90")


@cache
def fused_dense(kind):
    """Returns how often each pattern matches in the dense model."""
    torch._dynamo.reset()
    return Counter(site.pattern for site in step(model_of(kind, num_hidden_layers=1)).matches)


@pytest.mark.parametrize("form", STATED)
def test_a_configuration_alone_tells_what_is_fused_and_read(form):
    kind, stated, words, of_codes, beside = STATED[form]
    model = model_of(kind, num_hidden_layers=1)
    put_codes(model, stated)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()) if t.dtype.itemsize == 1)
    report = step(model)
    fused = Counter(site.pattern for site in report.matches)
    del fused["round_rows"]  # dense models do not round activations
    assert fused == fused_dense(kind)
    assert not [miss for miss in report.misses if miss.is_lost]
    savings = savings_of(report)
    assert savings.forms == (words,)
    numbers = savings.read.bfloat16 / 2
    assert savings.read.codes == of_codes * numbers
    # In addition to the scales, each weight in NVFP4 has one factor.
    assert savings.read.scales + savings.read.zeros == pytest.approx(beside * numbers, rel=2e-3)
    assert not any(one.has_codes for one in savings.unread)


def layout(linear):
    """Returns the tensors of a linear that its product reads, with their layouts."""
    held = linear.state_dict()
    held.pop("g_idx", None)
    return {name: (tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in held.items()}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_its_modules_are_those_that_prepare_leaves(method):
    packed = {"gptq": gptq_modules.TorchLinear, "awq": gptq_modules.AwqTorchLinear}[method]
    loaded = gptq_modules.pack(model_of("llama").to_empty(device="cpu"), packed)
    prepare(loaded)
    model = model_of("llama", torch.float16)
    put_codes(model, {"quant_method": method, **INT4})
    for name, module in loaded.named_modules():
        made = model.get_submodule(name)
        assert type(made) is type(module), name
        if isinstance(module, CodedLinear):
            assert layout(made) == layout(module), name


@pytest.mark.parametrize("config", [transformers.GPTQConfig, transformers.AwqConfig])
def test_groups_without_a_size_are_as_transformers_makes_them(config):
    stated = json.loads(config(bits=4).to_json_string(use_diff=False))
    group_size = stated.pop("group_size")
    model = model_of("llama")
    put_codes(model, stated)
    proj = model.model.layers[0].mlp.down_proj
    assert proj.group_size == group_size


def test_it_is_what_the_loaded_model_reads(tmp_path):
    """Compares a loaded checkpoint of ModelOpt with the model that is built from its configuration
    alone."""
    loaded = shipped.SHIPPED["modelopt-nvfp4"].load("llama", tmp_path)
    report = lower(loaded, (), shipped.step_of(loaded), target="sm90")
    torch._dynamo.reset()
    model = model_of("llama")
    put_codes(model, NVFP4)
    assert savings_of(step(model)).read == savings_of(report).read


def test_what_a_configuration_leaves_out_stays_dense():
    model = model_of("llama")
    put_codes(model, FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]})
    scopes = {one.scope for one in savings_of(step(model)).unread}
    assert "lm_head" in scopes
    assert type(model.model.layers[1].mlp.down_proj) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.down_proj) is not torch.nn.Linear


REFUSED = {
    "another method": ({"quant_method": "aqlm"}, f"'aqlm'.*{', '.join(METHODS)}"),
    "bits": ({"quant_method": "gptq", **INT4, "bits": 3}, "gptq: bits: expected 4, got 3"),
    "order": ({"quant_method": "gptq", **INT4, "desc_act": True}, "desc_act: expected false"),
    "some": (
        {"quant_method": "gptq", **INT4, "modules_in_block_to_quantize": [["self_attn.q_proj"]]},
        "modules_in_block_to_quantize: expected none",
    ),
    "groups": ({"quant_method": "awq", **INT4, "group_size": 96}, "divides 256, got 96"),
    "version": ({"quant_method": "awq", **INT4, "version": "gemv"}, "expected 'gemm', got 'gemv'"),
    "blocks": (FP8 | {"weight_block_size": [64, 64]}, r"expected \[128, 128\], got \[64, 64\]"),
    "table": ({"quant_method": "bitsandbytes", **NF4, "bnb_4bit_quant_type": "nf5"}, "'nf5'"),
    "outliers": ({"quant_method": "bitsandbytes", "llm_int8_threshold": 0.0}, "outliers"),
    "no experts": ({"quant_method": "mxfp4"}, "experts of gpt-oss"),
    "algorithm": ({"quant_algo": "W4A8"}, "expected one of FP8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_is_named(case):
    stated, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        put_codes(model_of("llama"), stated)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_words_that_are_not_whole_are_named(method):
    model = model_of("llama")
    model.model.layers[0].mlp.gate = torch.nn.Linear(256, 12, device="meta")
    with pytest.raises(ValueError, match=rf"{method}: weight: .* multiples of 8.* got \[12, 256\]"):
        put_codes(model, {"quant_method": method, **INT4})


def test_blocks_that_are_not_whole_are_named():
    model = model_of("llama")
    model.model.layers[0].mlp.gate = torch.nn.Linear(5, 3, device="meta")
    with pytest.raises(ValueError, match=r"bitsandbytes: weight: .* of 64 elements, got \[3, 5\]"):
        put_codes(model, {"quant_method": "bitsandbytes", **NF4})


def test_experts_of_modelopt_are_refused_by_name():
    with pytest.raises(ValueError, match="modelopt: experts"):
        put_codes(model_of("qwen3_moe"), NVFP4)


STATED_BY_LIBRARIES = {
    "compressed_tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 64,
                },
            }
        },
    },
    "torchao": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}},
        "modules_to_not_convert": ["lm_head"],
    },
}


@pytest.mark.parametrize("library", STATED_BY_LIBRARIES)
def test_a_library_lays_out_its_own_modules(library):
    pytest.importorskip(library)
    model = model_of("llama")
    put_codes(model, STATED_BY_LIBRARIES[library])
    savings = savings_of(step(model))
    assert sum(row.count for row in savings.rows) == 8  # those of two layers
    assert {one.scope for one in savings.unread} == {"lm_head"}


@pytest.mark.parametrize("library", STATED_BY_LIBRARIES)
def test_without_its_library_a_format_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    method = STATED_BY_LIBRARIES[library]["quant_method"]
    with pytest.raises(ValueError, match=f"{method}: the library itself must build"):
        put_codes(model_of("llama"), STATED_BY_LIBRARIES[library])
