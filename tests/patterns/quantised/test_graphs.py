"""Compares what is fused in stored graphs with what was fused before (`tests/graph_net.py`)."""

from __future__ import annotations

from tests.graph_net import check


def test_stored_graphs_are_fused_as_before(pytestconfig) -> None:
    check("quantised", pytestconfig)
