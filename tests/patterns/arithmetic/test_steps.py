"""Tests that reductions, clamps and fills are read as PyTorch reads their arguments, by position or
name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.patterns.recognise.test_gemm import value
from tilewright.patterns.arithmetic.constants import constant_of, one_number
from tilewright.patterns.arithmetic.steps import (
    chosen_by_mask,
    clamp_bounds,
    constant_factor,
    filled_with,
    floor_quotient,
    is_filled,
    keeps_dim,
    reduced_dims,
    start_and_step,
)

X = torch.arange(24.0).view(2, 3, 4) - 11
GIVEN = value("input", X)


def made(op, *args, **kwargs):
    """Returns (the value of an operation, the result that PyTorch computes for it)."""
    function = getattr(torch, op.removeprefix("new_"), None) or getattr(torch.nn.functional, op)
    if op.startswith("new_"):
        function = lambda x, *a, **k: getattr(x, op)(*a, **k)  # noqa: E731
    given = [X if a is GIVEN else a for a in args]
    result = function(*given, **kwargs)
    views = tuple(a.whole if a is GIVEN else a for a in args)
    return replace(value(f"aten.{op}", result, *views), kwargs=kwargs), result


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((-1,), {}),
        (((0, -1),), {}),
        ((), {"dim": -2}),
        (((1,), True), {}),
        ((2,), {"keepdim": True}),
    ],
)
def test_reductions(args, kwargs):
    found, result = made("sum", GIVEN, *args, **kwargs)
    dims, kept = reduced_dims(found), keeps_dim(found)
    assert torch.equal(X.sum(dims, keepdim=kept), result)


def test_a_reduction_without_dimensions_names_none():
    assert reduced_dims(made("sum", GIVEN)[0]) == ()
    scalar = value("aten.mean", X.sum(), value("input", X.sum()).whole, -1)
    assert reduced_dims(scalar) == ()


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("clamp", (-3, 5), {}),
        ("clamp", (), {"max": 2.0}),
        ("clamp", (-1,), {"max": 4}),
        ("clamp", (None, 4), {}),
        ("clamp_min", (1,), {}),
        ("clamp_max", (), {"max": 1}),
        ("hardtanh", (-2.0,), {"max_val": 3.0}),
        ("hardtanh", (), {"max_val": 3.0}),
        ("hardtanh", (), {}),
    ],
)
def test_clamps(op, args, kwargs):
    found, result = made(op, GIVEN, *args, **kwargs)
    low, high = clamp_bounds(found)
    assert torch.equal(X.clamp(low, high), result)
    assert clamp_bounds(GIVEN) is None


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("zeros", ((2, 2),), {}),
        ("zeros_like", (GIVEN,), {}),
        ("new_ones", (GIVEN, (3,)), {}),
        ("full", ((2, 2), 3), {}),
        ("full", (), {"size": (2, 2), "fill_value": 3}),
        ("full_like", (GIVEN, 1), {}),
        ("full_like", (GIVEN,), {"fill_value": 3}),
        ("new_full", (GIVEN, (2,), 0), {}),
        ("tensor", (1.0,), {}),
    ],
)
def test_fills(op, args, kwargs, number):
    found, result = made(op, *args, **kwargs)
    assert is_filled(found.whole, number) == bool((result == number).all())


def test_a_fill_is_not_that_of_the_tensor_it_is_shaped_like():
    zeros = value("aten.zeros", torch.zeros(2), (2,))
    threes = value("aten.full_like", torch.full((2,), 3.0), zeros.whole)
    threes = replace(threes, kwargs={"fill_value": 3.0})
    assert is_filled(threes.whole, 3)
    assert not is_filled(threes.whole, 0)
    assert not is_filled(value("input", torch.zeros(2)).whole, 0)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((9,), {}),
        ((), {"end": 9}),
        ((2, 9), {}),
        ((2,), {"end": 9}),
        ((), {"start": 2, "end": 9}),
        ((2, 9, 3), {}),
        ((2, 9), {"step": 3}),
        ((2,), {"end": 9, "step": 3}),
    ],
)
def test_numbers_that_count_up(args, kwargs):
    found, result = made("arange", *args, **kwargs)
    start, step = start_and_step(found)
    assert torch.equal(start + step * torch.arange(result.numel()), result)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("number", [0.3, 2.7, 1, True])
def test_a_fill_is_what_the_dtype_holds_of_it(number, dtype):
    found, result = made("full", (2,), number, dtype=dtype)
    assert filled_with(found.whole) == result[0].item()


@pytest.mark.parametrize("op", ["mul", "floor_divide", "remainder"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
@pytest.mark.parametrize("number", [100, 2, 0.5, 0])
def test_constants_are_computed_in_their_dtype(op, dtype, number):
    held = torch.full((), 7, dtype=dtype)
    given = replace(value("aten.full", held, (), 7), kwargs={"dtype": dtype})
    if number == 0 and op != "mul":
        result = held.clone()
        assert constant_of(value(f"aten.{op}", result, given.whole, number).whole) is None
        return
    result = getattr(torch, op)(held, number)
    found = constant_of(value(f"aten.{op}", result, given.whole, number).whole)
    assert found is not None
    assert found.item() == result.item()


def test_where_and_masked_fill_choose_by_a_mask():
    mask = value("input", X > 0)
    where = value("aten.where", X, mask.whole, GIVEN.whole, 0.0)
    fill = value("aten.masked_fill", X, GIVEN.whole, mask.whole, 0.0)
    assert chosen_by_mask(where) == (mask.whole, GIVEN.whole, 0.0)
    assert chosen_by_mask(fill) == (mask.whole, 0.0, GIVEN.whole)
    assert chosen_by_mask(value("aten.where", X, mask.whole)) is None
    assert chosen_by_mask(GIVEN) is None


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "divisor"),
    [
        ("floor_divide", (GIVEN, 3), {}, 3),
        ("div", (GIVEN, 3), {"rounding_mode": "floor"}, 3),
        ("div", (GIVEN, 3), {"rounding_mode": "trunc"}, None),
        ("div", (GIVEN, 3), {}, None),
        ("floor_divide", (GIVEN, -3), {}, None),
    ],
)
def test_floor_quotients(op, args, kwargs, divisor):
    found = floor_quotient(made(op, *args, **kwargs)[0])
    assert found == (None if divisor is None else (GIVEN.whole, divisor))


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_constant_factors(factor):
    for op, number in (("mul", factor), ("div", 1 / factor)):
        assert constant_factor(made(op, GIVEN, number)[0]) == (GIVEN.whole, factor)
    one = torch.full((1,), factor)
    tensor = value("aten.full", one, (1,), factor)
    product = value("aten.mul", X * one, tensor.whole, GIVEN.whole)
    assert constant_factor(product) is None
    assert constant_factor(product, one_number) == (GIVEN.whole, factor)
    over = value("aten.div", one / X, tensor.whole, GIVEN.whole)
    assert constant_factor(over, one_number) is None
