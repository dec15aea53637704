"""Random programs of views, copies, in-place writes and arithmetic, in the form of Dynamo's graphs.

A program is run while it is built, so that each step is valid. `example_value` of a node is the
real tensor, with the shape, strides and storage that the dataflow view reads.
"""

from __future__ import annotations

import operator
import random

import torch
from torch import fx


class Program:
    """A random program: its `graph`, its `inputs` before a run, and the `module` that runs it."""

    def __init__(self, seed: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.graph = fx.Graph()
        self.values: list[fx.Node] = []
        self.inputs = self._inputs()
        for i, tensor in enumerate(given_again(self.inputs)):
            node = self.graph.placeholder(f"input_{i}")
            node.meta["example_value"] = tensor
            self.values.append(node)
        made = 0
        while made < steps:
            made += self._step()
        self.graph.output(tuple(self.values[-3:]))
        self.module = fx.GraphModule({}, self.graph)

    def _inputs(self) -> list[torch.Tensor]:
        """Returns three tensors: a cache, a view of the cache's storage, and a separate tensor."""
        cache = torch.arange(96.0).view(4, 2, 3, 4)
        return [cache, cache[1:3], torch.arange(24.0).view(2, 3, 4) + 1000]

    def _step(self) -> bool:
        node = self.random.choice(self.values)
        return self.random.choice(STEPS)(self, node, node.meta["example_value"])

    def method(self, name: str, *args, **kwargs) -> bool:
        return self._made(self.graph.call_method(name, args, kwargs))

    def function(self, target, *args, **kwargs) -> bool:
        return self._made(self.graph.call_function(target, args, kwargs))

    def _made(self, node: fx.Node) -> bool:
        held = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
        args, kwargs = held
        try:
            if isinstance(node.target, str):
                result = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                result = node.target(*args, **kwargs)
        except (
            RuntimeError,
            IndexError,
            TypeError,
        ):  # this step is not valid here, so another step is drawn
            self.graph.erase_node(node)
            return False
        node.meta["example_value"] = result
        if isinstance(result, torch.Tensor):
            if result.numel() > 4096:
                self.graph.erase_node(node)
                return False
            self.values.append(node)
        elif isinstance(result, (tuple, list)):
            return self.function(operator.getitem, node, self.random.randrange(len(result)))
        return True

    # --- pieces of arguments ---

    def dim(self, tensor: torch.Tensor) -> int:
        return self.random.randrange(-tensor.dim(), tensor.dim()) if tensor.dim() else 0

    def range_of(self, size: int) -> tuple[int, int]:
        """Draws (start, length) within `size`."""
        start = self.random.randrange(size) if size else 0
        return start, self.random.randint(1, max(1, size - start))

    def factors(self, count: int) -> list[int]:
        sizes = []
        while count > 1 and len(sizes) < 4:
            divisors = [d for d in range(1, count + 1) if count % d == 0]
            sizes.append(self.random.choice(divisors))
            count //= sizes[-1]
        return [*sizes, count]

    def index(self, tensor: torch.Tensor) -> tuple:
        items = []
        for size in tensor.shape[: self.random.randint(0, tensor.dim())]:
            start, length = self.range_of(size)
            items.append(
                self.random.choice(
                    [
                        start,
                        start - size,
                        slice(None),
                        slice(start, start + length),
                        slice(start - size, None),
                        slice(None, None, 2),
                        slice(start, None, 3),
                        [start],
                    ]
                )
            )
        if self.random.random() < 0.3:
            items.insert(self.random.randint(0, len(items)), None)
        if self.random.random() < 0.3:
            items.append(Ellipsis)
        if any(isinstance(i, list) for i in items) and any(isinstance(i, int) for i in items):
            items = [slice(i, i + 1 or None) if isinstance(i, int) else i for i in items]
        return tuple(items)

    def positions(self, size: int) -> fx.Node | None:
        """Draws an index tensor for a dimension of `size`, without duplicates."""
        count = self.random.randint(1, size) if size else 0
        if not count:
            return None
        start = self.random.randint(0, size - count)
        self.function(torch.arange, start, start + count)
        node = self.values.pop()
        if self.random.random() < 0.5:
            self.method("flip", node, 0)
            node = self.values.pop()
        return node


def given_again(inputs):
    whole = inputs[0].clone()
    return [whole, whole[1:3], inputs[2].clone()]


# --- the steps ------------------------------------------------------------------------------------


def view(p, node, t):
    return p.method(p.random.choice(["view", "reshape"]), node, *p.factors(t.numel()))


def transpose(p, node, t):
    return p.method(p.random.choice(["transpose", "swapaxes"]), node, p.dim(t), p.dim(t))


def permute(p, node, t):
    order = list(range(t.dim()))
    p.random.shuffle(order)
    return p.method("permute", node, order)


def movedim(p, node, t):
    return p.function(torch.movedim, node, p.dim(t), p.dim(t))


def unsqueeze(p, node, t):
    return t.dim() < 6 and p.method("unsqueeze", node, p.dim(t))


def squeeze(p, node, t):
    return (
        p.method("squeeze", node)
        if p.random.random() < 0.5
        else p.method("squeeze", node, p.dim(t))
    )


def narrow(p, node, t):
    dim = p.dim(t)
    return t.dim() > 0 and p.method("narrow", node, dim, *p.range_of(t.shape[dim]))


def select(p, node, t):
    dim = p.dim(t)
    return t.dim() > 0 and p.method("select", node, dim, p.range_of(t.shape[dim])[0])


def getitem(p, node, t):
    return p.function(operator.getitem, node, p.index(t))


def expand(p, node, t):
    sizes = [p.random.choice([2, 3]) if n == 1 else p.random.choice([-1, n]) for n in t.shape]
    lead = [p.random.choice([1, 2])] if p.random.random() < 0.4 else []
    return p.method("expand", node, *lead, *sizes)


def flatten(p, node, t):
    return p.method("flatten", node, p.dim(t), p.dim(t))


def unflatten(p, node, t):
    dim = p.dim(t)
    return t.dim() > 0 and p.method("unflatten", node, dim, tuple(p.factors(t.shape[dim])))


def split(p, node, t):
    dim = p.dim(t)
    return t.dim() > 0 and p.method("split", node, p.random.randint(1, 3), dim)


def chunk(p, node, t):
    return t.dim() > 0 and p.function(torch.chunk, node, p.random.randint(1, 3), dim=p.dim(t))


def unbind(p, node, t):
    return t.dim() > 0 and p.method("unbind", node, p.dim(t))


def repeat_interleave(p, node, t):
    return t.dim() > 0 and p.function(torch.repeat_interleave, node, 2, dim=p.dim(t))


def repeat(p, node, t):
    return p.method("repeat", node, *[p.random.choice([1, 1, 2]) for _ in t.shape])


def copy(p, node, t):
    return p.method(p.random.choice(["clone", "contiguous", "detach"]), node)


def arithmetic(p, node, t):
    target = p.random.choice([operator.add, operator.mul, operator.sub])
    return p.function(target, node, p.random.choice([1, 0.5, node]))


def cast(p, node, t):
    dtype = p.random.choice([torch.float64, torch.float32, torch.int64])
    return p.method(p.random.choice(["to", "type"]), node, dtype)


def bits(p, node, t):
    return p.method("view", node, torch.int32 if t.dtype == torch.float32 else torch.float32)


def other_memory(p, node, t):
    """Adds a view of the same storage that does not follow from the tensor's sizes and strides."""
    return t.dim() > 1 and p.method("diagonal", node, 0, 0, 1)


def keywords(p, node, t):
    return p.function(torch.add, input=node, other=node, alpha=2)


def cat(p, node, t):
    others = [v for v in p.values if v.meta["example_value"].shape == t.shape]
    target = p.random.choice([torch.cat, torch.stack])
    pieces = [node, p.random.choice(others)]
    return t.dim() > 0 and p.function(target, pieces, dim=p.dim(t))


def new_empty(p, node, t):
    return p.method("new_empty", node, t.shape) and p.method("zero_", p.values[-1])


def assembled(p, node, t):
    """Allocates with `new_empty` and fills slices, which is a concatenation."""
    if t.dim() == 0 or t.shape[-1] < 2:
        return False
    cut = p.random.randint(1, t.shape[-1] - 1)
    p.method("new_empty", node, t.shape)
    fresh = p.values.pop()
    for part in (slice(0, cut), slice(cut, None)):
        p.function(operator.getitem, node, (Ellipsis, part))
        source = p.values.pop()
        p.function(operator.setitem, fresh, (Ellipsis, part), source)
    p.values.append(fresh)
    return True


def in_place(p, node, t):
    name = p.random.choice(["add_", "mul_", "sub_"])
    return p.method(name, node, p.random.choice([1, 2.0]))


def in_place_operator(p, node, t):
    return p.function(operator.iadd, node, 3)


def rectify(p, node, t):
    return p.function(torch.nn.functional.relu, node, inplace=p.random.random() < 0.5)


def fill(p, node, t):
    return p.method("zero_", node) if p.random.random() < 0.5 else p.method("fill_", node, 7)


def copy_into(p, node, t):
    p.method("clone", p.random.choice(p.values))  # copying a tensor onto itself is not defined
    return p.method("copy_", node, p.values[-1])


def set_slice(p, node, t):
    item = p.index(t)
    p.function(operator.getitem, node, item)
    p.method("clone", p.random.choice(p.values))
    source = p.random.choice([5.0, p.values[-1]])
    return p.function(operator.setitem, node, item, source)


def set_rows(p, node, t):
    """Writes `t[..., positions] = rows`, with the index tensor at any dimension."""
    if t.dim() == 0:
        return False
    dim = p.random.randrange(t.dim())
    at = p.positions(t.shape[dim])
    if at is None:
        return False
    item = (*[slice(None)] * dim, at)
    p.function(operator.getitem, node, item)
    source = p.values[-1]
    p.method("add", source, 100)
    return p.function(operator.setitem, node, item, p.values[-1])


def index_copy(p, node, t):
    if t.dim() == 0:
        return False
    dim = p.random.randrange(t.dim())
    at = p.positions(t.shape[dim])
    if at is None or not p.function(torch.index_select, node, dim, at):
        return False
    source = p.values[-1]
    return p.method(p.random.choice(["index_copy_", "index_add_"]), node, dim, at, source)


STEPS = [
    view, view, transpose, permute, movedim, unsqueeze, squeeze, narrow, select, getitem, getitem,
    expand, flatten, unflatten, split, chunk, unbind, repeat_interleave, repeat, copy, arithmetic,
    cast, bits, other_memory, keywords, cat, new_empty, assembled, in_place, in_place_operator,
    rectify, fill, copy_into, set_slice, set_rows, index_copy,
]  # fmt: skip
