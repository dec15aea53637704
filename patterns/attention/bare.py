"""Finds the tensors that are stored in memory for queries, keys and values, before casts to a wider
dtype and before products with a number. The op reads these tensors, and computes the casts and
products itself."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import before_widening, is_float_cast
from tilewright.patterns.arithmetic.constants import one_number
from tilewright.patterns.arithmetic.steps import constant_factor
from tilewright.patterns.attention.decoded import decoded_pair
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.recognise.attention import Attention, refuse


def bare(view: View, *, scaled: bool = True) -> tuple[View, float]:
    """Returns (x, n) such that a view is x * n, where the dtype of the view represents x exactly.
    scaled: whether n may differ from 1."""
    factor = 1.0
    view = before_widening(view)
    while scaled and (known := constant_factor(view.value, one_number)) is not None:
        inner, number = known
        factor *= number
        view = before_widening(view.of_operand(inner))
    return view, factor


def of_bare_operands(found: Attention, flow: Dataflow) -> Attention:
    """Returns the attention of the stored queries, keys and values, if they have one dtype or if
    keys and values are decoded from codes. Otherwise, returns the attention unchanged. If the
    attention's result has a wider dtype than the queries, the returned attention ends at the cast
    that rounds the result to the queries' dtype."""
    if len(found.terms) != 1:
        return found
    ((q, k),) = found.terms
    (q, of_q), (k, of_k), (v, _) = bare(q), bare(k), bare(found.v, scaled=False)
    dtypes = {view.value.dtype for view in ((q,) if decoded_pair(k, v) else (q, k, v))}
    if len(dtypes) != 1:
        return found
    ended = with_end_in(found, dtypes.pop(), flow)
    if ended is None:
        return found
    return replace(ended, terms=((q, k),), v=v, scale=found.scale * of_q * of_k)


def with_end_in(found: Attention, dtype: torch.dtype, flow: Dataflow) -> Attention | None:
    """Returns the attention, extended by the cast of its result to `dtype`. Returns None if the
    graph does not round the result to this dtype."""
    end = flow.only_user(found.end)
    if found.end.dtype == dtype:
        return found
    if end is None or not is_float_cast(end) or end.dtype != dtype:
        return None
    layout = effects.compose(end.operands[0].effect, found.layout)
    return replace(found, end=end, layout=layout, absorbed=(*found.absorbed, end))


def between(view: View, below: Value) -> tuple[Value, ...]:
    """Returns the casts and the products with a number that are between a view and the value that
    :func:`bare` finds."""
    found: list[Value] = []
    value = view.value
    while value is not below:
        found.append(value)
        known = constant_factor(value, one_number)
        value = (value.operands[0] if known is None else known[0]).value
    return tuple(found)


def by_token(q: View) -> View:
    """Returns [B, S, H, D] as [T, H, D]."""
    batch, queries, heads, width = q.shape
    return q.reshape(effects.product((batch, queries)), heads, width)


def check_dense(view: View, who: str, attention: Attention, flow: Dataflow) -> None:
    """Raises Reject (ATTENTION_FORM) unless the rows of a view are contiguous. who: what the
    message calls a row, such as "key"."""
    if not flow.rows_are_dense(view):
        why = f"the numbers of a {who} are not contiguous in memory"
        hint = (
            f"make them contiguous where they are computed: {who.replace(' ', '_')}s.contiguous()"
        )
        refuse(why, attention.end, hint=hint)
