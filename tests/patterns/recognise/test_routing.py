"""Tests which lists are the cells of a map of tokens and experts."""

from __future__ import annotations

import pytest
import torch

from tests.patterns.recognise.test_gemm import value
from tilewright.patterns.dataflow import View
from tilewright.patterns.recognise.routing import by_cell, flat

CELLS = value("input", torch.zeros(4, 6)).whole
ACROSS = flat(CELLS.permute(1, 0))


def applied(view: View, op: str, dtype: torch.dtype = torch.float32) -> View:
    return value(op, torch.zeros(view.shape, dtype=dtype), view).whole


@pytest.mark.parametrize(
    ("view", "of_ones", "is_read"),
    [
        (ACROSS, False, True),
        (applied(ACROSS, "aten.clone"), False, True),
        (applied(ACROSS, "cast", torch.bfloat16), False, True),
        (applied(ACROSS, "cast", torch.int64), False, False),
        (applied(ACROSS, "cast", torch.int64), True, True),
        (applied(ACROSS, "aten.neg"), True, False),
        (flat(CELLS), True, False),
        (CELLS, True, False),
        (value("input", torch.zeros(24)).whole, True, False),
        (flat(value("input", torch.zeros(2, 2, 6)).whole.permute(2, 0, 1)), True, False),
    ],
)
def test_cells_are_listed_expert_by_expert(view: View, of_ones: bool, is_read: bool) -> None:
    assert by_cell(view, of_ones) == (CELLS if is_read else None)
