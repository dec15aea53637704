"""Tests Llama with adapters of PEFT: the model is fused, and its results are no less accurate than
PEFT's against float64.

The models have one layer, except in one test, which checks that every layer is fused.
"""

import pytest
import torch

from tests.agreement import assert_no_worse, assert_untouched
from tests.compiler.test_hf_models import in_float64
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models.hf import build_hf
from tilewright.compiler import lower, reports
from tilewright.patterns.qkv import qkv_cache
from tilewright.tools.matrix.releases import release

pytest.importorskip("transformers", reason="Hugging Face models need the extra [models]")
peft = pytest.importorskip("peft", reason="adapters need the extra [models]")

LAYERS = 1
QKV = ("q_proj", "k_proj", "v_proj")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def adapted(
    cache="static",
    phase="decode",
    dtype=torch.bfloat16,
    targets=QKV,
    rank=4,
    in_fp32=True,
    name="llama",
    layers=LAYERS,
    **config,
):
    """Returns a model with random adapters on `targets`. `in_fp32`: whether the adapters are in
    float32, which is PEFT's default for models in half precision."""
    case = build_hf(name, cache=cache, phase=phase, dtype=dtype, num_hidden_layers=layers)
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=rank, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, **config
    )
    model = peft.get_peft_model(case.model, lora, autocast_adapter_dtype=in_fp32)
    return case._replace(model=model.eval().requires_grad_(False))


def assert_fused_and_no_worse(cases, patterns, **options):
    """Compiles the first of three equal models. Compares it with the second in eager mode, and with
    the third in float64."""
    ours, eager, exact = cases
    before = [tuple(t.clone() for t in pair) for pair in ours.caches]
    expected = eager.model(*eager.args, **eager.kwargs).logits
    reference = in_float64(exact) if exact.caches else None
    compiled = torch.compile(
        ours.model, backend="tilewright", options={"inner": "eager"}, **options
    )
    logits = compiled(*ours.args, **ours.kwargs).logits
    found = reports()[-1]
    assert patterns_in(found, "lora", "qkv") == patterns, misses_of(found, "lora", "qkv")
    if reference is None:
        exact_model = exact.model.to(torch.float64)
        reference = exact_model(*exact.args).logits
    assert_no_worse(logits, expected, reference, "logits")
    for layer, pair in enumerate(ours.caches):
        for part, tensor in enumerate(pair):
            what = f"layer {layer} cache {part}"
            eagers, exacts = eager.caches[layer][part], exact.caches[layer][part]
            assert_no_worse(tensor, eagers, exacts, what)
            assert_untouched(before[layer][part], tensor, exacts, what)
    return found


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_projection_adapters_and_cache_write_are_one_op(phase):
    """The adapters are in fp32. `test_sizes_as_symbols` tests adapters in bfloat16 for a prompt,
    and `test_ranks_and_factors_may_differ` for a decode step."""
    cases = [adapted(phase=phase) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)
    assert misses_of(found, "lora", "qkv") == []
    assert all(m.shapes["lora"] == "qkv rank=4" for m in matches_of(found, "lora", "qkv"))


def test_every_layer_is_fused():
    found = assert_fused_and_no_worse([adapted(layers=2) for _ in range(3)], ["qkv_cache"] * 2)
    assert misses_of(found, "lora", "qkv") == []
    assert all(m.shapes["lora"] == "qkv rank=4" for m in matches_of(found, "lora", "qkv"))


def test_in_fp32_too():
    found = assert_fused_and_no_worse(
        [adapted(dtype=torch.float32) for _ in range(3)], ["qkv_cache"] * LAYERS
    )
    assert misses_of(found, "lora", "qkv") == []


def test_sizes_as_symbols():
    cases = [adapted(phase="prefill", in_fp32=False) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS, dynamic=True)
    assert misses_of(found, "lora", "qkv") == []


@pytest.mark.parametrize(("targets", "letters"), [(("q_proj", "v_proj"), "qv"), (("k_proj",), "k")])
def test_only_some_projections_have_adapters(targets, letters):
    cases = [adapted(targets=targets, in_fp32=False) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)
    assert all(m.shapes["lora"] == f"{letters} rank=4" for m in matches_of(found, "lora", "qkv"))


def test_ranks_and_factors_may_differ():
    ranks = {"rank_pattern": {"q_proj": 8, "v_proj": 2}, "alpha_pattern": {"k_proj": 24}}
    found = assert_fused_and_no_worse(
        [adapted(in_fp32=False, **ranks) for _ in range(3)], ["qkv_cache"] * LAYERS
    )
    assert all(m.shapes["lora"] == "qkv rank=8/4/2" for m in matches_of(found, "lora", "qkv"))


def test_a_packed_projection_has_one_adapter_for_all():
    """Phi-3 has one packed linear for q, k and v, and one adapter for it."""
    cases = [adapted(name="phi3", targets=("qkv_proj",), in_fp32=False) for _ in range(3)]
    assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)


def without_cache(**options):
    case = adapted(cache="dynamic", phase="prefill", **options)
    return case._replace(kwargs={"use_cache": False}, caches=[])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_a_cache_the_adapters_are_fused(dtype):
    cases = [without_cache(dtype=dtype, in_fp32=False) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["lora_qkv"] * LAYERS)
    assert misses_of(found, "lora", "qkv") == []
    assert all(m.shapes["lora"] == "qkv rank=4" for m in matches_of(found, "lora", "qkv"))


def test_a_growing_cache_leaves_the_adapters_to_be_fused():
    ours, eager = (adapted(cache="dynamic", in_fp32=False) for _ in range(2))
    compiled = torch.compile(ours.model, backend="tilewright", options={"inner": "eager"})
    logits = compiled(*ours.args, **ours.kwargs).logits
    expected = eager.model(*eager.args, **eager.kwargs).logits
    found = reports()[-1]
    assert patterns_in(found, "lora", "qkv") == ["lora_qkv"] * LAYERS
    assert codes_of(found, "lora", "qkv") == {"GROWING_CACHE"}
    assert (logits.float() - expected.float()).abs().max() < 0.05


def test_every_linear_with_an_adapter_is_fused():
    """The linears that do not read the activation of q, k and v (the output projection and the MLP)
    have separate sites."""
    targets = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
    cases = [adapted(targets=targets, in_fp32=False) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS + ["lora_qkv"] * 4 * LAYERS)
    assert misses_of(found, "lora", "qkv") == []
    widths = [m.shapes["columns"] for m in matches_of(found, "lora_qkv")]
    assert widths == ["64", "128", "128", "64"] * LAYERS


def test_merged_adapters_leave_a_plain_model():
    cases = [adapted(in_fp32=False) for _ in range(3)]
    cases = [c._replace(model=c.model.merge_and_unload()) for c in cases]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)
    assert not any("lora" in m.shapes for m in matches_of(found, "lora", "qkv"))


def test_adapters_in_fp32_without_a_cache_are_missed_by_dtype():
    case = without_cache()
    compiled = torch.compile(case.model, backend="tilewright", options={"inner": "eager"})
    compiled(*case.args, **case.kwargs)
    found = reports()[-1]
    assert matches_of(found, "lora", "qkv") == []
    assert codes_of(found, "lora", "qkv") == {"DTYPE"}
    assert "autocast_adapter_dtype" in misses_of(found, "lora", "qkv")[0].hint


def several(active, in_fp32=False, **options):
    """Makes two adapters of different ranks. The deltas of the `active` adapters are summed."""
    case = adapted(in_fp32=in_fp32, **options)
    lora = peft.LoraConfig(r=6, lora_alpha=3, target_modules=[*QKV], init_lora_weights=False)
    torch.manual_seed(2)
    case.model.add_adapter("second", lora, autocast_adapter_dtype=in_fp32)
    case.model.base_model.set_adapter(active)
    case.model.requires_grad_(False)
    return case


def differences(a, b):
    """Runs two equal models, the first of them compiled. Returns the report, and the differences of
    logits and caches."""
    compiled = torch.compile(a.model, backend="tilewright", options={"inner": "eager"})
    ours, eager = compiled(*a.args, **a.kwargs).logits, b.model(*b.args, **b.kwargs).logits
    pairs = [(ours, eager)]
    for one, other in zip(a.caches, b.caches, strict=True):
        pairs += zip(one, other, strict=True)
    return reports()[-1], max((x.float() - y.float()).abs().max().item() for x, y in pairs)


def test_several_active_adapters_are_fused_with_the_cache_write():
    cases = [several(["default", "second"]) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)
    assert misses_of(found, "lora", "qkv") == []
    assert all(m.shapes["lora"] == "qkv rank=4/6" for m in matches_of(found, "lora", "qkv"))


def test_several_active_adapters_of_some_projections_each():
    cases = [several(["default", "second"], targets=("q_proj", "v_proj")) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)
    assert misses_of(found, "lora", "qkv") == []


@pytest.mark.parametrize("names", [["default"], ["default", "second"]])
def test_adapters_without_kernels_are_added_by_the_cache_write(names, monkeypatch):
    """PEFT keeps adapters in fp32 by default, for which a GPU has no kernels here. The graph still
    computes them, and the cache write adds them."""
    monkeypatch.setattr(qkv_cache, "has_kernels", lambda delta: False)
    cases = [several(names, in_fp32=True) for _ in range(3)]
    found = assert_fused_and_no_worse(cases, ["qkv_cache"] * LAYERS)
    assert all(m.shapes["lora"].endswith("added") for m in matches_of(found, "lora", "qkv"))


def test_one_active_adapter_of_two_is_fused_with_the_cache_write():
    report, off = differences(*(several(["second"]) for _ in range(2)))
    assert off < 0.05
    assert [m.shapes.get("lora") for m in matches_of(report, "lora", "qkv")] == [
        "qkv rank=6"
    ] * LAYERS


def test_a_batch_of_several_adapters_is_missed_by_name():
    """PEFT adds the delta of each adapter in place, to rows that a Python list names. The report
    says so."""
    cases = [several("default") for _ in range(2)]
    for case in cases:
        case.kwargs["adapter_names"] = ["default", "second"]
    report, off = differences(*cases)
    assert off < 0.05
    assert set(patterns_in(report, "lora", "qkv")) == {"cache_store"}
    assert codes_of(report, "lora", "qkv") == {"LORA_IN_PLACE", "K_PATH", "LONE_WRITE"}


def test_dora_is_missed_and_its_hint_can_be_followed():
    """Before torch 2.15, PEFT's DoRA breaks the graph. torch 2.15 traces it, and the projection is
    a miss."""
    case = adapted(targets=("q_proj",), use_dora=True)
    lowered = lower(case.model, case.args, case.kwargs)
    breaks = [m for m in misses_of(lowered, "capture") if "integrations.py" in m.message]
    assert bool(breaks) == (release(torch.__version__) < (2, 15))
    assert "Q_PATH" in codes_of(lowered, "qkv")
    assert all("merge_and_unload" in m.hint for m in breaks)
    merged = lower(case.model.merge_and_unload(), case.args, case.kwargs)
    assert patterns_in(merged, "qkv") == ["qkv_cache"] * LAYERS
