"""Writes a standalone file that reproduces a failure of tilewright.

The file is written if `TILEWRIGHT_REPRO=folder` is set. It holds the model's code as Dynamo traced
it, with source lines, the shapes of the inputs, and the options. It holds neither weights nor data.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import attribute_of
from tilewright.compiler.options import Options
from tilewright.patterns.language import registered

log = logging.getLogger("tilewright")

FOLDER = "TILEWRIGHT_REPRO"

# The size of the largest constant that is written out. A larger constant of the graph becomes
# zeros.
_WRITTEN_OUT = 64

_FILE = '''\
"""Compiles one graph with tilewright and shows the error: python <this file>."""

{imports}

torch._dynamo.config.capture_scalar_outputs = True
# {versions}


{graph}


def build(kind):
    """Makes the module of the graph, with the modules of its branches and loop bodies."""
    module = kind()
    for name, inner in list(vars(kind).items()):
        if isinstance(inner, type):
            delattr(kind, name)
            setattr(module, name, build(inner))
    return module


def constants(graph):
{constants}    return graph


def inputs():
{inputs}

if __name__ == "__main__":
    options = {options}
    graph = constants(build(Graph))
    with torch.no_grad():
        compiled = torch.compile(graph, backend="tilewright", options=options, dynamic={dynamic})
        compiled(*inputs())
    print("no error")
'''


def write_repro(gm: fx.GraphModule, options: Options) -> Path | None:
    """Writes the file for `gm` into the folder that TILEWRIGHT_REPRO names. Returns None if the
    variable is not set.

    The name of the file is a hash of its content, so that one graph gives one file. If the file
    cannot be written, logs a warning and returns None.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    try:
        text = repro_text(gm, options)
        name = f"tilewright_repro_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        path = Path(folder).expanduser() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except Exception:
        log.warning("%s=%s: no repro could be written", FOLDER, folder, exc_info=True)
        return None
    return path


def repro_text(gm: fx.GraphModule, options: Options) -> str:
    """Returns the text of the file: a module of the graph's code, its inputs, and a strict
    compilation."""
    held = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    graph = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    given = {"inner": "eager", "strict": True, "everywhere": True} | {
        name: list(value) if isinstance(value, tuple) else value
        for name in ("patterns", "only", "target")
        if (value := getattr(options, name)) is not None
    }
    dynamic = any(_compat.is_symbolic(item) for item in held)
    return _FILE.format(
        imports="\n".join(_imports(gm)),
        versions=f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        graph=graph.strip().replace("class GraphModule(", "class Graph(", 1),
        constants=_indented(_constants(gm)),
        inputs=_indented(_inputs(held)),
        options=repr(given),
        dynamic=dynamic or None,
    )


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _imports(gm: fx.GraphModule) -> Iterator[str]:
    """Yields imports of the names in the graph's code, and imports of modules that register further
    patterns."""
    yield "import torch"
    yield "from torch import device, inf, nan"
    yield "import torch._dynamo"
    yield "import torch.fx._pytree as fx_pytree"
    yield "import torch.utils._pytree as pytree"
    known = {"torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"}
    for name, item in gm.graph.python_code("self").globals.items():
        if name not in known:
            yield _import_of(name, item)
    for pattern in registered():
        module = type(pattern).__module__
        if not module.startswith("tilewright."):
            found = _importable(module)
            comment = "" if found else "# the module that registers it: "
            yield f"{comment}import {module}  # pattern {pattern.name!r}"


def _import_of(name: str, item: Any) -> str:
    module, path = getattr(item, "__module__", None) or "", getattr(item, "__qualname__", "")
    if isinstance(item, type(torch)):
        return f"import {item.__name__} as {name}"
    known = module and path.isidentifier() and _importable(module)
    if known and getattr(importlib.import_module(module), path, None) is item:
        return f"from {module} import {path} as {name}"
    return f"# {name} = {item!r}  # cannot be imported: put its definition here"


def _importable(module: str) -> bool:
    return module != "__main__" and getattr(sys.modules.get(module), "__spec__", None) is not None


def _constants(gm: fx.GraphModule) -> Iterator[str]:
    """Yields assignments of the tensors that the graph reads as attributes."""
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(item := attribute_of(node), torch.Tensor):
            yield f"graph.{node.target} = {_constant(item)}"


def _constant(tensor: torch.Tensor) -> str:
    if tensor.numel() <= _WRITTEN_OUT and type(tensor) is torch.Tensor and not tensor.is_meta:
        values = f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype})"
        return f"{values}.to({str(tensor.device)!r})"
    return _zeros(tensor)


def _inputs(held: Iterable[Any]) -> Iterator[str]:
    """Yields the lines of a function that returns the inputs. The inputs are zeros, and they share
    storage as the user's inputs do."""
    storages: dict[int, str] = {}
    yield "given = []"
    for item in held:
        if not isinstance(item, torch.Tensor):
            yield f"given.append({_compat.hint_of(item)!r})"
            continue
        keys = _compat.storage_keys(item)
        plain = len(keys) == 1 and not _compat.is_subclass(item)
        if not plain or item.layout is not torch.strided or not item.numel():
            yield f"given.append({_parameter(item, _zeros(item))})"
            continue
        (key,) = keys
        if key not in storages:
            storages[key] = f"storage_{len(storages)}"
            size = _compat.hint_of(item.untyped_storage().nbytes())
            device = str(item.device)
            zeros = f"torch.zeros({size}, dtype=torch.uint8, device={device!r})"
            yield f"{storages[key]} = {zeros}.untyped_storage()"
        sizes, strides = _compat.hints_of(item.shape), _compat.hints_of(item.stride())
        offset = _compat.hint_of(item.storage_offset())
        empty = f"torch.empty(0, dtype={item.dtype}, device={str(item.device)!r})"
        yield f"# {item.dtype}{list(sizes)}"
        made = f"{empty}.set_({storages[key]}, {offset}, {sizes}, {strides})"
        yield f"given.append({_parameter(item, made)})"
    yield "return given"


def _zeros(tensor: torch.Tensor) -> str:
    shape = _compat.hints_of(tensor.shape)
    device = str(tensor.device)
    return f"torch.zeros({shape}, dtype={tensor.dtype}, device={device!r})"


def _parameter(tensor: torch.Tensor, made: str) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return f"torch.nn.Parameter({made}, requires_grad=False)"
    return made
