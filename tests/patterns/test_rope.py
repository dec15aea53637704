"""Rotations are recognised by what they compute: every spelling, and no near miss."""

import pytest
import torch

from tilewright.compiler.view import build_view
from tilewright.patterns.language import Reject
from tilewright.patterns.projection import one_head_axis
from tilewright.patterns.rope import match_rope

T, H, D = 5, 2, 8


def half(x, cos, sin):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return x * cos + torch.cat((-b, a), -1) * sin


def half_chunk(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    c, s = cos[..., : D // 2], sin[..., : D // 2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def half_reordered(x, cos, sin):
    a, b = torch.split(x, D // 2, -1)
    c, s = cos[..., : D // 2], sin[..., : D // 2]
    return torch.cat([c * a - s * b, s * a + c * b], dim=-1)


def half_float32(x, cos, sin):
    y = x.float()
    rotated = torch.cat((-y[..., D // 2 :], y[..., : D // 2]), dim=-1)
    return (y * cos.float() + rotated * sin.float()).to(x.dtype)


def interleaved_stack(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    c, s = cos[..., : D // 2], sin[..., : D // 2]
    return torch.stack((a * c - b * s, b * c + a * s), dim=-1).flatten(-2)


def interleaved_rotate(x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def partial(x, cos, sin):
    x, rest = x[..., : D // 2], x[..., D // 2 :]
    q = D // 4
    cos, sin = cos[..., : D // 2], sin[..., : D // 2]
    turned = x * cos + torch.cat((-x[..., q:], x[..., :q]), -1) * sin
    return torch.cat((turned, rest), -1)


SPELLINGS = {
    half: ("half", D),
    half_chunk: ("half", D),
    half_reordered: ("half", D),
    half_float32: ("half", D),
    interleaved_stack: ("interleaved", D),
    interleaved_rotate: ("interleaved", D),
    partial: ("half", D // 2),
}


def wrong_sign(x, cos, sin):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return x * cos + torch.cat((b, -a), -1) * sin


def swapped_halves(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    c, s = cos[..., : D // 2], sin[..., : D // 2]
    return torch.cat((b * c + a * s, a * c - b * s), -1)


def de_interleaved(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    c, s = cos[..., : D // 2], sin[..., : D // 2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def last_dimensions(x, cos, sin):
    rest, x = x[..., : D // 2], x[..., D // 2 :]
    q = D // 4
    cos, sin = cos[..., : D // 2], sin[..., : D // 2]
    turned = x * cos + torch.cat((-x[..., q:], x[..., :q]), -1) * sin
    return torch.cat((rest, turned), -1)


def crossed_columns(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    c, s = cos[..., ::2], sin[..., : D // 2]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


NEAR_MISSES = [wrong_sign, swapped_halves, de_interleaved, last_dimensions, crossed_columns]


def rotated(form):
    """The dataflow view's value that a spelling of rope results in."""
    found = []

    def backend(gm, example_inputs):
        flow = build_view(gm.graph)
        found.append(flow.outputs[0])
        return gm.forward

    def model(x, weight, cos, sin):
        return form(torch.nn.functional.linear(x, weight).view(T, H, D), cos, sin)

    x, weight = torch.randn(T, 16), torch.randn(H * D, 16)
    cos, sin = torch.randn(T, 1, D), torch.randn(T, 1, D)
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x, weight, cos, sin)
    return found[0]


@pytest.mark.parametrize("form", SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling_is_the_same_rotation(form):
    view = rotated(form)
    if view.value.op == "cast":
        view = view.value.args[0]
    whole, _ = one_head_axis(view)
    rope = match_rope(whole)
    assert rope is not None
    assert (rope.style, rope.rotary_dim) == SPELLINGS[form]
    assert rope.cos.shape[-1] in (rope.rotary_dim, rope.rotary_dim // 2)
    assert rope.x.value.op in ("aten.linear", "cast")
    assert rope.x.shape == (T, H, D)


@pytest.mark.parametrize("form", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_refused_by_name(form):
    with pytest.raises(Reject) as rejected:
        match_rope(rotated(form))
    assert rejected.value.miss.code == "ROPE_STYLE"


def test_arithmetic_that_is_no_rotation_is_none():
    assert match_rope(rotated(lambda x, cos, sin: x + x)) is None
    assert match_rope(rotated(lambda x, cos, sin: torch.cat((x[..., 4:], x[..., :4]), -1))) is None
