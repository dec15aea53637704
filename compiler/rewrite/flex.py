"""Spells `flex_attention` out (`spelled.py`), so that patterns see one form of attention.

    flex_attention(q, k, v, score_mod)
        ⇒   softmax(score_mod(scale * q @ k^T, b, h, i, j)) @ v

A score_mod is written for one element. Here it is applied to all elements at once, with indices of
shapes [B, 1, 1, 1], [1, H, 1, 1], [1, 1, S, 1] and [1, 1, 1, K]. A call with a block mask stays and
runs Inductor's kernel: the lists of blocks in the mask are data, and they may hide more keys than
the mask's mask_mod does.

Dimension letters: B sequences, H query heads, S queries, K keys.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import attribute_of
from tilewright.compiler.dataflow.spelling import is_tensor_node, name_of
from tilewright.compiler.rewrite.spelled import SpelledOut, stand_in
from tilewright.compiler.rewrite.writer import Writer
from tilewright.patterns.attention.flex import SPELLED, UNREAD

# Operations that compute each element from the same element of their operands.
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "abs", "floor_divide", "remainder", "minimum", "maximum",
    "clamp", "where", "tanh", "exp", "exp2", "log", "pow", "sqrt", "eq", "ne", "lt", "le", "gt",
    "ge", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or", "logical_not",
    "to", "int", "long", "bool", "float",
}  # fmt: skip
#: The block size of a block mask that has a single block and leaves nothing out.
_NO_BLOCKS = 1 << 30


class _Unreadable(Exception):
    """Raised for a call, or a function that the call takes, that cannot be spelled out. The message
    says why."""


class FlexAttention:
    """The calls of `flex_attention`. If a call cannot be spelled out, its `meta` has the reason."""

    def takes(self, target: Any) -> bool:
        return target is torch.ops.higher_order.flex_attention

    def spell(self, call: fx.Node, write: Writer) -> SpelledOut:
        return _spelled_out(call, write)

    def refused(self, call: fx.Node, error: Exception) -> None:
        known = isinstance(error, _Unreadable)
        call.meta[UNREAD] = str(error) if known else f"{type(error).__name__}: {error}"


# --- one call -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The arguments of a call. `score_mod` holds the graph of the function, and the tensors that it
    reads besides the indices."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: Any
    score_mod: tuple[fx.Graph, tuple[Any, ...]]


def _call_of(node: fx.Node) -> _Call:
    names = ("q", "k", "v", "score_mod", "block_mask", "scale", "options", "of_score", "of_mask")
    given: dict[str, Any] = dict.fromkeys(names, ()) | dict(zip(names, node.args, strict=False))
    blocks = given["block_mask"]
    if node.kwargs or not isinstance(blocks, (tuple, list)) or len(blocks) < 3:
        raise _Unreadable("this version of PyTorch passes its arguments in another way")
    *_, rows, columns, mask_mod = blocks
    if not (rows == columns == _NO_BLOCKS) or not _hides_nothing(attribute_of(mask_mod).graph):
        raise _Unreadable("the lists of its block mask may hide more keys than mask_mod does")
    score_mod = attribute_of(given["score_mod"]).graph, given["of_score"]
    return _Call(given["q"], given["k"], given["v"], given["scale"], score_mod)


def _first_result(node: fx.Node) -> fx.Node:
    """Returns the node of the first result of a call. Raises _Unreadable if another result of the
    call is used."""
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(parts) != len(node.users) or set(parts) != {0}:
        raise _Unreadable("its log-sum-exp, or its largest score, is used")
    return parts[0]


def _spelled_out(node: fx.Node, write: Writer) -> SpelledOut:
    call, out = _call_of(node), _first_result(node)
    q = call.q.meta["example_value"]
    k, v = (_for_each_head(write, call.q, tensor) for tensor in (call.k, call.v))
    indices = _indices(write, call.q, k)
    logits = write.call(torch.matmul, call.q, write.call("transpose", k, -2, -1))
    working = torch.promote_types(q.dtype, torch.float32)
    logits = write.call(operator.mul, write.call("to", logits, working), call.scale)
    logits = _applied(write, *call.score_mod, (logits, *indices))
    weights = write.call(torch.softmax, logits, -1)
    weights.meta[SPELLED] = True
    end = write.call(torch.matmul, write.call("to", weights, q.dtype), v)
    end.meta["example_value"] = _compat.empty_like(out.meta["example_value"])
    return stand_in(write, [out], [end])


def _for_each_head(write: Writer, q: fx.Node, tensor: fx.Node) -> fx.Node:
    """Returns k or v, [1 or B, Hkv, K, D], as [B, H, K, D]."""
    heads, own = (n.meta["example_value"].shape[1] for n in (q, tensor))
    if not (isinstance(heads, int) and isinstance(own, int) and heads % own == 0):
        raise _Unreadable(f"it has {heads} query heads and {own} key heads")
    if heads != own:
        tensor = write.call("repeat_interleave", tensor, heads // own, dim=1)
    if tensor.meta["example_value"].shape[0] != q.meta["example_value"].shape[0]:
        tensor = write.call("expand", tensor, write.size(q, 0), -1, -1, -1)
    return tensor


def _indices(write: Writer, q: fx.Node, k: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the indices b, h, i and j. Each is a tensor of four dimensions that extends along its
    own dimension."""
    found = []
    for dim, of in enumerate((q, q, q, k)):
        place = 2 if of is k else dim
        device = of.meta["example_value"].device
        counted = write.call(torch.arange, write.size(of, place), device=device)
        shape = [1, 1, 1, 1]
        shape[dim] = -1
        found.append(write.call("view", counted, *shape))
    return tuple(found)


# --- the function that a call takes ---------------------------------------------------------------


def _hides_nothing(body: fx.Graph) -> bool:
    """Whether a mask_mod is True for every element."""
    result = body.output_node().args[0]
    return isinstance(result, fx.Node) and name_of(result) in ("new_ones", "ones")


def _applied(
    write: Writer, body: fx.Graph, captured: Sequence[Any], elements: Sequence[fx.Node]
) -> fx.Node:
    """Returns the result of a function for all elements. `captured` has the tensors and numbers
    that the function reads besides the elements."""
    taken = iter((*elements, *captured))
    known: dict[fx.Node, Any] = {n: next(taken) for n in body.find_nodes(op="placeholder")}
    tables = {n for n in known if known[n] in captured and is_tensor_node(known[n])}
    for node in body.nodes:
        if node in known or node.op == "output":
            continue
        if node.op not in ("call_function", "call_method"):
            raise _Unreadable(f"its function has a node {node.op} {node.target}")
        if (looked_up := _looked_up(node, tables)) is not None:
            table, at = looked_up
            places = tuple(known[i] if isinstance(i, fx.Node) else i for i in at)
            known[node] = write.call(operator.getitem, known[table], places)
        elif (held := _rank_of(node)) is not None and held > 0:
            continue  # the node is a row of a table, and a later node reads one element of this row
        elif name_of(node) not in _ELEMENTWISE:
            raise _Unreadable(f"its function calls {name_of(node)}")
        else:
            whole = {n: _wide(write, n, known) for n in node.all_input_nodes}
            known[node] = write.again(node, whole)
    result = body.output_node().args[0]
    if not isinstance(result, fx.Node):
        raise _Unreadable("its function gives no tensor")
    return _wide(write, result, known)


def _wide(write: Writer, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Returns an operand with all four dimensions, so that its type promotion is the same as that
    of the scores."""
    item = known[node]
    if not is_tensor_node(item) or item.meta["example_value"].dim() == 4:
        return item
    if _rank_of(node) != 0:
        raise _Unreadable("its function uses more than one element of a tensor")
    return write.call("view", item, 1, 1, 1, 1)


def _looked_up(node: fx.Node, tables: set[fx.Node]) -> tuple[fx.Node, list[Any]] | None:
    """Returns (table, an index for each of its dimensions) for `table[i][j]` and `table[i, j]`.
    Returns None for any other node."""
    at: list[Any] = []
    held = node
    while held not in tables:
        if name_of(held) not in ("getitem", "index") or _rank_of(held) is None:
            return None
        held, index = held.args[:2]  # type: ignore[assignment]
        at = [*(index if isinstance(index, (tuple, list)) else (index,)), *at]
    scalars = all(isinstance(i, int) or (isinstance(i, fx.Node) and not _rank_of(i)) for i in at)
    return (held, at) if node is not held and scalars and len(at) == _rank_of(held) else None


def _rank_of(node: fx.Node) -> int | None:
    """Returns the number of dimensions of a node's tensor. Returns None if the node has no
    tensor."""
    held = node.meta.get("example_value")
    return held.dim() if isinstance(held, torch.Tensor) else None
