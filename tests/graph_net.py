"""Reads stored graphs, and says what is fused in each.

`tests/patterns/FAMILY/graphs.json` has graphs of random models as Dynamo captured them. It also has
changed copies, in which `tests/programs/breakages.py` changed a number, an operand or an operation.
For a copy, the file stores only the lines that differ. With each graph it stores what is fused in
the graph: the calls of fused ops with all their arguments, and the misses. When a graph was stored,
its fused form was run and compared with eager mode, except for three graphs whose results are
undefined or unstable.

The graphs were chosen from 1400. Nearly every condition in `patterns` that is true in one of the
1400 graphs and false in another is also true and false in the chosen graphs. `test_graphs.py`
beside each file compares what is fused now. It runs neither Dynamo nor the graphs, and takes a
twentieth of a second for each graph.
`--tilewright-update` stores what is fused now; read the diff.
"""

from __future__ import annotations

import builtins
import json
import operator
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import _get_qualified_name

from tests.programs.breakages import held, told_again
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.tools.pytest_plugin import UPDATE

OPTIONS = Options(inner="eager", target="sm100", everywhere=True)
LINE = re.compile(r"(\w+) = (\.?[\w.]+)\((.*)\)")
FOLDER = Path(__file__).parent / "patterns"


def spelled(graph: fx.Graph) -> list[str]:
    """Returns the lines of a graph. Raises ValueError if it has nodes that lines cannot express."""
    storages: dict[int, int] = {}
    return [_line(node, storages) for node in graph.nodes]


def _line(node: fx.Node, storages: dict[int, int]) -> str:
    if node.op == "placeholder":
        return f"{node.name} = input({_tensor(held(node), storages)})"
    if node.op == "output":
        return f"output = output({node.args[0]!r})"
    if node.op not in ("call_function", "call_method"):
        raise ValueError(node.op)
    target = f".{node.target}" if node.op == "call_method" else _get_qualified_name(node.target)
    named = [f"{key}={value!r}" for key, value in node.kwargs.items()]
    line = f"{node.name} = {target}({', '.join([*map(repr, node.args), *named])})"
    read = LINE.fullmatch(line)
    if read is None or (node.op == "call_function" and _function(target) is not node.target):
        raise ValueError(line)
    return line


def _tensor(tensor: Any, storages: dict[int, int]) -> str:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(tensor)
    storage = tensor.untyped_storage()
    parts = [tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()]
    parts.append(storages.setdefault(storage._cdata, len(storages)))
    parts += [storage.nbytes(), isinstance(tensor, torch.nn.Parameter)]
    return ", ".join(map(repr, parts))


def _function(name: str) -> Any:
    room, _, rest = name.partition(".")
    rooms = {"_operator": operator, "torch": torch}
    found = operator.attrgetter(rest)(rooms[room]) if rest else getattr(builtins, room, None)
    return found


def read(lines: Sequence[str]) -> fx.GraphModule:
    """Returns the module of a graph, with the fake tensors that Dynamo would compute."""
    graph, storages = fx.Graph(), {}
    known: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
    known |= {"device": torch.device, "given": lambda *args, **kwargs: (args, kwargs)}
    mode = FakeTensorMode()
    for line in lines:
        name, target, arguments = LINE.fullmatch(line).groups()
        args, kwargs = eval(f"given({arguments})", known)
        if target == "input":
            node = graph.placeholder(name)
            with mode:
                node.meta["example_value"] = _made(storages, *args)
        elif target == "output":
            node = graph.output(args[0])
        elif target.startswith("."):
            node = graph.create_node("call_method", target[1:], args, kwargs, name=name)
        else:
            node = graph.create_node("call_function", _function(target), args, kwargs, name=name)
        known[name] = node
    told_again(graph)
    return fx.GraphModule({}, graph)


def _made(storages, dtype, shape, strides, offset, storage, size, is_parameter) -> torch.Tensor:
    memory = storages.setdefault(storage, torch.empty(size, dtype=torch.uint8))
    made = memory.view(dtype).as_strided(shape, strides, offset)
    return torch.nn.Parameter(made, requires_grad=False) if is_parameter else made


def found_in(module: fx.GraphModule) -> list[str]:
    """Returns a line for each call of a fused op, and one for each miss."""
    report = fuse(module, OPTIONS)
    calls = [node for node in report.after.graph.nodes if "tilewright" in node.meta]
    misses = [f"{m.pattern} {m.code} {' '.join(n.name for n in m.nodes)}" for m in report.misses]
    return [*(_line(node, {}) for node in calls), *sorted(misses)]


def lines_of(model: dict[str, Any], graph: dict[str, Any]) -> list[str]:
    """Returns the lines of a stored graph."""
    lines = list(model["lines"])
    for start, stop, new in reversed(graph["changes"]):
        lines[start:stop] = new
    return lines


def changes(before: list[str], after: list[str]) -> list[list[Any]]:
    """Returns the lines of `before` to replace: (from, to, new lines)."""
    parts = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [[a, b, after[c:d]] for what, a, b, c, d in parts if what != "equal"]


def check(family: str, config: pytest.Config) -> None:
    """Compares what is fused in the graphs of a family with the stored results."""
    path = FOLDER / family / "graphs.json"
    models = json.loads(path.read_text("utf-8"))
    wrong = []
    for model in models:
        for graph in model["graphs"]:
            found = found_in(read(lines_of(model, graph)))
            if found != graph["found"]:
                wrong.append((model["drawn"], graph["what"], found, graph["found"]))
            graph["found"] = found
    if config.getoption(UPDATE):
        path.write_text(json.dumps(models, indent=0) + "\n", "utf-8")
    else:
        assert not wrong, (wrong[0], f"{len(wrong)} differ; if this is intended: {UPDATE}")
