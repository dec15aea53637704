"""LoRA adapters of projections that are not a part of a fused cache write.

    x ─ A_q ─ B_q ─ [* scale] ─ + q        shrink_qkv_permute_3mn(x, A_q, A_k, A_v)
    x ─ A_k ─ B_k ─ [* scale] ─ + k   ⇒   lora_expand_add(.., q, k, v, B_q, B_k, B_v)
    x ─ A_v ─ B_v ─ [* scale] ─ + v

A site has one to three deltas of the same activation, in program order.

Dimension letters: T rows, K hidden, W columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tilewright.ops.checks import FLOAT_DTYPES
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope, upstream
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Match, Result, Sought, Stage, register, reject
from tilewright.patterns.lora.arguments import (
    CAST_ADAPTERS,
    LETTERS,
    check_kernels,
    delta_calls,
    fact,
    together,
)
from tilewright.patterns.lora.delta import LoraDelta, match_delta
from tilewright.patterns.lora.product import BATCHED
from tilewright.patterns.recognise.dtypes import check_dtypes, rows_fact
from tilewright.patterns.recognise.gemm import is_weight
from tilewright.patterns.recognise.routing import GATHERS, RESCALED, TAKEN, gathered


@dataclass(frozen=True)
class Sum:
    """A value that is the sum base + delta of whole tensors. base is [T, W]."""

    value: Value
    base: View
    delta: LoraDelta


@dataclass(frozen=True)
class LoraQkv:
    """Matches LoRA adapters of projections that are not a part of a fused cache write."""

    name: str = "lora_qkv"
    op: str = "lora_expand_add"
    asked_before: ClassVar[tuple[str, ...]] = ("cache_store",)
    takes_leftovers: bool = True
    sought: ClassVar[Sought] = Sought(
        "adapters: a linear, and two products of low rank added to it",
        frozenset({"aten.linear", "aten.addmm", "aten.mm", "aten.matmul", "aten.bmm"}),
        before=frozenset({"product"}),
        depth=2,
    )

    def anchors(self, flow: Dataflow) -> Iterator[tuple[Value, ...]]:
        """Yields groups of sums. Each group has up to three deltas that share one shrink call."""
        groups: list[list[Sum]] = []
        waiting: list[list[Sum]] = []
        for value in flow.values:
            if _is_foreign(value):
                yield (value,)
                continue
            found = match_sum(value)
            if found is None:
                if _resembles_sum(value):
                    yield (value,)
                continue
            waiting = [group for group in waiting if _waits(group, value, flow)]
            home = next((g for g in waiting if together(g[0].delta, found.delta)), None)
            if home is None:
                home = []
                groups.append(home)
                waiting.append(home)
            home.append(found)
        yield from (tuple(item.value for item in group) for group in groups)

    def match(self, anchor: tuple[Value, ...], flow: Dataflow) -> Match:
        if _is_foreign(anchor[0]):
            message = f"{_operator(anchor[0])}, an unknown operator, computes the delta"
            hint = (
                "write y + (x @ A[ids].mT) @ B[ids].mT with the stacks of all adapters, or "
                "call tilewright's shrink_qkv_permute_3mn and lora_expand_add there"
            )
            reject("LORA_OPERATOR", Stage.ANCHORED, message, anchor[0], hint=hint)
        sums = [found for value in anchor if (found := match_sum(value)) is not None]
        if not sums and (rescaled := _rescaled(anchor[0])):
            message = (
                f"{rescaled[0]} looks up the adapters and also writes them, because "
                "max_norm rescales rows"
            )
            hint = "rescale the stacks once, when the adapters are loaded, and leave out max_norm"
            reject("LORA_FORM", Stage.ACTIVATION, message, anchor[0], *rescaled, hint=hint)
        if not sums:
            message = "two products with stacks of matrices are added in an unknown form"
            hint = (
                "select the matrices of each row by index: A[index], B[index]; if one stack "
                "has the matrices of q, k and v, write one product for each of them: A[:, "
                "p][index], B[:, p][index]"
            )
            reject("LORA_FORM", Stage.ACTIVATION, message, anchor[0], hint=hint)
        deltas = [_with_gathers(item.delta, flow) for item in sums]
        for item in sums:
            _guard(item, flow)
        nothing = [None] * (len(LETTERS) - len(sums))
        call = delta_calls(
            [*deltas, *nothing],
            [*(delta.expand for delta in deltas), *nothing],
            [*(item.base for item in sums), *nothing],
            packed=False,
        )
        names = ("s", *LETTERS, *(f"{letter}_weight" for letter in LETTERS))
        results = tuple(
            Result.of_rows(item.value, item.value.whole.matrix.shape, output)
            for output, item in enumerate(sums)
        )
        absorbed = [
            v for item, d in zip(sums, deltas, strict=True) for v in (item.value, *d.absorbed)
        ]
        scope = anchor[0].scope
        for value in anchor[1:]:
            scope = common_scope(scope, value.scope)
        return Match(
            anchor=anchor[0],
            arguments={**dict(zip(names, call.operands, strict=True)), **dict(call.options)},
            results=results,
            absorbed=tuple(dict.fromkeys(absorbed)),
            facts=_facts(deltas, [*deltas, *nothing]),
            scope=scope,
        )


def match_sum(value: Value) -> Sum | None:
    """Returns a value as the sum of a tensor and the delta of an adapter; None for another
    value."""
    if value.op != "aten.add" or value.kwargs.get("alpha", 1) != 1 or len(value.operands) != 2:
        return None
    if len(value.shape) < 2 or len(value.args) != 2:
        return None
    for base, other in value.either_way:
        if not base.shape == other.shape == value.shape:
            continue
        delta = match_delta(other)
        if delta is None:
            continue
        try:
            return Sum(value, base.matrix, delta)
        except InexpressibleError:
            continue
    return None


def _waits(group: Sequence[Sum], place: Value, flow: Dataflow) -> bool:
    """Whether a sum at `place` can join a group. This requires that no value before `place` reads a
    sum of the group."""
    readers = (user for item in group for user in flow.users.get(item.value, ()))
    return len(group) < len(LETTERS) and all(user.position > place.position for user in readers)


def _with_gathers(delta: LoraDelta, flow: Dataflow) -> LoraDelta:
    """Returns the delta with the gathers of A and B added to its absorbed values, unless other
    values read these gathers."""
    inside = set(delta.absorbed)
    tables = dict.fromkeys(
        view.value
        for value in delta.absorbed
        for view in value.operands
        if view.value.op in GATHERS
        and view.value not in flow.output_values
        and inside.issuperset(flow.users.get(view.value, ()))
    )
    return replace(delta, absorbed=tuple(dict.fromkeys((*delta.absorbed, *tables))))


#: Matches the names of the operators with which serving engines multiply by B: bgmv and sgmv of
#: punica, and lora_expand of vLLM.
_EXPANDS = re.compile(
    r"::(?!.*shrink)\w*(bgmv|sgmv|lora_expand|expand_lora|lora_b(?![a-z])|add_lora)", re.IGNORECASE
)


def _operator(value: Value) -> str:
    """Returns the name of another library's operator that computes or writes a value; "" for other
    values."""
    name = value.store.kind if value.store is not None else value.op.removeprefix("opaque:")
    return name if "::" in name and not name.startswith("tilewright::") else ""


def _is_foreign(value: Value) -> bool:
    """Whether an operator that has the name of a LoRA kernel computes or writes a value."""
    return _EXPANDS.search(_operator(value)) is not None


#: Operations that may come between and after the products of a computation that resembles a delta.
_AROUND = {
    "aten.mul", "aten.div", "aten.where", "aten.masked_fill", "aten.flip", "cast", *TAKEN,
}  # fmt: skip
_STACKS = {"constant", *TAKEN}
# How many values before a sum are searched for lookups.
_REACH = 32


def _rescaled(sums: Value) -> list[Value]:
    """Returns lookups that also rescale their table (`max_norm`), among the values before the
    products of a sum."""
    around = _AROUND | {*BATCHED}
    before = upstream(sums, _REACH, lambda v: v is sums or v.op in around)
    return [value for value in before if value.op == RESCALED]


def _resembles_sum(value: Value) -> bool:
    """Whether a value is the result of two consecutive products with stacks of matrices, added to a
    tensor that is neither a parameter nor a part of one. (A parameter would be a bias, as for
    Mamba's time steps and for the results of experts.)"""
    return any(
        _stacked_products(delta.value) > 1 and not _is_bias(base)
        for base, delta in (value.either_way if value.op == "aten.add" else ())
    )


def _is_bias(base: View) -> bool:
    taken = gathered(base.value.whole)
    return is_weight(base if taken is None else taken[0])


def _stacked_products(value: Value, reach: int = 8) -> int:
    """Returns how many consecutive products with stacks of matrices lead to a value."""
    if reach == 0:
        return 0
    rest = _rest_of_product(value)
    if rest is not None:
        return 1 + _stacked_products(rest.value, reach - 1)
    shifted = value.op == "aten.add" and len(value.operands) == 1
    if value.op not in _AROUND and not shifted:
        return 0
    return max((_stacked_products(v.value, reach - 1) for v in value.operands), default=0)


def _rest_of_product(value: Value) -> View | None:
    """Returns the other operand of a product with a stack of matrices, which may be indexed or
    whole. Returns None for another value."""
    if value.op not in BATCHED:
        return None
    for stack, rest in value.either_way:
        # The rows of an embedding become matrices if they are viewed as matrices.
        rank = max(len(stack.shape), len(stack.value.shape))
        if rank > 2 and stack.value.op in _STACKS:
            return rest
    return None


def _guard(item: Sum, flow: Dataflow) -> None:
    delta = item.delta
    memory = flow.memory_of.get(flow.home(item.base.value))
    users = flow.users.get(item.value, ())
    stores = [u for u in users if u.store is not None and u.store.memory is memory]
    if stores:
        whole = item.base.is_whole and item.base.value.op not in GATHERS
        message = f"the delta is added to {'' if whole else 'some rows of '}its projection in place"
        hint = "y = y + delta instead of y += delta" if whole else _BY_ROW
        reject("LORA_IN_PLACE", Stage.GUARDS, message, *stores, hint=hint)
    dtypes = {t.value.dtype for t in (delta.x, delta.shrink, delta.expand, item.base)}
    dtypes.add(item.value.dtype)
    what, hint = "activation, adapter and projection", CAST_ADAPTERS
    check_dtypes(dtypes, what, item.value, FLOAT_DTYPES, hint)
    check_kernels(delta)


_BY_ROW = (
    "keep the adapters in one stack, and select the adapter of each row by index, A[ids] and "
    "B[ids]; with PEFT, use one adapter for the whole batch (set_adapter) instead of "
    "adapter_names"
)


def _facts(deltas: Sequence[LoraDelta], placed: Sequence[LoraDelta | None]) -> dict[str, Any]:
    x = deltas[0].x
    widths = "/".join(str(delta.expand.shape[1]) for delta in deltas)
    return {
        **fact([[d] if d else [] for d in placed]),
        "columns": widths,
        "x": rows_fact(x.value.dtype, *x.shape),
    }


register(LoraQkv())
