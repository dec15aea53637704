"""Replays a graph on real tensors, and compares its dataflow view with the result of each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.compiler.dataflow.build import build_view
from tilewright.patterns.dataflow import Dataflow, Store, Value, View
from tilewright.patterns.effects import Effect

# Values that are not computed from their operands, or whose contents are not known.
SKIPPED = ("aten.empty", "aten.new_empty", "aten.rand", "opaque", "store", "input", "constant")


def flow_of(function, *args) -> Dataflow:
    """Returns the dataflow view of Dynamo's graph of `function(*args)`, checked with these
    arguments."""
    graphs = []

    def backend(gm, example_inputs):
        def run(*inputs):
            graphs.append((gm, copies(inputs)))
            return gm.forward(*inputs)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
        gm, inputs = graphs[0]
        flow = build_view(gm.graph)
        check(flow, gm, inputs)
    return flow


def returned(function, *args) -> View:
    """Returns the graph's output as a view."""
    return flow_of(function, *args).outputs[0]


def copies(items: Sequence[Any]) -> list[Any]:
    """Returns copies of tensors that alias each other as the originals do."""
    storages: dict[int, torch.Tensor] = {}
    out = []
    for item in items:
        if not isinstance(item, torch.Tensor):
            out.append(item)
            continue
        key = item.untyped_storage()._cdata
        if key not in storages:
            whole = torch.empty(0, dtype=item.dtype).set_(item.untyped_storage())
            storages[key] = whole.clone()
        base = storages[key].view(item.dtype)
        copy = base.as_strided(item.shape, item.stride(), item.storage_offset())
        out.append(torch.nn.Parameter(copy) if isinstance(item, torch.nn.Parameter) else copy)
    return out


def numbers(*shape, start=0):
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 31 + start).view(shape).float()


def weight(*shape) -> torch.nn.Parameter:
    return torch.nn.Parameter(numbers(*shape), requires_grad=False)


def check(flow: Dataflow, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Checks three things: each node's tensor is the selection that its view describes; each value
    is the result of its operation on its operands; and each written memory is the result of its
    record."""
    replay = Replay(gm, flow)
    replay.run(*inputs)
    for node, view in flow.views.items():
        if view.value in replay.content:
            actual = selected(view.effect, replay.content[view.value])
            expected = replay.seen[node]
            assert same(actual, expected), f"{node.format_node()} is not {view}"
    for value, content in replay.content.items():
        if not value.op.startswith(SKIPPED):
            expected = recomputed(value, replay.content)
            assert expected is None or same(expected, content), f"{value} {value.args} is not so"
    for value, before in replay.before.items():
        source = value.store.source
        if source is not None and source.value in replay.content:
            expected = carried_out(value.store, before, replay.content)
            assert same(expected, replay.content[value]), f"{value} does not write {source}"


class Replay(fx.Interpreter):
    """Runs a graph and records its tensors.

    seen: the tensor of each node, just after the node ran.
    content: the tensor of each value, when it was made.
    before: the tensor of each written memory, before the write.
    """

    def __init__(self, gm: fx.GraphModule, flow: Dataflow) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.flow = flow
        self.seen: dict[fx.Node, torch.Tensor] = {}
        self.content: dict[Value, torch.Tensor] = {}
        self.before: dict[Value, torch.Tensor] = {}

    def run_node(self, node: fx.Node) -> Any:
        for value in self.flow.stores:
            if value.node is node and isinstance(
                self.env.get(value.store.memory.root), torch.Tensor
            ):
                self.before[value] = self.env[value.store.memory.root].clone()
        result = super().run_node(node)
        if isinstance(result, torch.Tensor):
            self.seen[node] = result.clone()
        self.env[node] = result
        for value in self.flow.values:
            if value.node is node and value.op != "opaque:memory":
                held = self.env[self.flow.home(value)]
                if isinstance(held, torch.Tensor):
                    self.content[value] = held.detach().clone()
        return result


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(
        ((a == b) | ((a != a) & (b != b))).all()
    )  # memory that nothing has written yet may hold NaN


def selected(effect: Effect, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements that an effect selects from a tensor, by its definition."""
    if 0 in effect.shape:
        return tensor.new_empty(
            [int(n) for n in effect.shape]
        )  # in an empty tensor, a start may lie outside
    atoms = [atom for dim in effect.dims for atom in dim]
    index = [torch.tensor(int(start)) for start in effect.start]
    for place, atom in enumerate(atoms):
        if atom.axis is not None:
            walk = torch.arange(int(atom.length)) * int(atom.step)
            walk = walk.view([-1 if i == place else 1 for i in range(len(atoms))])
            index[atom.axis] = index[atom.axis] + walk
    picked = tensor[tuple(index)] if index else tensor
    picked = picked.expand([int(atom.length) for atom in atoms])
    return picked.reshape([int(n) for n in effect.shape])


def carried_out(
    store: Store, before: torch.Tensor, content: dict[Value, torch.Tensor]
) -> torch.Tensor:
    """Returns a memory after the write that a record describes."""
    places = selected(store.target, torch.arange(before.numel()).view(before.shape))
    rest = [d for d in range(places.dim()) if d not in store.index]
    places = places.permute([*sorted(store.index), *rest])
    index = [store.index[d] for d in sorted(store.index)]
    if index:
        places = places[tuple(selected(i.effect, content[i.value]).long() for i in index)]
    source = selected(store.source.effect, content[store.source.value]).to(store.dtype)
    after = before.clone().reshape(-1)
    after.view(store.dtype).index_put_((places,), source, accumulate=store.accumulate)
    return after.view(before.shape)


def recomputed(value: Value, content: dict[Value, torch.Tensor]) -> torch.Tensor | None:
    """Computes a value from its operands. Returns None if the operands, or the operation, are not
    known."""
    if any(v.value not in content for v in value.operands):
        return None

    def held(item: Any) -> Any:
        if isinstance(item, View):
            return selected(item.effect, content[item.value])
        return tuple(held(i) for i in item) if isinstance(item, tuple) else item

    args = [held(a) for a in value.args]
    kwargs = {k: held(a) for k, a in value.kwargs.items()}
    if value.op == "cast":
        return args[0].to(value.dtype)
    if value.op == "bitcast":
        return args[0].contiguous().view(value.dtype)
    if value.op == "aten.index":
        base, indices = args
        by_dim: list[Any] = [slice(None)] * base.dim()
        for dim, index in indices:
            by_dim[dim] = index
        return base[tuple(by_dim)]
    if args and isinstance(args[0], (int, float)) and value.operands:
        args[0] = torch.tensor(args[0])
    output = kwargs.pop("output", None)
    name = value.op.removeprefix("aten.")
    homes = (torch.nn.functional, torch.Tensor, torch, torch.ops.aten)
    function = next(getattr(home, name) for home in homes if hasattr(home, name))
    result = function(*args, **kwargs)
    return result if output is None else result[output]
