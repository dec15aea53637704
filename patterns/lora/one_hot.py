"""Adapters chosen by a mask: each row is multiplied with every adapter's A, and all results but its
own adapter's are zeroed before B.

    s = einsum("th,grh->tgr", x, A) * one_hot(index, G)[..., None]
    delta = einsum("tgr,gwr->tw", s, B)

In place of one_hot also index[:, None] == arange(G): then an index that names no adapter is none.

Dimension letters: T rows, G adapters, K hidden, R rank, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Effect
from tilewright.patterns.lora.factors import is_index
from tilewright.patterns.lora.product import BATCHED, Product
from tilewright.patterns.recognise.gemm import Side, named_product
from tilewright.patterns.recognise.outside import COMPARED, REFUSED, Outside
from tilewright.patterns.recognise.routing import flat, is_arange, strip_integer_casts


@dataclass(frozen=True)
class OneHot:
    """The two products of a delta; masked: the product with the mask, between them."""

    first: Product
    second: Product
    masked: View


def match_one_hot(view: View) -> OneHot | None:
    """The products whose result, all of it, `view` [..., W] is."""
    product = named_product(view.value) if view.value.op in BATCHED and view.is_whole else None
    if product is None:
        return None
    ways = product.either_way
    found = (_masked_product(view, masked, stack, product.result) for masked, stack in ways)
    return next(filter(None, found), None)


def _masked_product(view: View, masked: Side, stack: Side, result: str) -> OneHot | None:
    s, names, weight_names = masked.view, masked.names, stack.names
    tokens, feature = result[:-1], result[-1]
    summed = set(weight_names) - {feature}
    if len(weight_names) != 3 or len(summed) != 2 or feature in names:
        return None
    if names[: len(tokens)] != tokens or set(names[len(tokens) :]) != summed or len(names) < 3:
        return None
    mul = s.value
    if mul.op != "aten.mul" or not s.is_whole or len(mul.operands) != 2 or mul.kwargs:
        return None
    for operand, factor in mul.either_way:
        place = _place_of_adapters(factor, mul.shape)
        if operand.shape != mul.shape or place is None or place < len(tokens):
            continue
        chosen = _index_of(_without(factor, mul.shape, 2 * len(tokens) + 1 - place))
        group, rank = names[place], names[2 * len(tokens) + 1 - place]
        first = _all_products(operand, len(tokens), place)
        if chosen is None or first is None:
            continue
        index, outside = chosen
        matrices = stack.ordered((group, feature, rank))
        if matrices.shape[0] != first[1].shape[0] or flat(index).shape != (first[0].shape[0],):
            continue
        rows = flat(index)
        return OneHot(
            Product(first[0], first[1], rows, operand.value, outside),
            Product(s, matrices, rows, view.value, outside),
            s,
        )
    return None


def _expanded(factor: View, shape: tuple) -> View | None:
    try:
        return factor.expand(*shape)
    except effects.InexpressibleError:
        return None


def _place_of_adapters(factor: View, shape: tuple) -> int | None:
    """Which of the last two axes counts adapters: the factor is broadcast along the other."""
    wide = _expanded(factor, shape)
    if wide is None or len(shape) < 3:
        return None
    still = [all(a.axis is None for a in dim) for dim in wide.effect.dims]
    if any(still[:-2]) or still[-2] == still[-1]:
        return None
    return len(shape) - 2 + still[-2]


def _without(factor: View, shape: tuple, axis: int) -> View:
    """The factor without an axis along which it is the same."""
    wide = _expanded(factor, shape)
    assert wide is not None
    dims = wide.effect.dims
    return wide.with_dims(*dims[:axis], *dims[axis + 1 :])


def _index_of(mask: View) -> tuple[View, Outside] | None:
    """(index, what numbers are that name no adapter) of a mask [..., G] that is one at each row's
    adapter."""
    mask = strip_integer_casts(mask)
    value = mask.value
    if not mask.is_whole:
        return None
    if value.op == "aten.one_hot":
        index = value.args[0]
        return (strip_integer_casts(index), REFUSED) if is_index(index) else None
    if value.op == "aten.eq" and len(value.operands) == 2 and not value.kwargs:
        for index, count in value.either_way:
            wide = _expanded(index, value.shape)
            numbers = _expanded(count, value.shape)
            if wide is None or numbers is None or not is_arange(count.value.whole):
                continue
            *rows, last = wide.effect.dims
            *others, numbered = numbers.effect.dims
            if any(a.axis is not None for a in last) or not is_index(index):
                continue
            if any(a.axis is not None for dim in others for a in dim):
                continue
            if (numbered,) == effects.identity(count.value.shape).dims:
                picked = View(index.value, Effect(tuple(rows), wide.effect.start))
                return strip_integer_casts(picked), COMPARED
    return None


def _all_products(s: View, rows: int, place: int) -> tuple[View, View] | None:
    """(x [T, K], A [G, R, K]) of a product [..., G, R], or [..., R, G], of every row with all."""
    product = named_product(s.value) if s.value.op in BATCHED and s.is_whole else None
    if product is None or len(s.shape) != rows + 2:
        return None
    result = product.result
    tokens, group, rank = result[:rows], result[place], result[2 * rows + 1 - place]
    for x, weight in product.either_way:
        summed = set(x.names) - set(tokens)
        if len(summed) != 1 or set(weight.names) != {group, rank, *summed}:
            continue
        (k,) = summed
        dims = x.dims
        merged = effects.coalesce(atom for name in tokens for atom in dims[name])
        flattened = x.view.with_dims(merged, dims[k])
        return flattened, weight.ordered((group, rank, k))
    return None
