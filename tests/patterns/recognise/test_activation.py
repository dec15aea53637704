"""Tests the recognition of activations. It must accept any value of a graph without an error."""

from __future__ import annotations

import pytest

from tests.patterns.arithmetic.test_steps import GIVEN, X, made
from tests.patterns.recognise.test_gemm import value
from tilewright.patterns.recognise.activation import match_activation


def test_a_number_in_place_of_a_tensor_is_no_activation():
    """A number in place of a tensor is no activation. The graphs have `2 ** x`, alone and in a
    product."""
    power = value("aten.pow", 2.0**X, 2.0, GIVEN.whole)
    assert match_activation(power.whole) is None
    product = value("aten.mul", X * 2.0**X, GIVEN.whole, power.whole)
    assert match_activation(product.whole) is None


@pytest.mark.parametrize("name", ["silu", "gelu", "relu"])
def test_of_one_argument(name):
    found, _ = made(name, GIVEN)
    assert match_activation(found.whole) is not None
