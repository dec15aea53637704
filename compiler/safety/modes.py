"""Finds the modes in which the nodes of a graph run, and refuses sites that must not be fused in
their mode.

A graph may turn grad mode on and off, wrap tensors for vmap, grad or jvp, and make dual tensors. A
fused op records nothing for a backward pass, and it knows neither tangents nor hidden dimensions.
Therefore a site that could meet any of these stays as written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler._compat.autocast import autocast_in_force
from tilewright.compiler.dataflow.spelling import calls_of, name_of
from tilewright.compiler.safety.legality import insertion_node, operands_of
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Match, Miss, Stage, Weight

_DUAL = "forward-mode differentiation"
# Calls that enter or leave a transform of torch.func, or a level of forward-mode differentiation.
_ENTER = {
    "_vmap_increment_nesting": "vmap",
    "_grad_increment_nesting": "grad",
    "_jvp_increment_nesting": "jvp",
    "_func_increment_nesting": "functionalize",
    "_enter_dual_level": _DUAL,
}
_LEAVE = frozenset(
    {
        "_vmap_decrement_nesting",
        "_grad_decrement_nesting",
        "_jvp_decrement_nesting",
        "_func_decrement_nesting",
        "_exit_dual_level",
    }
)
# Calls that change a mode for the nodes after them.
_CHANGES = _LEAVE.union(_ENTER, {
    "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode",
    "_enter_autocast", "_exit_autocast",
})  # fmt: skip
#: Autograd does not record the results of these calls, whatever their arguments are.
_CUTS = frozenset({"detach", "_autograd_grad", "grad"})
# Products and attention. A site that is lost contains one of these operations.
_WEIGHTY = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "_scaled_mm",
    "scaled_dot_product_attention", "conv1d",
})  # fmt: skip
GRAD_HINT = (
    "call the model under torch.no_grad() without torch.enable_grad() inside, or detach the "
    "tensors that need no gradient"
)
CUSTOM_OP = "make it a custom operator: torch.library.custom_op says what it writes (mutates_args)"
OUTSIDE = (
    "compute it outside of the transform; instead of vmap, give the batch a dimension of its own"
)


@dataclass(frozen=True)
class Mode:
    """The modes in which a node runs.

    grad: whether autograd records the node.
    levels: the transforms around the node, from the outermost to the innermost.
    autocast: for each device type, the dtype that the graph itself sets.
    """

    grad: bool
    levels: tuple[str, ...] = ()
    autocast: frozenset[tuple[str, torch.dtype | None]] = frozenset()


@dataclass(frozen=True)
class Modes:
    """The modes of a graph's nodes.

    grad: whether autograd records when the graph begins.
    of: the mode of each node; empty if no node changes a mode.
    differentiated: the nodes to whose tensors a gradient can flow.
    recorded: the nodes that autograd records.
    """

    grad: bool
    of: dict[fx.Node, Mode] = field(default_factory=dict)
    differentiated: frozenset[fx.Node] = frozenset()
    recorded: frozenset[fx.Node] = frozenset()

    def at(self, node: fx.Node) -> Mode:
        return self.of.get(node) or Mode(self.grad)


def modes_of(graph: fx.Graph, grad: bool) -> Modes:
    """Reads the modes of a graph. `grad` says whether grad mode is on when the graph begins."""
    of = _read(graph, grad)
    if not grad and not any(mode.grad for mode in of.values()):
        return Modes(grad, of)
    differentiated: set[fx.Node] = set()
    recorded: set[fx.Node] = set()
    for node in graph.nodes:
        # Dynamo's fake tensors say whether they need grad. Nodes that rewrites added have no such
        # mark; for them the inputs decide.
        tensors = _compat.tensors_of(node)
        if any(tensor.requires_grad for tensor in tensors):
            differentiated.add(node)
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if not (of[node].grad if of else grad) or name_of(node) in _CUTS:
            continue
        if not differentiated.isdisjoint(node.all_input_nodes):
            recorded.add(node)
            if any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
                differentiated.add(node)
    return Modes(grad, of, frozenset(differentiated), frozenset(recorded))


def _read(graph: fx.Graph, grad: bool) -> dict[fx.Node, Mode]:
    """Returns the mode of each node. The result is empty if no node changes a mode."""
    if not calls_of(graph, _CHANGES):
        return {}
    of: dict[fx.Node, Mode] = {}
    levels: list[str] = []
    before: dict[fx.Node, bool] = {}
    autocast: frozenset[tuple[str, torch.dtype | None]] = frozenset()
    for node in graph.nodes:
        of[node] = Mode(grad, tuple(levels), autocast)
        name = name_of(node) if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif name == "_enter_inference_mode":
            # Leaving inference mode turns grad mode on, whatever it was before.
            before[node], grad = grad, not node.args[0]
        elif name == "_exit_inference_mode":
            grad = before.get(node.args[0], grad)
        elif name in _ENTER:
            levels.append(_ENTER[name])
        elif name in _LEAVE and levels:
            levels.pop()
        elif name in ("_enter_autocast", "_exit_autocast"):
            autocast = frozenset(autocast_in_force(node.next).items())
    return of


# --- sites ----------------------------------------------------------------------------------------


def check_modes(match: Match, flow: Dataflow, modes: Modes) -> Miss | None:
    """Returns the miss that says why the modes of a graph do not allow a site to be fused. Returns
    None if they allow it."""
    if not modes.of and not modes.recorded:
        return None
    place = insertion_node(match, flow)
    results = [result.replaced for result in match.results]
    nodes = [v.node for v in (*match.absorbed, *match.stores, *match.scratch, *results)]
    for node in (*nodes, place):
        if levels := modes.at(node).levels:
            what = f"the graph computes this site inside {_named(levels)}"
            return _miss(match, "TRANSFORM", what, node, OUTSIDE)
    written = [v.node for v in match.stores]
    ended = [n for n in (*written, *(value.node for value in results)) if n in modes.recorded]
    if ended:
        what = "a gradient can flow through this site, and fused ops compute no gradients"
        return _miss(match, "GRADIENT", what, ended[0], GRAD_HINT)
    if modes.at(place).grad:
        for name, view in operands_of(match):
            if {view.value.node, flow.home(view.value)} & modes.differentiated:
                what = f"{name} needs grad, and grad mode is on at the place of the fused op"
                return _miss(match, "GRADIENT", what, view.value.node, GRAD_HINT)
    here = modes.at(place)
    for reader in _moved(results, place, match, flow):
        if modes.at(reader) != here:
            what = (
                "another node reads a result before the op's place, in another mode (grad or "
                "autocast)"
            )
            return _miss(match, "ORDER", what, reader)
    return None


def _moved(
    results: Sequence[Value], place: fx.Node, match: Match, flow: Dataflow
) -> Iterator[fx.Node]:
    """Yields the readers that the rewrite moves after the op, and the nodes that depend on these
    readers."""
    last = flow.positions[place]
    inside = {*results, *match.absorbed, *match.stores, *match.scratch}

    def moves(user: Value) -> bool:
        return user not in inside and flow.positions[user.node] < last

    for result in results:
        yield from (value.node for value in flow.downstream(result, None, moves)[1:])


def _named(levels: Sequence[str]) -> str:
    """Returns text such as `vmap in grad`. The level of dual tensors that jvp enters is left
    out."""
    named = [level for level in levels if level != _DUAL] or [_DUAL]
    return " in ".join(reversed(named))


def _miss(match: Match, code: str, message: str, node: fx.Node, hint: str = "") -> Miss:
    weight = match.miss_weight
    return Miss(match.pattern, code, Stage.HAZARDS, message, (node,), hint, weight=weight)


# --- what no pattern saw --------------------------------------------------------------------------


def unseen_in_transforms(modes: Modes) -> list[Miss]:
    """Returns a miss for each outermost transform that contains products or attention.

    Tensors inside a transform hide dimensions or tangents, so no pattern reads them. Patterns do
    read dual tensors outside such transforms.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    outermost: fx.Node | None = None
    for node, mode in modes.of.items():
        if not mode.levels:
            outermost = None
        elif outermost is None:
            outermost = node
        if outermost is not None and {*mode.levels} != {_DUAL} and is_weighty(node):
            found.setdefault(outermost, []).append(node)
    return [_unseen(nodes, modes) for nodes in found.values()]


def is_weighty(node: fx.Node) -> bool:
    """Whether a node is a product or attention of floating-point numbers."""
    if node.op not in ("call_function", "call_method") or name_of(node) not in _WEIGHTY:
        return False
    tensors = _compat.tensors_of(*node.all_input_nodes)
    return any(tensor.is_floating_point() for tensor in tensors)


def _unseen(nodes: Sequence[fx.Node], modes: Modes) -> Miss:
    where = _named(modes.at(nodes[0]).levels)
    what = "a product or attention" if len(nodes) == 1 else f"{len(nodes)} products or attentions"
    message = f"{what} inside {where}, where no pattern looks"
    return Miss(
        "tilewright", "TRANSFORM", Stage.ANCHORED, message, tuple(nodes), OUTSIDE, weight="advice"
    )  # advice, because it is not known whether they are a site


def unknown_writes(flow: Dataflow, matches: Sequence[Match]) -> list[Miss]:
    """Returns a miss for each call that may write any memory and stands before a product or
    attention.

    The miss is advice if a site after the call matches nevertheless.
    """
    if not flow.opaque:
        return []
    weighty = [flow.positions[node] for node in flow.graph.nodes if is_weighty(node)]
    matched = max((flow.positions[match.anchor.node] for match in matches), default=-1)
    found = []
    for node in flow.opaque:
        position = flow.positions[node]
        if weighty and position < weighty[-1]:
            weight: Weight = "advice" if position < matched else "lost"
            at = (node,)
            miss = Miss("tilewright", "OPAQUE_CALL", Stage.ANCHORED, _opaque(node), at, CUSTOM_OP)
            found.append(replace(miss, weight=weight))
    return found


def _opaque(node: fx.Node) -> str:
    name = name_of(node).removeprefix("python::")
    return (
        f"it is not known which memory {name} writes, so all memory that is read after it may "
        "have changed"
    )
