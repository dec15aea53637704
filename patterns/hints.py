"""Default hints, by code. They are used for misses that have no hint of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilewright.patterns.codes import HINTS, OF_OPERATORS
from tilewright.patterns.dataflow import scope_of

# Functions whose result has the dtype of their operands, unless autocast is on.
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
# How many nodes upstream of a miss are searched for products that autocast computed.
_REACH = 64


def hint_for(code: str, nodes: Sequence[fx.Node]) -> str:
    """Returns the hint for a miss with this code at these nodes; "" if the code has no hint."""
    by_nodes = _BY_NODES.get(code)
    return by_nodes(nodes) if by_nodes is not None and nodes else HINTS.get(code, "")


def with_declare(hint: str, code: str, nodes: Sequence[fx.Node]) -> str:
    """Returns a hint that also mentions `declare`, if one of the nodes calls an operator of another
    library."""
    if code not in OF_OPERATORS or "tilewright.declare" in hint:
        return hint
    name = next(filter(None, map(_library_operator, nodes)), "")
    if not name:
        return hint
    said = f"say what {name} computes: tilewright.declare"
    return f"{hint}; or {said}" if hint else said


def _library_operator(node: fx.Node) -> str:
    """Returns `namespace::name` of an operator of another library; "" for other nodes."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _TORCHS:
        return ""
    return str(target._schema.name)


# The namespaces of PyTorch's and of tilewright's operators.
_TORCHS = frozenset({
    "aten", "prim", "prims", "c10d", "_c10d_functional", "_dtensor", "symm_mem", "inductor",
    "quantized", "tilewright", "torch_attn",
})  # fmt: skip


def _one_dtype(nodes: Sequence[fx.Node]) -> str:
    """Returns the hint for operands of different dtypes. If autocast caused the difference, the
    hint says so."""
    computed = next(filter(None, map(_autocast_dtype, _before(nodes))), None)
    if computed is None:
        return HINTS["DTYPE"]
    return (
        f"autocast computes in {computed} with weights of another dtype, and casts them in every "
        f"call: load the model and its caches with model.to({computed}), and leave autocast out"
    )


def _before(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the nodes and the nodes that they are computed from, the nearest first."""
    found = list(nodes)
    for node in found:  # the list grows during the loop
        if len(found) < _REACH:
            found += [source for source in node.all_input_nodes if source not in found]
    return found[:_REACH]


def _autocast_dtype(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype in which autocast computed a product of tensors of another dtype; None for
    other nodes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    made = node.meta.get("example_value")
    if name not in _PRODUCTS or node.kwargs or not isinstance(made, torch.Tensor):
        return None
    held = (source.meta.get("example_value") for source in node.all_input_nodes)
    dtypes = {t.dtype for t in held if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return made.dtype if dtypes and made.dtype not in dtypes else None


def _look_at_module(nodes: Sequence[fx.Node]) -> str:
    """Returns the command that shows what each pattern looked for in a node's module."""
    scope = scope_of(nodes[0])
    if not scope:
        return HINTS["UNRECOGNISED"]
    said = "says what each pattern looked for there, and where it stopped"
    return f"`tilewright inspect MODEL --at {scope}` {said}"


_BY_NODES: Mapping[str, Callable[[Sequence[fx.Node]], str]] = {
    "DTYPE": _one_dtype,
    "UNRECOGNISED": _look_at_module,
}
