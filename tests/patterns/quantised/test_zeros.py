"""Tests zero points that are packed, that are selected, that are subtracted before scaling, and
that are added after it."""

import pytest
import torch

from tests.models import quantized
from tests.models.quantized import GROUP
from tests.patterns.quantised.attention import (
    Attention,
    arguments,
    assert_missed,
    check,
    linear_of,
    stored,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@stored(quantized.gptq)
def gptq_in_bytes(layer, dtype):
    """Zeros are packed along the other axis. A difference of nibbles fits into a signed byte."""
    codes, zeros = (t.to(torch.int8) for t in quantized.gptq_codes(layer))
    codes = codes.view(-1, GROUP, layer.width) - zeros[:, None]
    return (layer.scale[:, None].to(dtype) * codes.to(dtype)).view(layer.hidden, layer.width).t()


@stored(quantized.gptq)
def gptq_selected(layer, dtype):
    codes, zeros = quantized.gptq_codes(layer)
    group = torch.arange(layer.hidden, device=codes.device) // GROUP
    codes = (codes - zeros.index_select(0, group)).to(dtype)
    return (layer.scale.t().to(dtype).index_select(-1, group)).t().mul(codes).t()


def int8_with_words_of_zeros(layer, dtype):
    shifts = torch.arange(0, 32, 4, device=layer.words.device)
    zeros = ((layer.words[:, None] >> shifts[:, None]) & 15).view(layer.width, 1)
    return (layer.codes.to(dtype) - zeros.to(dtype)) * layer.scale[:, None].to(dtype)


def codes_and_words(rows, hidden, generator):
    words = quantized.words(generator, rows // 8, 1)
    return quantized.int8_buffers(rows, hidden, generator) | {"words": words}


int8_with_words_of_zeros.stored = codes_and_words


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        (gptq_in_bytes, "int4_k with zeros"),
        (gptq_selected, "int4_k with zeros"),
        (int8_with_words_of_zeros, "int8 with zeros"),
    ],
)
def test_zeros_are_read_however_they_are_packed_and_selected(form, weight):
    assert check(Attention(linear_of(form)), arguments(5))["weight"] == weight


def offset_buffers(rows, hidden, generator):
    buffers = quantized.nibble_buffers(rows, hidden, generator)
    offset = torch.randn(rows, hidden // GROUP, generator=generator).bfloat16() / 8
    return buffers | {"offset": offset, "zero": offset.float() + 8}


def offset(form):
    """Makes a form that gets the codes in groups [N, K / group, group], and their scale."""

    def made(layer, dtype):
        codes = torch.stack((layer.packed & 15, layer.packed >> 4), dim=-1).flatten(-2)
        scale, zero = (t.unsqueeze(-1) for t in (layer.scale, layer.offset))
        blocks = form(layer, codes.unflatten(-1, (-1, GROUP)), scale, zero)
        return blocks.flatten(-2).to(dtype)

    made.__name__ = form.__name__
    made.stored = offset_buffers
    return made


@offset
def in_float32(layer, codes, scale, zero):
    return (codes.float() - 8) * scale.float() + zero.float()


@offset
def in_its_own_dtype(layer, codes, scale, zero):
    """Rounds twice."""
    return zero + scale * (codes.to(scale.dtype) - 8)


@offset
def codes_from_zero(layer, codes, scale, zero):
    return codes.to(scale.dtype) * scale + zero


@pytest.mark.parametrize("form", [in_float32, in_its_own_dtype, codes_from_zero])
def test_zeros_may_be_added_behind_the_scale(form):
    facts = check(Attention(linear_of(form)), arguments(5))
    assert facts["weight"] == "int4_k_offset with zeros"


@offset
def zeros_on_both_sides(layer, codes, scale, zero):
    return (codes.float() - layer.zero.unsqueeze(-1)) * scale + zero


@offset
def scaled_behind_the_zeros(layer, codes, scale, zero):
    return ((codes.float() - 8) * scale + zero) * scale


@offset
def added_twice(layer, codes, scale, zero):
    return (codes.float() - 8) * scale + zero + zero


@offset
def subtracted(layer, codes, scale, zero):
    return (codes.float() - 8) * scale - zero


@offset
def added_with_a_factor(layer, codes, scale, zero):
    return torch.add((codes.float() - 8) * scale, zero, alpha=2)


NOT_ADDED = [
    zeros_on_both_sides,
    scaled_behind_the_zeros,
    added_twice,
    subtracted,
    added_with_a_factor,
]


@pytest.mark.parametrize("form", NOT_ADDED, ids=lambda form: form.__name__)
def test_other_sums_of_codes_and_zeros_are_no_format(form):
    assert_missed(Attention(linear_of(form)), arguments(5), "WEIGHT_FORMAT")


@stored(quantized.int8)
def int8_with_offset(layer, dtype):
    weight = layer.codes.to(dtype) * layer.scale[:, None].to(dtype)
    return weight + layer.zeros.to(dtype)


def test_codes_of_eight_bits_have_no_zeros_behind_the_scale():
    assert_missed(Attention(linear_of(int8_with_offset)), arguments(5), "WEIGHT_FORMAT")
