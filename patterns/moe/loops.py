"""A loop over all experts that Dynamo captured whole, as it does with
`capture_dynamic_output_shape_ops`: for each expert e

    token, slot = where(ids == e)
    y   = down[e](activation(gate[e](x[token]), up[e](x[token])))
    out = out.index_add(0, token, y * weights[token, slot, None])         from zeros

where the weights are parts of stacks [E, N, K]. T tokens, S slots, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.effects import Atom, Effect
from tilewright.patterns.language import Match, Result, Stage, reject
from tilewright.patterns.moe.choice import is_choice
from tilewright.patterns.moe.layer import Layer, cast_back, refuse_activation
from tilewright.patterns.moe.sentinels import without_foreign
from tilewright.patterns.recognise.activation import Activation, match_activation
from tilewright.patterns.recognise.gemm import match_gemm
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.linear import match_columns
from tilewright.patterns.recognise.norm import strip_casts
from tilewright.patterns.recognise.routing import gathered, strip_integer_casts
from tilewright.patterns.recognise.steps import is_filled


@dataclass(frozen=True)
class Loop:
    """ends: the sum after each expert, first to last."""

    ends: tuple[Value, ...]

    @property
    def node(self) -> fx.Node:
        return self.ends[-1].node

    @property
    def finds(self) -> frozenset[fx.Node]:
        """The nodes that find each expert's tokens."""
        return frozenset(end.args[2].value.node for end in self.ends)


def expert_loops(flow: Dataflow) -> Iterator[Loop]:
    """Sums, from zeros, of rows at the places that `where` finds, one after the other."""
    for value in flow.values:
        if not _adds_found(value) or not is_filled(value.args[0], 0):
            continue
        ends = [value]
        while (user := flow.only_user(ends[-1])) is not None and _adds_found(user):
            if user.args[0] != ends[-1].whole:
                break
            ends.append(user)
        if len(ends) > 1:
            yield Loop(tuple(ends))


def _adds_found(value: Value) -> bool:
    plain = value.op == "aten.index_add" and len(value.args) == 4 and not value.kwargs
    return plain and value.args[1] == 0 and _is_found(value.args[2], 0)


def _is_found(view: Any, dim: int) -> bool:
    """Whether a view is where a mask of two dimensions is true, along one of them."""
    if not isinstance(view, View) or not view.is_whole:
        return False
    value = view.value
    finds = value.op == "aten.where" and len(value.args) == 1 and len(value.args[0].shape) == 2
    return finds and value.kwargs.get("output") == dim


@dataclass(frozen=True)
class _Step:
    """What one expert computes: tensors as all experts share them, and its number."""

    expert: int
    shared: tuple[Any, ...]
    activation: Activation
    gemms: tuple[ExpertGemm, ...]
    absorbed: tuple[Value, ...]


def match_loop(name: str, op: str, loop: Loop, flow: Dataflow) -> Match:
    """The mixture that a loop computes; raises Reject."""
    steps = [_step(end) for end in loop.ends]
    first, last = steps[0], loop.ends[-1]
    (x, ids, weights, *_), gemms = first.shared, first.gemms
    if any(step.shared != first.shared for step in steps):
        _refuse(last, "its experts read different tensors")
    if sorted(step.expert for step in steps) != list(range(gemms[-1].weight.shape[0])):
        _refuse(last, "it does not run over each expert of the stack once")
    if last.shape[0] != x.shape[0]:
        _refuse(last, "its sum has other rows than the tokens")
    gate, *up, down = gemms
    layer = Layer(gate, up[0] if up else None, down, first.activation)
    arguments = layer.arguments()
    layer.check_kernels(x, last)
    ends = cast_back(flow, last, x.value.dtype)
    num_experts = down.weight.shape[0]
    chosen = is_choice(ids.value) and ids.value.args[0].shape[-1] == num_experts
    absorbed = dict.fromkeys((*(v for step in steps for v in step.absorbed), *ends))
    kind = arguments.get("weight_format", "dense")
    return Match(
        pattern=name,
        op=op,
        anchor=last,
        arguments={
            "x": x,
            "expert_ids": ids if chosen else without_foreign(ids, num_experts),
            "expert_weights": weights,
            **arguments,
        },
        results=(Result(ends[-1], effects.identity(last.shape)),),
        absorbed=tuple(absorbed),
        facts=layer.facts(x, ids.shape[1], kind, gate="loop", bias="no"),
        scope=common_scope(gate.end.scope, last.scope),
    )


def _refuse(culprit: Value, why: str) -> NoReturn:
    message = f"a loop over experts was captured, but {why}"
    hint = (
        "keep the experts' weights in one tensor [E, N, K]; sort the routes by expert and "
        "multiply with torch._grouped_mm"
    )
    reject("EXPERT_LOOP", Stage.ACTIVATION, message, culprit, hint=hint)


def _step(end: Value) -> _Step:
    token = end.args[2]
    found = token.value.args[0]
    mask = found.value
    ids = mask.args[0] if mask.op == "aten.eq" and found.is_whole else None
    expert = mask.args[1] if ids is not None else None
    if not isinstance(expert, int) or not isinstance(ids, View) or ids.shape != mask.shape:
        _refuse(end, "its tokens are not those whose choice is one expert")
    product, casts = strip_casts(end.args[3])
    for y, factor in product.value.either_way if product.value.op == "aten.mul" else ():
        by = _by_route(factor, token)
        y, more = strip_casts(y)
        down = match_gemm(y.value)
        if by is None or down is None or not (product.is_whole and y.is_whole):
            continue
        weights, steps = by
        activation, gemms, x, below = _mlp(down.x, down.weight, expert, token, end)
        if down.bias is not None:
            _refuse(end, "its experts have biases")
        kind = (activation.name, activation.alpha, activation.limit)
        shared = (x, strip_integer_casts(ids), weights, kind, *(gemm.weight for gemm in gemms))
        finds = (end, *casts, product.value, *more, down.value, *steps, *below, token.value, mask)
        return _Step(expert, shared, activation, gemms, finds)
    _refuse(end, "its results are not weighed by route")


def _by_route(factor: View, token: View) -> tuple[View, tuple[Value, ...]] | None:
    """(weights [T, S], values absorbed) of weights[token, slot, None]."""
    bare, casts = strip_casts(factor)
    value = bare.value
    if value.op != "aten.index" or not bare.shape or bare.effect.dims[-1] != ():
        return None
    weights, items = value.args
    if [dim for dim, _ in items] != [0, 1] or items[0][1] != token or len(bare.shape) != 2:
        return None
    slot = items[1][1]
    same = _is_found(slot, 1) and slot.value.node is token.value.node
    if not same or any(weights.effect.dims[2:]):
        return None
    whole = weights.with_dims(*weights.effect.dims[:2])
    return whole, (*casts, value, slot.value)


def _mlp(
    inner: View, down: View, expert: int, token: View, end: Value
) -> tuple[Activation, tuple[ExpertGemm, ...], View, tuple[Value, ...]]:
    """(activation, GEMMs with stacked weights, x [T, H], values absorbed) of one expert."""
    activation = match_activation(strip_casts(inner)[0])
    if activation is None:
        refuse_activation(inner)
    gemms, absorbed, x = [], [*strip_casts(inner)[1], *activation.absorbed], None
    for part in (activation.gate, activation.up):
        columns = None if part is None else match_columns(part, bare=True)
        if part is None:
            continue
        taken = None if columns is None else gathered(columns.linear.gemm.x)
        if columns is None or taken is None or taken[1] != token or columns.bias is not None:
            _refuse(end, "its products do not read the rows of its tokens, or add a bias")
        if x not in (None, taken[0]) or columns.linear.gemm.x_scale is not None:
            _refuse(end, "gate and up read different rows")
        x = taken[0]
        stack = _stack(columns.weight, expert, end)
        gemms.append(_gemm(x, stack, part.value))
        absorbed += [*columns.linear.absorbed, columns.linear.gemm.x.value]
    assert x is not None
    gemms.append(_gemm(inner, _stack(down, expert, end), end))
    return activation, tuple(gemms), x, tuple(absorbed)


def _gemm(x: View, weight: View, end: Value) -> ExpertGemm:
    return ExpertGemm(x, weight, None, None, None, None, end, 1, ())


def _stack(weight: View, expert: int, end: Value) -> View:
    """[E, N, K] of which `weight` [N, K] is one expert's."""
    value, effect = weight.value, weight.effect
    stacked = value.op in ("constant", "input") and len(value.shape) == 3 and len(effect.dims) == 2
    walked = any(atom.axis == 0 for dim in effect.dims for atom in dim)
    if not stacked or walked or effect.start[0] != expert:
        _refuse(end, "the experts' weights are tensors of their own, no stack")
    whole = Effect(((Atom(0, 1, value.shape[0]),), *effect.dims), (0, *effect.start[1:]))
    return View(value, whole)
