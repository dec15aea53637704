"""Every private or version-dependent torch import, in one place."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, get_origin

import sympy
import torch
from torch import fx
from torch._dynamo import convert_frame
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed, Unsupported, UserError
from torch._dynamo.exc import TorchDynamoException as DynamoError
from torch._dynamo.utils import graph_break_reasons
from torch._inductor.compile_fx import compile_fx
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.graph_transform_observer import GraphTransformObserver
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map

from tilewright.patterns.dataflow import innermost_outside_torch

log = logging.getLogger("tilewright")

__all__ = [
    "GROUPED_MM",
    "BackendCompilerFailed",
    "CannotStandInError",
    "DynamoError",
    "GraphTransformObserver",
    "adopt_origin",
    "as_meta",
    "aten_graph",
    "compile_apart",
    "compile_fx",
    "fake_mode_of",
    "forward_of",
    "graph_module",
    "has_address",
    "hint_of",
    "inductor_option_problem",
    "is_functorch_wrapper",
    "is_subclass",
    "is_symbolic",
    "layout_of",
    "listen_for_breaks",
    "mode_patches",
    "noting_breaks",
    "parts_of",
    "run_fake",
    "run_recorded",
    "size_comparison",
    "size_symbols",
    "storage_keys",
    "tensors_in",
    "trace_artifact",
    "triton_kernel_writes",
    "unlimited_compiles",
    "why_graph_ended",
    "writes",
    "written_arguments",
    "zeros_like_fake",
]


#: Every spelling of the grouped GEMM that a Dynamo graph may call.
GROUPED_MM = frozenset(
    target
    for place, name in (
        (torch, "_grouped_mm"),
        (torch.nn.functional, "grouped_mm"),
        (torch.ops.aten._grouped_mm, "default"),
    )
    if (target := getattr(place, name, None)) is not None
)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """A text in torch's structured trace (TORCH_TRACE), which tlparse shows with its compilation.

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


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that vmap, grad or jvp put around another."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's elements: itself, or those inside of a subclass such
    as DTensor or of a wrapper of functorch."""
    if is_functorch_wrapper(tensor):
        return parts_of(torch._C._functorch.get_unwrapped(tensor))
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [p for t in inner if isinstance(t, torch.Tensor) for p in parts_of(t)]
    return [tensor]


def storage_keys(tensor: torch.Tensor) -> tuple[int, ...]:
    """One number for each storage that holds a tensor's elements; equal for tensors that share it.

    Empty where torch does not tell, as for sparse tensors.
    """
    try:
        if type(tensor) is FakeTensor:  # nearly all of a graph
            return (tensor.untyped_storage()._cdata,)
        keys = [part.untyped_storage()._cdata for part in parts_of(tensor)]
    except (NotImplementedError, RuntimeError):
        return ()
    return tuple(dict.fromkeys(keys))


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has memory of its own: no fake, sparse or meta tensor has."""
    return (
        not isinstance(tensor, FakeTensor)
        and tensor.device.type != "meta"
        and bool(storage_keys(tensor))
    )


class CannotStandInError(RuntimeError):
    """Nothing can be put in the place of a value to try out a call on it."""


class _StandIns:
    """Fake tensors of a mode of their own, laid out and sharing storage as others do."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
        self.bases: dict[int, torch.Tensor] = {}
        self.originals: dict[int, list[torch.Tensor]] = {}
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, slice):
            return slice(*map(self.of, (value.start, value.stop, value.step)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied = copy.copy(value)
            for field in dataclasses.fields(value):
                object.__setattr__(copied, field.name, self.of_nested(getattr(value, field.name)))
            return copied
        return hint_of(value)

    def of_nested(self, value: Any) -> Any:
        return tree_map(self.of, value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_functorch_wrapper(tensor):
            raise CannotStandInError("a tensor under vmap, grad or jvp")
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.of(getattr(tensor, name)) for name in names}
            sizes = [tuple(_hints(given)) for given in (tensor.shape, tensor.stride())]
            return type(tensor).__tensor_unflatten__(inner, context, *sizes)
        keys = storage_keys(tensor)
        if not keys:
            raise CannotStandInError(f"a tensor of layout {tensor.layout}")
        (key,) = keys
        if key not in self.bases:
            count = int(hint_of(tensor.untyped_storage().nbytes()))
            self.bases[key] = torch.empty(count, dtype=torch.uint8, device=tensor.device)
            self.originals[self.bases[key].untyped_storage()._cdata] = []
        base = self.bases[key]
        sizes, strides = _hints(tensor.shape), _hints(tensor.stride())
        offset = int(hint_of(tensor.storage_offset()))
        made = _as(base, tensor.dtype).as_strided(sizes, strides, offset)
        self.originals[base.untyped_storage()._cdata].append(tensor)
        self.plain.append((made, tensor))
        return made


class _Writes(TorchDispatchMode):
    """Notes the storages that operators write by their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in written_arguments(func, args, kwargs or {}):
            for tensor in tensors_in(given):
                self.storages.update(storage_keys(tensor))
        return func(*args, **(kwargs or {}))


# Running statistics are updated by operators whose schemas do not say so.
_STATISTICS = frozenset({"running_mean", "running_var"})


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an overload of an operator is given for the arguments that it writes."""
    given = [(at, name) for at, name in _written_places(func) if at < len(args) or name in kwargs]
    return [args[at] if at < len(args) else kwargs[name] for at, name in given]


def writes(func: Any) -> bool:
    """Whether an overload of an operator writes any argument."""
    return bool(_written_places(func))


@cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    return [
        (at, spec.name)
        for at, spec in enumerate(func._schema.arguments)
        if (spec.alias_info is not None and spec.alias_info.is_write) or spec.name in _STATISTICS
    ]


def run_recorded(
    function: Callable[..., Any] | str, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors that a call writes, tensors whose shape, strides or storage it changes in place).

    The call is tried on fake tensors that stand in for those given, with the sizes of the traced
    run, and share memory as those do; nothing of theirs changes. function: a method's name, or what
    is called. A write is known by the schemas of the operators that run, and by torch's version
    counters. Raises whatever the call raises there, and CannotStandInError.
    """
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        made = _StandIns()
        with made.mode:
            given, named = made.of_nested(args), made.of_nested(kwargs)
            before = [(t, o, t._version, _placed(t)) for t, o in made.plain]
            writes = _Writes()
            with writes:
                if isinstance(function, str):
                    getattr(given[0], function)(*given[1:], **named)
                else:
                    function(*given, **named)
            counted = [o for t, o, version, _ in before if t._version != version]
            anew = [o for t, o, _, layout in before if _placed(t) != layout]
            written = [o for key in writes.storages for o in made.originals.get(key, ())]
    return [*counted, *written], anew


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and offset; of a tensor that has none of these, its shape and layout."""
    if tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.layout
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _placed(tensor: torch.Tensor) -> tuple[Any, ...]:
    return *layout_of(tensor), tensor.untyped_storage()._cdata


def triton_kernel_writes(kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Which tensors a user's Triton kernel writes, by torch's own analysis of the kernel.

    kwargs: of a `triton_kernel_wrapper_mutation` node, with tensors for nodes. None where torch
    cannot tell.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    given = kwargs["kwargs"]
    try:
        names = triton_kernel_wrap.get_mutated_tensors(
            kwargs["kernel_idx"],
            kwargs["constant_args_idx"],
            given,
            kwargs.get("tma_descriptor_metadata", {}),
        )
    except Exception:  # torch analyses what Triton compiles: without a GPU's compiler it may not
        return None
    return [tensor for name in names for tensor in tensors_in(given[name])]


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that wraps others (DTensor, quantised weights): no memory of its
    own is seen, and what is done to it is another class's business."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def size_comparison(inputs: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Equality of sizes (ints or sympy expressions) that guards where it depends on symbols."""
    environment = next((e for e in map(_shape_env, inputs) if e is not None), None)

    def same(a: Any, b: Any) -> bool:
        if a == b or (isinstance(a, int) and isinstance(b, int)) or environment is None:
            return bool(a == b)
        return bool(environment.evaluate_expr(sympy.Eq(a, b)))

    return same


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


def fake_mode_of(tensors: Sequence[Any]) -> Any:
    """The fake mode that made these tensors, or None where none is fake."""
    for tensor in tensors:
        mode = getattr(tensor, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def aten_graph(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.Graph:
    """The pre-dispatch ATen calls `function(*tensors)` makes, under the tensors' fake mode.

    Raises whatever tracing raises: the caller decides what an untraceable node is.
    """
    mode = fake_mode_of(tensors)
    traced = make_fx(function, pre_dispatch=True, tracing_mode="real")
    if mode is None:
        return traced(*tensors).graph
    with mode:
        return traced(*tensors).graph


def run_fake(node: fx.Node) -> Any:
    """What a node computes, on its arguments' fake tensors."""

    def held(argument: fx.Node) -> Any:
        return argument.meta["example_value"]

    args, kwargs = fx.node.map_arg(node.args, held), fx.node.map_arg(node.kwargs, held)
    mode = fake_mode_of([a.meta.get("example_value") for a in node.all_input_nodes])
    if mode is None:  # a factory of numbers alone
        mode = fake_mode_of([n.meta.get("example_value") for n in node.graph.nodes])

    def run() -> Any:
        if isinstance(node.target, str):
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)

    if mode is None:
        return run()
    with mode, torch.no_grad():
        return run()


def mode_patches(mode: str | None) -> dict[str, Any] | None:
    """Inductor's settings for a `torch.compile` mode; raises RuntimeError for an unknown one."""
    return torch._inductor.list_mode_options(mode) if mode else None


def inductor_option_problem(options: Mapping[str, Any]) -> str | None:
    """None, or a sentence on the first that is no setting of Inductor or not of its type."""
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
    """A module that runs `graph`; inside a compilation its code is made when it is first run."""
    made: fx.GraphModule = _make_graph_module(root, graph)
    return made


def forward_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """What runs a graph, its code made now."""
    getattr(gm, "real_recompile", gm.recompile)()
    return gm.forward


def adopt_origin(copy: fx.GraphModule, original: fx.GraphModule) -> None:
    """Tells a copy what Dynamo told of the original graph beside its nodes.

    By it AOTAutograd knows parameters and marked caches for inputs that stay where they are; else
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


def compile_apart(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile, which counts towards no other compilation's limit where torch can do that."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(model, **options)
    return compiled


def unlimited_compiles() -> Any:
    """A context in which Dynamo never gives up compiling, and so never runs the model instead."""
    many = 1 << 30
    return torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many)


# --- graph breaks ---
#
# Dynamo's counter leaves out branches on data, and frames that it gives up as a whole. What it
# knows of a break is the reason that a graph ended by (on the graph, and in `graph_break_reasons`),
# and the exception by which a frame was given up, in flight when its compilation ends.

#: Is told of the breaks in one frame: their texts, and the options given with the backend. Returns
#: whether they are to be an error; that they can be where Dynamo gave up the frame.
Listener = Callable[[list[str], Mapping[str, Any]], bool]

# Names that Dynamo gives as reasons, in words; the first line, and a hint.
_REASONS = {
    "generic_jump": (
        "a branch depends on the data of a tensor",
        "compute both sides and choose with torch.where, or use torch.cond",
    ),
    "step_unsupported": ("Dynamo does not know this statement", ""),
}

_GIVEN_UP = "; Dynamo gives up "

_listeners: dict[Any, Listener] = {}
# Reasons that the backend has told of already, as the reason of its own graph.
_told: set[int] = set()
# The latest reason there was when a frame ended; torch._dynamo.reset() empties their list.
_latest: Any = None


def why_graph_ended(gm: fx.GraphModule) -> list[str]:
    """The text of the break that ends a Dynamo graph, where one does; as graph breaks are told."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return []
    _told.add(id(reason))
    return [_break_text(reason.reason, reason.user_stack)]


def listen_for_breaks(backend: Any, listener: Listener) -> None:
    """From now on `listener` is told of breaks in frames compiled with the function `backend`."""
    _listeners[backend] = listener
    if not isinstance(callback_handler.end_callbacks, _Callbacks):
        callback_handler.end_callbacks = _Callbacks(callback_handler.end_callbacks)
    if _frame_ended not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_frame_ended)


@contextmanager
def noting_breaks(backend: Any) -> Iterator[list[str]]:
    """A list that fills with the texts of the breaks met inside, in frames of `backend`.

    Each is Dynamo's text, with `(file:line)` of the user's code after its first line where known,
    and is there once for each place.
    """
    places: set[str] = set()
    texts: list[str] = []

    def note(found: list[str], options: Mapping[str, Any]) -> bool:
        for text in found:
            # A frame is often tried again by itself, and given up for the same reason.
            place = text.partition("\n")[0].partition(_GIVEN_UP)[0]
            if place not in places:
                places.add(place)
                texts.append(text)
        return False

    listen_for_breaks(backend, note)
    try:
        yield texts
    finally:
        del _listeners[backend]


class _Callbacks(list[Any]):
    """Callbacks of Dynamo's among which ours outlives `torch._dynamo.reset()`, as backends do."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback is _frame_ended]


def _frame_ended(_: Any) -> None:
    """Dynamo's callback: nothing of ours that fails in it may stop the user's model."""
    try:
        _tell_of_breaks()
    except Exception:
        log.exception("graph breaks of a frame could not be told")


def _tell_of_breaks() -> None:
    """Tells the frame's listener of breaks in it that the backend has not told."""
    global _latest
    error = sys.exc_info()[1]
    known = next((i for i, r in enumerate(graph_break_reasons, 1) if r is _latest), 0)
    ended = [r for r in graph_break_reasons[known:] if id(r) not in _told]
    _latest = graph_break_reasons[-1] if graph_break_reasons else None
    _told.clear()
    gave_up = isinstance(error, (Unsupported, UserError))
    if not _listeners or not (ended or gave_up):
        return
    listener, options, frame = _listener_of_frame()
    if listener is None or (gave_up and frame.get("one_graph")):
        return
    texts = [_break_text(r.reason, r.user_stack) for r in ended]
    if gave_up:
        name = getattr(frame.get("code"), "co_name", "a function")
        stack = getattr(error, "real_stack", ())
        first, newline, rest = _break_text(getattr(error, "msg", str(error)), stack).partition("\n")
        texts.append(f"{first}{_GIVEN_UP}{name}() and runs it as plain Python{newline}{rest}")
    tracer = getattr(error, "_torch_dynamo_tracer_output", None)
    if listener(texts, options) and tracer is not None:
        tracer.error_on_graph_break = True  # as under torch._dynamo.error_on_graph_break


def _listener_of_frame() -> tuple[Listener | None, Mapping[str, Any], Mapping[str, Any]]:
    """(listener, the backend's options, Dynamo's variables) of the compilation that is ending."""
    place: FrameType | None = sys._getframe()
    while place is not None:
        if place.f_code.co_filename == convert_frame.__file__ and "compiler_fn" in place.f_locals:
            backend, options = _unwrapped(place.f_locals["compiler_fn"])
            try:
                return _listeners.get(backend), options, place.f_locals
            except TypeError:  # a backend that cannot be a key is none of ours
                return None, {}, {}
        place = place.f_back
    return None, {}, {}


def _unwrapped(compiler: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function given as `backend`, and the options given beside it, of Dynamo's wrappers."""
    options: Mapping[str, Any] = {}
    for _ in range(4):
        options = getattr(compiler, "kwargs", {}).get("options") or options
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(compiler, "compiler_fn", None)
        if inner is None:
            break
        compiler = inner
    return compiler, options


def _break_text(reason: str, stack: Sequence[traceback.FrameSummary]) -> str:
    first, newline, rest = reason.partition("\n")
    words, hint = _REASONS.get(first.partition(" ")[0], (first, ""))
    rest += f"\nHint: {hint}" if hint else ""
    return f"{words}{_place(stack)}{newline or (rest and chr(10))}{rest.lstrip(chr(10))}"


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    found = innermost_outside_torch([(f.filename, f.lineno or 0) for f in stack])
    return f" ({os.path.basename(found[0])}:{found[1]})" if found else ""


def zeros_like_fake(value: Any) -> Any:
    """A real tensor of zeros with a fake one's metadata; numbers for symbolic numbers."""
    if isinstance(value, torch.Tensor):
        sizes = _hints(value.shape)
        if any(n == 0 for n in sizes) or not storage_keys(value):
            return torch.zeros(sizes, dtype=value.dtype, device=value.device)
        strides = _hints(value.stride())
        empty = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return empty.zero_()
    return hint_of(value)


def is_symbolic(value: Any) -> bool:
    """Whether a value is, or a tensor's shape holds, a number that is not fixed."""
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in numbers)


def hint_of(value: Any) -> Any:
    """A symbolic number's value in the traced run; 1 where only the data decides it."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def _hints(values: Iterable[Any]) -> list[int]:
    return [int(hint_of(value)) for value in values]


def as_meta(values: Any) -> Any:
    """Fake tensors as plain meta tensors, symbolic sizes at their hints; views keep sharing."""
    bases: dict[int, torch.Tensor] = {}

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _meta_tensor(item, bases)
        if isinstance(item, (tuple, list)):
            return type(item)(convert(i) for i in item)
        return hint_of(item)

    return convert(values)


def _meta_tensor(fake: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
    sizes, strides = ([int(hint_of(n)) for n in ns] for ns in (fake.shape, fake.stride()))
    offset = int(hint_of(fake.storage_offset()))
    key = fake.untyped_storage()._cdata
    if key not in bases:
        count = int(hint_of(fake.untyped_storage().nbytes()))
        bases[key] = torch.empty(count, dtype=torch.uint8, device="meta")
    return _as(bases[key], fake.dtype).as_strided(sizes, strides, offset)


def _as(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as numbers of a dtype, without those left over at the end."""
    return base[: base.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
