"""The parts of absorbed attention: attention over the latents, between two products with a weight
per head.

    q_latent = q_nope @ W_UK[h]              [T, H, L], W_UK[h] [N, L]
    o_latent = attention([q_latent, q_rope], [latents, rope_keys], latents)
    out      = o_latent @ W_UV[h]^T          [T, H, V], W_UV[h] [V, L]

Dimension letters are explained in `patterns/mla/keys.py`. Each sequence has S queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from tilewright.patterns import effects
from tilewright.patterns.attention.bare import bare
from tilewright.patterns.dataflow import Dataflow, Value, View, upstream
from tilewright.patterns.effects import Atom, Dim, Effect, InexpressibleError, Size
from tilewright.patterns.recognise.attention_eager import product_of, without_repeats
from tilewright.patterns.recognise.attention_varlen import FORMS, name_of_op
from tilewright.patterns.recognise.gemm import Side, is_weight, named_product, piece_of

_REACH = 48


@dataclass(frozen=True)
class PerHead:
    """A product with a weight for each head: x [tokens..., H, K] @ weight[h] [K, F].

    value: the result of the product.
    result: the names of the result's dimensions, which include `heads` and `feature`.
    x: the operand x, with the names of its dimensions, which include `heads` and `hidden`.
    weight: [H, K, F].
    """

    value: Value
    result: str
    x: Side
    weight: View
    heads: str
    hidden: str
    feature: str

    @property
    def sizes(self) -> tuple[Size, Size, Size]:
        """(H, K, F): the number of heads, the summed width, and the width of the result's heads."""
        heads, hidden, features = self.weight.shape
        return heads, hidden, features

    def is_axis(self, dim: Dim, name: str) -> bool:
        """Whether `dim`, a dimension of a view of the value, covers a whole dimension of the value.
        name: the name of the value's dimension."""
        axis = self.result.index(name)
        return dim == effects.identity(self.value.shape).dims[axis]


@dataclass(frozen=True)
class Absorbed:
    """An attention over latents, together with two products: the product that makes q_latent, and
    the product that reads o_latent."""

    query: PerHead
    attention: Value
    result: PerHead

    @property
    def node(self) -> fx.Node:
        return self.attention.node

    @property
    def values(self) -> tuple[Value, ...]:
        """The attention and the two products."""
        return self.query.value, self.attention, self.result.value


def absorbed_attentions(flow: Dataflow) -> Iterator[Absorbed]:
    """Yields possible absorbed attentions, each attention once."""
    products = {p.value: p for value in flow.values if (p := _per_head(value)) is not None}
    seen: set[Value] = set()
    for result in products.values():
        attention = _attention_of(result)
        if attention is None or attention in seen:
            continue
        # The nearest products before the attention multiply queries and keys. The product that
        # makes q_latent comes before them.
        logits = set(upstream(attention, _REACH, lambda v: not _multiplies(v)))
        above = upstream(attention, _REACH, lambda v: v.dtype.is_floating_point)
        made = (products[v] for v in above if v in products and v not in logits)
        query = next((q for q in made if _fit(q, result)), None)
        if query is not None:
            seen.add(attention)
            yield Absorbed(query, attention, result)


def _attention_of(result: PerHead) -> Value | None:
    """Returns the attention operator, or the softmax of a spelled-out attention, whose result a
    product reads; else None."""
    value = _before_casts(result.x.view.value)
    if _attends(value):
        return value
    if not _multiplies(value):
        return None
    weights = (_before_casts(v.value) for v in value.operands)
    return next((v for v in weights if v.op == "aten.softmax"), None)


def _before_casts(value: Value) -> Value:
    """Returns the value before casts and dropout, which may stand between a softmax and its product
    with the values."""
    while value.op in ("cast", "aten.dropout"):
        value = value.operands[0].value
    return value


def _attends(value: Value) -> bool:
    """Whether a value is an attention operator."""
    return value.op == "aten.scaled_dot_product_attention" or name_of_op(value) in FORMS


def _multiplies(value: Value) -> bool:
    whole = _attends(value) or value.op == "aten.baddbmm"
    return whole or product_of(value) is not None


def _fit(query: PerHead, result: PerHead) -> bool:
    heads, _, rank = query.sizes
    return result.sizes[:2] == (heads, rank)


def _per_head(value: Value) -> PerHead | None:
    product = named_product(value)
    if product is None or not product.names_differ:
        return None
    sides = [without_repeats(side, product) for side in product.sides]
    # The weight is the operand that is a parameter. If neither is a parameter, the weight is the
    # operand that does not depend on a product with a weight. If neither depends on such a product,
    # the weight is the second operand.
    sides.sort(key=lambda side: (is_weight(side.view), not side.view.value.projected))
    return _with_weight(value, product.result, *sides)


def _with_weight(value: Value, result: str, x: Side, stack: Side) -> PerHead | None:
    heads = [n for n in stack.names if n in x.names and n in result]
    hidden = [n for n in stack.names if n in x.names and n not in result]
    features = [n for n in stack.names if n not in x.names]
    if stack.view.value.projected or not len(heads) == len(hidden) == len(features) == 1:
        return None
    if not {*features, *x.names} - {*hidden} <= {*result}:
        return None
    weight = stack.ordered([*heads, *hidden, *features])
    if any(a.axis is None for dim in weight.effect.dims for a in dim):
        return None
    return PerHead(value, result, x, weight, heads[0], hidden[0], features[0])


# --- the query ------------------------------------------------------------------------------------


def heads_of(product: PerHead, query: Side) -> str | None:
    """Returns the name of the query's dimension of heads, if the query or a part of it is the
    result of `product`; else None."""
    for name, dim in query.dims.items():
        if _are_heads(query.view.with_dims(dim), product):
            return name
    return None


def _are_heads(view: View, product: PerHead) -> bool:
    """Whether a view of one dimension has the product's heads, one after the other."""
    if view.effect.dims == ((),):
        return False
    view, _ = bare(view)
    value = view.value
    if value is product.value:
        return product.is_axis(view.effect.dims[0], product.heads)
    if value.op != "aten.cat":
        return False
    parts, axis = value.args
    start = list(view.effect.start)
    first: Size = 0
    for part in parts:
        start[axis] = first
        piece = piece_of(View(value, Effect(view.effect.dims, tuple(start))))
        if piece.value is not value and _are_heads(piece, product):
            return True
        first = first + part.shape[axis]
    return False


def query_of(product: PerHead, latent: View) -> View:
    """Returns the x [B, S, H, N] from which a product makes q_latent [B, S, H, L]. latent: q_latent
    as a view of the product's value.

    Raises InexpressibleError if the view does not have whole heads and columns.
    """
    *tokens, heads, columns = latent.effect.dims
    taken = {product.result.index(n): n for n in (product.heads, product.feature)}
    whole = product.is_axis(heads, product.heads) and product.is_axis(columns, product.feature)
    if not whole or any(latent.effect.start[axis] for axis in taken):
        raise InexpressibleError("a part of the heads or of the columns of the absorbed query")
    if any(a.axis in taken for dim in tokens for a in dim):
        raise InexpressibleError("a diagonal of the absorbed query")
    x = product.x
    inner = x.ordered([None if n == product.feature else n for n in product.result])
    rows = inner.through(Effect((*tokens, heads), latent.effect.start))
    return rows.with_dims(*rows.effect.dims, x.dims[product.hidden])


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """The columns of an attention's result that the product after the attention reads.

    columns: the index of the first of these columns. layout: the dimensions of the product's
    result, expressed on the axes [B, S, H, V].
    """

    columns: Size
    layout: Effect


def taken_of(product: PerHead, layout: Effect) -> Taken:
    """Returns the columns of an attention's result that the product reads. layout: the dimensions
    of the attention's result, expressed on the axes [B, S, H, width]. The attention's result is the
    operand x of the product.

    Raises InexpressibleError if the product does not take whole heads.
    """
    heads, rank, features = product.sizes
    x = effects.compose(product.x.view.effect, layout)
    dims = dict(zip(product.x.names, x.dims, strict=True))
    whole = dims[product.heads] == effects.coalesce([Atom(2, 1, heads)]) and x.start[2] == 0
    whole = whole and dims[product.hidden] == effects.coalesce([Atom(3, 1, rank)])
    tokens = [dims[n] for n in product.x.names if n not in (product.heads, product.hidden)]
    if not whole or any(a.axis in (2, 3) for dim in tokens for a in dim):
        raise InexpressibleError("a part of the heads or of the columns of the attention's result")
    dims[product.feature] = effects.coalesce([Atom(3, 1, features)])
    made = Effect(tuple(dims.get(n, ()) for n in product.result), (*x.start[:3], 0))
    return Taken(x.start[3], made)
