"""Tests numbers that a graph computes itself and then selects from."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.dataflow.build import build_view
from tilewright.patterns.arithmetic.constants import constant_of


def picked(indices):
    """Returns the numbers that the pattern language reads from a table at the given places."""
    found = []

    def backend(gm, _):
        flow = build_view(gm.graph)
        found.append(constant_of(flow.outputs[0]))
        return gm.forward

    def step(x):
        return torch.arange(8)[torch.tensor(indices)].clone()

    torch._dynamo.reset()
    torch.compile(step, backend=backend)(torch.zeros(1))
    return found[0]


@pytest.mark.parametrize("indices", [[0, 7], [-4, 3], [-8, -1]])
def test_places_count_from_either_end(indices):
    assert picked(indices).tolist() == torch.arange(8)[indices].tolist()
