"""Tests which products with matrices that an index selects are read as such."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.flow_check import numbers, returned
from tilewright.patterns.lora.product import match_product

SIZES = {"t": 4, "j": 2, "k": 6, "n": 8}


@pytest.mark.parametrize(
    ("equation", "is_read"),
    [
        ("tk,tnk->tn", True),
        ("tjk,tnjk->tn", False),  # a sum over two dimensions
        ("tk,tk->t", False),  # no features
        ("tjk,tnk->tn", False),  # a sum over a dimension that the matrices lack
        ("tk,tnjk->tn", False),  # a sum over a dimension that x lacks
        ("tn,tn->tn", False),  # no sum
    ],
)
def test_one_dimension_is_summed(equation: str, is_read: bool) -> None:
    xs, matrices = equation.partition("->")[0].split(",")
    x = numbers(*(SIZES[name] for name in xs))
    stored = numbers(3, *(SIZES[name] for name in matrices[1:]))
    index = torch.tensor([0, 2, 1, 2])
    view = returned(lambda x, w, i: torch.einsum(equation, x, w[i]), x, stored, index)
    found = match_product(view)
    assert (found is not None) == is_read
    if found is not None:
        assert found.weight.shape == (3, 8, 6)
