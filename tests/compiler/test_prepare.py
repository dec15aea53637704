"""Tests that `prepare` keeps the function of models that quantisation libraries load, and that the
models are fused."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the models are those of transformers")
from transformers import CompileConfig, DynamicCache

from tests.models.shipped import BY_TRANSFORMERS, SHIPPED, compressed, dense, step_of
from tests.tables import in_turn
from tilewright.compiler import lower, prepare, reports
from tilewright.compiler.quantised import Prepared, coded_linear, compressed_tensors
from tilewright.compiler.verify import relative_error
from tilewright.tools.paged_cache import PagedCache, kv_scales

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EVERYTHING = {"qkv_cache": 2, "cache_attention": 2, "linear_activation": 2, "linear_residual": 4}
#: Formats that stay as the library loads them, with the reason.
LEFT = {
    "torchao-int8-dynamic": "its activations are int8, which no fused op takes",
}
#: Formats whose activations are floats of four bits. A different rounding earlier in the model
#: moves some activations to the next code.
FLIPS = ("ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4")
#: Formats that are fused as they are loaded. `prepare` reads them, too.
READ = ("torchao-int8", "torchao-fp8", "torchao-intx", "quanto-int8", "quanto-fp8")
#: Formats that only `prepare` can read. Other weights of the same libraries can be read as they are
#: loaded.
READ_ONCE = {
    "torchao-int4": "makes its codes unsigned",
    "torchao-int4-tiled": "unpacks its tiles",
    "torchao-nvfp4": "puts its scales in order",
}
#: Formats that need no preparation.
PLAIN = ("hqq-int8", "modelopt-fp8", "modelopt-nvfp4")


def load(name, kind, folder):
    shipped = SHIPPED[name]
    if not shipped.is_installed:
        pytest.skip(f"{name} needs {shipped.library}, which `make matrix ROWS=quantised` installs")
    return shipped.load(kind, folder)


def named(items):
    """Counts the sites of each pattern, except roundings of activations before a linear."""
    return dict(Counter(item.pattern for item in items if item.pattern != "round_rows"))


@pytest.mark.parametrize(
    ("name", "kind"), in_turn([name for name in SHIPPED if name not in LEFT], ["llama", "qwen3"])
)
def test_a_prepared_model_computes_what_the_library_does_and_is_fused(name, kind, tmp_path):
    expected = load(name, kind, tmp_path / "a" if name.startswith("ct") else tmp_path)
    model = load(name, kind, tmp_path / "b" if name.startswith("ct") else tmp_path)
    theirs = expected(**step_of(expected)).logits
    prepared = prepare(model)
    assert prepared.left == []
    assert len(prepared.replaced) == (0 if name in PLAIN else 14)
    logits = model(**step_of(model)).logits
    # The results may differ by one rounding: quanto and int4 multiply with other kernels, and 8-bit
    # activations are decoded.
    rounded = "quanto" in name or name == "bitsandbytes-int8" or name.startswith("torchao-int4")
    # AWQ's weight has the same numbers in another order in memory, in which the CPU's library adds
    # in another order.
    allowed = 0.02 if rounded else 0.002 if name == "awq" else 0
    torch.testing.assert_close(logits, theirs, rtol=0, atol=allowed)
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    fused = compiled(**step_of(model)).logits
    (report,) = reports()
    assert named(report.matches) == EVERYTHING
    close = 0.25 if name in FLIPS else 0.05
    torch.testing.assert_close(fused, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("name", READ)
def test_subclasses_are_fused_as_they_are_loaded(name, kind, tmp_path):
    model, prepared = (load(name, kind, tmp_path) for _ in range(2))
    assert prepare(prepared).left == []
    step = step_of if kind == "llama" else latent_step_of
    lowered, known = (lower(one, (), step(one)) for one in (model, prepared))
    assert named(lowered.matches) == named(known.matches)
    assert lowered.misses == []
    assert not lowered.census.unaccounted
    if kind == "llama":  # a rounding may send a token to another expert
        theirs = model(**step(model)).logits
        compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
        torch.testing.assert_close(compiled(**step(model)).logits, theirs, rtol=0.05, atol=0.05)


def latent_step_of(model):
    """Runs a prompt of a model whose caches hold latents."""
    return {"input_ids": torch.arange(1, 7)[None], "use_cache": False}


@pytest.mark.parametrize("name", READ_ONCE)
def test_what_prepare_alone_reads_is_told_with_it(name, tmp_path):
    model = load(name, "llama", tmp_path)
    misses = [m for m in lower(model, (), step_of(model)).misses if m.code == "SUBCLASS"]
    assert misses
    assert all(f"`prepare` {READ_ONCE[name]}, once" in miss.message for miss in misses)
    assert all("tilewright.compiler.prepare(model)" in miss.hint for miss in misses)


#: Formats whose experts transformers 5.23 cannot load, or decodes without the factor that all
#: scales of an expert share.
WITHOUT_EXPERTS, WITHOUT_FACTOR = ("ct-w8a8",), ("ct-nvfp4", "ct-nvfp4a16")
# In ModelOpt's formats, experts keep their codes, and `moe` does not support their activations
# (`test_modelopt.py`).
OF_CODES = ("modelopt-fp8", "modelopt-nvfp4")
OF_MIXTURE = {"qkv_cache": 2, "cache_attention": 2, "moe": 2, "moe_router": 2, "linear_residual": 2}


@pytest.mark.parametrize(
    "name", [n for n in SHIPPED if n not in (*LEFT, *WITHOUT_EXPERTS, *OF_CODES)]
)
def test_a_prepared_model_of_mixtures_is_fused(name, tmp_path):
    """The experts that transformers decodes nearly equal the original experts, before they were
    quantised."""
    model = load(name, "qwen3_moe", tmp_path)
    assert prepare(model).left == []
    lowered = lower(model, (), step_of(model))
    assert named(lowered.matches) == OF_MIXTURE
    assert not lowered.misses
    before, after = (m.model.layers[0].mlp.experts for m in (dense("qwen3_moe"), model))
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        is_near = relative_error(other.double(), one.double()) < 0.2
        assert is_near == (name not in WITHOUT_FACTOR)


@pytest.mark.parametrize(
    ("name", "replaced", "weights"), [("mxfp4", 0, "dense"), ("mxfp4-gpu", 4, "mxfp4")]
)
def test_gpt_oss_is_fused_as_transformers_loads_it(name, replaced, weights, tmp_path):
    model = BY_TRANSFORMERS[name].load("gpt_oss", tmp_path)
    assert len(prepare(model).replaced) == replaced
    lowered = lower(model, (), step_of(model))
    assert named(lowered.matches) == OF_MIXTURE
    assert not lowered.misses
    assert {m.shapes["weights"] for m in lowered.matches if m.pattern == "moe"} == {weights}


#: The fused sites of a model, by pattern.
SITES = {pattern: count for pattern, count in EVERYTHING.items() if pattern != "cache_attention"}
#: The hints that name a library which breaks the graph, by the first word of the format's name.
BREAKS = dict.fromkeys(("ct", "gptq", "bitsandbytes"), "tilewright.compiler.prepare(model)")


@pytest.mark.parametrize("prepared", [False, True], ids=["as loaded", "prepared"])
@pytest.mark.parametrize("name", SHIPPED)
def test_every_site_is_fused_or_told(name, prepared, tmp_path):
    model = load(name, "llama", tmp_path)
    if prepared:
        prepare(model)
    lowered = lower(model, (), step_of(model))
    broken = [miss for miss in lowered.misses if miss.code == "GRAPH_BREAK"]
    if broken:
        assert BREAKS[name.partition("-")[0]] in broken[0].hint
        assert not prepared or name in LEFT
    else:
        told = named([*lowered.matches, *lowered.misses])
        assert {pattern: told.get(pattern) for pattern in SITES} == SITES
    assert all(miss.hint for miss in lowered.misses)
    assert not lowered.census.unaccounted


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_read_is_left_with_the_reason(name, tmp_path):
    model = load(name, "llama", tmp_path)
    prepared = prepare(model)
    assert prepared.replaced == []
    assert {one.reason.partition(";")[0] for one in prepared.left} == {LEFT[name]}
    assert LEFT[name] in str(prepared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_of_four_bits_are_rounded_as_the_library_rounds_them(dtype):
    utilities = "compressed_tensors.quantization.utils"
    theirs = pytest.importorskip(f"{utilities}.fp4_utils", reason="the library rounds here")
    scales = pytest.importorskip(f"{utilities}.mxfp_utils", reason="the library rounds here")
    x = torch.linspace(-6, 6, 4801).to(dtype)  # middles too
    assert torch.equal(coded_linear.nearest_e2m1(x), theirs.cast_to_fp4(x.clone()))
    tiny = torch.finfo(dtype).tiny
    sizes = torch.cat([tiny * 2.0**power * torch.linspace(0, 2, 65) for power in range(29)])
    sizes = sizes.to(dtype)
    exponents = scales.generate_mx_scales(sizes).clamp(0, 255).round().to(torch.int32) - 127
    expected = (2.0 ** exponents.float()).to(dtype)
    assert torch.equal(compressed_tensors._power_of_two(sizes, 6.0), expected)


@pytest.mark.parametrize("name", ["gptq", "ct-fp8-dynamic", "ct-w4a16", "ct-nvfp4"])
def test_names_of_tensors_stay(name, tmp_path):
    model = load(name, "llama", tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    "name", ["torchao-fp8", "quanto-int8", "gptq", "awq", "ct-w8a8", "bitsandbytes-nf4"]
)
def test_it_is_undone(name, tmp_path):
    model = load(name, "llama", tmp_path)
    before = dict(model.named_modules())
    prepared = prepare(model)
    assert dict(model.named_modules()) != before
    prepared.undo()
    assert dict(model.named_modules()) == before
    assert prepared.replaced == []
    prepared.undo()


@pytest.mark.parametrize(
    "name", ["torchao-fp8", "gptq", "awq", "ct-w8a8", "quanto-int8", "bitsandbytes-nf4"]
)
def test_a_copy_leaves_the_model_and_shares_its_tensors(name, tmp_path):
    model = load(name, "llama", tmp_path)
    before = dict(model.named_modules())
    prepared = prepare(model, copy=True)
    assert dict(model.named_modules()) == before
    # Not even a forward pass of the copy changes the model.
    tensors = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert prepared.model(**step_of(prepared.model)).logits.isfinite().all()
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == tensors
    assert prepared.model is not model
    one, other = (m.model.embed_tokens.weight for m in (model, prepared.model))
    assert one.data_ptr() == other.data_ptr()


def test_a_model_that_needs_nothing_stays_as_it_is():
    model = dense("llama")
    modules = dict(model.named_modules())
    prepared = prepare(model)
    assert prepared.model is model
    assert dict(model.named_modules()) == modules
    assert str(prepared) == "prepare: no module needs to be replaced"


def test_a_subclass_that_is_not_known_is_named():
    class Wrapped(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Wrapped), requires_grad=False)
    prepared = prepare(nn.Sequential(linear))
    assert [one.name for one in prepared.left] == ["0"]
    assert "test_prepare.Wrapped" in prepared.left[0].reason
    assert "module.weight.dequantize()" in prepared.left[0].reason
    assert "1 x Linear stays:" in str(prepared)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got function"):
        prepare(copy.copy)


def test_the_outcome_of_a_model_without_modules():
    assert isinstance(prepare(nn.Sequential()), Prepared)


def rounds_keys_and_values(folder):
    pytest.importorskip("compressed_tensors")
    model = compressed("llama", folder, "FP8_DYNAMIC", kv_scales=(0.02, 0.035))
    if not any(hasattr(module, "k_scale") for module in model.modules()):
        pytest.skip("compressed-tensors does not know the attention of this transformers")
    return model


def test_keys_and_values_are_rounded_as_compressed_tensors_does(tmp_path):
    """A hook of compressed-tensors rounds keys and values. Without `prepare`, the hook breaks the
    graph."""
    theirs = rounds_keys_and_values(tmp_path / "a")
    model = rounds_keys_and_values(tmp_path / "b")
    hooks = [list(layer.self_attn._forward_pre_hooks.values()) for layer in model.model.layers]
    prepared = prepare(model)
    assert prepared.left == []
    assert torch.equal(model(**step_of(model)).logits, theirs(**step_of(theirs)).logits)
    lowered = lower(model, (), step_of(model))
    stored = {pattern: count for pattern, count in EVERYTHING.items() if pattern != "qkv_cache"}
    assert named(lowered.matches) == stored | {"cache_store": 2, "scaled_linear": 6}
    assert {miss.code for miss in lowered.misses} == {"K_PATH"}
    prepared.undo()
    put_back = [list(layer.self_attn._forward_pre_hooks.values()) for layer in model.model.layers]
    assert put_back == hooks


def test_a_cache_in_eight_bits_rounds_keys_and_values_once(tmp_path):
    theirs = rounds_keys_and_values(tmp_path / "a")
    model = rounds_keys_and_values(tmp_path / "b")
    prepare(model)
    ids, expected = torch.arange(1, 8)[None], DynamicCache(config=model.config)
    theirs(ids, past_key_values=expected)
    scales = kv_scales(model)
    cache = PagedCache(model.config, page_size=8, dtype=torch.float8_e4m3fn, scales=scales)
    model(ids, past_key_values=cache)
    layer, first = cache.paged[0], expected.layers[0]
    sides = zip((layer.keys, layer.values), scales[0], (first.keys, first.values), strict=True)
    for pool, scale, stored in sides:
        found = pool[int(layer.pages.block_table[0, 0]), :7].float() * scale.float()
        same = (found - stored[0].transpose(0, 1).float()).abs() < 2.0**-8 * found.abs() + 1e-9
        assert same.float().mean() > 0.97
    how = CompileConfig(backend="tilewright", mode=None, options={"inner": "eager"})
    how._compile_all_devices = True
    cache = PagedCache(model.config, page_size=8, dtype=torch.float8_e4m3fn, scales=scales)
    model.generate(
        ids, max_new_tokens=4, do_sample=False, past_key_values=cache, compile_config=how
    )
    assert named(reports()[-1].matches) == EVERYTHING
