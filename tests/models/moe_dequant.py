"""Stacked expert weights [E, N, K] dequantised in plain PyTorch, spelling by spelling.

SPELLINGS[name] is (format, function). The function takes (codes, scales, factor [E]) as `stored`
makes them, and returns the weight in bfloat16.
"""

from __future__ import annotations

import torch

from tilewright.ops.formats import fp8_block, mxfp4, nvfp4

E, N, K = 3, 64, 128
FP8_BLOCK = (32, 64)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TABLE = [*E2M1, *(-m for m in E2M1)]


def stored(name, seed=0, shape=(E, N, K)):
    """Returns (codes, scales, factor) of random weights in a format. Some scales of NVFP4 are
    negative."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    w = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    factor = torch.rand(shape[0], generator=generator) + 0.5
    if name == "nvfp4":
        codes, scales = nvfp4.quantize(w * 64)
        signs = torch.rand(scales.shape, generator=generator) < 0.25
        scales = (scales.view(torch.uint8) | signs.to(torch.uint8) << 7).view(scales.dtype)
        return codes, scales, factor / 64
    if name == "mxfp4":
        return (*mxfp4.quantize(w), factor)
    if name == "fp8":
        return (*fp8_block.quantize_blocks(w, FP8_BLOCK), factor)
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), generator=generator)
    scales = (torch.rand(*shape[:2], shape[2] // 32, generator=generator) + 0.5) / 64
    return codes.to(torch.uint8), scales, factor


def nibbles(codes):
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def look_up(codes, dtype=torch.float32, scale=1.0):
    table = torch.tensor([scale * v for v in TABLE], dtype=dtype, device=codes.device)
    low, high = table[(codes & 0x0F).int()], table[(codes >> 4).long()]
    return torch.stack([low, high], -1).flatten(-2)


def by_block(values, scales):
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)


def nvfp4_table(codes, scales, factor):
    return (by_block(look_up(codes), scales.float()) * factor[:, None, None]).bfloat16()


def nvfp4_sign_and_magnitude(codes, scales, factor):
    high, low = (codes & 0xF0) >> 4, codes & 0x0F
    both = torch.stack((low, high), dim=-1).flatten()
    sign, magnitude = (both & 0x08).to(torch.bool), (both & 0x07).to(torch.long)
    values = torch.tensor(E2M1, device=codes.device)[magnitude] * torch.where(sign, -1.0, 1.0)
    values = values.reshape(*codes.shape[:-1], -1)
    scale = scales.view(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return by_block(values, scale / (1 / factor)[:, None, None]).bfloat16()


def nvfp4_arithmetic(codes, scales, factor):
    """Decodes without a table: (-1)^s * 2^(e - 1) * (1 + m / 2), or m / 2 if e is 0."""
    code = nibbles(codes).int()
    mantissa, exponent = (code & 1).float() * 0.5, (code >> 1) & 3
    magnitude = torch.where(
        exponent == 0, mantissa, (mantissa + 1) * torch.exp2((exponent - 1).float())
    )
    values = magnitude * (1 - 2 * (code >> 3))
    return by_block(values * factor[:, None, None], scales.float()).bfloat16()


def nvfp4_magnitudes(codes, scales, factor):
    return by_block(look_up(codes), scales.float().abs() * factor[:, None, None]).bfloat16()


def nvfp4_seven_bits(codes, scales, factor):
    unsigned = (scales.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
    return by_block(look_up(codes, torch.bfloat16), unsigned.bfloat16())


def nvfp4_library(codes, scales, factor):
    return nvfp4.dequantize(codes, scales, torch.tensor(2.0), torch.bfloat16)


def nvfp4_one_factor(codes, scales, factor):
    return (by_block(look_up(codes), scales.float()) * factor[0]).bfloat16()


def nvfp4_no_factor(codes, scales, factor):
    return by_block(look_up(codes, torch.bfloat16), scales.bfloat16())


def nvfp4_scale_per_32(codes, scales, factor):
    return by_block(look_up(codes), scales[..., ::2].float()).bfloat16()


def mxfp4_ldexp(codes, scales, factor):
    blocks = codes.unflatten(-1, (-1, 16))
    values = look_up(blocks, torch.bfloat16)
    return torch.ldexp(values, (scales.to(torch.int32) - 127).unsqueeze(-1)).flatten(-2)


def mxfp4_stored_by_halves(codes, scales, factor):
    table = torch.tensor(TABLE, dtype=torch.bfloat16, device=codes.device)
    blocks = codes.unflatten(-1, (-1, 16))
    out = torch.empty(*blocks.shape[:-1], 32, dtype=torch.bfloat16, device=codes.device)
    out[..., 0::2] = table[(blocks & 0x0F).to(torch.int)]
    out[..., 1::2] = table[(blocks >> 4).to(torch.int)]
    return torch.ldexp(out, (scales.to(torch.int32) - 127).unsqueeze(-1)).flatten(-2)


def mxfp4_exp2(codes, scales, factor):
    return by_block(look_up(codes), torch.exp2(scales.float() - 127)).bfloat16()


def mxfp4_power(codes, scales, factor):
    return by_block(look_up(codes), 2.0 ** (scales.float() - 127)).bfloat16()


def mxfp4_e8m0(codes, scales, factor):
    scale = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return look_up(codes, torch.bfloat16) * scale.repeat_interleave(32, -1)


def mxfp4_bits(codes, scales, factor):
    scale = (scales.int() << 23).view(torch.float32)
    values = look_up(codes, scale=2.0) * 0.5
    return (values * scale.repeat_interleave(32, -1)).bfloat16()


def mxfp4_library(codes, scales, factor):
    return mxfp4.dequantize(codes, scales, torch.bfloat16)


def fp8_repeated(codes, scales, factor):
    rows, columns = FP8_BLOCK
    wide = scales.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    return (codes.float() * wide).bfloat16()


def fp8_blocks(codes, scales, factor):
    (rows, columns), (e, n, k) = FP8_BLOCK, codes.shape
    blocks = codes.float().view(e, n // rows, rows, k // columns, columns)
    return (blocks * scales[:, :, None, :, None]).view(e, n, k).bfloat16()


def fp8_library(codes, scales, factor):
    return fp8_block.dequantize(codes, scales, FP8_BLOCK, torch.bfloat16)


def fp8_by_expert(codes, scales, factor):
    return codes.bfloat16() * factor.bfloat16()[:, None, None]


def fp8_rounded_scale(codes, scales, factor):
    wide = scales.repeat_interleave(FP8_BLOCK[0], 1).repeat_interleave(FP8_BLOCK[1], 2)
    return codes.bfloat16() * wide.to(torch.bfloat16)


def int4_groups(codes, scales, factor):
    return by_block((nibbles(codes).to(torch.int8) - 8).float(), scales).bfloat16()


def _one(codes, scales, factor):
    return (by_block(look_up(codes), scales.float()) * factor).bfloat16()


def nvfp4_stacked(codes, scales, factor):
    """Decodes the weights expert by expert."""
    return torch.stack([_one(*item) for item in zip(codes, scales, factor, strict=True)])


def nvfp4_concatenated(codes, scales, factor):
    experts = (slice(e, e + 1) for e in range(codes.shape[0]))
    return torch.cat([nvfp4_table(codes[e], scales[e], factor[e]) for e in experts])


SPELLINGS = {
    f.__name__: (f.__name__.split("_")[0], f)
    for f in (
        nvfp4_table, nvfp4_sign_and_magnitude, nvfp4_arithmetic, nvfp4_library, nvfp4_one_factor,
        nvfp4_no_factor, nvfp4_magnitudes, nvfp4_seven_bits, nvfp4_scale_per_32,
        nvfp4_stacked, nvfp4_concatenated, mxfp4_ldexp, mxfp4_stored_by_halves, mxfp4_exp2,
        mxfp4_power, mxfp4_e8m0, mxfp4_bits, mxfp4_library,
        fp8_repeated, fp8_blocks, fp8_library, fp8_by_expert, fp8_rounded_scale, int4_groups,
    )
}  # fmt: skip


# --- near misses: (format, code, function) --------------------------------------------------------


def high_nibble_first(codes, scales, factor):
    table = torch.tensor(TABLE, device=codes.device)
    values = torch.stack([table[(codes >> 4).int()], table[(codes & 15).int()]], -1).flatten(-2)
    return by_block(values, scales.float()).bfloat16()


STORED_TABLE = torch.tensor(TABLE)


def table_of_the_model(codes, scales, factor):
    values = torch.stack([STORED_TABLE[(codes & 15).int()], STORED_TABLE[(codes >> 4).int()]], -1)
    return by_block(values.flatten(-2), scales.float()).bfloat16()


def another_table(codes, scales, factor):
    table = torch.tensor([*TABLE[:7], 8.0, *TABLE[8:]], device=codes.device)
    values = torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], -1).flatten(-2)
    return by_block(values, scales.float()).bfloat16()


def scale_per_8(codes, scales, factor):
    return by_block(look_up(codes), torch.cat([scales, scales], -1).float()).bfloat16()


def scales_of_the_next_block(codes, scales, factor):
    return by_block(look_up(codes), scales.roll(1, -1).float()).bfloat16()


def float_scales(codes, scales, factor):
    return by_block(look_up(codes), scales.float().sqrt()).bfloat16()


def offset(codes, scales, factor):
    return by_block(look_up(codes) + 1, scales.float()).bfloat16()


def two_block_scales(codes, scales, factor):
    return by_block(by_block(look_up(codes), scales.float()), scales.float()).bfloat16()


def wrong_bias(codes, scales, factor):
    return by_block(look_up(codes), torch.exp2(scales.float() - 126)).bfloat16()


def other_guard(codes, scales, factor):
    return torch.where((scales == 254)[..., None].repeat_interleave(32, -1).flatten(-2), torch.nan,
                       mxfp4_exp2(codes, scales, factor))  # fmt: skip


def zero_of_seven(codes, scales, factor):
    return by_block((nibbles(codes).to(torch.int8) - 7).float(), scales).bfloat16()


def scale_per_element(codes, scales, factor):
    return (codes.float() * codes.float().abs().sqrt()).bfloat16()


def stacked_backwards(codes, scales, factor):
    return torch.stack([_one(codes[e], scales[e], factor[e]) for e in (2, 1, 0)])


def stacked_with_scales_of_the_next(codes, scales, factor):
    around = [1, 2, 0]
    return torch.stack([_one(codes[e], scales[a], factor[e]) for e, a in enumerate(around)])


def stored_one_by_one(codes, scales, factor):
    out = torch.empty(*codes.shape[:2], 2 * codes.shape[2], dtype=torch.bfloat16)
    for e in range(codes.shape[0]):
        out[e] = _one(codes[e], scales[e], factor[e])
    return out


NEAR_MISSES = {
    stacked_backwards: ("nvfp4", "WEIGHT_FORMAT"),
    stacked_with_scales_of_the_next: ("nvfp4", "WEIGHT_FORMAT"),
    stored_one_by_one: ("nvfp4", "WEIGHT_FORMAT"),
    high_nibble_first: ("nvfp4", "WEIGHT_FORMAT"),
    table_of_the_model: ("nvfp4", "WEIGHT_FORMAT"),
    another_table: ("nvfp4", "WEIGHT_FORMAT"),
    scale_per_8: ("nvfp4", "WEIGHT_FORMAT"),
    float_scales: ("nvfp4", "WEIGHT_FORMAT"),
    offset: ("nvfp4", "WEIGHT_FORMAT"),
    two_block_scales: ("nvfp4", "WEIGHT_FORMAT"),
    wrong_bias: ("mxfp4", "WEIGHT_FORMAT"),
    other_guard: ("mxfp4", "WEIGHT_FORMAT"),
    zero_of_seven: ("int4", "WEIGHT_FORMAT"),
    scale_per_element: ("fp8", "WEIGHT_FORMAT"),
}
