"""Tests that rotations are recognised by what they compute: every spelling is recognised, and no
near miss is."""

import pytest
import torch
from torch import nn

from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models import ropes
from tests.tables import in_turn
from tilewright.compiler import lower, reports
from tilewright.compiler.dataflow.build import build_view
from tilewright.patterns import effects
from tilewright.patterns.language import Reject, Stage
from tilewright.patterns.projection.epilogue import one_head_axis
from tilewright.patterns.recognise.rope import match_rope

T, K, H, D = 5, 16, 2, 8


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Attention(nn.Module):
    """Projects, rotates q and k by `turn(heads, positions)`, writes the cache, and returns q."""

    def __init__(self, turn, heads_first=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in "qkv":
            weight = torch.randn(H * D, K, generator=generator) / 4
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
        self.turn, self.heads_first = turn, heads_first

    def forward(self, x, slots, k_cache, v_cache):
        lead = x.shape[:-1]
        q, k, v = (nn.functional.linear(x, w).view(*lead, H, D) for w in (self.q, self.k, self.v))
        if self.heads_first:
            q, k = (y.transpose(1, 2) for y in (q, k))
        q, k = self.turn(q), self.turn(k)
        if self.heads_first:
            k = k.transpose(1, 2)
        k_cache.view(-1, H, D)[slots] = k.flatten(0, -3)
        v_cache.view(-1, H, D)[slots] = v.flatten(0, -3)
        return q * 2


def arguments(*tokens):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*tokens, K, generator=generator)
    caches = [torch.randn(4, 4, H, D, generator=generator) for _ in range(2)]
    return x, torch.randperm(16, generator=generator)[: x[..., 0].numel()], *caches


def angles(*shape, width=D // 2):
    """Returns angles by position, which broadcast against heads."""
    generator = torch.Generator().manual_seed(2)
    return torch.rand(*shape, width, generator=generator) * 6


def check(turn, args, heads_first=False, **facts):
    """Checks that compiled and eager results agree, and that the only match has these `facts`."""
    model = Attention(turn, heads_first)
    eager, ours = ([a.clone() for a in args] for _ in range(2))
    expected = model(*eager)
    actual = torch.compile(model, backend="tilewright", options={"inner": "eager"})(*ours)
    found = reports()[-1]
    assert patterns_in(found, "qkv") == ["qkv_cache"], [str(m) for m in misses_of(found, "qkv")]
    assert {name: matches_of(found, "qkv")[0].shapes[name] for name in facts} == facts
    for a, b in zip((actual, *ours), (expected, *eager), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ropes.SPELLINGS, ids=lambda f: f.__name__)
def test_every_spelling_is_the_same_rotation(form):
    style = ropes.SPELLINGS[form]
    if form is ropes.partial:
        style += f"({D // 2})"
    table = angles(T, 1)
    cos, sin = table.cos(), table.sin()
    check(lambda x: form(x, cos, sin), arguments(T), rope=style)


COMPUTED = {
    "polar": lambda x, a: torch.view_as_real(
        torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        * torch.polar(torch.ones_like(a), a)
    ).flatten(3),
    "strided": lambda x, a: ropes.half_chunk(x, a.cos()[..., ::2], a.sin()[..., 1::2]),
    "scaled": lambda x, a: ropes.half(x, a.cos() * 1.25, a.sin() * 1.25),
    "wide_then_narrow": lambda x, a: ropes.half(x, a.double().cos().float(), a.sin()),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_tables_computed_in_the_graph(name):
    table = angles(1, T, 1, width=D if name == "strided" else D // 2)
    check(lambda x: COMPUTED[name](x, table), arguments(2, T))


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        *in_turn(
            [(1, 1, T), (2, 1, T), (1, 1, 1), (2, 1, 1)],
            [ropes.half, ropes.complex_numbers, ropes.to_halves],
        ),
        ((2, 1, T), ropes.half),
        ((1, 1, T), ropes.complex_numbers),
    ],
)
def test_tables_that_repeat_over_tokens(shape, form):
    """Heads come first, `[B, H, S, D]`. There is a row for each position, for each sequence, for
    all, or for each token."""
    table = angles(*shape)
    cos, sin = table.cos(), table.sin()
    check(lambda x: form(x, cos, sin), arguments(2, T), heads_first=True)


GATHERS = {
    "getitem": lambda table, at: table[at],
    "index_select": lambda table, at: table.index_select(0, at),
    "embedding": lambda table, at: nn.functional.embedding(at, table),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gathered_tables(name):
    table, at = torch.cat((angles(9).cos(), angles(9).sin()), -1), torch.tensor([3, 1, 8, 0, 4])

    def turn(x):
        cos, sin = GATHERS[name](table, at).unsqueeze(1).chunk(2, -1)
        return ropes.half_chunk(x, cos, sin)

    check(turn, arguments(T))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_buffer_of_matrices(seed):
    """A buffer of matrices may hold any numbers. Nothing shows that they rotate, and the op's
    tables need not rotate either."""
    generator = torch.Generator().manual_seed(seed)
    freqs = torch.randn(9, D // 2, 2, 2, generator=generator)

    def turn(x):
        rows = freqs[:T].view(1, T, 1, D // 2, 2, 2)
        return (x.reshape(*x.shape[:-1], -1, 1, 2) * rows).sum(5).flatten(3)

    check(turn, arguments(2, T), rope="interleaved")


@pytest.mark.parametrize("how", ["keepdim", "one axis more", "mean", "by head"])
def test_other_sums_of_matrices_are_no_rotation(how):
    generator = torch.Generator().manual_seed(0)
    freqs = torch.randn(T, H if how == "by head" else 1, D // 2, 2, 2, generator=generator)

    def turn(x):
        product = x.reshape(T, H, -1, 1, 2) * freqs
        if how == "keepdim":
            product = product.sum(4, keepdim=True)
        elif how == "one axis more":
            product = product.sum((3, 4)).repeat_interleave(2, -1)
        else:
            product = product.mean(4) if how == "mean" else product.sum(4)
        return product.reshape(T, H, D)

    torch._dynamo.reset()
    found = lower(Attention(turn), arguments(T))
    assert "qkv_cache" not in patterns_in(found, "qkv")
    assert bool(codes_of(found, "qkv"))


def test_a_complex_table_before_the_transpose():
    """Rotates `[B, S, H, D]` and then transposes, as Llama 4 does."""
    table = torch.polar(torch.ones(2, T, D // 2), angles(2, T))

    def turn(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[:, :, None, :]).flatten(3).type_as(x)

    check(turn, arguments(2, T), rope="interleaved")


# --- what is no such rotation ---------------------------------------------------------------------


def last_dimensions(x, cos, sin):
    rest, x = x.chunk(2, dim=-1)
    q = D // 4
    return torch.cat((rest, ropes.half(x, cos[..., :q], sin[..., :q])), -1)


def one_pair_backwards(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos + b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def columns_of_the_other_member(x, cos, sin):
    """Orders the columns of the cosine by halves, but rotates adjacent pairs."""
    a, b = x[..., ::2], x[..., 1::2]
    wide = torch.cat((cos, sin), -1)
    even, odd = wide[..., : D // 2], wide[..., D // 2 :]
    return torch.stack((a * even - b * sin, b * odd + a * sin), dim=-1).flatten(-2)


def tripled(x, cos, sin):
    return ropes.half(x, cos, sin) + x * ropes.twice(cos)


def odd_number_of_dimensions(x, cos, sin):
    """Rotates a share of the head that is rounded down, which gives halves of 2 and of 3
    columns."""
    cos, sin = (torch.cat((table, table[..., :1]), -1)[..., :5] for table in (cos, sin))
    turned, rest = x[..., :5], x[..., 5:]
    other = torch.cat((-turned[..., 2:], turned[..., :2]), -1)
    return torch.cat((turned * cos + other * sin, rest), -1)


#: Rotations that tilewright does not support, each with words of the miss.
NEAR_MISSES = {
    last_dimensions: "not the first ones of the head",
    one_pair_backwards: "",
    columns_of_the_other_member: "",
    tripled: "",
    odd_number_of_dimensions: "an odd number of elements, 5,",
}


def rotated(form):
    """Returns the result of a spelling of rope, as a value of the dataflow view."""
    found = []

    def backend(gm, example_inputs):
        found.append(build_view(gm.graph).outputs[0])
        return gm.forward

    def model(x, weight, cos, sin):
        return form(nn.functional.linear(x, weight).view(T, H, D), cos, sin)

    x, weight = torch.randn(T, 16), torch.randn(H * D, 16)
    table = angles(T, 1)
    torch.compile(model, backend=backend)(x, weight, table.cos(), table.sin())
    return found[0]


@pytest.mark.parametrize("form", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_refused_by_name(form):
    whole, _ = one_head_axis(rotated(form))
    with pytest.raises(Reject) as rejected:
        match_rope(whole, Stage.K_PATH)
    assert rejected.value.miss.code == "ROPE_STYLE"
    assert NEAR_MISSES[form] in rejected.value.miss.message


def test_stacked_halves_are_one_head_where_a_view_joins_them():
    """Stacked halves are one head only if a view joins them. In a view that keeps them apart, they
    may be two heads."""

    def stacked(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -2).flatten(-2)

    joined = rotated(stacked)
    whole, effect = one_head_axis(joined)
    assert (whole.shape, effect) == ((T, H, D), effects.identity((T, H, D)))
    assert match_rope(whole).style == "half"
    assert one_head_axis(joined.value.whole)[0].shape == (T, H, 2, D // 2)


def test_arithmetic_that_is_no_rotation_is_none():
    assert match_rope(rotated(lambda x, cos, sin: x + x), Stage.K_PATH) is None
    swapped = rotated(lambda x, cos, sin: torch.cat((x[..., 4:], x[..., :4]), -1))
    assert match_rope(swapped, Stage.K_PATH) is None


def test_a_table_that_varies_by_head_is_refused():
    table = angles(T, H)
    lowered = lower(Attention(lambda x: ropes.half(x, table.cos(), table.sin())), arguments(T))
    assert "ROPE_TABLE" in codes_of(lowered, "qkv")


def test_a_complex_table_that_varies_by_head_is_refused():
    table = torch.polar(torch.ones(T, H, D // 2), angles(T, H))

    def turn(x):
        pairs = torch.view_as_complex(x.reshape(T, H, -1, 2))
        return torch.view_as_real(pairs * table).flatten(-2)

    lowered = lower(Attention(turn), arguments(T))
    assert "ROPE_TABLE" in codes_of(lowered, "qkv")
