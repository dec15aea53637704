"""Inlines the bodies of wrappers that compute nothing themselves.

    (y,) = tag_activation_checkpoint(body, x, w)      ⇒   y = body(x, w), node by node

`torch.utils.checkpoint` decides which values are kept for the backward pass, and a nested compile
region is compiled once for all its calls. In a forward pass, both only run their bodies. Other
operators that hold a graph (`torch.cond`, an autograd.Function that records) stay, and a miss names
the sites that they hide.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import attribute_of
from tilewright.compiler.dataflow.build import build_view
from tilewright.compiler.dataflow.memory import LIES_WITH
from tilewright.compiler.safety.legality import check_legality
from tilewright.compiler.safety.modes import GRAD_HINT, Modes
from tilewright.patterns.language import Miss, Pattern, Stage, find

# The wrappers, with the position of the first operand of each.
_TRANSPARENT = {"tag_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2}
# Operators whose bodies the patterns read themselves.
_READ = frozenset({"flex_attention", "flex_attention_backward"})


def inline_bodies(graph: fx.Graph, modes: Modes) -> int:
    """Inlines the bodies of wrappers through which no gradient can flow. Returns the number of
    inlined bodies."""
    inlined = 0
    pending = _higher_order(graph.nodes)
    for node in pending:
        if node in modes.recorded or str(node.target) not in _TRANSPARENT:
            continue
        added = _inlined(node)
        if added is not None:
            inlined += 1
            pending += _higher_order(added)
    return inlined


def _higher_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the calls of higher-order operators."""
    nodes = list(nodes)
    called = {node.target for node in nodes}  # there are few, and isinstance is slow
    operators = {one for one in called if isinstance(one, torch._ops.HigherOrderOperator)}
    return [node for node in nodes if node.target in operators] if operators else []


def _inlined(call: fx.Node) -> list[fx.Node] | None:
    """Returns the nodes that replace a call. Returns None if the call must stay."""
    body = _body(call)
    if body is None:
        return None
    results = body.graph.output_node().args[0]
    results = results if isinstance(results, (tuple, list)) else (results,)
    parts = [user for user in call.users if user.target is operator.getitem]
    operands = call.args[_TRANSPARENT[str(call.target)] :]
    inputs = body.graph.find_nodes(op="placeholder")
    fits = len(parts) == len(call.users) and len(inputs) == len(operands)
    if not fits or not all(isinstance(results[part.args[1]], fx.Node) for part in parts):  # type: ignore[index]
        return None
    known: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    added: list[fx.Node] = []
    try:
        _copy_nodes(body.graph, call, known, added)
    except Exception:  # a node that cannot run on fake tensors again
        for node in reversed(added):
            call.graph.erase_node(node)
        return None
    for part in parts:
        made = known[results[part.args[1]]]  # type: ignore[index]
        made.meta.setdefault(LIES_WITH, []).append(part.meta["example_value"])
        part.replace_all_uses_with(made)
        call.graph.erase_node(part)
    attribute = call.args[0]
    call.graph.erase_node(call)
    if isinstance(attribute, fx.Node) and not attribute.users:
        attribute.graph.erase_node(attribute)
    return added


def _body(call: fx.Node) -> fx.GraphModule | None:
    """Returns the body of a wrapper. Returns None if the wrapper may do more than run its body."""
    attribute = call.args[0]
    body = attribute_of(attribute) if isinstance(attribute, fx.Node) else attribute
    if not isinstance(body, fx.GraphModule) or "_checkpoint_context_fn" in body.meta:
        return None
    return body


def _copy_nodes(
    body: fx.Graph, call: fx.Node, known: dict[fx.Node, Any], added: list[fx.Node]
) -> None:
    """Adds the nodes of a body before a call. `known` maps the nodes of the body to their copies or
    arguments; the function adds the copies."""
    graph, owner = call.graph, call.args[0]
    assert isinstance(owner, fx.Node)
    for node in body.nodes:
        if node in known or node.op == "output":
            continue
        held = node.meta.get("example_value")
        if _compat.is_unbacked(held):
            raise NotImplementedError(f"{node} is a number that only the data decides")
        with graph.inserting_before(call):
            made = graph.node_copy(node, known.__getitem__)
        added.append(made)
        known[node] = made
        if node.op == "get_attr":
            made.target = f"{owner.target}.{node.target}"
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            made.meta["example_value"] = _compat.made_again(held)
        elif held is not None:
            # Two calls of one body return different memory.
            made.meta["example_value"] = _compat.run_fake(made)


# --- what stays -----------------------------------------------------------------------------------


def unseen_in_bodies(graph: fx.Graph, modes: Modes, patterns: Sequence[Pattern]) -> list[Miss]:
    """Returns a miss for each pattern that would match in the body of a call that is not
    inlined."""
    return [
        _unseen(node, pattern, count, modes)
        for node in _higher_order(graph.nodes)
        for pattern, count in _matches_in(node, patterns).items()
    ]


def _matches_in(node: fx.Node, patterns: Sequence[Pattern]) -> Counter[str]:
    """Returns the number of matches of each pattern in the graphs that a node takes as
    arguments."""
    found: Counter[str] = Counter()
    if str(node.target) in _READ:
        return found
    for source in node.all_input_nodes:
        body = attribute_of(source) if source.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            matches = find(build_view(body.graph), patterns, check_legality).matches
            found |= Counter(match.pattern for match in matches)
            for inner in _higher_order(body.graph.nodes):
                found |= _matches_in(inner, patterns)
    return found


def _unseen(node: fx.Node, pattern: str, count: int, modes: Modes) -> Miss:
    sites = "a site" if count == 1 else f"{count} sites"
    if node in modes.recorded:
        message = f"{sites} inside {node.target}, through which a gradient can flow"
        return Miss(pattern, "GRADIENT", Stage.HAZARDS, message, (node,), GRAD_HINT, count)
    message = f"{sites} in a separate graph, which is an argument of {node.target}"
    hint = "compute it outside this operator, or compile the function that the operator takes"
    return Miss(pattern, "SUBGRAPH", Stage.HAZARDS, message, (node,), hint, count)
