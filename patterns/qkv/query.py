"""Finds the query projection that belongs to a K projection and a V projection.

If K is rotated, Q is rotated with the same cos and sin. Otherwise, Q is a projection of the same
activation whose result attention combines with the written cache. Q may be another product, or the
rest of the product that computes K or V.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.arithmetic.steps import constant_factor
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Effect
from tilewright.patterns.language import Parts, Reject, Result, Stage, reject
from tilewright.patterns.projection.epilogue import match_epilogue
from tilewright.patterns.projection.heads import Heads, match_heads, on_heads, rope_table
from tilewright.patterns.projection.rows import rest_of
from tilewright.patterns.recognise.dtypes import dtype_name
from tilewright.patterns.recognise.gemm import match_gemm
from tilewright.patterns.recognise.linear import Linear, Path
from tilewright.patterns.recognise.rope import same_table

# The operations between a projection and attention: a bias, a norm, RoPE and casts. The search from
# the projection goes only through these operations.
_INSIDE = {
    "aten.add", "aten.sub", "aten.mul", "aten.neg", "aten.cat", "aten.pow", "aten.square",
    "aten.mean", "aten.rsqrt", "aten.rms_norm", "aten.clamp", "aten.hardtanh", "cast", "aten.var",
    "aten.sqrt", "aten.div", "aten.reciprocal", "aten.sum", "aten.layer_norm", "aten._scaled_mm",
    "aten.view_as_complex", "aten.view_as_real", "aten.conj", "aten._conj",
}  # fmt: skip
_REACH = 64
_PATH = Path("Q_PATH", Stage.Q_PATH, "attention")
_KNOWN = (
    "between a query's projection and attention there may be a bias, a norm, a constant factor and "
    "a rotation by K's cos and sin"
)

# Operations that may combine a query with the output of attention, and that are not attention to
# this query: residuals and gates.
_JOINS = {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.cat", "aten.where", "cast"}


@dataclass(frozen=True)
class Query:
    """The heads of Q, and the parts of the graph that they replace.

    Attributes:
        heads: The heads of Q.
        results: The replaced parts of the graph.
        run: The length of the alternating runs of queries and gates among the heads, or 0 if there
            are no gates.
    """

    heads: Heads
    results: tuple[Result | Parts, ...]
    run: int = 0


def find_query(
    flow: Dataflow,
    k: Heads,
    v: Heads,
    store: Value,
    inside: frozenset[Value],
    place: int,
) -> Query:
    """Returns the query that belongs to K and V. Raises Reject (Q_PATH) if there is no such query,
    or more than one.

    store: the write of K.
    inside: the values that the match absorbs for K and V.
    place: where the op will be inserted, in program order; a query must not depend on values that
        are computed after this place.
    """
    if k.rope is not None:
        rope_table(k, k.rope.cos), rope_table(k, k.rope.sin)
    found = {
        p: q for p in _products_of(flow, k, v) if (q := _query_at(flow, p, (k, v), inside, place))
    }
    if k.rope is None:
        found |= {q.heads.product: q for q in _rests(k, v) if q.heads.product not in found}
        found = _attending(flow, found, (k, v), store)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found and _is_cross(flow, k, v, store):
        reject(
            "Q_PATH",
            Stage.Q_PATH,
            f"K and V project {k.x.value}, but their queries project another activation, as in "
            "cross-attention",
            k.product,
            hint="K and V are still written by a fused op, without the query",
            weight="advice",
        )
    if not found and (wide := _cast_query(flow, k, v)) is not None:
        made, read = (dtype_name(d) for d in (wide.product.dtype, wide.end.dtype))
        reject(
            "Q_PATH",
            Stage.Q_PATH,
            f"the query is rotated like K and stays {read}, but its projection computes {made}",
            wide.end,
            hint=f"cast the rotated query like the keys: query = query.to(torch.{made})",
        )
    if not found and k.rope is not None:
        _refuse_turned(flow, k, v)
    what = f"{len(found)} candidates for the" if found else "no"
    were = "were" if found else "was"
    reject(
        "Q_PATH",
        Stage.Q_PATH,
        f"{what} query projection of {k.x.value} {were} found beside K and V",
        k.product,
        hint="the query must project the same activation and be rotated with the same cos and sin",
    )


def _products_of(flow: Dataflow, k: Heads, v: Heads) -> list[Value]:
    """Returns every product of K's activation with a weight.

    Libraries quantise an activation separately for each linear that reads it. If only K and V read
    K's activation, products of an equal activation count as well.
    """
    if k.x_scale is None:
        found = _multiplying(flow.users.get(k.x.value, ()), k)
        if _holds_more(k, v) or not {k.product, v.product}.issuperset(found):
            return found
    return _multiplying([value for value in flow.values if value.op == k.product.op], k)


def _holds_more(k: Heads, v: Heads) -> bool:
    """Whether K and V are parts of one product that also has other rows, such as the rows of a
    packed query."""
    rows = k.rows.indices() | v.rows.indices()
    return k.product is v.product and k.linear.gemm.weight.shape[0] != len(rows)


def _multiplying(users: Iterable[Value], k: Heads) -> list[Value]:
    """Returns the values that are products of an activation equal to K's activation."""
    found = []
    for user in dict.fromkeys(users):
        gemm = match_gemm(user)
        try:
            if gemm is not None and equal_values(gemm.flat_x, k.x):
                found.append(user)
        except effects.InexpressibleError:
            continue
    return found


def _is_cross(flow: Dataflow, k: Heads, v: Heads, store: Value) -> bool:
    """Whether attention reads the keys, and only K and V are projections of their activation."""
    others = set(_products_of(flow, k, v)) - {k.product, v.product}
    return not others and _Meetings(flow, store).any()


# --- another product, or a part of one with its own norm or rotation ------------------------------


def _query_at(
    flow: Dataflow,
    product: Value,
    kv: tuple[Heads, Heads],
    inside: frozenset[Value],
    place: int,
) -> Query | None:
    """Returns Q if it is computed from this product. Q is the value furthest downstream that has
    K's rotation and clamp. Returns None if there is no such value."""
    k, _ = kv
    sharing = [h for h in kv if h.product is product]
    taken = [h.rows.indices() for h in sharing]
    num_rows = sharing[0].linear.gemm.weight.shape[0] if sharing else None
    if isinstance(num_rows, int) and len(frozenset().union(*taken)) == num_rows:
        return None  # the product has only K's and V's rows
    first: Query | None = None
    late: Query | None = None
    for end in _ends(flow, product):
        if constant_factor(strip_casts(end.whole)[0].value) is not None:
            continue  # attention reads the value before the factor, which scales its logits
        try:
            heads = match_heads(end.whole, _PATH, head_dim=k.head_dim, factors=True)
            result = Result(end, on_heads(heads, heads.layout), factor=heads.factor)
            query = Query(heads, (result,))
            fits = heads.product is product and _mirrors(heads, k) and _keeps_range(heads)
        except (Reject, effects.InexpressibleError):
            continue
        if not fits or any(heads.rows.indices() & rows for rows in taken):
            continue
        if not _is_ready(flow, heads, place):
            late = late or query
        elif _closed(flow, heads, inside):
            return query
        else:
            first = first or query
    return first or late


def _cast_query(flow: Dataflow, k: Heads, v: Heads) -> Heads | None:
    """Returns a query that cannot be fused only because of its dtype; else None."""
    for product in _products_of(flow, k, v):
        for end in _ends(flow, product):
            try:
                heads = match_heads(end.whole, _PATH, head_dim=k.head_dim)
            except (Reject, effects.InexpressibleError):
                continue
            rows = [h.rows.indices() for h in (k, v) if h.product is product]
            other = heads.product is product and not any(heads.rows.indices() & r for r in rows)
            if other and heads.end.dtype != product.dtype and _same_projection(heads, k):
                return heads
    return None


def _refuse_turned(flow: Dataflow, k: Heads, v: Heads) -> None:
    """Raises Reject and names the obstacle, if a projection other than the projections of K and V
    might be the query."""
    for product in _products_of(flow, k, v):
        for end in _ends(flow, product):
            try:
                epilogue = match_epilogue(end.whole, Stage.Q_PATH, True)
            except (Reject, effects.InexpressibleError):
                continue
            if epilogue.rope is None or end in k.absorbed:
                continue
            why = "its rotation, or its clamp, is not K's"
            try:
                heads = match_heads(end.whole, _PATH, head_dim=k.head_dim, factors=True)
                if heads.product in (k.product, v.product):
                    continue
                if not _keeps_range(heads):
                    number = f"{heads.factor:g}"
                    why = f"float16 may overflow before the factor {number} is applied"
            except Reject as rejection:
                why = rejection.miss.message
            except effects.InexpressibleError:
                continue
            message = f"the result of {product} is rotated, but is not a query: {why}"
            reject("Q_PATH", Stage.Q_PATH, message, end, hint=_KNOWN)
    others = [p for p in _products_of(flow, k, v) if p not in (k.product, v.product)]
    if len(others) == 1:
        message = (
            f"no query: {others[0]} projects {k.x.value} too, but no part of it is rotated like K"
        )
        reject("Q_PATH", Stage.Q_PATH, message, others[0], hint=_KNOWN)


def _is_ready(flow: Dataflow, q: Heads, place: int) -> bool:
    """Whether the bias and norm of Q are computed before `place` in program order."""
    weight = None if q.norm is None else q.norm.weight
    operands = [view for view in (q.linear.bias, weight) if isinstance(view, View)]
    return all(flow.positions[view.value.node] < place for view in operands)


def _closed(flow: Dataflow, q: Heads, inside: frozenset[Value]) -> bool:
    """Whether values outside of Q read only the last value of Q, its end."""
    within = {*q.absorbed, *inside}
    return all(
        value is q.end
        or (value not in flow.output_values and within.issuperset(flow.users.get(value, ())))
        for value in q.absorbed
    )


def _ends(flow: Dataflow, product: Value) -> list[Value]:
    """Returns the values downstream of a product. The furthest value comes first."""
    found = flow.downstream(product, _REACH, lambda value: value.op in _INSIDE)
    return sorted(found, key=lambda value: -value.position)


def _mirrors(q: Heads, k: Heads) -> bool:
    """Whether one op can compute both q and k, because they have the same rotation, clamp and
    head_dim."""
    return q.end.dtype == q.product.dtype and _same_projection(q, k)


def _keeps_range(q: Heads) -> bool:
    """Whether the heads stay in the range of their dtype if their factor is left out."""
    return abs(q.factor) >= 1 or q.end.dtype != torch.float16


def _same_projection(q: Heads, k: Heads) -> bool:
    same_head = q.head_dim == k.head_dim and q.linear.clip == k.linear.clip
    return same_head and _same_rotation(q, k)


def _same_rotation(q: Heads, k: Heads) -> bool:
    if q.rope is None or k.rope is None:
        return q.rope is k.rope
    return (
        q.rope.style == k.rope.style
        and q.rope.rotary_dim == k.rope.rotary_dim
        and same_table(rope_table(q, q.rope.cos), rope_table(k, k.rope.cos))
        and same_table(rope_table(q, q.rope.sin), rope_table(k, k.rope.sin))
    )


# --- the rest of a shared product -----------------------------------------------------------------


def _rests(k: Heads, v: Heads) -> Iterator[Query]:
    """Yields, for each product that K or V is a part of, the rest of this product as a query."""
    shared = k.product is v.product
    for heads in (k,) if shared else (k, v):
        taken = heads.rows.indices() | (v.rows.indices() if shared else frozenset())
        alone = not shared or k.linear.value is v.linear.value
        linear = heads.linear if alone and covers(heads.linear) else heads.linear.product
        rows = rest_of(linear.gemm.shape[-1], taken, k.head_dim)
        if rows is None or linear.clip != k.linear.clip:
            continue
        q = replace(
            heads,
            linear=linear,
            rows=rows,
            layout=linear.layout,
            norm=None,
            end=linear.value,
            absorbed=linear.absorbed,
        )
        yield Query(q, (Parts(linear.value, partial(_restated, q)),))


def covers(linear: Linear) -> bool:
    """Whether the bias and the clamp were applied to all features, and not only to a part of the
    features."""
    return effects.product(linear.layout.shape) == effects.product(linear.gemm.shape)


def _restated(q: Heads, effect: Effect) -> Effect:
    return on_heads(q, effects.compose(effect, q.layout))


# --- choice among several -------------------------------------------------------------------------


def _attending(
    flow: Dataflow, found: dict[Value, Query], kv: tuple[Heads, Heads], store: Value
) -> dict[Value, Query]:
    """Returns the candidates that reach attention over the written cache, if the graph shows which
    candidates do."""
    if not found:
        return found
    meetings = _Meetings(flow, store)
    if meetings.any():
        return {p: q for p, q in found.items() if meetings.of(q.results[0].replaced, kv)}
    packed = {p: q for p, q in found.items() if any(p is h.product for h in kv)}
    return packed or found


class _Meetings:
    """The places where data from the written cache is combined with other projected data, as in
    attention.

    The graph is searched only as far as a question requires, because attention is near and many
    layers follow.
    """

    def __init__(self, flow: Dataflow, store: Value) -> None:
        self.flow = flow
        self._reading = {store}
        self._seen = bisect_left(flow.values, store.position, key=attrgetter("position"))

    def any(self) -> bool:
        for at in range(self._seen, len(self.flow.values)):
            value = self.flow.values[at]
            if self._reads(value) and self._meets(value):
                return True
        return False

    def of(self, query: Value, kv: tuple[Heads, Heads]) -> bool:
        """Whether values that are computed from `query`, other than K and V, reach such a place."""
        own = {value for heads in kv for value in heads.absorbed if value is not query}
        made = self.flow.downstream(query, None, lambda v: v not in own and self._carries(v))
        return any(
            self._reads(user) and self._meets(user)
            for value in made
            for user in self.flow.users.get(value, ())
        )

    def _reads(self, value: Value) -> bool:
        """Whether a value is computed from the cache after the write."""
        values = self.flow.values
        while self._seen < len(values) and values[self._seen].position <= value.position:
            item = values[self._seen]
            self._seen += 1
            if any(view.value in self._reading for view in item.operands):
                self._reading.add(item)
        return value in self._reading

    def _carries(self, value: Value) -> bool:
        """Whether the search from a query continues through a value. It stops at writes, at values
        that are computed from the cache, and at integers, such as the choice of experts."""
        plain = value.op != "store" and value.dtype.is_floating_point
        return plain and not self._reads(value)

    def _meets(self, value: Value) -> bool:
        if value.op in _JOINS or value.op == "store":
            return False
        read = [self._reads(v.value) for v in value.operands]
        return any(read) and any(
            v.value.projected and not r for v, r in zip(value.operands, read, strict=True)
        )
