"""Programs with additional statements. A program is a graph in which something is fused, as Dynamo
records it, with one or two inserted calls.

:mod:`tests.compiler.statements` judges the results. The overloads are drawn from the schemas that
torch registers, not from a list.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from tests.compiler.steps import Layer, make_args, plain, store
from tests.models import lora_idioms, mla_idioms, moe_idioms
from tilewright.compiler import _compat

# --- graphs that fuse -----------------------------------------------------------------------------


def whole_numbers(module: torch.nn.Module, args: tuple) -> tuple:
    """Fills tensors with small integers, so that products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(3)

    def drawn(t):
        if not t.is_floating_point():
            return t
        return torch.randint(-2, 3, t.shape, generator=generator).to(t.dtype)

    for parameter in module.parameters():
        parameter.copy_(drawn(parameter))
    return tuple(drawn(arg) for arg in args)


def turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rotated(m, x, k_cache, v_cache, slots, cos, sin):
    q, k, v = m.qkv(x)
    store(k_cache, slots, turned(k, cos, sin))
    store(v_cache, slots, v)
    return turned(q, cos, sin) * 2, k_cache.sum(0)


def stored_alone(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k.relu())
    store(v_cache, slots, v.relu())
    return q, v_cache.sum(0)


def qkv():
    layer = Layer(rotated)
    tables = torch.ones(5, 1, 16), torch.ones(5, 1, 16)
    return layer, whole_numbers(layer, (*make_args(), *tables))


def qkv_plain():
    layer = Layer(plain)
    return layer, whole_numbers(layer, make_args())


def cache_store():
    layer = Layer(stored_alone)
    return layer, whole_numbers(layer, make_args())


def moe():
    return moe_idioms.build("plain")


def lora():
    return lora_idioms.build("gather_einsum", dtype=torch.float32)


def mla():
    return mla_idioms.build("plain", dtype=torch.float32)


FAMILIES: dict[str, Callable[[], tuple[torch.nn.Module, tuple]]] = {
    "qkv": qkv,
    "qkv_plain": qkv_plain,
    "cache_store": cache_store,
    "moe": moe,
    "lora": lora,
    "mla": mla,
}


@dataclass(frozen=True)
class Base:
    """A captured graph, and the inputs with which it was captured."""

    module: fx.GraphModule
    inputs: list[torch.Tensor]


@cache
def base(family: str) -> Base:
    """Returns the graph of a family's model. Every pattern of the family matches it."""
    with torch.no_grad():
        model, args = FAMILIES[family]()
    captured: list[Base] = []

    def backend(gm, inputs):
        held = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
        captured.append(Base(gm, held))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    (only,) = captured
    return Base(only.module, [given(node) for node in placeholders(only.module, only.inputs)])


def placeholders(gm, inputs):
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return list(zip(nodes, inputs, strict=True))


def given(pair):
    _, value = pair
    return value.clone() if isinstance(value, torch.Tensor) else value


# --- operators, by schema -------------------------------------------------------------------------

# Operators that a graph never contains, or whose results no second run can repeat.
LEFT_OUT = (
    "aten::_", "aten::from_file", "aten::rename", "aten::set_", "aten::resize", "aten::record",
    "aten::empty", "aten::uniform", "aten::rand", "aten::multinomial", "aten::sparse",
    "aten::q_", "aten::fbgemm", "aten::miopen", "aten::cudnn", "aten::mkldnn", "aten::dequantize",
    "aten::to_mkldnn", "aten::retain_grad", "aten::requires_grad", "aten::backward",
    "aten::item", "aten::is_", "aten::special_", "aten::fused_moving_avg",
)  # fmt: skip
ALSO = ("aten::_foreach", "aten::_index_put_impl_", "aten::_unsafe_view", "aten::_reshape_alias")


@cache
def overloads(kind: str) -> list[Any]:
    """Returns the overloads of a kind: overloads that write a tensor ("writes"), overloads that
    write a tensor given as `out` ("out"), or overloads whose result is a view of an argument
    ("aliases")."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name
        if not name.startswith("aten::") or not (
            name.startswith(ALSO) or not name.startswith(LEFT_OUT)
        ):
            continue
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is None or torch.Tag.inplace_view in overload.tags:
            continue
        arguments = overload._schema.arguments
        tensors = [a for a in arguments if "Tensor" in str(a.type)]
        writes = [a for a in tensors if a.alias_info is not None and a.alias_info.is_write]
        outs = [a for a in writes if a.is_out]
        aliases = [a for a in tensors if a.alias_info is not None and not a.alias_info.is_write]
        if kind == ("out" if outs else "writes" if writes else "aliases" if aliases else None):
            found.append(overload)
    return sorted(found, key=str)


class Undrawn(Exception):
    """Raised if a draw is not valid. The test then draws again."""


class Spoiled(BaseException):
    """Raised if a program changed metadata that the programs of its family share. The metadata was
    restored."""


# --- a program ------------------------------------------------------------------------------------


class Inside(torch.Tensor):
    """A tensor subclass that holds another tensor, and applies every operator to it."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Inside(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda t: Inside(t) if isinstance(t, torch.Tensor) else t, out)


def unwrapped(item):
    return item.inner if isinstance(item, Inside) else item


class Inserter:
    """Inserts calls after a node, one after the other, with the metadata that Dynamo would give."""

    def __init__(self, module: fx.GraphModule, mode: Any, where: fx.Node, inserted: list) -> None:
        self.module, self.mode, self.where, self.inserted = module, mode, where, inserted

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.untyped(target, *args, **kwargs)
        node.meta["example_value"] = self.example(target, args, kwargs)
        return node

    def untyped(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a call whose result is no tensor."""
        with self.module.graph.inserting_after([self.where, *self.inserted][-1]):
            self.inserted.append(self.module.graph.call_function(target, args, kwargs))
        return self.inserted[-1]

    def attribute(self, body: fx.GraphModule) -> fx.Node:
        """Inserts a body (a graph module) as a node."""
        name = f"body_{len(list(self.module.children()))}"
        self.module.add_submodule(name, body)
        with self.module.graph.inserting_after([self.where, *self.inserted][-1]):
            self.inserted.append(self.module.graph.get_attr(name))
        return self.inserted[-1]

    def example(self, target: Any, args: Any, kwargs: Any) -> Any:
        held = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self.mode, torch.no_grad():
            return target(*held[0], **held[1])


class Program:
    """A program: `module` is a copy of a family's graph with inserted statements, and `said`
    describes the statements.

    The seed determines the first statement: seeds go through the `turns` one after another.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.family, *first = turn_of(seed)
        self.base = base(self.family)
        self.said: list[str] = []
        self.module = self._copy()
        self.results: list[fx.Node] = []
        self._statement(*first)
        if self.random.random() < 0.25:
            self._statement(*self.random.choice(turns())[1:])
        self._return_results()
        self.module.recompile()

    def _copy(self) -> fx.GraphModule:
        graph = fx.Graph()
        mapped: dict[fx.Node, fx.Node] = {}
        mode = _compat.fake_mode_of(
            [n.meta.get("example_value") for n in self.base.module.graph.nodes]
        )
        for node in self.base.module.graph.nodes:
            mapped[node] = graph.node_copy(node, mapped.__getitem__)
        copy = fx.GraphModule(self.base.module, graph)
        self.mode = mode
        return copy

    # --- statements ---

    def _statement(self, kind: str, form: str) -> None:
        for _ in range(40):
            nodes = [n for n in self.module.graph.nodes if n.op != "output"]
            where = self.random.choice(nodes)
            before = nodes[: nodes.index(where) + 1]
            if any(n.op == "placeholder" for n in nodes[nodes.index(where) + 1 :]):
                continue
            operands = [n for n in before if is_tensor(n)]
            operand = self.random.choice(operands)
            inserted: list[fx.Node] = []
            shared = [laid_out(t) for n in nodes for t in examples(n)]
            try:
                self._draw(kind, form, where, operand, inserted)
                return
            except Exception:  # the statement is not valid here, so another statement is drawn
                for node in reversed(inserted):
                    self.module.graph.erase_node(node)
            finally:
                changed = [was for was in shared if laid_out(was[0]) != was]
                if changed:  # an `out` of another shape was resized
                    with self.mode, torch.no_grad():
                        for tensor, *layout in changed:
                            tensor.as_strided_(*layout)
                    raise Spoiled
        raise Undrawn

    def _draw(
        self, kind: str, form: str, where: fx.Node, operand: fx.Node, inserted: list[fx.Node]
    ) -> None:
        call = Inserter(self.module, self.mode, where, inserted)
        if kind == "reads":
            kept = [call(torch.ops.aten.clone.default, operand)]
            self.results += kept
            self.said.append(f"clone({operand.name}) after {where.name}")
            return
        overload = self.random.choice(overloads(kind))
        if form == "subclass":
            operand = call(Inside, operand)
        args, kwargs = self._arguments(overload, operand, call)
        result = FORMS[form](call, overload, args, kwargs)
        kept: list[fx.Node] = []
        if kind == "aliases":
            view = next(iter(self._tensors(result, call)))
            change = self.random.choice((torch.ops.aten.mul_.Scalar, torch.ops.aten.fill_.Scalar))
            call(change, view, 2)
        elif self.random.random() < 0.5:
            kept = [call(torch.ops.aten.clone.default, n) for n in self._tensors(result, call)]
            kept = kept if form != "subclass" else []
        self._check()
        self.results += kept
        self.said.append(f"{overload} as {form} of {operand.name} after {where.name}")

    def _tensors(self, node: fx.Node, call: Any) -> list[fx.Node]:
        """Returns the first tensor of a call's result."""
        held = node.meta.get("example_value")
        if isinstance(held, torch.Tensor):
            return [node]
        if not isinstance(held, (tuple, list)):
            return []
        first = next((i for i, t in enumerate(held) if isinstance(t, torch.Tensor)), None)
        return [] if first is None else [call(operator.getitem, node, first)]

    def _check(self) -> None:
        """Checks that the whole graph runs with its real inputs."""
        self.module.recompile()
        run(self.module, self.base.inputs)

    def _arguments(self, overload: Any, operand: fx.Node, call: Any) -> tuple[list, dict]:
        """Draws arguments by their types. The operand becomes the first argument that is written,
        or else the first argument."""
        arguments = overload._schema.arguments
        tensors = [a for a in arguments if "Tensor" in str(a.type)]
        written = [a for a in tensors if a.alias_info is not None]
        main = self.random.choice(written or tensors)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in arguments:
            if argument is main:
                many = "List[" in str(argument.type)
                value = (
                    [operand, self._other(operand, call)][: self.random.randint(1, 2)]
                    if many
                    else operand
                )
                if many and self.random.random() < 0.5:
                    value = value[::-1]
            elif argument.has_default_value() and self.random.random() < 0.8:
                if not argument.kwarg_only:
                    args.append(argument.default_value)
                continue
            else:
                value = self._value(argument, operand, call)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _other(self, operand: fx.Node, call: Any) -> fx.Node:
        """Draws another tensor: the operand itself, ones, positions, a mask, or any tensor of the
        graph."""
        choice = self.random.random()
        if choice < 0.3:
            return operand
        if choice < 0.7:
            return call(torch.ops.aten.ones_like.default, operand)
        if choice < 0.8:
            return call(torch.ops.aten.zeros.default, [2], dtype=torch.long)
        if choice < 0.9:
            return call(torch.ops.aten.ge.Scalar, operand, 0)
        nodes = [n for n in self.module.graph.nodes if is_tensor(n) and n < operand]
        return self.random.choice(nodes or [operand])

    def _value(self, argument: Any, operand: fx.Node, call: Any) -> Any:
        kind = str(argument.type)
        if "Tensor" in kind:
            other = self._other(operand, call)
            return [other] if "List[" in kind else other
        if kind.startswith("Optional"):
            return None
        rank = operand.meta["example_value"].dim()
        if "List[int]" in kind or "SymInt]" in kind:
            shape = [int(n) for n in operand.meta["example_value"].shape]
            return self.random.choice((shape, [0], [rank - 1], [1]))
        if kind in ("int", "SymInt"):
            return self.random.choice((0, 1, -1))
        if kind == "bool":
            return self.random.random() < 0.5
        if kind in ("number", "float", "Scalar"):
            return self.random.choice((0, 1, 2))
        if "List[" in kind:
            return [1.0]
        raise Undrawn

    def _return_results(self) -> None:
        output = next(iter(reversed(self.module.graph.nodes)))
        returned = output.args[0]
        output.args = ((*returned, *self.results),)


def examples(node: fx.Node) -> list[torch.Tensor]:
    return _compat.tensors_in(node.meta.get("example_value"))


def laid_out(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a tensor, and the places of its elements in its memory."""
    return tensor, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def run(module: fx.GraphModule, inputs: list) -> list[torch.Tensor]:
    """Returns the outputs and the inputs after a run on copies."""
    copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        results = module(*copies)
    return [unwrapped(t) for t in tree_leaves((results, copies)) if isinstance(t, torch.Tensor)]


# --- spellings of one call ------------------------------------------------------------------------


def as_overload(call, overload, args, kwargs):
    return call(overload, *args, **kwargs)


def as_packet(call, overload, args, kwargs):
    return call(overload.overloadpacket, *args, **kwargs)


def as_torch_function(call, overload, args, kwargs):
    name = overload._schema.name.removeprefix("aten::")
    function = getattr(torch, name, None) or getattr(torch.Tensor, name)
    return call(function, *args, **kwargs)


def in_a_dict(call, overload, args, kwargs):
    """Stands for a user's function. Graphs call it by its name, as after `allow_in_graph`."""

    def users_own(held):
        return overload(*held["args"], **held["kwargs"])

    return call(users_own, {"args": list(args), "kwargs": dict(kwargs)})


def body_of(call, overload, args, kwargs):
    """Returns a graph that makes the call with its arguments, and the nodes to pass as
    arguments."""
    given = list(dict.fromkeys(n for n in tree_leaves((args, kwargs)) if isinstance(n, fx.Node)))
    graph = fx.Graph()
    inside = {node: graph.placeholder(f"given_{i}") for i, node in enumerate(given)}
    for node, stand_in in inside.items():
        stand_in.meta["example_value"] = node.meta["example_value"]
    mapped = fx.node.map_arg((tuple(args), dict(kwargs)), inside.__getitem__)
    node = graph.call_function(overload, *mapped)
    node.meta["example_value"] = call.example(overload, *mapped)
    graph.output((graph.call_function(torch.ops.aten.ones.default, ([1],)),))
    return fx.GraphModule({}, graph), given


def in_a_checkpoint(call, overload, args, kwargs):
    body, given = body_of(call, overload, args, kwargs)
    return call.untyped(
        tag_activation_checkpoint, call.attribute(body), *given, use_reentrant=False
    )


def in_a_branch(call, overload, args, kwargs):
    body, given = body_of(call, overload, args, kwargs)
    yes = call(torch.ops.aten.scalar_tensor.default, True, dtype=torch.bool)
    branch = call.attribute(body)
    return call.untyped(torch.ops.higher_order.cond, yes, branch, branch, tuple(given))


FORMS = {
    "overload": as_overload,
    "packet": as_packet,
    "function": as_torch_function,
    "dict": in_a_dict,
    "checkpoint": in_a_checkpoint,
    "cond": in_a_branch,
    "subclass": as_overload,
}


@cache
def turns() -> list[tuple[str, str, str]]:
    """Returns (family, kind, form) for each kind of statement, in each spelling, in the graph of
    each family.

    Statements that write are listed twice. A read is written in one way only. Bodies of
    `checkpoint` or `cond` return no view that could be written.
    """
    kinds = ("writes", "writes", "out", "aliases")
    statements = [(kind, form) for kind in kinds for form in FORMS] + [("reads", "overload")] * 2
    statements = [s for s in statements if s[0] != "aliases" or s[1] not in ("checkpoint", "cond")]
    return [(family, *statement) for statement in statements for family in FAMILIES]


def turn_of(seed: int) -> tuple[str, str, str]:
    return turns()[seed % len(turns())]
