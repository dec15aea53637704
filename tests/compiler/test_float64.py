"""Tests the report of a graph that cannot be computed in float64."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tilewright.compiler.verify.float64 import NoFloat64Error, run_in_float64


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, NotImplementedError])
def test_an_operator_without_float64_is_named(kind):
    """torch._scaled_mm raises ValueError for scales in float64."""

    def single_alone(x):
        if x.dtype == torch.float64:
            raise kind("expected float32")
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(single_alone, (graph.placeholder("x"),)))
    module = fx.GraphModule({}, graph)
    with pytest.raises(NoFloat64Error, match=r"\A[^\n]*single_alone[^\n]*expected float32[^\n]*\Z"):
        run_in_float64(module, [torch.ones(2)])
