"""Every private or version-dependent torch import, in one room: trials.py has what tries calls.

Names imported `as` themselves are used by other modules of the compiler.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any, cast, get_origin

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
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.amp.autocast_mode import _enter_autocast
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.graph_transform_observer import (
    GraphTransformObserver as GraphTransformObserver,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

#: Every spelling of the grouped GEMM that a Dynamo graph may call.
GROUPED_MM = frozenset(
    {torch._grouped_mm, torch.nn.functional.grouped_mm, torch.ops.aten._grouped_mm.default}
)


def compile_fx(
    gm: fx.GraphModule, inputs: list[Any], config_patches: dict[str, Any] | None
) -> Callable[..., Any]:
    """Inductor, which is imported where it compiles: that takes as long as torch itself."""
    from torch._inductor import compile_fx as inductor

    return cast(Callable[..., Any], inductor.compile_fx(gm, inputs, config_patches=config_patches))


def register_artifacts(
    kind: str, populate: Callable[[str, bytes], Any]
) -> Callable[[str, bytes], None] | None:
    """Makes `kind` a type of torch's cache artifacts: `populate(key, content)` is called for each
    that is loaded. What records one; None where this torch has another interface."""
    try:
        from torch.compiler._cache import (
            CacheArtifact,
            CacheArtifactFactory,
            CacheArtifactManager,
        )

        class Artifact(CacheArtifact):
            def populate_cache(self) -> None:
                populate(self.key, self.content)

            @staticmethod
            def type() -> str:
                return kind

        CacheArtifactFactory.register(Artifact)
        return partial(CacheArtifactManager.record_artifact, kind)
    except (ImportError, AttributeError, TypeError, AssertionError):
        return None


def store() -> Any:
    """What the ranks of the default group tell each other by key; starts no collective."""
    return torch.distributed.distributed_c10d._get_default_store()


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Adds a text to torch's structured trace (TORCH_TRACE); tlparse shows it with the compilation.

    payload is called only where a trace is written. encoding: "string" or "json".
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order."""
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
    """The example values of nodes: their fake tensors, those in containers too, in order."""
    return [t for node in nodes for t in tensors_in(node.meta.get("example_value"))]


def is_models_own(node: fx.Node) -> bool:
    """Whether an input of a graph is a parameter or a buffer, or else an attribute, of a module."""
    if node.op == "get_attr":
        return True
    if isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        return True
    source = getattr(node, "_dynamo_source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def storages_of(*nodes: fx.Node) -> list[int]:
    """The :func:`storage_keys` of the tensors that nodes hold."""
    return [key for tensor in tensors_of(*nodes) for key in storage_keys(tensor)]


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper that vmap, grad or jvp put around another."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's elements: itself, or those inside a subclass such as
    DTensor or inside a functorch wrapper."""
    if is_functorch_wrapper(tensor):
        return parts_of(torch._C._functorch.get_unwrapped(tensor))
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [p for t in inner if isinstance(t, torch.Tensor) for p in parts_of(t)]
    return [tensor]


def storage_keys(tensor: torch.Tensor) -> tuple[int, ...]:
    """One number for each storage that holds a tensor's elements; equal for tensors that share it.

    Empty where torch does not say, as for sparse tensors.
    """
    try:
        if type(tensor) is FakeTensor:  # nearly all of a graph
            return (tensor.untyped_storage()._cdata,)
        keys = [part.untyped_storage()._cdata for part in parts_of(tensor)]
    except (NotImplementedError, RuntimeError):
        return ()
    return tuple(dict.fromkeys(keys))


def wrapping_of(tensor: torch.Tensor) -> str:
    """What the class of a subclass knows besides the tensors inside (of a DTensor its mesh and its
    placements), with the layouts of those; empty for a plain tensor."""
    if not is_subclass(tensor):
        return ""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return repr((context, [layout_of(part) for part in parts_of(tensor)]))


def wrapped_like(outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """A subclass as `outer`, which holds one tensor, with `inner` in its place."""
    names, context = outer.__tensor_flatten__()  # type: ignore[attr-defined]
    held = {name: getattr(outer, name) for name in names}  # a device mesh may be among them
    held = {name: inner if isinstance(h, torch.Tensor) else h for name, h in held.items()}
    wrap = type(outer).__tensor_unflatten__  # type: ignore[attr-defined]
    return cast(torch.Tensor, wrap(held, context, outer.shape, outer.stride()))


def holds_in_place(outer: torch.Tensor, inner: torch.Tensor) -> bool:
    """Whether the one tensor inside `outer`, or `outer` itself, is element for element the one
    inside `inner`: of the same dtype, at the same places of the same storage."""
    parts = [parts_of(tensor) for tensor in (outer, inner)]
    if not all(len(held) == 1 and storage_keys(held[0]) for held in parts):
        return False
    one, other = (
        (held.dtype, held.device, layout_of(held), storage_keys(held)) for (held,) in parts
    )
    return one == other


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has memory of its own: no fake, sparse or meta tensor has."""
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.device.type != "meta"
        and bool(storage_keys(tensor))
    )


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and storage offset; of a tensor without strides, its shape and layout."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.layout
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def placement_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The layout of a tensor and the storage that it lies in."""
    return *layout_of(tensor), tensor.untyped_storage()._cdata


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that wraps others (DTensor, quantised weights): it has no memory
    of its own, and its class decides what operators on it do."""
    plain = type(value) is FakeTensor  # nearly all of a graph
    return not plain and isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor that wraps no other, and that neither vmap, grad nor jvp does."""
    wrapped = is_subclass(value) or is_functorch_wrapper(value)
    return isinstance(value, torch.Tensor) and not wrapped


def size_comparison(inputs: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """A test of sizes (ints or sympy expressions) for equality, which adds a guard for symbols."""
    environment = next((e for e in map(_shape_env, inputs) if e is not None), None)

    def same(a: Any, b: Any) -> bool:
        if a == b or (isinstance(a, int) and isinstance(b, int)) or environment is None:
            return bool(a == b)
        return bool(environment.evaluate_expr(sympy.Eq(a, b)))

    return same


def is_at_least(size: Any, other: Any) -> bool:
    """Whether a size is certainly as large as another; asks for no guard."""
    return isinstance(size, (int, torch.SymInt)) and bool(statically_known_true(size >= other))


def size_symbols(size: Any) -> tuple[sympy.Symbol, ...]:
    """The symbols a SymInt stands for: its own, and the one that guards have replaced it by."""
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
    """The fake mode of the first tensor that has one, or None."""
    modes = (getattr(tensor, "fake_mode", None) for tensor in tensors)
    return next((mode for mode in modes if mode is not None), None)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as a fake one, of its fake mode, with memory of its own."""
    with fake_mode_of([tensor]) or nullcontext(), torch.no_grad():
        return torch.empty_like(tensor)


def detached(value: Any) -> Any:
    """A fake tensor on the memory of another, which a change of its shape leaves as it is; of
    anything else, the value."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        return value.detach()


def name_of_operator(op: Any) -> str | None:
    """`namespace::name` of an operator, with the overload where one is given that is not the only
    one; None for anything else."""
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
    """What ATen says of an operator, by the tags of its overloads; nothing of an unknown one."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else packet.overloads()
    return frozenset(tag for one in overloads for tag in getattr(packet, one).tags)


def selected(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]` of fake tensors. Raises RuntimeError for a mask, whose result has no known
    shape."""
    with fake_mode_of(tensors_in([tensor, index])) or nullcontext(), torch.no_grad():
        return cast(torch.Tensor, tensor[index])


def made_again(value: Any) -> Any:
    """Fake tensors of numbers, or a tuple of them, each laid out as a given one, with memory of its
    own."""
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
    """The ATen calls `function(*inputs)` makes, under the fake mode of the tensors among them.

    pre_dispatch: as they are called, not what autograd makes of those that are composed of others.
    Raises whatever tracing raises: the caller decides what an untraceable node is.
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
    """What a node computes, on its arguments' fake tensors. instead: of some arguments, others."""
    if instead is None and _is_quick(node):
        source = cast(fx.Node, node.args[0]).meta["example_value"]
        # `reshape` would ask for the device, which a fake tensor answers in Python.
        method = "view" if node.target == "reshape" else cast(str, node.target)
        with torch.no_grad(), in_kernel_invocation_manager(source.fake_mode):
            made = call(method, (source, *node.args[1:]), {})
        return _fake_like(source, made)
    others = instead or {}

    def held(argument: fx.Node) -> Any:
        return others[argument] if argument in others else argument.meta["example_value"]

    args, kwargs = fx.node.map_arg(node.args, held), fx.node.map_arg(node.kwargs, held)
    # What is made of numbers alone has the mode of the graph's other nodes.
    nodes = chain(node.all_input_nodes, node.graph.nodes)
    mode = fake_mode_of(source.meta.get("example_value") for source in nodes)
    with mode or nullcontext(), torch.no_grad(), autocast_at(node):
        return call(cast(Any, node.target), args, kwargs)


# --- autocast in the graph ---


def has_autocast(graph: fx.Graph) -> bool:
    """Whether a graph enters autocast, or leaves it for a while."""
    return bool(graph.find_nodes(op="call_function", target=_enter_autocast, sort=False))


def autocast_in_force(node: fx.Node) -> dict[str, torch.dtype | None]:
    """The dtype of autocast where a node stands, None where it is off, for each device type for
    which the graph itself sets another than there is around it."""
    found: dict[str, torch.dtype | None] = {}
    for entry in node.graph.find_nodes(op="call_function", target=_enter_autocast):
        # Its other users are none: what is entered is left by a node that is given it.
        if entry < node and not any(leave < node for leave in entry.users):
            device, dtype, enabled, *_ = entry.args
            chosen = (dtype or torch.get_autocast_dtype(device)) if enabled else None
            found[device] = chosen
    return {device: dtype for device, dtype in found.items() if dtype != autocast_dtype(device)}


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast for a type of device, as it is now; None where it is off."""
    try:
        on = torch.is_autocast_enabled(device)
    except RuntimeError:  # of the meta device torch does not say
        return None
    return torch.get_autocast_dtype(device) if on else None


def autocast_at_devices(node: fx.Node, devices: Iterable[str]) -> frozenset[Any]:
    """The dtypes of autocast, where it is on, for some types of devices where a node stands."""
    known = autocast_in_force(node)
    now = {device: known.get(device, autocast_dtype(device)) for device in devices}
    return frozenset((device, dtype) for device, dtype in now.items() if dtype is not None)


def autocast_at(node: fx.Node) -> AbstractContextManager[Any]:
    """Within, autocast is as where a node stands in its graph."""
    stack = ExitStack()
    for device, dtype in autocast_in_force(node).items():
        stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
    return stack


# Methods that give a view, of whose layout the meta tensor inside of a fake one is asked at once;
# FakeTensor's own way takes several times as long. `reshape` gives one of dense tensors; of others
# the two may differ in the strides of dimensions of one.
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
    """Whether a value is a fake tensor that knows no more than its layout, in numbers, and its
    device."""
    if type(held) is not FakeTensor or held.constant is not None:
        return False
    layout = *held.shape, *held.stride(), held.storage_offset()
    return all(type(n) is int for n in layout) and getattr(held, "real_tensor", None) is None


def strided_view(
    source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A view of a plain fake tensor, of a layout in numbers."""
    fake = cast(FakeTensor, source)
    with torch.no_grad(), in_kernel_invocation_manager(fake.fake_mode):
        return _fake_like(fake, source.as_strided(size, stride, offset))


def _fake_like(like: Any, meta: torch.Tensor) -> torch.Tensor:
    """A meta tensor as a fake one of the mode and device of another."""
    return FakeTensor(like.fake_mode, meta, like.fake_device)


def mode_patches(mode: str | None) -> dict[str, Any] | None:
    """Inductor's settings for a `torch.compile` mode; raises RuntimeError for an unknown one."""
    return torch._inductor.list_mode_options(mode) if mode else None


def inductor_option_problem(options: Mapping[str, Any]) -> str | None:
    """What is wrong with the first option that Inductor does not have or that has another type;
    None where all are good."""
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            return f"settings of Inductor; {name!r} is none (near it: {near})"
        kind = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):
            return f"a value of {kind} for {name!r}"
    return None


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs `graph`; during a compilation its code is generated at the first call."""
    made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def forward_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """The function that runs a graph, its code generated now."""
    getattr(gm, "real_recompile", gm.recompile)()
    return gm.forward


def copy_origin(copy: fx.GraphModule, original: fx.GraphModule) -> None:
    """Gives a copy of a graph what Dynamo attached to the original besides its nodes.

    From it AOTAutograd knows that parameters and marked caches keep their addresses; without it
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


def compile_isolated(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile with a recompile limit of its own, where this torch offers that."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(model, **options)
    return compiled


_REPLACING = threading.Lock()
#: What was there before, and how many contexts want something else there, by owner and name.
_REPLACED: dict[tuple[Any, str], tuple[Any, int]] = {}


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `owner.name` is what `make` makes of it. Contexts of several threads may overlap in
    any order: the first puts it there, and the last takes it away."""
    with _REPLACING:
        before, count = _REPLACED.get((owner, name), (getattr(owner, name), 0))
        _REPLACED[owner, name] = before, count + 1
        if count == 0:
            setattr(owner, name, make(before))
    try:
        yield
    finally:
        with _REPLACING:
            before, count = _REPLACED.pop((owner, name))
            if count > 1:
                _REPLACED[owner, name] = before, count - 1
            else:
                setattr(owner, name, before)


def autocast_off_on_meta() -> AbstractContextManager[None]:
    """Within, torch says of the meta device that autocast is off, where it raises otherwise.

    Models ask of the device of their arguments before they compute in fp32, transformers 5.0 of
    any; there is no autocast of what computes nothing.
    """

    def make(asked: Callable[..., bool]) -> Callable[..., bool]:
        def is_autocast_enabled(*device_type: str) -> bool:
            return device_type != ("meta",) and asked(*device_type)

        return is_autocast_enabled

    return _replaced(torch, "is_autocast_enabled", make)


def numbers_fake_on_meta() -> AbstractContextManager[None]:
    """Within, what Dynamo traces on the meta device is fake as on any other.

    `torch.tensor(0.0, device="meta")` makes a plain tensor under fake tensors too, which the next
    call of them refuses. On other devices it makes a fake one.
    """

    def make(run_node: Callable[..., Any]) -> Callable[..., Any]:
        def run_node_faked(tracer: Any, node: fx.Node, *rest: Any) -> Any:
            made = run_node(tracer, node, *rest)
            plain = node.op == "call_function" and type(made) is torch.Tensor and made.is_meta
            mode = torch._guards.detect_fake_mode() if plain else None
            return made if mode is None else mode.from_tensor(made)

        return run_node_faked

    return _replaced(torch._dynamo.utils, "run_node", make)


def unlimited_compiles() -> Any:
    """A context without recompile limits: Dynamo never gives up and runs the model uncompiled."""
    many = 1 << 30
    return torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)


def zeros_like_fake(value: Any) -> Any:
    """A real tensor of zeros with a fake one's shape, strides, dtype and device; of a symbolic
    number, its value in the traced run."""
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
    """Whether a value is a symbolic number that only the data decides, or a tensor with one in its
    shape."""
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    symbolic = [n for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool))]
    return not all(n.node.has_hint() for n in symbolic)


def hint_of(value: Any) -> Any:
    """A symbolic number's value in the traced run; 1 where only the data decides it."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def hints_of(values: Iterable[Any]) -> tuple[int, ...]:
    """Sizes or strides in the traced run."""
    return tuple(hint_of(value) for value in values)
