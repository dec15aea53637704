"""Tests arithmetic that is nearly that of a format. It has a named miss."""

import pytest
import torch

from tests.models import quantized
from tests.models.quantized import GROUP, QuantizedLinear
from tests.patterns.quantised.attention import (
    Attention,
    K,
    arguments,
    assert_missed,
    linear_of,
    stored,
)
from tilewright.codegen import formats

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@stored(quantized.nibbles_low_first)
def signed_nibbles(layer, dtype):
    """Decodes signed codes of four bits."""
    packed = layer.packed.to(torch.int8)
    codes = torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).flatten(-2)
    return quantized.grouped(layer, codes, dtype, zero=0)


@stored(quantized.nibbles_low_first)
def halves_side_by_side(layer, dtype):
    """Unpacks words so that the two codes of a byte are not next to each other along K."""
    codes = torch.cat((layer.packed & 0xF, layer.packed >> 4), dim=-1)
    return quantized.grouped(layer, codes, dtype)


@stored(quantized.nibbles_low_first)
def low_nibble_twice(layer, dtype):
    low = layer.packed & 0xF
    return quantized.grouped(layer, torch.stack((low, low), dim=-1).flatten(-2), dtype)


@stored(quantized.nibbles_low_first)
def three_bits(layer, dtype):
    codes = torch.stack((layer.packed & 7, layer.packed >> 4), dim=-1).flatten(-2)
    return quantized.grouped(layer, codes, dtype)


@stored(quantized.nibbles_low_first)
def nibbles_that_wrap_around(layer, dtype):
    """Below zero, unsigned bytes wrap around."""
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2) - 8
    return quantized.grouped(layer, codes, dtype, zero=0)


@stored(quantized.gptq)
def a_mask_that_wraps_around(layer, dtype):
    """Masks all bits of a signed word, which keeps the sign, so the last nibble has a sign."""
    nibbles = [(layer.packed >> shift) & 15 for shift in range(0, 28, 4)]
    codes = torch.stack((*nibbles, (layer.packed & 0xFFFFFFFF) >> 28), dim=1)
    codes = codes.view(-1, GROUP, layer.width).to(dtype) - 8
    return (layer.scale[:, None].to(dtype) * codes).view(layer.hidden, layer.width).t()


@stored(quantized.int8_with_zeros)
def codes_that_wrap_around(layer, dtype):
    return (layer.codes - layer.zeros).to(dtype) * layer.scale[:, None].to(dtype)


@stored(quantized.int8_in_words)
def bytes_that_wrap_around(layer, dtype):
    codes = layer.packed.view(torch.uint8) - 127
    return codes.to(dtype) * layer.scale[:, :1].to(dtype)


@stored(quantized.int8_in_words)
def bytes_cast_to_signed(layer, dtype):
    """The cast wraps around, too."""
    codes = layer.packed.view(torch.uint8).to(torch.int8) - 64
    return codes.to(dtype) * layer.scale[:, :1].to(dtype)


@stored(quantized.int8_in_words)
def halves_of_words(layer, dtype):
    codes = layer.packed.view(torch.int16).to(dtype).repeat(1, 2) - 128
    return codes * layer.scale[:, :1].to(dtype) / 256


@stored(quantized.nibbles_low_first)
def scaled_then_moved(layer, dtype):
    """Adds the minimum after the scale."""
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    scale = layer.scale[:, :1].to(dtype)
    return codes.to(dtype) * scale - layer.scale[:, 1:2].to(dtype)


@stored(quantized.nibbles_low_first)
def scales_in_tiles(layer, dtype):
    """Shares a scale among columns that are far apart."""
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    return (codes.to(dtype) - 8) * layer.scale.repeat(1, GROUP).to(dtype)


@stored(quantized.int8)
def scaled_twice(layer, dtype):
    return layer.codes.to(dtype) * layer.scale[:, None].to(dtype) * layer.scale[:1].to(dtype)


@stored(quantized.int8)
def scaled_by_nothing(layer, dtype):
    return layer.codes.to(dtype)


@stored(quantized.fp8_tensor)
def five_bits_of_exponent(layer, dtype):
    return layer.codes.view(torch.float8_e5m2).to(dtype) * layer.scale.to(dtype)


@stored(quantized.fp8_tensor)
def multiplied_codes(layer, dtype):
    return (layer.codes.to(dtype) * layer.codes.to(dtype)) * layer.scale.to(dtype)


@stored(quantized.nvfp4)
def floats_of_another_table(layer, dtype):
    """Exchanges two numbers of the table."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 3.0, 6.0]
    table = torch.tensor([*numbers, *(-n for n in numbers)], device=layer.packed.device)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    blocks = table[codes.int()].view(layer.width, -1, GROUP) * layer.scale.float()[:, :, None]
    return (blocks * layer.factor).view(layer.width, -1).to(dtype)


@stored(quantized.mxfp4)
def powers_from_126(layer, dtype):
    table = torch.tensor([*quantized.E2M1, *(-m for m in quantized.E2M1)]).to(dtype)
    codes = torch.stack((layer.packed & 0xF, layer.packed >> 4), dim=-1).flatten(-2)
    values = table[codes.int()].view(layer.width, -1, 32)
    exponents = layer.exponents.to(torch.int32) - 126
    return torch.ldexp(values, exponents[:, :, None]).view(layer.width, -1)


@stored(quantized.nvfp4)
def floats_scaled_twice(layer, dtype):
    scale = layer.scale.to(dtype).repeat_interleave(GROUP, dim=1)
    return quantized.nvfp4(layer, dtype) * scale


@stored(quantized.nf4)
def blocks_that_begin_within_one(layer, dtype):
    codes = torch.stack((layer.packed >> 4, layer.packed & 0xF), dim=-1).flatten(-2)
    table = torch.tensor(formats.TABLES["nf4"], device=codes.device)
    scale = layer.scale.repeat_interleave(GROUP, dim=1)
    scale = torch.cat([scale[:, GROUP // 2 :], scale[:, : GROUP // 2]], 1)
    return (table[codes.int()] * scale).to(dtype)


NEAR_MISSES = {
    signed_nibbles: "WEIGHT_FORMAT",
    halves_side_by_side: "WEIGHT_FORMAT",
    low_nibble_twice: "WEIGHT_FORMAT",
    three_bits: "WEIGHT_FORMAT",
    nibbles_that_wrap_around: "WEIGHT_FORMAT",
    a_mask_that_wraps_around: "WEIGHT_FORMAT",
    codes_that_wrap_around: "WEIGHT_FORMAT",
    bytes_that_wrap_around: "WEIGHT_FORMAT",
    bytes_cast_to_signed: "WEIGHT_FORMAT",
    halves_of_words: "WEIGHT_FORMAT",
    scaled_then_moved: "WEIGHT_FORMAT",
    scaled_twice: "WEIGHT_FORMAT",
    scaled_by_nothing: "WEIGHT_FORMAT",
    five_bits_of_exponent: "WEIGHT_FORMAT",
    multiplied_codes: "WEIGHT_FORMAT",
    scales_in_tiles: "SCALE_BLOCK",
    quantized.gptq_act_order: "SCALE_BLOCK",
    quantized.nvfp4_high_first: "WEIGHT_FORMAT",
    quantized.nf4_low_first: "WEIGHT_FORMAT",
    quantized.nf4_rounded: "WEIGHT_FORMAT",
    blocks_that_begin_within_one: "SCALE_BLOCK",
    floats_of_another_table: "WEIGHT_FORMAT",
    powers_from_126: "WEIGHT_FORMAT",
    floats_scaled_twice: "WEIGHT_FORMAT",
}


@pytest.mark.parametrize("form", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_missed_by_name_and_still_right(form):
    module, args = Attention(linear_of(form)), arguments(5)
    assert_missed(module, args, NEAR_MISSES[form])


@stored(quantized.gptq)
def a_difference_that_wraps_around(layer, dtype):
    codes, zeros = (t.to(torch.int8) for t in quantized.gptq_codes(layer))
    codes = codes.view(-1, GROUP, layer.width) - 100 - (zeros + 100)[:, None]
    return (layer.scale[:, None].to(dtype) * codes.to(dtype)).view(layer.hidden, layer.width).t()


def test_a_difference_that_may_wrap_around_is_no_code():
    form = a_difference_that_wraps_around
    assert_missed(Attention(linear_of(form)), arguments(5), "WEIGHT_FORMAT")


def test_a_shift_table_that_is_a_buffer_is_not_known():
    class Shifts(QuantizedLinear):
        def __init__(self, *args):
            super().__init__(quantized.awq_plain, *args)
            self.register_buffer("shifts", torch.arange(0, 32, 4))

        def forward(self, x):
            codes = ((self.packed.unsqueeze(-1) >> self.shifts) & 15).flatten(-2).to(x.dtype)
            scale = self.scale.repeat_interleave(GROUP, dim=0).to(x.dtype)
            return x @ (codes * scale)

    module = Attention(lambda width, seed: Shifts(K, width, seed))
    assert_missed(module, arguments(5), "WEIGHT_FORMAT")
