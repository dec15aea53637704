"""Compares integers that are linear in their indices, and comparisons of such integers, with
PyTorch's results."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import arange, diff, full, ones

from tests.compiler.flow_check import returned
from tests.patterns.test_effects import random_view
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.recognise.lines import Compared, line_of, truth_of

X = torch.zeros(2)


def told(line, shape):
    """Returns the integers that a line describes."""
    total = torch.full(shape, line.offset)
    for dim, slope in enumerate(line.slopes):
        steps = arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
        total = total + slope * steps
    return total


def grid(step=4):
    return arange(0, 3 * step, step)[:, None] + arange(4)


LINES = {
    "range": lambda x: arange(3, 11, 2),
    "transposed": lambda x: arange(12).view(3, 4).t(),
    "places of pages": lambda x: grid().flatten(),
    "some of them": lambda x: grid().flatten()[4:],
    "of three dimensions": lambda x: (arange(0, 24, 12)[:, None, None] + grid()).flatten(),
    "with a gap": lambda x: grid(5).view(3, 2, 2).flatten(1),
    "differences": lambda x: 5 - arange(4),
    "a difference of two": lambda x: arange(6).view(3, 2) - arange(2),
    "cast": lambda x: arange(6).to(torch.int32),
    "one number": lambda x: full((2, 3), 7),
    "expanded": lambda x: arange(3)[:, None].expand(3, 4),
    "steps of a range": lambda x: diff(arange(2, 12, 2), prepend=full((1,), 0)),
    "steps of rows": lambda x: diff(grid(), dim=0, prepend=(arange(4) - 4)[None]),
    "running sum": lambda x: ones(2, 4, dtype=torch.int64).cumsum(-1),
    "running sum of rows": lambda x: full((3, 2), 5).cumsum(0),
    "running sum of truths": lambda x: (arange(4) <= arange(4)).cumsum(0),
    "taken": lambda x: arange(10, 30, 2)[arange(5) + 1],
    "taken from two": lambda x: grid()[arange(3)[:, None], arange(2, 4)],
    "one number taken": lambda x: full((3,), 4)[x.long()],
    "a column taken": lambda x: arange(3)[:, None].expand(3, 4)[arange(2), x.long()],
}
OTHERS = {
    "pages with gaps": lambda x: grid(5).flatten(),
    "in another order": lambda x: grid().t().flatten(),
    "twice as much": lambda x: torch.add(arange(4), arange(4), alpha=2),
    "floats": lambda x: arange(4.0),
    "floats cast": lambda x: arange(4.0).long(),
    "integers cast": lambda x: arange(4).float(),
    "halves": lambda x: full((2,), 0.5),
    "inputs": lambda x: x.long() + arange(2),
    "steps from elsewhere": lambda x: diff(arange(2, 12, 2), prepend=full((1,), 1)),
    "steps of steps": lambda x: diff(arange(6), 2, prepend=full((1,), -1)),
    "running sum of a range": lambda x: arange(4).cumsum(0),
    "taken from the end": lambda x: arange(5)[arange(-2, 2)],
    "taken backwards": lambda x: arange(5)[4 - arange(3)],
    "rows taken": lambda x: grid()[arange(2)],
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_what_the_tensor_holds(name):
    view, expected = returned(LINES[name], X), LINES[name](X)
    line = line_of(view)
    assert line is not None
    assert torch.equal(told(line, expected.shape), expected.long())


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_line(name):
    assert line_of(returned(OTHERS[name], X)) is None


@pytest.mark.parametrize("seed", range(4))
def test_random_views_of_a_line(seed):
    rng = random.Random(seed)
    known = 0
    view = returned(LINES["of three dimensions"], X)
    for _ in range(40):
        tensor, effect = LINES["of three dimensions"](X), view.effect
        for _ in range(4):
            with contextlib.suppress(InexpressibleError):
                tensor, effect = random_view(tensor, effect, rng)
        line = line_of(view.value.whole.through(effect))
        if line is not None:
            known += 1
            assert torch.equal(told(line, tensor.shape), tensor)
    assert known > 20


TRUTHS = {
    "below": (lambda x: arange(4) < arange(4) + 1, True),
    "not below": (lambda x: arange(4) < arange(4), False),
    "at most": (lambda x: arange(4) <= arange(4), True),
    "not at most": (lambda x: arange(4) <= arange(4) - 1, False),
    "above": (lambda x: arange(4) + 1 > arange(4), True),
    "not above": (lambda x: arange(4) > arange(4), False),
    "at least": (lambda x: arange(4) >= arange(4), True),
    "not at least": (lambda x: arange(4) >= arange(4) + 1, False),
    "equal": (lambda x: arange(4) == arange(4), True),
    "not equal": (lambda x: arange(4) == arange(4) + 1, False),
    "unequal": (lambda x: arange(4) != arange(4) + 1, True),
    "not unequal": (lambda x: arange(4) != arange(4), False),
    "both": (lambda x: (arange(4) <= arange(4)) & (arange(4) != arange(4) + 1), True),
    "not the other": (lambda x: (arange(2) <= x.long()) & (arange(2) != arange(2)), False),
    "inverted": (lambda x: ~(arange(4) != arange(4)), True),
    "a number": (lambda x: full((3,), 2) > 1, True),
}
#: Comparisons of two lines, which are true for some elements and false for others.
COMPARED = {
    "<=": lambda x: arange(4)[None] <= arange(3)[:, None] + 1,
    "<": lambda x: arange(4)[None] < arange(3)[:, None] + 1,
    ">=": lambda x: arange(4)[None] >= arange(3)[:, None] + 1,
    ">": lambda x: arange(4)[None] > arange(3)[:, None] + 1,
    "not <=": lambda x: ~(arange(4)[None] <= arange(3)[:, None] + 1),
    "not >": lambda x: ~(arange(4)[None] > arange(3)[:, None]),
    "and true": lambda x: (arange(4)[None] > arange(3)[:, None]) & (arange(4) == arange(4)),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_truth_of_all_elements(name):
    function, expected = TRUTHS[name]
    assert bool(function(X).all()) == expected
    assert truth_of(returned(function, X)) is expected


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_of_lines(name):
    expected = COMPARED[name](X)
    found = truth_of(returned(COMPARED[name], X))
    assert isinstance(found, Compared)
    low, high = (told(line_of(side), expected.shape) for side in (found.low, found.high))
    assert torch.equal(low <= high + found.slack, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: arange(4) == 2,
        lambda x: x > 1,
        lambda x: ~arange(4),
        lambda x: (arange(2) <= x.long()) & (arange(2) >= x.long()),
        lambda x: x.long().cumsum(0) < 1.5,
    ],
)
def test_what_is_not_known_is_neither_true_nor_false(function):
    assert truth_of(returned(function, X)) is None
