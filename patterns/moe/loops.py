"""A loop over all experts that Dynamo captured whole, as it does with
`capture_dynamic_output_shape_ops`: for each expert e

    token, slot = where(ids == e)                                    or of one_hot(ids)[..., e]
    y   = down[e](activation(gate[e](x[token]), up[e](x[token])))
    out = out.index_add(0, token, y * weights[token, slot, None])
    out = out.index_put(token, out[token] + ...)                     where no token comes twice

where the weights are parts of stacks [E, N, K]. T tokens, S slots, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.effects import Atom, Effect
from tilewright.patterns.language import Match, Result, Stage, reject
from tilewright.patterns.moe.layer import Layer, added_to, cast_back, refuse_activation
from tilewright.patterns.recognise.activation import Activation, match_activation
from tilewright.patterns.recognise.gemm import match_gemm
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.linear import match_columns
from tilewright.patterns.recognise.outside import COMPARED, Outside, experts_argument
from tilewright.patterns.recognise.routing import (
    gathered,
    is_arange,
    is_distinct,
    per_row,
    rows_added_to,
    strip_integer_casts,
)


@dataclass(frozen=True)
class Added:
    """out[token] += rows, by one expert. end: the sum after it. before: that before it.

    once: whether a token that came twice would count once. absorbed: values besides `end`.
    """

    end: Value
    before: View
    token: View
    rows: View
    once: bool = False
    absorbed: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Loop:
    """added: what each expert adds, first to last."""

    added: tuple[Added, ...]

    @property
    def last(self) -> Value:
        return self.added[-1].end

    @property
    def node(self) -> fx.Node:
        return self.last.node

    @property
    def values(self) -> tuple[Value, ...]:
        """The sums, and the rows that they add."""
        return tuple(value for one in self.added for value in (one.end, one.rows.value))

    @property
    def finds(self) -> frozenset[fx.Node]:
        """The nodes that find each expert's tokens."""
        return frozenset(added.token.value.node for added in self.added)


def expert_loops(flow: Dataflow) -> Iterator[Loop]:
    """Sums of rows at the places that `where` finds, one after the other."""
    found = {v: added for v in flow.values if (added := _adds_found(v)) is not None}
    within = {added.before.value for added in found.values() if added.before.is_whole}
    for value in found:
        if value in within:
            continue
        steps = [found[value]]
        while (before := steps[0].before).is_whole and before.value in found:
            steps.insert(0, found[before.value])
        if len(steps) > 1:
            yield Loop(tuple(steps))


def _adds_found(value: Value) -> Added | None:
    """What a value adds to rows at places that `where` finds; None for another value."""
    if (added := rows_added_to(value)) is not None:
        before, token, rows = added
        return Added(value, before, token, rows) if _finds(token) else None
    if value.op != "aten.index_put" or value.argument(3, "accumulate", False):
        return None
    before, indices, given = value.args[:3]
    found: Any = indices[0] if len(indices) == 1 else None
    if not isinstance(given, View) or not _finds(found):
        return None
    put, casts = strip_casts(given)
    if put.value.op != "aten.add" or not put.is_whole:
        return None
    if put.value.kwargs.get("alpha", 1) != 1:
        return None
    for read, rows in put.value.either_way:
        if gathered(read) == (before, found):
            return Added(value, before, found, rows, True, (*casts, put.value, read.value))
    return None


def _finds(view: Any) -> bool:
    """Whether a view is where a mask of two dimensions is true, along one of them."""
    if not isinstance(view, View) or not view.is_whole:
        return False
    value = view.value
    return value.op == "aten.where" and len(value.args) == 1 and len(value.args[0].shape) == 2


@dataclass(frozen=True)
class _Step:
    """What one expert computes: tensors as all experts share them, and its number."""

    expert: int
    outside: Outside
    shared: tuple[Any, ...]
    activation: Activation
    gemms: tuple[ExpertGemm, ...]
    absorbed: tuple[Value, ...]


def match_loop(name: str, op: str, loop: Loop, flow: Dataflow) -> Match:
    """The mixture that a loop computes; raises Reject."""
    steps = [_step(added) for added in loop.added]
    first, last, before = steps[0], loop.last, loop.added[0].before
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
    num_experts, outside = down.weight.shape[0], first.outside
    if any(added.once for added in loop.added) and not is_distinct(ids):
        _refuse(last, "a token that names an expert twice would count once")
    absorbed = dict.fromkeys((*(v for step in steps for v in step.absorbed), *ends))
    base = added_to(before, ends, absorbed)
    kind = arguments.get("weight_format", "dense")
    return Match(
        pattern=name,
        op=op,
        anchor=last,
        arguments={
            "x": x,
            "expert_ids": experts_argument(ids, num_experts, outside),
            "expert_weights": weights,
            **arguments,
        },
        results=(Result(ends[-1], effects.identity(last.shape), added=base),),
        absorbed=tuple(absorbed),
        facts=layer.facts(x, ids.shape[1], kind, gate="loop", bias="no"),
        scope=common_scope(gate.end.scope, last.scope),
    )


_SORT = (
    "keep the experts' weights in one tensor [E, N, K]; sort the routes by expert and "
    "multiply with torch._grouped_mm"
)
_STACK = (
    "where the model is loaded, put the experts' weights into one parameter [E, N, K] for each "
    "projection (torch.stack), and let expert e multiply with part e of it; to stack them in every "
    "call would copy all experts"
)


def _refuse(culprit: Value, why: str, hint: str = _SORT) -> NoReturn:
    message = f"a loop over experts was captured, but {why}"
    reject("EXPERT_LOOP", Stage.ACTIVATION, message, culprit, hint=hint)


def _step(added: Added) -> _Step:
    end, token = added.end, added.token
    chosen = _mask(token.value.args[0])
    if chosen is None or token.value.kwargs.get("output") != chosen.tokens:
        _refuse(end, "its tokens are not those whose choice is one expert")
    product, casts = strip_casts(added.rows)
    for y, factor in product.value.either_way if product.value.op == "aten.mul" else ():
        by = _by_route(factor, token)
        y, more = strip_casts(y)
        down = match_gemm(y.value)
        if by is None or down is None or not (product.is_whole and y.is_whole):
            continue
        weights, steps = by
        activation, gemms, x, below = _mlp(down.x, down.weight, chosen.expert, token, end)
        if down.bias is not None:
            _refuse(end, "its experts have biases")
        kind = (activation.name, activation.alpha, activation.limit)
        shared = (x, chosen.ids, weights, chosen.outside, kind, *(gemm.weight for gemm in gemms))
        own = (end, *added.absorbed, token.value, *chosen.absorbed)
        finds = (*own, *casts, product.value, *more, down.value, *steps, *below)
        return _Step(chosen.expert, chosen.outside, shared, activation, gemms, finds)
    _refuse(end, "its results are not weighed by route")


@dataclass(frozen=True)
class _Chosen:
    """Where ids [T, S] name an expert. tokens: which dimension of the mask is of tokens. outside:
    what numbers are that name none."""

    ids: View
    expert: int
    tokens: int
    absorbed: tuple[Value, ...]
    outside: Outside = COMPARED


def _mask(found: View) -> _Chosen | None:
    """What a mask [T, S] or [S, T] is true of; None for another mask."""
    value = found.value
    if value.op == "aten.eq" and found.is_whole and isinstance(value.args[1], int):
        ids = value.args[0]
        same = isinstance(ids, View) and ids.shape == value.shape
        return _Chosen(strip_integer_casts(ids), value.args[1], 0, (value,)) if same else None
    expert = found.effect.start[-1]
    by_expert = _by_expert(value) if len(value.shape) == 3 and isinstance(expert, int) else None
    if by_expert is None or len(found.shape) != 2:
        return None
    one_hot = value.op == "aten.one_hot"
    outside = Outside("error", "none", end=value.shape[2]) if one_hot else COMPARED
    for tokens, order in enumerate(((0, 1), (1, 0))):
        if found == value.whole.select(2, expert).permute(*order):
            return _Chosen(strip_integer_casts(by_expert), expert, tokens, (value,), outside)
    return None


def _by_expert(value: Value) -> View | None:
    """ids [T, S] of one_hot(ids), or of ids[..., None] == arange(E); None for another value."""
    if value.op == "aten.one_hot":
        ids: View = value.args[0]
        return ids
    for ids, experts in value.either_way if value.op == "aten.eq" else ():
        ids, experts = value.whole.of_operand(ids), value.whole.of_operand(experts)
        *leading, last = experts.effect.dims
        counts = not any(a.axis is not None for dim in leading for a in dim)
        if counts and is_arange(experts.with_dims(last)):
            return per_row(ids)
    return None


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
    same = _finds(slot) and slot.value.node is token.value.node and slot != token
    if not same or any(weights.effect.dims[2:]):
        return None
    # Each expert may cast the weights anew.
    whole, _ = strip_casts(weights.with_dims(*weights.effect.dims[:2]))
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
        taken = None if columns is None else _taken(columns.linear.gemm.x)
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


def _taken(rows: View) -> tuple[View, View] | None:
    """(tokens, numbers) of tokens[numbers], or of tokens[None, numbers] without its first axis."""
    value = rows.value
    if value.op != "aten.index" or value.shape[0] != 1 or rows != value.whole.select(0, 0):
        return gathered(rows)
    tokens, items = value.args[0], value.args[1]
    return (tokens.select(0, 0), items[0][1]) if [dim for dim, _ in items] == [1] else None


def _gemm(x: View, weight: View, end: Value) -> ExpertGemm:
    return ExpertGemm(x, weight, None, None, None, None, end, 1, ())


def _stack(weight: View, expert: int, end: Value) -> View:
    """[E, N, K] of which `weight` [N, K] is one expert's."""
    value, effect = weight.value, weight.effect
    stacked = value.op in ("constant", "input") and len(value.shape) == 3 and len(effect.dims) == 2
    walked = any(atom.axis == 0 for dim in effect.dims for atom in dim)
    if not stacked or walked or effect.start[0] != expert:
        _refuse(end, "the experts' weights are tensors of their own, no stack", _STACK)
    whole = Effect(((Atom(0, 1, value.shape[0]),), *effect.dims), (0, *effect.start[1:]))
    return View(value, whole)
