"""Tests whether different indices of a tensor certainly mean different elements, by sizes and
strides."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tilewright.compiler.safety.legality import _has_its_own_elements
from tilewright.patterns.dataflow import Memory


def memory(shape, strides):
    node = fx.Graph().placeholder("cache")
    return Memory(node, True, False, tuple(shape), tuple(strides), 0, torch.float32, 0)


@pytest.mark.parametrize(
    ("shape", "strides", "apart"),
    [
        ((4, 6), (6, 1), True),
        ((4, 6), (1, 4), True),
        ((4, 6), (8, 1), True),
        ((4, 1, 6), (6, 0, 1), True),
        ((4, 6), (5, 1), False),
        ((4, 6), (0, 1), False),
        ((4, 6), (1, 1), False),
    ],
)
def test_numbers(shape, strides, apart):
    assert _has_its_own_elements(memory(shape, strides)) == apart


def symbols(*hints):
    environment = ShapeEnv()
    for number, hint in enumerate(hints):
        source = ConstantSource(f"size{number}")
        symbol = environment.create_symbol(hint, source, DimDynamic.DYNAMIC)
        yield environment.create_symintnode(symbol, hint=hint, source=source)


def test_symbols_that_lie_side_by_side():
    """Tests tensors without gaps: each stride is the product of all sizes inside it. If there are
    gaps, nothing is known."""
    pages, size, width = symbols(5, 7, 11)
    shape = (pages, size, width)
    assert _has_its_own_elements(memory(shape, (size * width, width, 1)))
    assert _has_its_own_elements(memory(shape, (width, pages * width, 1)))
    assert not _has_its_own_elements(memory(shape, (width, width, 1)))
    assert not _has_its_own_elements(memory(shape, (2 * size * width, width, 1)))
    assert not _has_its_own_elements(memory(shape, (size * width, 2 * width, 2)))
