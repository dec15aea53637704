"""Every private or version-dependent torch import, in one place."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, get_origin

import sympy
import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException as DynamoError
from torch._dynamo.utils import counters, graph_break_reasons
from torch._inductor.compile_fx import compile_fx
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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

__all__ = [
    "GROUPED_MM",
    "CannotStandInError",
    "DynamoError",
    "GraphTransformObserver",
    "adopt_origin",
    "as_meta",
    "aten_graph",
    "compile_apart",
    "compile_fx",
    "counting_graph_breaks",
    "empty_like_fake",
    "fake_mode_of",
    "has_address",
    "inductor_option_problem",
    "is_functorch_wrapper",
    "mode_patches",
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
    "written_arguments",
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
        return _hint(value)

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
            count = int(_hint(tensor.untyped_storage().nbytes()))
            self.bases[key] = torch.empty(count, dtype=torch.uint8, device=tensor.device)
            self.originals[self.bases[key].untyped_storage()._cdata] = []
        base = self.bases[key]
        sizes, strides = _hints(tensor.shape), _hints(tensor.stride())
        whole = base[: base.numel() // tensor.element_size() * tensor.element_size()]
        made = whole.view(tensor.dtype).as_strided(
            sizes, strides, int(_hint(tensor.storage_offset()))
        )
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
            before = [(t, o, t._version, _layout_of(t)) for t, o in made.plain]
            writes = _Writes()
            with writes:
                if isinstance(function, str):
                    getattr(given[0], function)(*given[1:], **named)
                else:
                    function(*given, **named)
            counted = [o for t, o, version, _ in before if t._version != version]
            anew = [o for t, o, _, layout in before if _layout_of(t) != layout]
            written = [o for key in writes.storages for o in made.originals.get(key, ())]
    return [*counted, *written], anew


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage()._cdata,
    )


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


@contextmanager
def counting_graph_breaks() -> Iterator[list[str]]:
    """A list that holds, afterwards, the reasons of the graph breaks met inside.

    Each is Dynamo's text, with `(file:line)` of the user's code after its first line where known.
    """
    before, known = dict(counters["graph_break"]), len(graph_break_reasons)
    reasons: list[str] = []
    yield reasons
    stacks = graph_break_reasons[known:]
    for text, count in counters["graph_break"].items():
        if count > before.get(text, 0):
            places = dict.fromkeys(_place(s.user_stack) for s in stacks if s.reason == text)
            first, newline, rest = text.partition("\n")
            reasons += [f"{first}{place}{newline}{rest}" for place in places or [""]]


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    found = innermost_outside_torch([(f.filename, f.lineno or 0) for f in stack])
    return f" ({os.path.basename(found[0])}:{found[1]})" if found else ""


def empty_like_fake(value: Any) -> Any:
    """A real, uninitialised tensor of a fake one's metadata; numbers for symbolic numbers."""
    if isinstance(value, torch.Tensor):
        sizes, strides = _hints(value.shape), _hints(value.stride())
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return _hint(value)


def _hint(value: Any) -> Any:
    """A symbolic number's value in the traced run; 1 where only the data decides it."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def _hints(values: Iterable[Any]) -> list[int]:
    return [int(_hint(value)) for value in values]


def as_meta(values: Any) -> Any:
    """Fake tensors as plain meta tensors, symbolic sizes at their hints; views keep sharing."""
    bases: dict[int, torch.Tensor] = {}

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _meta_tensor(item, bases)
        if isinstance(item, (tuple, list)):
            return type(item)(convert(i) for i in item)
        return _hint(item)

    return convert(values)


def _meta_tensor(fake: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
    sizes, strides = ([int(_hint(n)) for n in ns] for ns in (fake.shape, fake.stride()))
    offset = int(_hint(fake.storage_offset()))
    key = fake.untyped_storage()._cdata
    if key not in bases:
        count = int(_hint(fake.untyped_storage().nbytes())) // fake.element_size()
        bases[key] = torch.empty(count, dtype=fake.dtype, device="meta")
    return bases[key].view(fake.dtype).as_strided(sizes, strides, offset)
