"""Collects every private or version-dependent torch import.

Imports for tensors, sizes and nodes are in this file. Imports for trials of calls, autocast,
Inductor and the surroundings of a compilation have files of their own. Names imported `as`
themselves are used by other modules of the compiler.
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
    """Runs Inductor, imported only here: the import takes as long as that of torch itself."""
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
    """Returns the example values of nodes: their fake tensors, also those in containers, in
    order."""
    return [t for node in nodes for t in tensors_in(node.meta.get("example_value"))]


def is_models_own(node: fx.Node) -> bool:
    """Whether an input of a graph is a parameter, a buffer or another attribute of a module, or is
    a tensor inside one."""
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
    """Whether a tensor is a wrapper that vmap, grad or jvp put around another."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold a tensor's elements: itself, or those inside a subclass
    such as DTensor or a functorch wrapper."""
    if is_functorch_wrapper(tensor):
        return parts_of(torch._C._functorch.get_unwrapped(tensor))
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [p for t in inner if isinstance(t, torch.Tensor) for p in parts_of(t)]
    return [tensor]


def storage_keys(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns a number for each storage that holds a tensor's elements; tensors that share a
    storage have equal numbers.

    Empty where torch does not tell the storage, as for sparse tensors.
    """
    try:
        if type(tensor) is FakeTensor:  # nearly all tensors of a graph
            return (tensor.untyped_storage()._cdata,)
        keys = [part.untyped_storage()._cdata for part in parts_of(tensor)]
    except (NotImplementedError, RuntimeError):
        return ()
    return tuple(dict.fromkeys(keys))


def wrapping_of(tensor: torch.Tensor) -> str:
    """Returns a subclass's metadata besides the tensors inside it (for a DTensor its mesh and its
    placements), and their layouts; empty for a plain tensor."""
    if not is_subclass(tensor):
        return ""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return repr((context, [layout_of(part) for part in parts_of(tensor)]))


def with_parts(outer: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a subclass like `outer` in which `part(inner)` replaces each tensor inside it."""
    names, context = outer.__tensor_flatten__()  # type: ignore[attr-defined]
    held = {name: getattr(outer, name) for name in names}  # a device mesh may be among them
    held = {name: part(h) if isinstance(h, torch.Tensor) else h for name, h in held.items()}
    wrap = type(outer).__tensor_unflatten__  # type: ignore[attr-defined]
    return cast(torch.Tensor, wrap(held, context, outer.shape, outer.stride()))


def wrapped_like(outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """Returns a subclass like `outer`, which holds one tensor, with `inner` in its place."""
    return with_parts(outer, lambda _: inner)


def holds_in_place(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    """Whether `outer` and `inner` hold the same elements: one plain tensor each, with the same
    dtype, at the same addresses of the same storage."""
    parts = [parts_of(tensor) for tensor in (outer, inner)]
    if not all(len(held) == 1 and storage_keys(held[0]) for held in parts):
        return False
    one, other = (
        (held.dtype, held.device, layout_of(held), storage_keys(held)) for (held,) in parts
    )
    return one == other


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has an address in memory: fake, sparse and meta tensors have none."""
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.device.type != "meta"
        and bool(storage_keys(tensor))
    )


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns (shape, strides, storage offset); for a tensor without strides, (shape, layout)."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.layout
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def placement_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the layout of a tensor and the storage that it lies in."""
    return *layout_of(tensor), tensor.untyped_storage()._cdata


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that wraps others (DTensor, quantised weights): it has no memory
    itself, and its class decides what operators on it do."""
    plain = type(value) is FakeTensor  # nearly all tensors of a graph
    return not plain and isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor that wraps no other, and that vmap, grad and jvp do not wrap."""
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
    """Whether a size is certainly at least as large as another; adds no guard."""
    return isinstance(size, (int, torch.SymInt)) and bool(statically_known_true(size >= other))


def size_symbols(size: Any) -> tuple[sympy.Symbol, ...]:
    """Returns the symbols of a SymInt: its own, and the one with which guards have replaced it."""
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
    """Returns a tensor in new memory with the layout and the fake mode of a fake one."""
    with fake_mode_of([tensor]) or nullcontext(), torch.no_grad():
        return torch.empty_like(tensor)


def detached(value: Any) -> Any:
    """Returns a fake tensor on the memory of the given one. If the result is reshaped in place, the
    given tensor keeps its shape. Returns anything but a tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        return value.detach()


def name_of_operator(op: Any) -> str | None:
    """Returns `namespace::name` of an operator; adds the overload's name for an overload that is
    not the only one. None for anything else."""
    if isinstance(op, CustomOpDef):
        return op._qualname
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if not isinstance(op, torch._ops.OpOverload):
        return None
    only = len(op.overloadpacket.overloads()) == 1
    return op._schema.name if only else f"{op._schema.name}.{op._overloadname}"


@cache
def aten_tags(name: str) -> frozenset[torch.Tag]:
    """Returns the tags of an ATen operator's overloads; none for an unknown operator."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else packet.overloads()
    return frozenset(tag for one in overloads for tag in getattr(packet, one).tags)


def selected(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Returns `tensor[index]` for fake tensors. Raises RuntimeError for a mask, whose result has no
    known shape."""
    with fake_mode_of(tensors_in([tensor, index])) or nullcontext(), torch.no_grad():
        return cast(torch.Tensor, tensor[index])


def made_again(value: Any) -> Any:
    """Returns a fake tensor in new memory with the layout of the given one, or a tuple of them for
    a tuple. The sizes must be numbers."""
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
    """Returns the ATen calls that `function(*inputs)` makes, under the fake mode of its tensors.

    pre_dispatch: record calls as they are made, before autograd splits composite operators.
    Raises any exception of tracing: the caller decides what an untraceable node is.
    """
    traced = make_fx(function, pre_dispatch=pre_dispatch, tracing_mode="real")
    tensors = [held for held in inputs if isinstance(held, torch.Tensor)]
    with fake_mode_of(tensors) or nullcontext(), torch.no_grad():
        return traced(*inputs).graph


def call(target: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a node's target: a function, or the name of a method of the first argument."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def run_fake(node: fx.Node, instead: Mapping[fx.Node, Any] | None = None) -> Any:
    """Runs a node on its arguments' fake tensors, and returns the result. instead: values that
    replace some arguments."""
    if instead is None and _is_quick(node):
        source = cast(fx.Node, node.args[0]).meta["example_value"]
        # `reshape` would ask for the device, which a fake tensor answers slowly, in Python.
        method = "view" if node.target == "reshape" else cast(str, node.target)
        with torch.no_grad(), in_kernel_invocation_manager(source.fake_mode):
            made = call(method, (source, *node.args[1:]), {})
        return _fake_like(source, made)
    others = instead or {}

    def held(argument: fx.Node) -> Any:
        return others[argument] if argument in others else argument.meta["example_value"]

    args, kwargs = fx.node.map_arg(node.args, held), fx.node.map_arg(node.kwargs, held)
    # A node that reads only numbers gets the fake mode of the graph's other nodes.
    nodes = chain(node.all_input_nodes, node.graph.nodes)
    mode = fake_mode_of(source.meta.get("example_value") for source in nodes)
    with mode or nullcontext(), torch.no_grad(), autocast_at(node):
        return call(cast(Any, node.target), args, kwargs)


# Methods that return a view. The meta tensor inside a fake one computes the view's layout;
# FakeTensor's own way takes several times as long. `reshape` is among them for dense tensors only;
# for others the two ways may differ in the strides of dimensions of size one.
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
    """Whether a value is a fake tensor that has nothing but a layout, in numbers, and a device."""
    if type(held) is not FakeTensor or held.constant is not None:
        return False
    layout = *held.shape, *held.stride(), held.storage_offset()
    return all(type(n) is int for n in layout) and getattr(held, "real_tensor", None) is None


def strided_view(
    source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Returns a view of a plain fake tensor with a layout in numbers."""
    fake = cast(FakeTensor, source)
    with torch.no_grad(), in_kernel_invocation_manager(fake.fake_mode):
        return _fake_like(fake, source.as_strided(size, stride, offset))


def _fake_like(like: Any, meta: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor as a fake one with the mode and the device of another."""
    return FakeTensor(like.fake_mode, meta, like.fake_device)


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Returns a module that runs `graph`; in a compilation, the first call generates its code."""
    made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def forward_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """Returns the function that runs a graph, with its code generated now."""
    getattr(gm, "real_recompile", gm.recompile)()
    return gm.forward


def copy_origin(copy: fx.GraphModule, original: fx.GraphModule) -> None:
    """Copies to a graph's copy what Dynamo attached to the original besides its nodes.

    From this, AOTAutograd knows that parameters and marked caches keep their addresses. Without it,
    Inductor's CUDA graphs would copy all weights at each call, and refuse caches that are written.
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
    """Returns a real tensor of zeros with a fake one's shape, strides, dtype and device; for a
    symbolic number, its value in the traced run."""
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
    """Whether a value is a symbolic number that only data decide, or a tensor with one in its
    shape."""
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    symbolic = [n for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool))]
    return not all(n.node.has_hint() for n in symbolic)


def hint_of(value: Any) -> Any:
    """Returns a symbolic number's value in the traced run; 1 if only data decide it."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def hints_of(values: Iterable[Any]) -> tuple[int, ...]:
    """Returns the values of sizes or strides in the traced run."""
    return tuple(hint_of(value) for value in values)
