"""Collects every import from torch that is private or depends on the version.

Imports for tensors, sizes and nodes are in this file. Imports for trials of calls, for autocast,
for Inductor and for the conditions of a compilation have separate files. The names that are
imported `as` themselves are for other modules of the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import chain
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._dynamo import convert_frame as convert_frame
from torch._dynamo.callback import callback_handler as callback_handler
from torch._dynamo.eval_frame import innermost_fn as innermost_fn
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import TorchDynamoException as DynamoError  # noqa: F401
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.exc import UserError as UserError
from torch._dynamo.utils import graph_break_reasons as graph_break_reasons
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.graph_transform_observer import (
    GraphTransformObserver as GraphTransformObserver,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils._sympy.functions import CleanDiv as CleanDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv

from tilewright.compiler._compat.autocast import autocast_at

#: Every spelling of the grouped GEMM that a Dynamo graph may call.
GROUPED_MM = frozenset(
    {torch._grouped_mm, torch.nn.functional.grouped_mm, torch.ops.aten._grouped_mm.default}
)


def compile_fx(
    gm: fx.GraphModule, inputs: list[Any], config_patches: dict[str, Any] | None
) -> Callable[..., Any]:
    """Runs Inductor, which is imported only here, because the import takes as long as the import of
    torch itself."""
    from torch._inductor import compile_fx as inductor

    return cast(Callable[..., Any], inductor.compile_fx(gm, inputs, config_patches=config_patches))


def store() -> Any:
    """Returns the store of the default group, in which ranks share values by key. Starts no
    collective."""
    return torch.distributed.distributed_c10d._get_default_store()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return [] if value is None else [value]
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def tensors_of(*nodes: fx.Node) -> list[torch.Tensor]:
    """Returns the example values of nodes, that is, their fake tensors in order. Tensors inside
    containers are included."""
    return [t for node in nodes for t in tensors_in(node.meta.get("example_value"))]


def is_models_own(node: fx.Node) -> bool:
    """Whether an input of a graph is a parameter, a buffer or another attribute of a module, or a
    tensor inside such an attribute."""
    if node.op == "get_attr":
        return True
    if isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        return True
    if node.target is getattr:  # a tensor inside a subclass
        return is_models_own(node.all_input_nodes[0])
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def storages_of(*nodes: fx.Node) -> list[int]:
    """Returns the :func:`storage_keys` of the tensors that nodes hold."""
    return [key for tensor in tensors_of(*nodes) for key in storage_keys(tensor)]


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper that vmap, grad or jvp put around another tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold a tensor's elements. These are the tensor itself, or the
    tensors inside a subclass such as DTensor or inside a functorch wrapper."""
    if is_functorch_wrapper(tensor):
        return parts_of(torch._C._functorch.get_unwrapped(tensor))
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [p for t in inner if isinstance(t, torch.Tensor) for p in parts_of(t)]
    return [tensor]


def storage_keys(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns a number for each storage that holds a tensor's elements. Tensors that share a
    storage have equal numbers.

    The result is empty if torch does not tell the storage, as for sparse tensors.
    """
    try:
        if type(tensor) is FakeTensor:  # nearly all tensors of a graph
            return (tensor.untyped_storage()._cdata,)
        keys = [part.untyped_storage()._cdata for part in parts_of(tensor)]
    except (NotImplementedError, RuntimeError):
        return ()
    return tuple(dict.fromkeys(keys))


def wrapping_of(tensor: torch.Tensor) -> str:
    """Returns a text that describes a tensor subclass: the layouts of the tensors inside it, and
    its other metadata (for a DTensor its mesh and its placements). The text is empty for a plain
    tensor."""
    if not is_subclass(tensor):
        return ""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return repr((context, [layout_of(part) for part in parts_of(tensor)]))


def with_parts(outer: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a subclass like `outer` in which `part(inner)` replaces each inner tensor."""
    names, context = outer.__tensor_flatten__()  # type: ignore[attr-defined]
    held = {name: getattr(outer, name) for name in names}  # a device mesh may be among them
    held = {name: part(h) if isinstance(h, torch.Tensor) else h for name, h in held.items()}
    wrap = type(outer).__tensor_unflatten__  # type: ignore[attr-defined]
    return cast(torch.Tensor, wrap(held, context, outer.shape, outer.stride()))


def wrapped_like(outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Returns a subclass like `outer`, which holds a single tensor, with `inner` in the place of
    that tensor."""
    return with_parts(outer, lambda _: inner)


def holds_in_place(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    """Whether `outer` and `inner` hold the same elements. Each must hold one plain tensor, with the
    same dtype, at the same addresses of the same storage."""
    parts = [parts_of(tensor) for tensor in (outer, inner)]
    if not all(len(held) == 1 and storage_keys(held[0]) for held in parts):
        return False
    one, other = (
        (held.dtype, held.device, layout_of(held), storage_keys(held)) for (held,) in parts
    )
    return one == other


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has an address in memory. Fake, sparse and meta tensors have none."""
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.device.type != "meta"
        and bool(storage_keys(tensor))
    )


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns (shape, strides, storage offset) of a tensor, or (shape, layout) for a tensor without
    strides."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.layout
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def placement_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the layout of a tensor and the storage in which it lies."""
    return *layout_of(tensor), tensor.untyped_storage()._cdata


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that wraps other tensors (a DTensor, a quantised weight). Such a
    tensor has no memory itself, and its class decides what operators on it do."""
    plain = type(value) is FakeTensor  # nearly all tensors of a graph
    return not plain and isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor that wraps no other tensor, and that vmap, grad and jvp do not
    wrap."""
    wrapped = is_subclass(value) or is_functorch_wrapper(value)
    return isinstance(value, torch.Tensor) and not wrapped


def size_comparison(inputs: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Returns a function that tests whether two sizes (ints or sympy expressions) are equal. The
    test adds guards on symbols."""
    environment = next((e for e in map(_shape_env, inputs) if e is not None), None)

    def same(a: Any, b: Any) -> bool:
        if a == b or (isinstance(a, int) and isinstance(b, int)) or environment is None:
            return bool(a == b)
        return bool(environment.evaluate_expr(sympy.Eq(a, b)))

    return same


def is_at_least(size: Any, other: Any) -> bool:
    """Whether a size is certainly at least as large as another. The test adds no guard."""
    return isinstance(size, (int, torch.SymInt)) and bool(statically_known_true(size >= other))


def size_symbols(size: Any) -> tuple[sympy.Symbol, ...]:
    """Returns the symbols of a SymInt: its own symbol and, if guards have replaced this symbol by
    another, the other symbol."""
    if not isinstance(size, torch.SymInt):
        return ()
    found = (size.node._expr, size.node.expr)
    return tuple(dict.fromkeys(e for e in found if isinstance(e, sympy.Symbol)))


def _shape_env(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.shape_env
    if isinstance(value, torch.Tensor):
        sizes: Iterable[Any] = value.shape
        return next((n.node.shape_env for n in sizes if isinstance(n, torch.SymInt)), None)
    return None


def fake_mode_of(tensors: Iterable[Any]) -> Any:
    """Returns the fake mode of the first tensor that has one, or None."""
    modes = (getattr(tensor, "fake_mode", None) for tensor in tensors)
    return next((mode for mode in modes if mode is not None), None)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in new memory that has the layout and the fake mode of a given fake
    tensor."""
    with fake_mode_of([tensor]) or nullcontext(), torch.no_grad():
        return torch.empty_like(tensor)


def detached(value: Any) -> Any:
    """Returns a fake tensor on the memory of the given fake tensor. If the result is reshaped in
    place, the given tensor keeps its shape. A value that is not a tensor is returned as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        return value.detach()


def name_of_operator(op: Any) -> str | None:
    """Returns `namespace::name` of an operator. If the operator has several overloads, adds the
    name of the overload. Returns None for a value that is not an operator."""
    if isinstance(op, CustomOpDef):
        return op._qualname
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if not isinstance(op, torch._ops.OpOverload):
        return None
    only = len(op.overloadpacket.overloads()) == 1
    return op._schema.name if only else f"{op._schema.name}.{op._overloadname}"


def names_of_operators() -> list[str]:
    """Returns the names of all overloads that are registered now: `namespace::name` of a default
    overload, `namespace::name.overload` of any other."""
    return torch._C._dispatch_get_all_op_names()


@cache
def aten_tags(name: str) -> frozenset[torch.Tag]:
    """Returns the tags of an ATen operator's overloads. An unknown operator has no tags."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else packet.overloads()
    return frozenset(tag for one in overloads for tag in getattr(packet, one).tags)


def selected(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Returns `tensor[index]` for fake tensors. Raises RuntimeError for a mask, because the shape
    of its result is unknown."""
    with fake_mode_of(tensors_in([tensor, index])) or nullcontext(), torch.no_grad():
        return cast(torch.Tensor, tensor[index])


def made_again(value: Any) -> Any:
    """Returns a fake tensor in new memory that has the layout of the given fake tensor. For a
    tuple, returns a tuple of such new tensors. The sizes must be numbers."""
    return _strided_again(value) if type(value) is FakeTensor else tree_map(_strided_again, value)


def _strided_again(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    layout = item.shape, item.stride()
    if type(item) is not FakeTensor:
        return torch.empty_strided(*layout, dtype=item.dtype, device=item.device)
    with torch.no_grad(), in_kernel_invocation_manager(item.fake_mode):
        made = torch.empty_strided(*layout, dtype=item.dtype, device="meta")
    return _fake_like(item, made)


def aten_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor | torch.SymInt], pre_dispatch: bool
) -> fx.Graph:
    """Returns the ATen calls that `function(*inputs)` makes under the fake mode of its tensors.

    With `pre_dispatch`, calls are recorded as they are made, before autograd splits composite
    operators. Raises any exception of tracing, because the caller decides what to do about a node
    that cannot be traced.
    """
    traced = make_fx(function, pre_dispatch=pre_dispatch, tracing_mode="real")
    tensors = [held for held in inputs if isinstance(held, torch.Tensor)]
    with fake_mode_of(tensors) or nullcontext(), torch.no_grad():
        return traced(*inputs).graph


def call(target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a node's target, which is a function or the name of a method of the first argument."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def run_fake(node: fx.Node, instead: Mapping[fx.Node, Any] | None = None) -> Any:
    """Runs a node on the fake tensors of its arguments, and returns the result. `instead` maps
    arguments to the values that replace them."""
    if instead is None and _is_quick(node):
        source = cast(fx.Node, node.args[0]).meta["example_value"]
        # `reshape` would ask for the device, and a fake tensor answers that question slowly, in
        # Python.
        method = "view" if node.target == "reshape" else cast(str, node.target)
        with torch.no_grad(), in_kernel_invocation_manager(source.fake_mode):
            made = call(method, (source, *node.args[1:]), {})
        return _fake_like(source, made)
    others = instead or {}

    def held(argument: fx.Node) -> Any:
        return others[argument] if argument in others else argument.meta["example_value"]

    args, kwargs = fx.node.map_arg(node.args, held), fx.node.map_arg(node.kwargs, held)
    # A node that reads only numbers gets the fake mode of the other nodes of the graph.
    nodes = chain(node.all_input_nodes, node.graph.nodes)
    mode = fake_mode_of(source.meta.get("example_value") for source in nodes)
    with mode or nullcontext(), torch.no_grad(), autocast_at(node):
        return call(cast(Any, node.target), args, kwargs)


# Methods that return a view. The meta tensor inside a fake tensor computes the layout of the view,
# because FakeTensor's own way takes several times as long. `reshape` is among these methods only
# for dense tensors. For other tensors the two ways may differ in the strides of dimensions of size
# one.
_QUICK = frozenset(
    {"expand", "movedim", "narrow", "permute", "reshape", "select", "unflatten", "unfold"}
    | {"unsqueeze"}
)


def _is_quick(node: fx.Node) -> bool:
    """Whether a node calls a method of _QUICK on a fake tensor without symbols."""
    if node.op != "call_method" or node.target not in _QUICK or node.kwargs:
        return False
    inputs = node.all_input_nodes
    held: Any = inputs[0].meta.get("example_value") if len(inputs) == 1 else None
    if not is_plain_fake(held) or node.args[0] is not inputs[0]:
        return False
    return node.target != "reshape" or bool(held.is_contiguous())


def is_plain_fake(held: Any) -> bool:
    """Whether a value is a fake tensor whose only properties are a device and a layout in
    numbers."""
    if type(held) is not FakeTensor or held.constant is not None:
        return False
    layout = *held.shape, *held.stride(), held.storage_offset()
    return all(type(n) is int for n in layout) and getattr(held, "real_tensor", None) is None


def strided_view(
    source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Returns a view of a plain fake tensor. The layout of the view is given in numbers."""
    fake = cast(FakeTensor, source)
    with torch.no_grad(), in_kernel_invocation_manager(fake.fake_mode):
        return _fake_like(fake, source.as_strided(size, stride, offset))


def _fake_like(like: Any, meta: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor as a fake tensor that has the mode and the device of the fake tensor
    `like`."""
    return FakeTensor(like.fake_mode, meta, like.fake_device)


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Returns a module that runs `graph`. During a compilation, the first call generates the code
    of the module."""
    made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def forward_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """Returns the function that runs a graph. The code of the function is generated now."""
    getattr(gm, "real_recompile", gm.recompile)()
    return gm.forward


def copy_origin(copy: fx.GraphModule, original: fx.GraphModule) -> None:
    """Copies the attributes that Dynamo attached to a graph, besides its nodes, to a copy of the
    graph.

    From these attributes, AOTAutograd knows that parameters and marked caches keep their addresses.
    Without them, Inductor's CUDA graphs would copy all weights at each call, and would refuse
    caches that are written.
    """
    copy.meta.update(original.meta)
    if hasattr(original, "_param_name_to_source"):
        copy._param_name_to_source = original._param_name_to_source
    pairs = zip(_placeholders(copy), _placeholders(original), strict=True)
    for mine, given in pairs:
        if hasattr(given, "_dynamo_source"):
            mine._dynamo_source = given._dynamo_source


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def zeros_like_fake(value: Any) -> Any:
    """Returns a real tensor of zeros with the shape, strides, dtype and device of a fake tensor.
    For a symbolic number, returns its value in the traced run."""
    if isinstance(value, torch.Tensor):
        sizes = hints_of(value.shape)
        if any(n == 0 for n in sizes) or not storage_keys(value):
            return torch.zeros(sizes, dtype=value.dtype, device=value.device)
        strides = hints_of(value.stride())
        empty = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return empty.zero_()
    return hint_of(value)


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number, or a tensor with one in its shape."""
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers)


def is_unbacked(value: Any) -> bool:
    """Whether a value is a symbolic number that depends on data alone, or a tensor with such a
    number in its shape."""
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    symbolic = [n for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool))]
    return not all(n.node.has_hint() for n in symbolic)


def hint_of(value: Any) -> Any:
    """Returns the value of a symbolic number in the traced run. Returns 1 for a number that depends
    on data alone."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def hints_of(values: Iterable[Any]) -> tuple[int, ...]:
    """Returns the values of sizes or strides in the traced run."""
    return tuple(hint_of(value) for value in values)
