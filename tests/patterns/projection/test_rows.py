"""Compares the rows of heads with PyTorch's views of numbered rows."""

from __future__ import annotations

import random

import pytest
import sympy
import torch

from tests.compiler.flow_check import selected
from tests.patterns.test_effects import random_view
from tilewright.patterns import effects
from tilewright.patterns.effects import Atom, Effect, InexpressibleError
from tilewright.patterns.projection.rows import Rows, heads_of, rest_of

N = 24
WHOLE = effects.identity((2, N))


def narrowed(start, length, step=1):
    return effects.narrow(WHOLE, 1, start, length, step)


def grouped():
    """Returns the first two of each three heads."""
    return effects.narrow(effects.reshape(WHOLE, (2, 2, 3, 4)), 2, 0, 2)


LAYOUTS = {
    "heads": (effects.reshape(WHOLE, (2, 6, 4)), None, Rows(0, ((6, 4),), 4)),
    "heads of a given size": (WHOLE, 4, Rows(0, ((6, 4),), 4)),
    "one head": (narrowed(8, 8), None, Rows(8, (), 8)),
    "a part": (narrowed(8, 8), 4, Rows(8, ((2, 4),), 4)),
    "in groups": (grouped(), None, Rows(0, ((2, 12), (2, 4)), 4)),
    "columns first": (
        effects.permute(effects.reshape(WHOLE, (2, 6, 4)), (0, 2, 1)), None, Rows(0, ((6, 4),), 4),
    ),
    "split columns": (effects.reshape(WHOLE, (2, 6, 2, 2)), 4, Rows(0, ((6, 4),), 4)),
    "too large heads": (effects.reshape(WHOLE, (2, 6, 4)), 5, None),
    "no divisor": (WHOLE, 16, None),
    "every other row": (narrowed(0, 12, 2), None, None),
    "every other row of a given size": (narrowed(0, 12, 2), 2, None),
    "no row": (Effect(((Atom(0, 1, 2),),), (0, 3)), None, None),
    "a symbol of rows": (Effect(((Atom(0, 1, 2),), (Atom(1, 1, sympy.Symbol("n")),)), (0, 0)), 4,
                         None),
    "a symbol before": (Effect(WHOLE.dims, (0, sympy.Symbol("n"))), 4, None),
    "three levels": (
        effects.narrow(effects.narrow(effects.reshape(effects.identity((2, 54)), (2, 3, 3, 3, 2)),
                                      2, 0, 2), 3, 0, 2),
        2, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_view_that_are_heads(name):
    layout, head_dim, expected = LAYOUTS[name]
    assert heads_of(layout, 1, head_dim) == expected


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (range(8), Rows(8, ((4, 4),), 4)),
        (range(8, 16), Rows(0, ((2, 16), (2, 4)), 4)),
        (range(16, 40), Rows(0, ((4, 4),), 4)),
        ((), Rows(0, ((6, 4),), 4)),
        (range(-4, 20), Rows(20, (), 4)),
        (range(24), None),
        (range(6), None),
        (range(4, 8), None),
        ((*range(4), *range(8, 16), *range(20, 24)), Rows(4, ((2, 12),), 4)),
        ((*range(4), *range(8, 12), *range(16, 20)), Rows(4, ((3, 8),), 4)),
        ((*range(4, 8), *range(12, 20)), None),
    ],
    ids=str,
)
def test_rows_that_are_left_are_heads_at_equal_distances(taken, expected):
    assert rest_of(N, frozenset(taken), 4) == expected


HEADS = (
    Rows(4, ((3, 4),), 4),
    Rows(0, ((2, 12), (2, 4)), 4),
    Rows(8, (), 8),
    Rows(2, ((2, 8),), 6),
)


@pytest.mark.parametrize("rows", HEADS, ids=str)
def test_a_view_of_heads_is_restated_as_one_of_the_ops_output(rows):
    tokens = (2, 3)
    x = torch.arange(6 * N).view(*tokens, N)
    places = [rows.first + d for d in range(rows.head_dim)]
    for count, step in reversed(rows.heads):
        places = [at + i * step for i in range(count) for at in places]
    out = x[..., places].view(6, rows.num_heads, rows.head_dim)
    assert rows.indices() == set(places)
    start = (0, 0, rows.first)
    whole = Effect(((Atom(0, 1, 2),), (Atom(1, 1, 3),), *rows.dims(2)), start)
    seen = out.view(*tokens, rows.num_heads, rows.head_dim)
    assert torch.equal(selected(whole, x), seen)
    for seed in range(40):
        rng, tensor, effect = random.Random(seed), seen, whole
        for _ in range(4):
            try:
                tensor, effect = random_view(tensor, effect, rng)
            except InexpressibleError:
                break
        try:
            restated = rows.restate(effect, tokens)
        except InexpressibleError:
            assert seed, "the view of whole heads is not restated"
            continue
        assert torch.equal(selected(restated, out), tensor), seed


@pytest.mark.parametrize("start", [0, 3, 20])
def test_a_view_of_other_rows_is_not_restated(start):
    effect = Effect(((Atom(0, 1, 2),), (Atom(1, 1, 4),)), (0, start))
    with pytest.raises(InexpressibleError):
        Rows(4, ((3, 4),), 4).restate(effect, (2,))
