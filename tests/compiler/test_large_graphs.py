"""Work on a graph grows with its nodes: calls are counted, for seconds depend on the machine."""

from __future__ import annotations

import cProfile

import pytest
import torch

from tests.models.large import STRUCTURES
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options

SMALL, LARGE = 24, 144


def calls(structure, pieces):
    """Python calls of `fuse` for each node of a graph."""
    found = []

    def backend(gm, inputs):
        profiler = cProfile.Profile()
        profiler.enable()
        fuse(gm, Options(inner="eager", target="sm100", everywhere=True))
        profiler.disable()
        found.append(sum(entry.callcount for entry in profiler.getstats()) / len(gm.graph.nodes))
        return gm.forward

    torch._dynamo.reset()
    function, args = structure(pieces)
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(*args)
    return found[0]


@pytest.mark.parametrize("name", ["unbind", "setitems_fresh", "adapters_masked"])
def test_a_node_of_a_large_graph_takes_no_more_calls(name):
    structure = STRUCTURES[name].make
    calls(structure, SMALL)  # what is done once
    assert calls(structure, LARGE) < 1.3 * calls(structure, SMALL)
