"""Every private or version-dependent torch import, in one place."""

from __future__ import annotations

import difflib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_origin

import sympy
import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException as DynamoError
from torch._dynamo.utils import counters, graph_break_reasons
from torch._inductor.compile_fx import compile_fx
from torch._logging import trace_structured
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from tilewright.patterns.dataflow import innermost_outside_torch

__all__ = [
    "GROUPED_MM",
    "DynamoError",
    "GraphTransformObserver",
    "adopt_origin",
    "as_meta",
    "aten_calls",
    "compile_apart",
    "compile_fx",
    "counting_graph_breaks",
    "empty_like_fake",
    "fake_mode_of",
    "inductor_option_problem",
    "mode_patches",
    "run_fake",
    "size_comparison",
    "size_symbols",
    "storage_key",
    "trace_artifact",
    "unlimited_compiles",
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


def storage_key(tensor: torch.Tensor) -> int | None:
    """Equal for fake tensors that share storage; None for one without (sparse, wrappers)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


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


def aten_calls(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[fx.Node]:
    """The pre-dispatch ATen calls `function(*tensors)` makes, under the tensors' fake mode.

    Raises whatever tracing raises: the caller decides what an untraceable node is.
    """
    mode = fake_mode_of(tensors)
    traced = make_fx(function, pre_dispatch=True, tracing_mode="real")
    if mode is None:
        graph = traced(*tensors).graph
    else:
        with mode:
            graph = traced(*tensors).graph
    return [
        n for n in graph.nodes if n.op == "call_function" and n.target.__module__ != "_operator"
    ]


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
        sizes = [int(_hint(n)) for n in value.shape]
        strides = [int(_hint(n)) for n in value.stride()]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return _hint(value)


def _hint(value: Any) -> Any:
    """A symbolic number's value in the traced run; 1 where only the data decides it."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.hint if value.node.has_hint() else 1


def as_meta(values: Any) -> Any:
    """Fake tensors as plain meta tensors, symbolic sizes at their hints; views keep sharing."""
    bases: dict[int | None, torch.Tensor] = {}

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return _meta_tensor(item, bases)
        if isinstance(item, (tuple, list)):
            return type(item)(convert(i) for i in item)
        return _hint(item)

    return convert(values)


def _meta_tensor(fake: torch.Tensor, bases: dict[int | None, torch.Tensor]) -> torch.Tensor:
    sizes, strides = ([int(_hint(n)) for n in ns] for ns in (fake.shape, fake.stride()))
    offset = int(_hint(fake.storage_offset()))
    key = storage_key(fake)
    if key not in bases:
        count = int(_hint(fake.untyped_storage().nbytes())) // fake.element_size()
        bases[key] = torch.empty(count, dtype=fake.dtype, device="meta")
    return bases[key].view(fake.dtype).as_strided(sizes, strides, offset)
