"""Tests that the work on a graph grows only with the number of its nodes. The tests count calls,
because seconds depend on the machine."""

from __future__ import annotations

import cProfile

import pytest
import torch
import torch.nn.functional as F

from tests.models.large import STRUCTURES
from tilewright.compiler.dataflow.build import build_view
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.patterns.language import find, registered

SMALL, LARGE = 24, 96


def calls(structure, pieces):
    """Returns the number of Python calls of `fuse` for each node of a graph."""
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
    calls(structure, 2)  # work that is done only once
    assert calls(structure, LARGE) < 1.25 * calls(structure, SMALL)


def layers_of_attention(x, weight, caches, slots):
    """Has a layer for each pair of caches [slots, 1, 16]. No layer rotates, so that a query is
    recognised only because it attends to the layer's cache."""
    for k_cache, v_cache in caches:
        q, k, v = (F.linear(x, w)[:, None] for w in weight)
        k_cache[slots] = k
        v_cache[slots] = v
        y = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k_cache, v_cache)))
        x = x + y[0]
    return x


def calls_for_queries(layers):
    """Returns the number of Python calls of `qkv_cache` for each layer."""
    found = []

    def backend(gm, inputs):
        flow = build_view(gm.graph)
        profiler = cProfile.Profile()
        profiler.enable()
        matches = find(flow, registered(["qkv_cache"])).matches
        profiler.disable()
        assert len(matches) == layers
        found.append(sum(entry.callcount for entry in profiler.getstats()) / layers)
        return gm.forward

    torch._dynamo.reset()
    caches = [[torch.zeros(8, 1, 16) for _ in range(2)] for _ in range(layers)]
    args = (torch.zeros(2, 16), torch.zeros(3, 16, 16), caches, torch.arange(2))
    with torch.no_grad():
        torch.compile(layers_of_attention, backend=backend)(*args)
    return found[0]


def test_a_query_is_found_in_its_own_layer():
    calls_for_queries(2)  # work that is done only once
    assert calls_for_queries(24) < 1.2 * calls_for_queries(4)
