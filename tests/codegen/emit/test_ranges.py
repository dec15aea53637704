"""Compares ranges of integers with brute force: every conclusion must hold at every point."""

import itertools
import operator
import random

import pytest

from tilewright.codegen.emit.ranges import MIRRORED, Range, loop_range

INT32 = Range.of("int32")


def leaves(rng):
    """Yields (index of a coordinate of the point, range, values of the range) for each leaf."""
    made = []
    for position, high in enumerate((rng.choice([0, 3, 7]), 5, 3)):
        step = rng.choice([1, 1, 4])
        low = rng.choice([0, 2]) if high > 2 else 0
        points = range(low * step, high * step + 1, step)
        made.append(
            (lambda point, p=position: point[p], Range(low * step, high * step, step), points)
        )
    return made


def grow(rng, parts, depth):
    """Returns a random expression over the leaves, as a function of a point, and the expression's
    range."""
    if depth == 0:
        evaluate, known, _ = rng.choice(parts)
        return evaluate, known
    left, a = grow(rng, parts, depth - 1)
    right, b = grow(rng, parts, depth - 1)
    number = rng.choice([1, 2, 3, 4, 8])
    constant = Range.constant(number)
    return rng.choice(
        [
            (lambda p: left(p) + right(p), a + b),
            (lambda p: left(p) * number, a * constant),
            (lambda p: left(p) * number + right(p), a * constant + b),
            (lambda p: left(p) // number, a // constant),
            (lambda p: left(p) % number, a % constant),
            (lambda p: min(left(p), right(p)), a.minimum(b).limited(a).limited(b)),
            (lambda p: max(left(p), right(p)), a.maximum(b)),
            (lambda p: left(p) - right(p) + 64, a - b + Range.constant(64)),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_conclusions_hold_everywhere(seed):
    rng = random.Random(seed)
    parts = leaves(rng)
    (first, a), (second, b) = grow(rng, parts, 3), grow(rng, parts, 2)
    points = list(itertools.product(*(points for _, _, points in parts)))
    pairs = [(first(point), second(point)) for point in points]
    holds(a, [x for x, _ in pairs])
    for compare in MIRRORED:
        decided = a.compares(compare, b)
        if decided is not None:
            assert all(compare(x, y) == decided for x, y in pairs), compare
        for truth in (True, False):
            holds(a.given(compare, b, truth), [x for x, y in pairs if compare(x, y) == truth])


def holds(known, values):
    assert all(known.low <= x <= known.high for x in values)
    assert all(x == 0 if known.multiple == 0 else x % known.multiple == 0 for x in values)


@pytest.mark.parametrize(
    "bounds", list(itertools.product((0, 1, 8), (0, 7, 8, 32), (1, 4, 16))), ids=str
)
def test_the_variable_of_a_loop(bounds):
    start, stop, step = bounds
    known = loop_range(Range.constant(start), Range.constant(stop), step)
    assert (known is None) == (not range(start, stop, step))
    if known is not None:
        holds(known, range(start, stop, step))


def test_block_of_a_divided_range_is_never_cut():
    n, lane = Range(0, 2**31 - 1, 16), Range(0, 15)
    start = loop_range(Range.constant(0), n, 16)
    assert (start + lane).compares(operator.lt, n) is True
    assert (start + Range(0, 31)).compares(operator.lt, n) is None
    wide = loop_range(Range.constant(0), n, 32)
    assert (wide + lane).compares(operator.lt, n) is True
    assert (wide + lane).compares(
        operator.lt, Range(0, 2**31 - 1, 16)
    ) is None  # it is another number


def test_what_the_smaller_of_two_numbers_never_exceeds():
    n, m = Range(0, 1000), Range(5, 2000)
    least = n.minimum(m).limited(n).limited(m)
    first = loop_range(Range.constant(0), least, 1)
    assert all(first.compares(operator.lt, other) for other in (least, n, m))
    assert n.compares(operator.gt, first) is True
    assert (first + Range(0, 1)).compares(operator.lt, n) is None


def test_nothing_is_concluded_from_a_value_that_may_wrap():
    total = (INT32 + Range.constant(1)).fit("int32")
    assert total.compares(operator.gt, INT32) is None
    doubled = (INT32 * Range.constant(8)).fit("int32")
    assert (doubled.low, doubled.high, doubled.multiple) == (-(2**31), 2**31 - 1, 8)
    limited = INT32.limited(Range(0, 3))
    assert not (limited + Range.constant(1)).fit("int32").limits


def test_tiles_of_a_grid():
    tile = Range(0, 47)
    column = tile % Range.constant(6)
    assert (column.low, column.high) == (0, 5)
    offset = column * Range.constant(128) + Range(0, 127)
    assert offset.compares(operator.lt, Range.constant(768)) is True
    assert offset.compares(operator.lt, Range.constant(767)) is None
    assert tile % Range.constant(48) is tile


def test_negative_numerators_are_left_alone():
    quotient = (Range(-8, 8) // Range.constant(4)).fit("int32")
    assert (quotient.low, quotient.high) == (INT32.low, INT32.high)


def test_a_range_is_one_value():
    x = Range(0, 15)
    assert x.compares(operator.eq, x) is True
    assert x.compares(operator.eq, Range(0, 15)) is None
