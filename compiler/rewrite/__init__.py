"""Replaces the nodes that a match absorbs by one fused op, in the graph itself."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.codegen.targets import Target
from tilewright.compiler._compat import trials
from tilewright.compiler.dataflow.spelling import argument, shape_of
from tilewright.compiler.rewrite.materialise import Materialiser
from tilewright.compiler.rewrite.size_checks import erase_size_checks
from tilewright.compiler.rewrite.strides import (
    is_dense,
    is_packed_as,
    packed_as,
    same_steps,
    strides_matter,
)
from tilewright.compiler.safety.legality import insertion_node
from tilewright.compiler.safety.lint import check_site
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import FusedOp, get_op, is_ours
from tilewright.ops.runtime.device import target_at
from tilewright.patterns.dataflow import Dataflow
from tilewright.patterns.effects import Effect, InexpressibleError
from tilewright.patterns.language import (
    Failed,
    Match,
    Miss,
    Parts,
    PatternError,
    Result,
    Stage,
    internal_miss,
)

IN_16_BITS = "load the model, and allocate its caches, in bfloat16 or float16"


@dataclass(frozen=True)
class Rewritten:
    """One rewritten site: its match, the node of the fused op, and the names of the absorbed nodes
    (`before`)."""

    match: Match
    node: fx.Node
    before: tuple[str, ...]


class HalfRewrittenError(Exception):
    """Raised if a rewrite fails after it has begun to change the graph. The graph must then not be
    used.

    `__cause__` is the exception that the rewrite raised.
    """

    def __init__(self, match: Match) -> None:
        super().__init__(f"the rewrite of {match.anchor} by {match.pattern!r} failed half-way")
        self.match = match


def rewrite_sites(
    graph: fx.Graph,
    flow: Dataflow,
    matches: Sequence[Match],
    failed: Failed = internal_miss,
    target: Target | None = None,
) -> tuple[list[Rewritten], list[tuple[Match, Miss]]]:
    """Rewrites every match of `flow` in `graph`. The matches must not overlap.

    The op's fake implementation runs first. If this implementation refuses its arguments or fails,
    the site stays as it was, and the result has a Miss for the site; `failed` makes the miss of a
    failure. A site on a chip that has no kernels for its op becomes a Miss, too. `target` is the
    chip for sites whose device does not tell it. Raises HalfRewrittenError for a failure after the
    graph has changed.
    """
    materialiser = Materialiser(graph, flow)
    done: list[Rewritten] = []
    refused: list[tuple[Match, Miss]] = []
    for match in matches:
        answer = _rewrite(match, materialiser, failed, target)
        if isinstance(answer, Rewritten):
            done.append(answer)
        else:
            refused.append((match, answer))
    return done, refused


def _rewrite(
    match: Match, materialiser: Materialiser, failed: Failed, target: Target | None
) -> Rewritten | Miss:
    graph, flow = materialiser.graph, materialiser.flow
    last = insertion_node(match, flow)
    materialiser.serving = last
    before = last.prev
    try:
        op = get_op(match.op if "::" in match.op else f"tilewright::{match.op}")
        with graph.inserting_before(last):
            node = _insert(op, match, materialiser)
            chip = target_at(match.anchor.device, target)
            if chip is not None and (obstacle := _target_obstacle(before, last, chip)):
                _erase_between(graph, before, last)
                return _miss(match, "NO_KERNELS", Stage.CAPABILITY, obstacle, last)
            if chip is not None and (why := _slower(op, match, node, chip)):
                _erase_between(graph, before, last)
                return _miss(match, "NO_KERNELS", Stage.CAPABILITY, f"{op.name}: {why}", last)
            if match.needs_kernel and (without := _no_kernel(op, node, chip)):
                if match.anchor.dtype is torch.float64:
                    _erase_between(graph, before, last)
                    what = f"{op.name} has no kernel for float64"
                    return _miss(match, "NO_KERNELS", Stage.CAPABILITY, what, last, IN_16_BITS)
                if _device_type(match) != "cpu":
                    raise ArgumentError(
                        op.name, "arguments", "arguments that a kernel supports", without
                    )
            found = [pair for r in match.results for pair in _restate(r, node, materialiser)]
            moved = _moved_and_written(found, flow)
            replacements = [
                (old, new if moved else _laid_out(old, new, materialiser)) for old, new in found
            ]
    except Exception as error:
        _erase_between(graph, before, last)
        if not isinstance(error, (ArgumentError, InexpressibleError)):
            return failed(match.pattern, "to rewrite", error, (match.anchor.node,))
        return _miss(match, "UNSUPPORTED", Stage.CAPABILITY, _refusal(op, error), last)
    if moved is not None:
        _erase_between(graph, before, last)
        message = (
            f"{moved.name} is changed in place, and the result of the fused op has other strides"
        )
        hint = "change a copy of the tensor"
        return _miss(match, "INPUT_MUTATED", Stage.HAZARDS, message, moved, hint)
    try:
        return _put_in_place(match, materialiser, op, node, replacements)
    except Exception as error:
        raise HalfRewrittenError(match) from error


def _miss(
    match: Match, code: str, stage: Stage, message: str, node: fx.Node, hint: str = ""
) -> Miss:
    return Miss(match.pattern, code, stage, message, (node,), hint, weight=match.miss_weight)


def _put_in_place(
    match: Match,
    materialiser: Materialiser,
    op: FusedOp,
    node: fx.Node,
    replacements: Sequence[tuple[fx.Node, fx.Node]],
) -> Rewritten:
    """Makes users of replaced nodes read the op's result, and erases the absorbed nodes."""
    node.meta["tilewright"] = {
        "pattern": match.pattern,
        "op": op.qualified_name,
        "absorbed": tuple(v.node.name for v in match.absorbed),
        "stores": tuple(s.node.name for s in match.stores),
    }
    for result in match.results:
        if isinstance(result, Parts):
            materialiser.parts[result.replaced] = (_output(result, node, materialiser), result)
    for old, new in replacements:
        _redirect(old, new)
        materialiser.replaced[old] = new
    _erase(match, materialiser, [old for old, _ in replacements])
    check_site(match, node, replacements)
    return Rewritten(match, node, node.meta["tilewright"]["absorbed"])


def _moved_and_written(
    replacements: Sequence[tuple[fx.Node, fx.Node]], flow: Dataflow
) -> fx.Node | None:
    """Returns a replaced node that is written in place and whose replacement has other strides.
    Returns None if there is none.

    Strides decide whether `flatten` and `reshape` return views or copies, and therefore whether a
    write changes the original.
    """
    for old, new in replacements:
        one, two = old.meta["example_value"], new.meta["example_value"]
        written = next(flow.writes_on(flow.storage_of(one)), None)
        if written is not None and not same_steps(one, two):
            return old
    return None


def _laid_out(old: fx.Node, new: fx.Node, materialiser: Materialiser) -> fx.Node:
    """Returns the replacement of a node. If the graph could tell the two apart by their strides,
    returns a copy that has the node's strides."""
    held, now = (node.meta["example_value"] for node in (old, new))
    if same_steps(held, now) or not strides_matter(old, now, materialiser.flow):
        return new
    if not is_dense(held):
        # The node holds columns of a wider tensor. Every view of these columns is also a view of a
        # copy that is packed in the order of their dimensions.
        if strides_matter(old, now, materialiser.flow, returned=False):
            raise InexpressibleError(
                f"the graph reads {old.name} by its strides, and the op's result has other strides"
            )
        if is_packed_as(held, now):
            return new
    return packed_as(held, new, materialiser.call)


def arguments_of(op: FusedOp, node: fx.Node) -> Any:
    """Returns an op's arguments at a node, as meta tensors."""
    args = fx.node.map_arg(node.args, lambda n: n.meta["example_value"])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["example_value"])
    tensors = trials.as_meta([*args, *kwargs.values()])
    named = dict(zip(kwargs, tensors[len(args) :], strict=True))
    return op.arguments(*tensors[: len(args)], **named)


def _device_type(match: Match) -> str:
    return match.anchor.device.type


def _target_obstacle(before: fx.Node, last: fx.Node, target: Target) -> str | None:
    """Returns why a chip has no kernels for one of our ops between two nodes. Returns None if no
    reason is known."""
    node = before.next
    while node is not last:
        called, node = node, node.next
        if isinstance(called.target, torch._ops.OpOverload) and is_ours(called.target):
            op = get_op(called.target._schema.name)
            if target.complete and op.chip_obstacle is None:
                continue
            if obstacle := op.target_obstacle(arguments_of(op, called), target):
                return f"{op.name}: {obstacle}"
    return None


def _slower(op: FusedOp, match: Match, node: fx.Node, chip: Target) -> str | None:
    """Returns why the graph is faster than this call of the op on a chip. Returns None if no reason
    is known."""
    if not match.needs_kernel:
        return None
    held = [given.meta["example_value"] for given in node.all_input_nodes]
    shapes = [shape_of(one) for one in held if isinstance(one, torch.Tensor)]
    varies = any(not isinstance(size, int) for shape in shapes for size in shape)
    return op.slower_on(arguments_of(op, node), chip, varies)


def _no_kernel(op: FusedOp, node: fx.Node, chip: Target | None) -> str:
    """Returns why no GPU kernel computes this call of the op. Returns an empty text if a kernel
    does.

    Without a kernel, the op's reference would run, and it is slower than the graph.
    """
    choice = op.choose("cuda", arguments_of(op, node), chip)
    if choice.lowering.name != "reference":
        return ""
    return "; ".join(reason for _, reason in choice.rejected)


def _insert(op: FusedOp, match: Match, materialiser: Materialiser) -> fx.Node:
    """Adds the node of the op. The call passes arguments by position up to the first one that the
    match leaves out, and by name after it."""
    _check_names(op, match)
    given = {name: materialiser.argument(item) for name, item in match.arguments.items()}
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    for at, (name, by_keyword) in enumerate(op.parameters.items()):
        if name not in given:
            continue
        if by_keyword or at != len(positional):
            keyword[name] = given[name]
        else:
            positional.append(given[name])
    return materialiser.call(op.torch_op, *positional, **keyword)


def _refusal(op: FusedOp, error: Exception) -> str:
    return str(error) if isinstance(error, ArgumentError) else f"{op.name}: {error}"


def _check_names(op: FusedOp, match: Match) -> None:
    unknown = sorted(set(match.arguments) - set(op.parameters))
    if unknown:
        raise PatternError(
            f"pattern {match.pattern!r}: {op.qualified_name} has no argument {unknown}; it takes "
            f"{[*op.parameters]}"
        )


def _restate(
    result: Result | Parts, node: fx.Node, materialiser: Materialiser
) -> list[tuple[fx.Node, fx.Node]]:
    """Returns each replaced node with the node that selects the same part of the op's output."""
    node = _output(result, node, materialiser)
    shape = shape_of(node.meta["example_value"])
    if isinstance(result, Result):
        selected = materialiser.select(node, shape, result.effect)
        if result.factor != 1.0:
            selected = materialiser.call(torch.mul, selected, result.factor)
        if result.added is not None:
            selected = materialiser.call(operator.add, selected, materialiser.view(result.added))
        return [(result.replaced.node, selected)]
    held = _held_parts(result, materialiser.flow)
    return [(part, materialiser.select(node, shape, effect)) for part, effect in held]


def _output(result: Result | Parts, node: fx.Node, materialiser: Materialiser) -> fx.Node:
    if isinstance(node.meta["example_value"], (tuple, list)):
        return materialiser.call(operator.getitem, node, result.output)
    return node


def _held_parts(parts: Parts, flow: Dataflow) -> list[tuple[fx.Node, Effect]]:
    """Returns the nodes that are views of a value and that the op's output holds, each with the
    effect that selects it from the output. Leaves out views of these views."""
    found: dict[fx.Node, Effect] = {}
    held: set[fx.Node] = set()
    for node in flow.nodes_of(parts.replaced):
        source = node
        while isinstance(above := argument(source, 0, "input"), fx.Node) and above not in held:
            source = above
        if isinstance(above, fx.Node):
            held.add(node)
            continue
        try:
            found[node] = parts.restate(flow.views[node].effect)
        except InexpressibleError:
            continue
        held.add(node)
    return list(found.items())


def _redirect(old: fx.Node, new: fx.Node) -> None:
    """Makes the users of `old` read `new`, and moves users that come before `new` after it."""
    old.replace_all_uses_with(new)
    front = [new]
    behind = new
    while front:
        for user in list(front.pop(0).users):
            if user < behind:
                behind.append(user)
                behind = user
                front.append(user)


def _erase(match: Match, materialiser: Materialiser, replaced: Sequence[fx.Node]) -> None:
    """Erases the writes and values that the op replaces, and the nodes that only they used."""
    graph, flow = materialiser.graph, materialiser.flow
    candidates: list[fx.Node] = []
    for store in dict.fromkeys(s.node for s in (*match.stores, *match.scratch)):
        candidates += store.all_input_nodes
        target = argument(store, 0, "input")
        if isinstance(target, fx.Node):
            store.replace_all_uses_with(target)
            materialiser.replaced[store] = target
        graph.erase_node(store)
    candidates += [*(v.node for v in match.absorbed), *replaced]
    erase_unused(graph, flow, candidates)


def erase_unused(graph: fx.Graph, flow: Dataflow, candidates: Sequence[fx.Node]) -> None:
    """Erases the candidates that have no users and no effect, and then the nodes that only these
    candidates used."""
    front = list(candidates)
    while front:
        node = front.pop()
        if node._erased:
            continue
        erase_size_checks(graph, node)
        if node.users or not _removable(node, flow):
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        front += inputs


def _removable(node: fx.Node, flow: Dataflow) -> bool:
    """Whether a node has no effect and may be erased. Writes, placeholders and the output may not
    be erased."""
    if node.op not in ("call_function", "call_method") or node not in flow.positions:
        return False
    held = node.meta.get("example_value")
    return isinstance(held, (torch.Tensor, tuple, list)) and node not in flow.store_nodes


def _erase_between(graph: fx.Graph, before: fx.Node, last: fx.Node) -> None:
    """Erases the nodes that were inserted between two nodes."""
    node = last.prev
    while node is not before:
        previous = node.prev
        graph.erase_node(node)
        node = previous
