"""Tests whether the elements of a view's last dimension are adjacent in memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Dataflow

#: For each tensor and view of it, whether the elements of the last dimension are neighbours.
ROWS = {
    "whole": (torch.empty(4, 6), lambda e: e, True),
    "turned": (torch.empty(4, 6), lambda e: effects.permute(e, (1, 0)), False),
    "turned in memory": (torch.empty(6, 4).T, lambda e: effects.permute(e, (1, 0)), True),
    "a part": (torch.empty(4, 6), lambda e: effects.narrow(e, 1, 2, 3), True),
    "every other": (torch.empty(4, 6), lambda e: effects.narrow(e, 1, 0, 3, 2), False),
    "every other of every other": (
        torch.empty(4, 12)[:, ::2], lambda e: effects.narrow(e, 1, 0, 3, 2), False,
    ),
    "joined axes": (torch.empty(2, 3, 4), lambda e: effects.reshape(e, (2, 12)), True),
    "joined with a gap": (torch.empty(2, 3, 8)[..., :4], lambda e: effects.reshape(e, (2, 12)),
                          False),
    "joined the other way": (
        torch.empty(2, 3, 4), lambda e: effects.reshape(effects.permute(e, (0, 2, 1)), (2, 12)),
        False,
    ),
    "one element": (torch.empty(4, 1), lambda e: e, True),
    "repeated": (torch.empty(4, 1), lambda e: effects.expand(e, (4, 6)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_dense_where_elements_are_neighbours(name):
    held, view, dense = ROWS[name]
    node = SimpleNamespace(meta={"example_value": held})
    seen = SimpleNamespace(effect=view(effects.identity(held.shape)), value=None)
    flow = SimpleNamespace(home=lambda value: node)
    assert Dataflow.rows_are_dense(flow, seen) == dense
