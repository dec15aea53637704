"""Random changes of a captured graph, after which eager can still run it.

A breakage takes (draw, graph) and returns a sentence that says what it changed, or None if it found
nothing to change. It keeps the graph's data flow valid. Afterwards `told_again` fills in
`meta["example_value"]` as Dynamo would.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from tilewright.compiler import _compat


def told_again(graph: fx.Graph) -> None:
    """Gives every changed node, and the nodes after it, the fake tensors that Dynamo would
    compute."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and (
            node.meta.get("told") != _said(node) or not changed.isdisjoint(node.all_input_nodes)
        ):
            changed.add(node)
            node.meta = {**node.meta, "example_value": _compat.run_fake(node)}
            node.meta["told"] = _said(node)


def remember(graph: fx.Graph) -> None:
    """Marks every node as one whose fake tensors are right."""
    for node in graph.nodes:
        node.meta["told"] = _said(node)


def _said(node: fx.Node) -> tuple[Any, ...]:
    return (node.target, node.args, node.kwargs)


def held(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def tensors(graph: fx.Graph, *kinds: str) -> list[fx.Node]:
    """Returns the nodes whose value is a tensor. `kinds` limits them to nodes with these values of
    `op`."""
    return [
        n
        for n in graph.nodes
        if isinstance(held(n), torch.Tensor) and n.op != "output" and (not kinds or n.op in kinds)
    ]


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op in ("call_function", "call_method")]


def like(a: fx.Node, b: fx.Node) -> bool:
    """Whether one node may replace the other: both must have equal shapes, dtypes and devices."""
    x, y = held(a), held(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device


def before(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that come earlier in the program."""
    for other in node.graph.nodes:
        if other is node:
            return
        yield other


def new_call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Inserts a call at the graph's insertion point, with its fake result."""
    make = graph.call_method if isinstance(target, str) else graph.call_function
    node = make(target, args, kwargs)
    try:
        node.meta["example_value"] = _compat.run_fake(node)
    except Exception:
        graph.erase_node(node)
        raise
    return node


# --- numbers, operands and operations of one call -------------------------------------------------


def places(items: Any, wanted: Callable[[Any], bool], at: tuple = ()) -> Iterator[tuple]:
    """Returns the places, within nested arguments, of the values that a predicate accepts."""
    if wanted(items):
        yield at
    elif isinstance(items, (tuple, list)):
        for i, item in enumerate(items):
            yield from places(item, wanted, (*at, i))
    elif isinstance(items, dict):
        for key, item in items.items():
            yield from places(item, wanted, (*at, key))
    elif isinstance(items, slice):
        for name in ("start", "stop", "step"):
            yield from places(getattr(items, name), wanted, (*at, name))


def at_place(items: Any, at: tuple) -> Any:
    for key in at:
        items = getattr(items, key) if isinstance(items, slice) else items[key]
    return items


def put(items: Any, at: tuple, new: Any) -> Any:
    if not at:
        return new
    key, *rest = at
    if isinstance(items, slice):
        parts = {name: getattr(items, name) for name in ("start", "stop", "step")}
        parts[key] = put(parts[key], tuple(rest), new)
        return slice(parts["start"], parts["stop"], parts["step"])
    if isinstance(items, dict):
        return {**items, key: put(items[key], tuple(rest), new)}
    changed = list(items)
    changed[key] = put(changed[key], tuple(rest), new)
    return type(items)(changed)


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {"args": tuple(node.args), "kwargs": dict(node.kwargs)}


def _change(node: fx.Node, at: tuple, new: Any) -> None:
    changed = put(_arguments(node), at, new)
    node.args, node.kwargs = changed["args"], changed["kwargs"]


def number(draw: random.Random, graph: fx.Graph) -> str | None:
    """Replaces a constant by another: a dimension, the end of a slice, an epsilon, or a scale."""

    def is_number(item: Any) -> bool:
        return isinstance(item, (int, float)) and not isinstance(item, bool)

    found = [(n, at) for n in calls(graph) for at in places(_arguments(n), is_number)]
    if not found:
        return None
    node, at = draw.choice(found)
    old = at_place(_arguments(node), at)
    if isinstance(old, int):
        new: Any = draw.choice((old + 1, old - 1, -old, old + 2, 0, 1, 2 * old))
    else:
        new = draw.choice((old * 2, old / 2, -old, old + 0.1, 0.0, 1.0))
    if new == old:
        return None
    _change(node, at, new)
    return f"{node.name}: {old} is {new}"


def flag(draw: random.Random, graph: fx.Graph) -> str | None:
    """Negates a truth value."""
    found = [
        (n, at) for n in calls(graph) for at in places(_arguments(n), lambda i: isinstance(i, bool))
    ]
    if not found:
        return None
    node, at = draw.choice(found)
    _change(node, at, not at_place(_arguments(node), at))
    return f"{node.name}: {at} turned round"


def dtype(draw: random.Random, graph: fx.Graph) -> str | None:
    """Replaces a dtype that a call names by another."""
    found = [
        (n, at)
        for n in calls(graph)
        for at in places(_arguments(n), lambda i: isinstance(i, torch.dtype))
    ]
    if not found:
        return None
    node, at = draw.choice(found)
    new = draw.choice((torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64))
    _change(node, at, new)
    return f"{node.name}: to {new}"


def operands_swapped(draw: random.Random, graph: fx.Graph) -> str | None:
    found = []
    for node in calls(graph):
        at = list(places(_arguments(node), lambda i: isinstance(i, fx.Node)))
        if len(at) > 1:
            found.append((node, at))
    if not found:
        return None
    node, at = draw.choice(found)
    one, two = draw.sample(at, 2)
    a, b = (at_place(_arguments(node), place) for place in (one, two))
    if a is b:
        return None
    _change(node, one, b)
    _change(node, two, a)
    return f"{node.name}: {a} and {b} change places"


def operand(draw: random.Random, graph: fx.Graph) -> str | None:
    """Replaces an operand by another tensor of its shape and dtype, such as V for K, sin for cos,
    or another layer's weight."""
    node = draw.choice(calls(graph))
    at = [
        place
        for place in places(_arguments(node), lambda i: isinstance(i, fx.Node))
        if isinstance(held(at_place(_arguments(node), place)), torch.Tensor)
    ]
    if not at:
        return None
    place = draw.choice(at)
    old = at_place(_arguments(node), place)
    earlier = set(before(node))
    others = [n for n in tensors(graph) if n in earlier and n is not old and like(n, old)]
    if not others:
        return None
    new = draw.choice(others)
    _change(node, place, new)
    return f"{node.name}: {new} instead of {old}"


def inputs_swapped(draw: random.Random, graph: fx.Graph) -> str | None:
    """Exchanges two inputs of one shape in all their uses."""
    inputs = tensors(graph, "placeholder")
    pairs = [(a, b) for i, a in enumerate(inputs) for b in inputs[i + 1 :] if like(a, b)]
    if not pairs:
        return None
    a, b = draw.choice(pairs)
    users = {n: list(n.users) for n in (a, b)}
    for old, new in ((a, b), (b, a)):
        for user in users[old]:
            if user not in users[new]:
                user.replace_input_with(old, new)
    return f"{a} and {b} change places"


#: Operations that may replace each other, in both directions.
SIMILAR: tuple[tuple[Any, ...], ...] = (
    (operator.add, operator.sub, operator.mul, torch.maximum, operator.truediv),
    (operator.iadd, operator.imul, operator.isub),
    (operator.floordiv, operator.mod),
    (operator.lt, operator.le, operator.ge, operator.gt, operator.eq, operator.ne),
    (torch.rsqrt, torch.sqrt, torch.reciprocal, torch.sigmoid),
    (F.silu, F.gelu, F.relu, torch.sigmoid, torch.tanh, F.mish),
    (torch.cos, torch.sin, torch.tanh),
    (operator.neg, torch.abs, torch.square, torch.clone),
    (torch.bmm, torch.matmul),
    (torch.cat, torch.stack),
    ("cos", "sin", "tanh", "neg", "abs", "clone", "exp"),
    ("mean", "sum", "amax", "cumsum"),
    ("sqrt", "rsqrt", "reciprocal", "sigmoid"),
    ("softmax", "log_softmax", "cumsum", "cumprod"),
    ("index_copy_", "index_add_"),
    ("add_", "mul_", "sub_"),
    ("sort", "topk"),
    ("view", "reshape", "expand"),
    ("split", "chunk", "tensor_split"),
    ("float", "double", "half", "bfloat16"),
    ("transpose", "swapaxes", "flip"),
    ("index_add", "index_copy"),
    ("scatter", "scatter_add"),
    ("clamp", "clamp_min", "clamp_max"),
    ("contiguous", "neg", "abs", "clone"),
)


def operation(draw: random.Random, graph: fx.Graph) -> str | None:
    """Replaces an operation by a similar one: a mean for a sum, a difference for a sum."""
    found = []
    for node in calls(graph):
        for group in SIMILAR:
            if node.target in group:
                found += [(node, other) for other in group if other != node.target]
    if not found:
        return None
    node, other = draw.choice(found)
    old = node.target
    node.target = other
    node.op = "call_method" if isinstance(other, str) else "call_function"
    return f"{node.name}: {getattr(other, '__name__', other)} instead of {old}"


# --- what is put between --------------------------------------------------------------------------


def _roll(graph, x, dim):
    return new_call(graph, torch.roll, x, 1, dim)


def _exchanged(graph, x, dim):
    """Exchanges two dimensions of equal size."""
    shape = held(x).shape
    same = [d for d in range(len(shape)) if d != dim and shape[d] == shape[dim]]
    return new_call(graph, "transpose", x, dim, same[0])


def _two_halves(graph, x, dim):
    parts = new_call(graph, "chunk", x, 2, dim=dim)
    one, two = (new_call(graph, operator.getitem, parts, i) for i in range(2))
    return new_call(graph, torch.cat, (two, one), dim=dim)


def _part(graph, x, dim):
    """Replaces the second half of a tensor by the first half."""
    half = new_call(graph, "narrow", x, dim, 0, max(1, held(x).shape[dim] // 2))
    return new_call(graph, torch.cat, [half, half], dim=dim)


def _cast_and_back(graph, x, dim):
    kept = held(x).dtype
    small = torch.bfloat16 if kept == torch.float32 else torch.float8_e4m3fn
    return new_call(graph, "to", new_call(graph, "to", x, small), kept)


LAYOUT: dict[str, Callable[..., fx.Node]] = {
    "flipped": lambda g, x, d: new_call(g, "flip", x, d),
    "rolled": _roll,
    "exchanged": _exchanged,
    "halves_swapped": _two_halves,
    "first_half_twice": _part,
    "contiguous": lambda g, x, d: new_call(g, "contiguous", x),
    "cloned": lambda g, x, d: new_call(g, "clone", x),
    "there_and_back": lambda g, x, d: new_call(
        g, "transpose", new_call(g, "contiguous", new_call(g, "transpose", x, 0, d)), 0, d
    ),
    "flat_and_back": lambda g, x, d: new_call(
        g, "view", new_call(g, "reshape", x, -1), held(x).shape
    ),
    "sliced_whole": lambda g, x, d: new_call(g, operator.getitem, x, (..., slice(None))),
}
FLOATS: dict[str, Callable[..., fx.Node]] = {
    "negated": lambda g, x, d: new_call(g, operator.neg, x),
    "scaled": lambda g, x, d: new_call(g, operator.mul, x, 1.5),
    "divided": lambda g, x, d: new_call(g, operator.truediv, x, 3),
    "shifted": lambda g, x, d: new_call(g, operator.add, x, 0.25),
    "added_zero": lambda g, x, d: new_call(g, operator.add, x, 0),
    "times_one": lambda g, x, d: new_call(g, operator.mul, x, 1.0),
    "clamped": lambda g, x, d: new_call(g, "clamp", x, -0.5, 0.5),
    "clipped_above": lambda g, x, d: new_call(g, "clamp", x, max=0.3),
    "rectified": lambda g, x, d: new_call(g, F.relu, x),
    "soft": lambda g, x, d: new_call(g, "softmax", x, d),
    "running": lambda g, x, d: new_call(g, "cumsum", x, d),
    "centred": lambda g, x, d: new_call(
        g, operator.sub, x, new_call(g, "mean", x, d, keepdim=True)
    ),
    "squared": lambda g, x, d: new_call(g, operator.mul, x, x),
    "cast_and_back": _cast_and_back,
    "dropout": lambda g, x, d: new_call(g, F.dropout, x, 0.1, False),
    "masked": lambda g, x, d: new_call(g, "masked_fill", x, new_call(g, operator.lt, x, -0.4), 0.0),
    "rounded": lambda g, x, d: new_call(g, torch.round, x, decimals=1),
}
INTEGERS: dict[str, Callable[..., fx.Node]] = {
    "one_more": lambda g, x, d: new_call(g, operator.add, x, 1),
    "one_less": lambda g, x, d: new_call(g, operator.sub, x, 1),
    "halved": lambda g, x, d: new_call(g, operator.floordiv, x, 2),
    "wrapped": lambda g, x, d: new_call(g, operator.mod, x, 3),
    "all_of_them_one": lambda g, x, d: new_call(
        g, operator.add, new_call(g, operator.mul, x, 0), 1
    ),
    "limited": lambda g, x, d: new_call(g, "clamp", x, 1, 2),
    "narrower": lambda g, x, d: new_call(g, "to", new_call(g, "to", x, torch.int32), held(x).dtype),
    "negative": lambda g, x, d: new_call(g, operator.sub, x, 4),
    "sorted": lambda g, x, d: new_call(
        g, operator.getitem, new_call(g, "sort", x, dim=d), 0
    ),
    "doubled": lambda g, x, d: new_call(g, operator.mul, x, 2),
}  # fmt: skip


def between(draw: random.Random, graph: fx.Graph) -> str | None:
    """Inserts an operation between a value and some or all of its users."""
    node = draw.choice(tensors(graph))
    value = held(node)
    users = list(node.users)
    if not users or value.dim() == 0:
        return None
    kinds = dict(LAYOUT)
    if value.dtype.is_floating_point:
        kinds |= FLOATS
    elif value.dtype not in (torch.bool, torch.uint8):
        kinds |= INTEGERS
    name = draw.choice(tuple(kinds))
    dim = draw.randrange(value.dim())
    some = users if draw.random() < 0.5 else [draw.choice(users)]
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_before(min(some, key=order.__getitem__)):
        new = kinds[name](graph, node, dim)
    for user in some:
        user.replace_input_with(node, new)
    return f"{node.name}, dimension {dim}, is {name} for {', '.join(map(str, some))}"


IN_PLACE: dict[str, Callable[..., fx.Node]] = {
    "mul_": lambda g, x: new_call(g, "mul_", x, 2),
    "add_": lambda g, x: new_call(g, "add_", x, 1),
    "imul": lambda g, x: new_call(g, operator.imul, x, 0.5),
    "iadd": lambda g, x: new_call(g, operator.iadd, x, 1),
    "zero_": lambda g, x: new_call(g, "zero_", x),
    "neg_": lambda g, x: new_call(g, "neg_", x),
    "relu": lambda g, x: new_call(g, F.relu, x, inplace=True),
    "set_first": lambda g, x: new_call(g, operator.setitem, x, 0, 0.5),
    "set_last": lambda g, x: new_call(g, operator.setitem, x, (..., -1), 0),
    "foreach": lambda g, x: new_call(g, torch._foreach_mul_, [x], 2),
    "out": lambda g, x: new_call(g, torch.add, x, x, out=x),
    "clamp_": lambda g, x: new_call(g, "clamp_", x, 0, 1),
    "copy_": lambda g, x: new_call(g, "copy_", x, new_call(g, "flip", x, 0)),
    "masked_fill_": lambda g, x: new_call(g, "masked_fill_", x, new_call(g, operator.gt, x, 0), 0),
}
VIEWS: dict[str, Callable[..., fx.Node]] = {
    "itself": lambda g, x: x,
    "flat": lambda g, x: new_call(g, "view", x, -1),
    "first": lambda g, x: new_call(g, operator.getitem, x, 0),
    "last": lambda g, x: new_call(g, "select", x, -1, -1),
    "turned": lambda g, x: new_call(g, "transpose", x, 0, -1),
    "detached": lambda g, x: new_call(g, "detach", x),
    "every_other": lambda g, x: new_call(g, operator.getitem, x, slice(None, None, 2)),
    "strided": lambda g, x: new_call(
        g, torch.as_strided, x, held(x).shape, held(x).stride(), held(x).storage_offset()
    ),
}


def _place(draw: random.Random, graph: fx.Graph, after: fx.Node) -> fx.Node:
    """Returns a node after `after` before which a statement may be inserted."""
    order = list(graph.nodes)
    inputs = sum(1 for n in order if n.op in ("placeholder", "get_attr"))
    return draw.choice(order[max(order.index(after) + 1, inputs) :])


def changed_in_place(draw: random.Random, graph: fx.Graph) -> str | None:
    """Inserts a write into a tensor, or into a view of it, at some later place."""
    node = draw.choice(tensors(graph))
    view, change = draw.choice(tuple(VIEWS)), draw.choice(tuple(IN_PLACE))
    where = _place(draw, graph, node)
    with graph.inserting_before(where):
        alias = VIEWS[view](graph, node)
        IN_PLACE[change](graph, alias)
    return f"{change} on {node.name} ({view}) before {where.name}"


def aliased_early(draw: random.Random, graph: fx.Graph) -> str | None:
    """Takes a view where a tensor is made, and writes into the view much later."""
    node = draw.choice(tensors(graph))
    view, change = draw.choice(tuple(VIEWS)), draw.choice(tuple(IN_PLACE))
    order = list(graph.nodes)
    inputs = sum(1 for n in order if n.op in ("placeholder", "get_attr"))
    first = order[max(order.index(node) + 1, inputs)]
    with graph.inserting_before(first):
        alias = VIEWS[view](graph, node)
    where = _place(draw, graph, first.prev)
    with graph.inserting_before(where):
        IN_PLACE[change](graph, alias)
    return f"{change} on an early view ({view}) of {node.name} before {where.name}"


# --- uses and order -------------------------------------------------------------------------------


def _output(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def _also_returned(graph: fx.Graph, node: fx.Node) -> None:
    output = _output(graph)
    output.args = ((*output.args[0], node),)


READS: dict[str, Callable[..., fx.Node]] = {
    "as_it_is": lambda g, x: x,
    "cloned": lambda g, x: new_call(g, "clone", x),
    "summed": lambda g, x: new_call(g, "sum", x),
    "first": lambda g, x: new_call(g, operator.getitem, x, 0),
    "flat": lambda g, x: new_call(g, "reshape", x, -1),
    "scaled": lambda g, x: new_call(g, operator.mul, x, 3),
}


def read_elsewhere(draw: random.Random, graph: fx.Graph) -> str | None:
    """Adds a reader of a value at some later place. The program returns the reader's result."""
    node = draw.choice(tensors(graph))
    name = draw.choice(tuple(READS))
    where = _place(draw, graph, node)
    with graph.inserting_before(where):
        _also_returned(graph, READS[name](graph, node))
    return f"{node.name} is read ({name}) before {where.name}"


def _bounds(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Returns the last operand and the first user of a statement, between which it may move. Inputs
    of the graph stay at its beginning."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    fixed = [n for n in node.graph.nodes if n.op in ("placeholder", "get_attr")]
    last = max([*node.all_input_nodes, *fixed], key=order.__getitem__)
    first = min([*node.users, _output(node.graph)], key=order.__getitem__)
    return last, first


def moved(draw: random.Random, graph: fx.Graph) -> str | None:
    """Moves a statement to another place between its operands and its users."""
    node = draw.choice(calls(graph))
    last, first = _bounds(node)
    order = list(graph.nodes)
    room = [n for n in order[order.index(last) + 1 : order.index(first) + 1] if n is not node]
    if len(room) < 2:
        return None
    where = draw.choice(room)
    where.prepend(node)
    return f"{node.name} moved before {where.name}"


def is_write(node: fx.Node) -> bool:
    called = node.target
    name = called if isinstance(called, str) else getattr(called, "__name__", "")
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def write_moved(draw: random.Random, graph: fx.Graph) -> str | None:
    """Moves a write, so that readers of the memory see it earlier or later."""
    writes = [n for n in calls(graph) if is_write(n)]
    if not writes:
        return None
    node = draw.choice(writes)
    last, first = _bounds(node)
    order = list(graph.nodes)
    room = [n for n in order[order.index(last) + 1 : order.index(first) + 1] if n is not node]
    if not room:
        return None
    where = draw.choice(room)
    where.prepend(node)
    return f"the write {node.name} moved before {where.name}"


def write_left_out(draw: random.Random, graph: fx.Graph) -> str | None:
    writes = [n for n in calls(graph) if is_write(n) and not n.users]
    if not writes:
        return None
    node = draw.choice(writes)
    graph.erase_node(node)
    return f"the write {node.name} is left out"


def twice(draw: random.Random, graph: fx.Graph) -> str | None:
    """Runs a statement a second time, directly after the first or at the end. A user reads the
    second result."""
    node = draw.choice([n for n in calls(graph) if is_write(n)] if draw.random() < 0.4 else
                       calls(graph) or [None])  # fmt: skip
    where = draw.choice((node.next, _output(graph)))
    with graph.inserting_before(where):
        copy = graph.node_copy(node)
    later = set(graph.nodes) - set(before(copy))
    users = [u for u in node.users if u in later]
    if users and draw.random() < 0.7:
        draw.choice(users).replace_input_with(node, copy)
    return f"{node.name} is computed twice"


BREAKAGES: tuple[Callable[[random.Random, fx.Graph], str | None], ...] = (
    number, number, number, flag, dtype, operands_swapped, operand, operand, operand,
    inputs_swapped, operation, operation, between, between, between, between, changed_in_place,
    changed_in_place, aliased_early, aliased_early, read_elsewhere, read_elsewhere, moved,
    write_moved, write_moved, write_left_out, twice,
)  # fmt: skip
