"""Checks a rewritten site, and the whole graph once at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tilewright.compiler.dataflow.spelling import shape_of
from tilewright.patterns.language import Match


class LintError(RuntimeError):
    """Raised if a rewrite left the graph inconsistent. The graph must then not be used."""


def check_site(
    match: Match, node: fx.Node, replacements: Sequence[tuple[fx.Node, fx.Node]]
) -> None:
    """Checks the order of nodes around one fused op, the users of replaced nodes, the written
    tensors and the metadata. Raises LintError if any of these is wrong."""
    for operand in node.all_input_nodes:
        _require(operand < node, f"{node.name} uses {operand.name} before it is computed")
    for _, new in replacements:
        for user in new.users:
            _require(new < user, f"{user.name} uses {new.name} before it is computed")
    written = {s.store.memory.root for s in match.stores if s.store is not None}
    caches = {a for a in node.all_input_nodes if a in written}
    _require(caches == written, f"{node.name} writes {caches}, but the match writes {written}")
    for store in match.stores:
        _require(store.node._erased, f"{store.node.name} still writes what {node.name} writes")
    for old, new in replacements:
        _same_metadata(old, new)


def _same_metadata(old: fx.Node, new: fx.Node) -> None:
    tensor, expected = new.meta["example_value"], old.meta["example_value"]
    same = (
        isinstance(tensor, torch.Tensor)
        and shape_of(tensor) == shape_of(expected)
        and tensor.dtype == expected.dtype
        and tensor.device == expected.device
    )
    if not same:  # formatting a tensor is slow
        raise LintError(f"{new.name} is {tensor}, expected {expected} for {old.name}")


def check_graph(graph: fx.Graph) -> None:
    """Runs fx's own lint: topological order, ownership, names."""
    graph.lint()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LintError(message)
