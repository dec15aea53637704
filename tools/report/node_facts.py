"""Describes a node for a page: the node's label, its facts, and the source lines from which it
comes."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.patterns.dataflow import innermost_outside_torch, lines_of, scope_of
from tilewright.patterns.recognise.dtypes import dtype_name

#: Nodes of these kinds are not operations. They are named in the facts of the nodes that read them.
INPUTS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class SourceLine:
    """A line of source: the name of its file, its number, and its text. The text is empty if it is
    not known."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def label(node: fx.Node) -> str:
    """Returns the name of the node's operator, without its namespace."""
    target = node.target if isinstance(node.target, str) else _name(node.target)
    return target.rpartition("::")[2].removesuffix(".default") or node.op


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", str(target)).rpartition(".")[2]


def shape(node: fx.Node) -> str:
    """Returns the dtype and shape of the first result, such as `bf16[1,4096]`. Returns "" if the
    result is not a tensor."""
    whole = next(_shapes(node.meta.get("example_value")), "")
    return re.sub(r"^(b?)(float|int|u)\w*?(\d+)", _short, whole)


def _short(dtype: re.Match[str]) -> str:
    """Returns a short name, such as `bf16` for bfloat16 and `i64` for int64."""
    return dtype[1] + dtype[2][0] + dtype[3]


def facts(node: fx.Node) -> str:
    """Returns the lines that a page shows when the pointer is on a node: the operator, the shapes,
    the weights and caches that the node reads, the module and the source."""
    lines = [label(node), *_shapes(node.meta.get("example_value"))]
    for read in inputs_of(node):
        lines += [f"reads {read.name} {s}" for s in _shapes(read.meta.get("example_value"))]
    lines += [place] if (place := scope_of(node)) else []
    lines += [f"{line}  {line.text}".strip() for line in source_lines(node)]
    return "\n".join(lines)


def inputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the weights, caches and other inputs of the graph that a node reads, directly or
    through views that are not drawn (:func:`is_view_of_input`)."""
    for used in node.all_input_nodes:
        if used.op in INPUTS:
            yield used
        elif is_view_of_input(used):
            yield from inputs_of(used)


_LAYOUT = frozenset({"reshape", "view", "permute", "transpose", "select", "narrow", "unsqueeze",
                     "squeeze", "expand", "t", "flatten"})  # fmt: skip


def is_view_of_input(node: fx.Node) -> bool:
    """Whether the node is a view of an input of the graph, directly or through other views."""
    sources = node.all_input_nodes
    if len(sources) != 1 or label(node) not in _LAYOUT:
        return False
    return sources[0].op in INPUTS or is_view_of_input(sources[0])


def writes_in_place(node: fx.Node) -> bool:
    """Whether the operator itself writes into one of its arguments: `index_copy_`, `cache[i] = k`,
    or an operator with a mutable schema."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = label(node)
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))


def _shapes(value: Any) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        dims = ",".join(str(size) for size in value.shape)
        yield f"{dtype_name(value.dtype)}[{dims}]"
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _shapes(item)


def source_lines(node: fx.Node) -> tuple[SourceLine, ...]:
    """Returns the innermost line in the model's own code. If that line calls a library, the
    library's line follows.

    The model's own code is in the files that define the modules around the node.
    """
    lines = lines_of(node.meta.get("stack_trace") or "")
    inner = innermost_outside_torch(list(lines))
    own_files = _files_of_modules(node)
    own = next((at for at in reversed(lines) if at[0] in own_files), None)
    found = dict.fromkeys(at for at in (own, inner) if at is not None)
    return tuple(SourceLine(os.path.basename(at[0]), at[1], lines[at]) for at in found)


def _files_of_modules(node: fx.Node) -> set[str]:
    """Returns the files that define the classes of the modules around a node, without torch's
    own."""
    classes = (kind for _, kind in (node.meta.get("nn_module_stack") or {}).values())
    found = set()
    for kind in classes:
        if isinstance(kind, type) and not kind.__module__.startswith("torch."):
            try:
                found.add(inspect.getsourcefile(kind) or "")
            except (OSError, TypeError):  # a class without a source file
                continue
    return found
