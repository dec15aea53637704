"""Tests that quantised weights are recognised by what they compute, however they are stored."""

import pytest
import torch

from tests.found import patterns_in
from tests.models import quantized
from tests.models.quantized import STORED, WHOLE
from tests.patterns.quantised.attention import (
    Attention,
    D,
    K,
    Rotated,
    arguments,
    check,
    linear_of,
    stored,
)
from tests.scaled_products import ROW_SCALES
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


MISSED = (
    quantized.gptq_act_order,
    quantized.nvfp4_high_first,
    quantized.nf4_low_first,
    quantized.nf4_rounded,
)


FORMATS = {
    "nibbles": "int4_k",
    "gptq": "int4_k with zeros",
    "awq": "int4_n with zeros",
    "int8": "int8",
    "fp8": "fp8",
    "scaled": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nf4": "nf4",
    "fp4": "fp4",
}


MATCHED = [form for form in STORED if form not in MISSED]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=ROW_SCALES if form is quantized.scaled_mm_token else ())
        for form in MATCHED
    ],
    ids=lambda f: f.__name__,
)
def test_every_form_is_matched_and_no_worse(form):
    facts = check(Attention(linear_of(form)), arguments(5))
    expected = FORMATS[form.__name__.partition("_")[0]]
    assert facts["weight"] == expected + (" with zeros" if "with_zeros" in form.__name__ else "")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "form",
    [
        quantized.nibbles_low_first,
        quantized.awq,
        quantized.gptq,
        quantized.int8_after,
        quantized.fp8_blocks_repeated,
        pytest.param(quantized.scaled_mm_token, marks=ROW_SCALES),
    ],
    ids=lambda f: f.__name__,
)
def test_one_weight_for_all_three(form, bias):
    facts = check(Attention(linear_of(form, bias=bias), packed=True), arguments(2, 3))
    assert facts["projection"] == "packed"
    assert facts["bias"] == ("yes" if bias else "no")


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        (quantized.int8, 1),
        (quantized.int8_after, 1),
        (quantized.int8_after, 5),
        (quantized.fp8_blocks_viewed, 5),
        pytest.param(quantized.scaled_mm_token, 1, marks=ROW_SCALES),
    ],
)
def test_a_rotation_is_no_scale_of_the_codes(form, tokens):
    """A rotation is no scale of the codes, although both the rotation of a single token and a scale
    of the sums are one number for each row of the weight."""
    assert check(Rotated(linear_of(form)), arguments(tokens))["rope"] == "half"


@pytest.mark.parametrize("number", [0.0, -0.25, torch.nan, torch.inf])
@pytest.mark.parametrize(
    "form", [quantized.int8, quantized.nibbles_low_first, quantized.fp8_blocks_repeated],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_scale_may_be_any_number(form, number):
    """A scale may be any number. A group of zeros has scale 0 in every quantiser that computes the
    scale from the largest number."""
    module, (x, *rest) = Attention(linear_of(form)), arguments(5)
    x[0] = 0
    for part in module.parts:
        part.scale.view(-1)[0] = number
    results = []
    for run in (module, torch.compile(module, backend="tilewright", options={"inner": "eager"})):
        caches = [t.clone() for t in rest]
        results.append([run(x, *caches), *caches])
    assert patterns_in(reports()[-1], "qkv") == ["qkv_cache"]
    for eager, ours in zip(*results, strict=True):
        assert torch.equal(eager.isfinite(), ours.isfinite())
        same = (t.nan_to_num(0, 0, 0) for t in (ours, eager))
        torch.testing.assert_close(*same, atol=0.03, rtol=0.02)


STORED_AS = {
    quantized.nibbles_low_first: (torch.uint8, None),
    quantized.awq: (torch.int32, torch.int32),
    quantized.gptq: (torch.int32, torch.int32),
    quantized.awq_other_zeros: (torch.int32, torch.int8),
    quantized.int8_after: (torch.int8, None),
    quantized.fp8_blocks_repeated: (torch.float8_e4m3fn, None),
}


@pytest.mark.parametrize("form", STORED_AS, ids=lambda f: f.__name__)
def test_weights_are_read_as_they_are_stored(form):
    """No node of the rewritten graph decodes the codes."""
    graph = lower(Attention(linear_of(form)), arguments(5)).graphs[0].after.graph
    (fused,) = [n for n in graph.nodes if "fused_qkv_paged" in str(n.target)]
    graph.eliminate_dead_code()
    codes, zeros = STORED_AS[form]
    for letter, weight in zip("qkv", fused.args[1:4], strict=True):
        zero = fused.kwargs.get(f"{letter}_zero")
        assert weight.meta["example_value"].dtype == codes
        assert (zero is None) == (zeros is None)
        assert zero is None or zero.meta["example_value"].dtype == zeros
    shapes = [n.meta.get("example_value") for n in graph.nodes if n.op.startswith("call")]
    weight = (torch.bfloat16, torch.float32)
    assert not [t for t in shapes if t is not None and t.dtype in weight and t.numel() >= K * D]


@stored(quantized.int8_in_words)
def bytes_in_another_order(layer, dtype):
    codes = layer.packed.view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return (codes.to(dtype) - 128) * layer.scale[:, :1].to(dtype)


@stored(quantized.nvfp4)
def nvfp4_factors_of_rows(layer, dtype):
    """Has a factor for each half of the rows."""
    both = torch.stack((layer.factor, 2 * layer.factor))
    factor = both.repeat_interleave(layer.width // 2)[:, None]
    return (quantized.nvfp4_unscaled(layer, torch.float32) * factor).to(dtype)


@stored(quantized.nvfp4)
def nvfp4_factor_of_a_cast(layer, dtype):
    """Stores the factor in bfloat16, and multiplies by another number, too."""
    factor = layer.factor.bfloat16().float()
    return (quantized.nvfp4_unscaled(layer, torch.float32) * factor * 0.5).to(dtype)


@stored(quantized.nvfp4)
def nvfp4_by_a_number(layer, dtype):
    return (quantized.nvfp4_unscaled(layer, torch.float32) * 0.125).to(dtype)


@pytest.mark.parametrize(
    ("form", "apart"),
    [
        (quantized.nvfp4, True),
        (quantized.nvfp4_divided, True),
        (nvfp4_factor_of_a_cast, True),
        (nvfp4_by_a_number, True),
        (quantized.nvfp4_unscaled, None),
        (nvfp4_factors_of_rows, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_factor_for_all_of_a_weight_is_an_argument(form, apart, graphs_kept):
    """A factor for a whole weight is an argument, so that the op reads the scale as it is stored.
    Factors by blocks are multiplied into the scale."""
    check(Attention(linear_of(form)), arguments(5))
    graph = reports()[-1].after.graph
    (fused,) = [n for n in graph.nodes if "fused_qkv_paged" in str(n.target)]
    assert (fused.kwargs.get("factors") is not None) is (apart is True)
    if apart:
        assert fused.kwargs["factors"].meta["example_value"].shape == (3,)
    scale = torch.float32 if apart is False else torch.float8_e4m3fn
    for letter in "qkv":
        assert fused.kwargs[f"{letter}_scale"].meta["example_value"].dtype == scale


def test_bytes_that_the_graph_puts_in_another_order_are_read_in_that():
    assert check(Attention(linear_of(bytes_in_another_order)), arguments(5))["weight"] == "int8"


def test_whole_layers_are_all_tested():
    assert set(WHOLE) <= set(MATCHED)
