"""Index facts against brute force: every conclusion holds at every point of the ranges."""

import itertools
import random

import pytest
import sympy

from tilewright.codegen.emit.index_math import IndexMath


class Expression:
    """A random index expression, its value at a point, and the facts concluded of it."""

    def __init__(self, math_, evaluate, index):
        self.math, self.evaluate, self.index = math_, evaluate, index


def leaves(math_, rng):
    ranges = [(0, rng.choice([1, 3, 7])), (rng.choice([0, 2]), 5), (0, 3)]
    made = []
    for position, (low, high) in enumerate(ranges):
        step = rng.choice([1, 1, 4])
        symbol = math_.symbol(None, low * step, high * step, step)
        points = range(low * step, high * step + 1, step)
        made.append((lambda point, p=position: point[p], symbol, points))
    return made


def grow(math_, rng, parts, depth):
    """A random expression over the leaves, non-negative where it is divided."""
    if depth == 0:
        evaluate, index, _ = rng.choice(parts)
        return evaluate, index
    left, a = grow(math_, rng, parts, depth - 1)
    right, b = grow(math_, rng, parts, depth - 1)
    number = rng.choice([1, 2, 3, 4, 8])
    constant = sympy.Integer(number)
    return rng.choice(
        [
            (lambda p: left(p) + right(p), math_.fit(a + b, "int32")),
            (lambda p: left(p) * number, math_.fit(a * number, "int32")),
            (lambda p: left(p) * number + right(p), math_.fit(a * number + b, "int32")),
            (lambda p: left(p) // number, math_.floordiv(a, constant, "int32")),
            (lambda p: left(p) % number, math_.mod(a, constant, "int32")),
            (lambda p: min(left(p), right(p)), math_.minimum(a, b)),
            (lambda p: max(left(p), right(p)), math_.maximum(a, b)),
            (lambda p: left(p) - right(p) + 64, math_.fit(a - b + 64, "int32")),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_conclusions_hold_everywhere(seed):
    rng = random.Random(seed)
    math_ = IndexMath()
    parts = leaves(math_, rng)
    first, a = grow(math_, rng, parts, 3)
    second, b = grow(math_, rng, parts, 2)
    points = list(itertools.product(*(points for _, _, points in parts)))
    values = [(first(point), second(point)) for point in points]
    low, high = math_.bounds(a)
    assert low <= min(x for x, _ in values)
    assert max(x for x, _ in values) <= high
    divisor = math_.multiple(a)
    assert all(x == 0 if divisor == 0 else x % divisor == 0 for x, _ in values)
    compare = {"<": int.__lt__, "<=": int.__le__, ">": int.__gt__, ">=": int.__ge__}
    compare |= {"==": int.__eq__, "!=": int.__ne__}
    for symbol, function in compare.items():
        decided = math_.decide(symbol, a, b)
        if decided is not None:
            assert all(function(x, y) == decided for x, y in values), symbol


def test_block_of_a_divided_range_is_never_cut():
    math_ = IndexMath()
    n = math_.symbol(None, 0, 2**31 - 1, multiple=16)
    lane = math_.symbol(None, 0, 15)
    start = math_.loop_variable(sympy.Integer(0), n, 16, "int32")
    assert math_.decide("<", math_.fit(start + lane, "int32"), n) is True
    wide = math_.loop_variable(sympy.Integer(0), n, 32, "int32")
    assert math_.decide("<", math_.fit(wide + lane, "int32"), n) is True
    two = math_.symbol(None, 0, 31)
    assert math_.decide("<", math_.fit(wide + two, "int32"), n) is None


def test_nothing_is_concluded_from_a_value_that_may_wrap():
    math_ = IndexMath()
    n = math_.unknown("int32")
    total = math_.fit(n + 1, "int32")
    assert math_.decide(">", total, n) is None
    assert math_.decide(">", math_.fit(n + 1, "int64"), n) is True
    doubled = math_.fit(n * 8, "int32")
    assert math_.multiple(doubled) == 8
    assert math_.floordiv(doubled, sympy.Integer(8), "int32") != n


def test_tiles_of_a_grid():
    math_ = IndexMath()
    tile = math_.symbol(("program_id", 0), 0, 47)
    column = math_.mod(tile, sympy.Integer(6), "int32")
    row = math_.floordiv(tile, sympy.Integer(6), "int32")
    assert math_.bounds(column) == (0, 5)
    assert math_.bounds(row) == (0, 7)
    offset = math_.fit(column * 128 + math_.symbol(None, 0, 127), "int32")
    assert math_.decide("<", offset, sympy.Integer(768)) is True
    assert math_.floordiv(offset, sympy.Integer(128), "int32") == column
    assert math_.decide("<", offset, sympy.Integer(767)) is None


def test_negative_numerators_are_left_alone():
    math_ = IndexMath()
    x = math_.symbol(None, -8, 8)
    quotient = math_.floordiv(x, sympy.Integer(4), "int32")
    assert math_.bounds(quotient) == (-(2**31), 2**31 - 1)


def test_assumptions_end_with_their_scope():
    math_ = IndexMath()
    x = math_.symbol(None, 0, 100)
    with math_.scope():
        math_.assume("<", x, sympy.Integer(10), True)
        assert math_.bounds(x) == (0, 9)
        assert math_.bounds(math_.floordiv(x, sympy.Integer(2), "int32")) == (0, 4)
    assert math_.bounds(x) == (0, 100)
    assert math_.bounds(math_.floordiv(x, sympy.Integer(2), "int32")) == (0, 50)
    with math_.scope():
        math_.assume("<", x, sympy.Integer(10), False)
        assert math_.bounds(x) == (10, 100)


def test_axes_are_told_apart():
    math_ = IndexMath()
    lane = math_.symbol(("arange", 0, 16), 0, 15)
    row, column = math_.relabel(lane, ":,new"), math_.relabel(lane, "new,:")
    assert row == math_.relabel(lane, ":,new")
    assert math_.decide("==", row, column) is None
    assert math_.bounds(row) == (0, 15)
