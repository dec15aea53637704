"""Compares products and rows with PyTorch's results, for random equations, weights and views."""

from __future__ import annotations

import random
import string

import pytest
import torch

from tests.compiler.flow_check import numbers, returned, selected
from tests.patterns.test_effects import random_view
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Effect, InexpressibleError
from tilewright.patterns.projection.rows import Rows, heads_of, rest_of
from tilewright.patterns.recognise.gemm import bias_rows, match_gemm, piece_of

T, N = 5, 24


def value(op, tensor, *args):
    return Value(op, args, tuple(tensor.shape), tensor.dtype, tensor.device, None, 0)  # type: ignore[arg-type]


def product(op, operands, *args):
    """Returns (the value of a product of x and a weight, the result of the product)."""
    x, weight = value("input", operands[0]), value("constant", operands[1])
    result = getattr(torch, op)(*args, *operands)
    return value(f"aten.{op}", result, *args, x.whole, weight.whole), result


def held(view, tensor):
    return selected(view.effect, tensor)


def assert_normal_form(op, operands, *args):
    of, result = product(op, operands, *args)
    gemm = match_gemm(of)
    assert gemm is not None, (args, [o.shape for o in operands])
    x, weight = held(gemm.x, operands[0]), held(gemm.weight, operands[1])
    flat = (x.double() @ weight.double().T).view(gemm.shape)
    torch.testing.assert_close(selected(gemm.layout, flat), result.double())


def random_equation(rng):
    letters = iter(rng.sample(string.ascii_lowercase, 8))
    tokens, features, summed = (
        {next(letters): rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2)))} for _ in range(3)
    )
    sizes = tokens | features | summed

    def shuffled(names):
        names = list(names)
        rng.shuffle(names)
        return "".join(names)

    x, weight = shuffled(tokens | summed), shuffled(features | summed)
    equation = f"{x},{weight}->{shuffled(tokens | features)}"
    return equation, [numbers(*(sizes[n] for n in names)) for names in (x, weight)]


@pytest.mark.parametrize("block", range(4))
def test_random_equations(block):
    rng = random.Random(block)
    for _ in range(50):
        equation, operands = random_equation(rng)
        assert_normal_form("einsum", operands, equation)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        ((5, 4), (4, 6)),
        ((2, 5, 4), (4, 6)),
        ((1, 5, 4), (3, 4, 6)),
        ((2, 1, 5, 4), (3, 4, 6)),
        ((2, 5, 4), (1, 4, 6)),
    ],
)
def test_batched_products(x, weight):
    assert_normal_form("matmul", (numbers(*x), numbers(*weight)))


@pytest.mark.parametrize(
    ("equation", "x", "weight"),
    [
        ("tk,tkd->td", (5, 4), (5, 4, 6)),
        ("tk,hkd->td", (5, 4), (3, 4, 6)),
        ("tk,ndk->tn", (5, 4), (3, 6, 4)),
        ("tks,kd->td", (5, 4, 2), (4, 6)),
        ("tk,hd->thd", (5, 4), (3, 6)),
        ("tt,td->td", (4, 4), (4, 6)),
        ("k,kd->d", (4,), (4, 6)),
        ("tk,kd->td", (5, 1), (4, 6)),
    ],
)
def test_what_is_no_product_of_tokens_with_a_weight(equation, x, weight):
    of, _ = product("einsum", (numbers(*x), numbers(*weight)), equation)
    assert match_gemm(of) is None


def test_a_batch_of_weights_is_no_weight():
    of, _ = product("matmul", (numbers(2, 5, 4), numbers(2, 4, 6)))
    assert match_gemm(of) is None


# --- rows ---------------------------------------------------------------------------------------


def random_rows(rng):
    """Returns rows of N, in up to two groups."""
    while True:
        head_dim = rng.choice((2, 3, 4))
        inner = rng.choice((1, 2, 3)), head_dim * rng.choice((1, 2))
        outer = rng.choice((1, 2, 3)), inner[0] * inner[1] + rng.choice((0, 2, 5))
        heads = tuple(h for h in (outer, inner) if h[0] > 1)
        found = Rows(rng.randrange(N), heads, head_dim)
        if max(found.indices()) < N:
            return found


def in_order(rows):
    """Returns row numbers [heads, head_dim]."""
    at = torch.tensor([rows.first])
    for count, step in (*rows.heads, (rows.head_dim, 1)):
        at = (at[:, None] + torch.arange(count) * step).flatten()
    return at.view(rows.num_heads, rows.head_dim)


@pytest.mark.parametrize("scales", [(1, 1), (2, 1), (2, 3), (1, 384)])
def test_a_scale_of_blocks_is_the_view_that_repeats_it(scales):
    """A scale by blocks equals the view that repeats it, because equal views have equal effects."""
    x, weight = value("input", torch.ones(T, 256)), value("constant", torch.ones(256, 384))
    scale, one = value("constant", torch.ones(scales)), value("constant", torch.ones(1, 1))
    of = value("aten._scaled_mm", torch.ones(T, 384), x.whole, weight.whole, one.whole, scale.whole)
    repeats = 256 // scales[0], 384 // scales[1]
    apart = effects.unsqueeze(effects.unsqueeze(scale.whole.effect, 2), 1)
    spread = effects.expand(apart, (scales[0], repeats[0], scales[1], repeats[1]))
    expected = effects.permute(effects.reshape(spread, (256, 384)), (1, 0))
    found = match_gemm(of)
    assert found is not None
    assert found.weight_scale == View(scale, expected)


@pytest.mark.parametrize("block", range(4))
def test_rows_of_a_weight(block):
    rng = random.Random(block)
    weight = numbers(N, 3)
    for _ in range(50):
        rows = random_rows(rng)
        view = rows.of(value("constant", weight).whole)
        assert view.shape == (*rows.shape, 3)
        assert torch.equal(held(view, weight).view(-1, rows.head_dim, 3), weight[in_order(rows)])


@pytest.mark.parametrize("block", range(4))
def test_views_of_rows_are_views_of_the_output(block):
    """Random views of some heads are converted to views of the output. A view that contains other
    rows is refused."""
    rng = random.Random(block)
    flat = numbers(T, N)
    taken = 0
    for _ in range(60):
        rows = random_rows(rng)
        output = flat[:, in_order(rows)]
        heads = [effects.coalesce([Atom(1, step, count)]) for count, step in rows.heads]
        dims = ((Atom(0, 1, T),), *heads, (Atom(1, 1, rows.head_dim),))
        tensor, effect = (
            selected(Effect(dims, (0, rows.first)), flat),
            Effect(dims, (0, rows.first)),
        )
        try:
            for _ in range(rng.randrange(5)):
                tensor, effect = random_view(tensor, effect, rng)
            restated = rows.restate(effect, (T,))
        except InexpressibleError:
            continue
        taken += 1
        assert torch.equal(selected(restated, output), tensor)
    assert taken > 30


@pytest.mark.parametrize("block", range(4))
def test_other_rows_are_never_restated(block):
    rng = random.Random(block)
    numbered = torch.arange(N).expand(T, N)
    refused = 0
    for _ in range(200):
        rows = random_rows(rng)
        low = rng.randrange(N)
        effect = effects.narrow(effects.identity((T, N)), 1, low, rng.randint(1, N - low))
        inside = rows.indices().issuperset(selected(effect, numbered).flatten().tolist())
        try:
            restated = rows.restate(effect, (T,))
        except InexpressibleError:
            refused += 1
            continue
        assert inside
        assert torch.equal(
            selected(restated, numbered[:, in_order(rows)]), selected(effect, numbered)
        )
    assert refused > 100


@pytest.mark.parametrize("block", range(4))
def test_heads_are_read_back_from_their_view(block):
    rng = random.Random(block)
    for _ in range(50):
        rows = random_rows(rng)
        heads = [effects.coalesce([Atom(1, step, count)]) for count, step in rows.heads]
        layout = Effect(((Atom(0, 1, T),), *heads, (Atom(1, 1, rows.head_dim),)), (0, rows.first))
        found = heads_of(layout, 1, rows.head_dim)
        assert found is not None
        assert torch.equal(in_order(found), in_order(rows))


def test_what_is_left():
    assert rest_of(24, Rows(0, ((2, 4),), 4).indices(), 4) == Rows(8, ((4, 4),), 4)
    # The order is 4, then 8, then 4.
    assert rest_of(24, Rows(4, ((2, 12),), 4).indices(), 4) is None
    every_third = frozenset(r for h in range(2) for r in range(12 * h + 4, 12 * h + 12))
    assert rest_of(24, every_third, 4) == Rows(0, ((2, 12),), 4)
    grouped = frozenset(r for h in range(2) for r in range(12 * h + 8, 12 * h + 12))
    assert rest_of(24, grouped, 4) == Rows(0, ((2, 12), (2, 4)), 4)
    assert rest_of(24, frozenset(range(24)), 4) is None
    assert rest_of(24, frozenset(range(2)), 4) is None


# --- bias and joined weights ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(N,), (1, N), (3, 8), (8,), (3, 1), (1, 3, 8)])
def test_a_bias_by_feature(shape):
    bias = numbers(*shape)
    by_head = (len(shape) > 1 and shape[-2:] != (1, N)) or shape == (8,)
    effect = effects.identity((T, N))
    target = effects.reshape(effect, (T, 3, 8)) if by_head else effect
    found = bias_rows(value("constant", bias).whole, target, 1)
    assert found is not None
    rows, first = found
    wide = torch.zeros(target.shape).add(bias)[0].flatten()
    assert first == 0
    assert torch.equal(held(rows, bias), wide)


def test_a_bias_of_some_of_the_features():
    bias = numbers(2, 4)
    part = effects.reshape(effects.narrow(effects.identity((T, N)), 1, 8, 8), (T, 2, 4))
    found = bias_rows(value("constant", bias).whole, part, 1)
    assert found is not None
    assert found[1] == 8
    assert torch.equal(held(found[0], bias), bias.flatten())


@pytest.mark.parametrize("shape", [(T, N), (T, 1), (2, T, N)])
def test_what_varies_by_token_is_no_bias(shape):
    bias = value("constant", numbers(*shape)).whole
    assert bias_rows(bias, effects.identity((T, N)), 1) is None


def test_the_piece_that_holds_a_view():
    pieces = [numbers(8, 3, start=s) for s in (0, 100, 200)]
    views = tuple(value("constant", p).whole for p in pieces)
    joined = value("aten.cat", torch.cat(pieces), views, 0)
    for at, piece in enumerate(pieces):
        inside = View(joined, effects.narrow(effects.identity((24, 3)), 0, 8 * at + 2, 4))
        found = piece_of(inside)
        assert found.value is views[at].value
        assert torch.equal(held(found, piece), piece[2:6])
    across = View(joined, effects.narrow(effects.identity((24, 3)), 0, 6, 4))
    assert piece_of(across) is across


def test_a_part_that_a_concatenation_makes_wider_is_none_of_its_pieces():
    narrow, wide = torch.ones(4, 3, dtype=torch.int8), torch.ones(2, 3, dtype=torch.int64)
    joined = returned(lambda x, y: torch.cat((x, y)), narrow, wide)
    assert piece_of(joined.narrow(0, 0, 4)).value is joined.value
    assert piece_of(joined.narrow(0, 4, 2)).value.op == "input"
