"""Rotary position embedding in the spellings of models and engines.

Each function rotates heads x [..., D]. Its arguments cos and sin are [..., D / 2] and broadcast to
x.
"""

from __future__ import annotations

import torch

from tests.models.norms import wide


def rotate_half(x):
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def twice(table):
    return torch.cat((table, table), dim=-1)


def half(x, cos, sin):
    return x * twice(cos) + rotate_half(x) * twice(sin)


def half_chunk(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def half_reordered(x, cos, sin):
    a, b = torch.split(x, x.shape[-1] // 2, -1)
    return torch.cat([cos * a - sin * b, sin * a + cos * b], dim=-1)


def half_wide(x, cos, sin):
    """Rotates in fp32, with fp32 tables, and casts the result back (OLMo 2)."""
    y = wide(x)
    return (y * twice(wide(cos)) + rotate_half(y) * twice(wide(sin))).to(x.dtype)


def half_sine_signed(x, cos, sin):
    """Puts the sign into the table of sines, so that the halves are only exchanged."""
    a, b = x.chunk(2, dim=-1)
    return x * twice(cos) + torch.cat((b, a), dim=-1) * torch.cat((-sin, sin), dim=-1)


def half_backwards(x, cos, sin):
    """Rotates by the negative angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def half_swapped_sign(x, cos, sin):
    """Exchanges the halves without a sign, although the table contains the sign for only one
    half."""
    a, b = x.chunk(2, dim=-1)
    return x * twice(cos) + torch.cat((b, -a), dim=-1) * twice(-sin)


def half_quarter_turn(x, cos, sin):
    """Exchanges the halves of the result, which rotates by another quarter turn."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b * cos + a * sin, a * cos - b * sin), dim=-1)


def interleaved(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def interleaved_repeated(x, cos, sin):
    """Uses tables that have every column twice (GLM-4, Cohere)."""
    cos, sin = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def interleaved_pairs(x, cos, sin):
    """Views pairs as a dimension of their own (gpt-fast)."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def pair_matrices(x, cos, sin):
    """Multiplies each pair by a 2 x 2 matrix (lingua)."""
    turn = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
    return (pairs * wide(turn)).sum(-1).flatten(-2).type_as(x)


def two_tables(x, cos, sin):
    """Uses different tables for the two halves of a head."""
    a, b = x.chunk(2, dim=-1)
    other_cos, other_sin = cos * 1.0, sin + 0.0
    return torch.cat((a * cos - b * sin, b * other_cos + a * other_sin), dim=-1)


def complex_numbers(x, cos, sin):
    """Views pairs as complex numbers (Llama, DeepSeek-V2)."""
    pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2))
    turn = torch.complex(wide(cos), wide(sin))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def complex_table(x, cos, sin):
    """Uses a table of real pairs that is viewed as complex numbers."""
    pairs = torch.view_as_complex(wide(x.reshape(*x.shape[:-1], -1, 2)))
    turn = torch.view_as_complex(torch.stack((wide(cos), wide(sin)), dim=-1))
    return torch.view_as_real(turn * pairs).flatten(-2).to(x.dtype)


def complex_backwards(x, cos, sin):
    """Multiplies by the conjugate, which rotates by the negative angle."""
    pairs = torch.view_as_complex(wide(x).reshape(*x.shape[:-1], -1, 2))
    turn = torch.complex(wide(cos), wide(sin)).conj()
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


def to_halves(x, cos, sin):
    """Reorders pairs into two halves, and then rotates the halves (DeepSeek-V3)."""
    x = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)
    return half(x, cos, sin)


def to_halves_strided(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def partial(x, cos, sin):
    """Rotates half of the head. The other half stays unchanged."""
    x, rest = x.chunk(2, dim=-1)
    width = cos.shape[-1] // 2
    return torch.cat((half(x, cos[..., :width], sin[..., :width]), rest), dim=-1)


def leading(x, cos, sin):
    """Rotates as many elements as the table has. The other elements stay unchanged."""
    width = 2 * cos.shape[-1]
    return torch.cat((half(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def with_empty_rest(x, cos, sin):
    """Rotates as Phi-3 does, with an unchanged part that has no elements."""
    width = x.shape[-1]
    return torch.cat((half(x[..., :width], cos, sin), x[..., width:]), dim=-1)


#: For each form, its style.
SPELLINGS = {
    half: "half",
    half_chunk: "half",
    half_reordered: "half",
    half_wide: "half",
    half_sine_signed: "half",
    half_backwards: "half",
    half_swapped_sign: "half",
    half_quarter_turn: "half",
    interleaved: "interleaved",
    interleaved_repeated: "interleaved",
    interleaved_pairs: "interleaved",
    pair_matrices: "interleaved",
    two_tables: "half",
    complex_numbers: "interleaved",
    complex_table: "interleaved",
    complex_backwards: "interleaved",
    to_halves: "interleaved_to_half",
    to_halves_strided: "interleaved_to_half",
    partial: "half",
    with_empty_rest: "half",
}
