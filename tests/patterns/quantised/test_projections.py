"""Tests projections by operators, by buffers, in several formats, and with scaled sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import cloned
from tests.found import codes_of, misses_of, patterns_in
from tests.models import quantized
from tests.models.quantized import OTHER_LAYERS, STORED, QuantizedLinear
from tests.patterns.quantised.attention import (
    Attention,
    K,
    Rotated,
    arguments,
    assert_missed,
    check,
    linear_of,
)
from tests.scaled_products import ROW_SCALES
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (quantized.by_operator, "quantized_tests::linear "),
        (quantized.by_operator_in_place, "quantized_tests::linear_out "),
    ],
)
def test_projections_by_an_operator_are_told_by_its_name(form, name):
    """Projections by an operator are reported with the operator's name. One of the operators writes
    its result in place. Its weights are buffers."""
    report = lower(Attention(linear_of(form)), arguments(5))
    assert patterns_in(report, "qkv") == ["cache_store"]
    (miss,) = misses_of(report, "qkv")
    assert (miss.code, miss.is_lost) == ("K_PATH", True)
    assert f"{name}computes the projection" in miss.message
    assert "dequantize=True" in miss.hint


@pytest.mark.parametrize(
    "form",
    [
        quantized.buffer_einsum,
        pytest.param(
            quantized.scaled_mm_v2_token,
            marks=[
                ROW_SCALES,
                pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this PyTorch has none"),
            ],
        ),
    ],
)
def test_projections_from_buffers_are_matched(form):
    check(Attention(linear_of(form)), arguments(5))


def test_a_site_that_the_op_refuses_hides_no_miss_of_another():
    """A site that the op refuses hides no miss of another site. The op refuses the second site,
    which the next pattern then tries in another round. In that round, `cache_store` rewrites the
    first site."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            forms = (quantized.nvfp4_high_first, quantized.int8)
            self.parts = nn.ModuleList(Attention(linear_of(form)) for form in forms)

        def forward(self, x, y, slots, *caches):
            return self.parts[0](x, slots, *caches[:2]), self.parts[1](y, slots, *caches[2:])

    x, slots, *caches = arguments(5)
    y = x.t().contiguous().t()
    report = lower(Two(), (x, y, slots, *caches, *cloned(caches)))
    assert codes_of(report, "qkv") == {"WEIGHT_FORMAT", "UNSUPPORTED"}
    assert patterns_in(report, "qkv") == ["cache_store", "cache_store"]


def sums_scaled_besides(layer, x):
    """Scales the weight, and also scales the sums by column."""
    return x @ quantized.int8(layer, x.dtype).t() * layer.scale.to(x.dtype)


def sums_of_bare_codes(layer, x):
    return x @ layer.codes.to(x.dtype).t()


@pytest.mark.parametrize(
    ("form", "tokens", "code"),
    [(sums_scaled_besides, 1, "K_PATH"), (sums_of_bare_codes, 5, "WEIGHT_FORMAT")],
)
def test_rotated_sums_with_two_scales_or_none_are_missed(form, tokens, code, monkeypatch):
    monkeypatch.setitem(OTHER_LAYERS, form, STORED[quantized.int8])
    assert_missed(Rotated(linear_of(form)), arguments(tokens), code)


def one_of(forms):
    """Makes projections of different forms."""
    return lambda width, seed: QuantizedLinear(forms[seed], K, width, seed)


@pytest.mark.parametrize(
    "forms",
    [
        (quantized.nibbles_low_first, quantized.nibbles_high_first, quantized.nibbles_low_first),
        (quantized.int8, quantized.int8, quantized.fp8_channel),
        (quantized.awq, quantized.awq_plain, quantized.awq),
        (quantized.gptq, quantized.awq, quantized.awq),
    ],
)
def test_projections_of_different_formats_are_refused(forms):
    assert_missed(Attention(one_of(forms)), arguments(5), "WEIGHT_FORMAT")


def test_one_dense_projection_among_quantised_ones_is_refused():
    def make(width, seed):
        if seed == 2:
            return nn.Linear(K, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        return QuantizedLinear(quantized.int8, K, width, seed)

    assert_missed(Attention(make), arguments(5), "WEIGHT_FORMAT")


def test_blocks_of_different_size_are_cut_to_the_smaller():
    forms = (quantized.fp8_channel, quantized.fp8_tensor, quantized.fp8_blocks_viewed)
    check(Attention(one_of(forms)), arguments(5))
