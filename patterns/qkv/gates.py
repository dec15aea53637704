"""Gates that one linear computes together with the query.

    x ─ linear ─┬─ [norm] ─ [rope] ─▶ q ─▶ attention ─▶ · sigmoid(gate)
                └─▶ gate ──────────────────────────────────▲

The linear has as many rows for gates as for queries. The rows of the gates are beside each query
head, or after all query heads. The op computes both, but normalises and rotates only the queries.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Dataflow, View
from tilewright.patterns.effects import Effect
from tilewright.patterns.language import Parts, Result
from tilewright.patterns.projection.epilogue import HeadNorm
from tilewright.patterns.projection.heads import Heads, on_heads
from tilewright.patterns.projection.rows import Rows, rest_of
from tilewright.patterns.qkv.query import Query, covers


def with_gates(flow: Dataflow, query: Query, kv: tuple[Heads, Heads]) -> Query:
    """Returns the query together with the other rows of its product, if these rows are gates that
    the graph uses. Otherwise returns the query unchanged."""
    q, (result,) = query.heads, query.results
    if not isinstance(result, Result) or not covers(q.linear) or kv[1].norm is not None:
        return query
    if not _is_read(flow, q):
        return query
    taken = frozenset().union(*(h.rows.indices() for h in kv if h.product is q.product))
    size = q.linear.gemm.shape[-1]
    both = rest_of(size, taken, q.head_dim)
    gates = rest_of(size, taken | q.rows.indices(), q.head_dim)
    if both is None or gates is None or len(both.heads) > 1:
        return query
    run = _run(both, q.rows)
    if run == 0 or (q.norm is not None and not _for_all_heads(q.norm)):
        return query
    wide = replace(q, rows=both)
    result = replace(result, effect=on_heads(wide, q.layout))
    held = Parts(q.linear.value, partial(_restated, wide, replace(q, rows=gates)))
    return Query(wide, (result, held), run)


def _for_all_heads(norm: HeadNorm) -> bool:
    """Whether a norm runs over single heads and has one weight for all heads. In this case the rows
    of gates need no weight of their own."""
    vectors = [vector for vector in (norm.weight, norm.bias) if vector is not None]
    return norm.width == "head" and all(
        isinstance(vector, View) and len(vector.shape) == 1 for vector in vectors
    )


def _is_read(flow: Dataflow, q: Heads) -> bool:
    """Whether values other than the query read the projection."""
    inside, value = set(q.absorbed), q.linear.value
    return value in flow.output_values or not inside.issuperset(flow.users.get(value, ()))


def _run(both: Rows, queries: Rows) -> int:
    """Returns the length of the alternating runs of queries and gates. Returns 0 if they do not
    alternate in runs of equal length."""
    is_query = [row in queries.indices() for row in sorted(both.indices())[:: both.head_dim]]
    run = is_query.index(False) if False in is_query else 0
    regular = [run > 0 and at // run % 2 == 0 for at in range(len(is_query))]
    return run if is_query == regular and len(is_query) == 2 * queries.num_heads else 0


def _restated(wide: Heads, gates: Heads, effect: Effect) -> Effect:
    """Converts an effect on the projection to an effect on the op's output. Raises
    InexpressibleError if the effect reads queries, because the queries in the op's output are
    normalised and rotated."""
    on_product = effects.compose(effect, wide.linear.layout)
    on_heads(gates, on_product)
    return on_heads(wide, on_product)
