"""Absorbed decode: attention over the latents themselves, kv_b multiplied into query and result.

    q_latent = q_nope @ W_UK[h]              [T, H, L]
    o_latent = attention([q_latent, q_pe], [latents, rope_keys], latents)
    out      = o_latent @ W_UV[h]^T          [T, H, V]

It is recognised so that it is named: for one or few queries it is the better algorithm already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.language import register_code
from tilewright.patterns.recognise.attention_varlen import name_of_op
from tilewright.patterns.recognise.gemm import is_weight, named_product

register_code(
    "ABSORBED_DECODE",
    "attention runs over the latents themselves, with the up-projection multiplied into q",
)

_ATTENDS = ("aten.softmax", "aten.scaled_dot_product_attention")
_REACH = 24


@dataclass(frozen=True)
class _PerHead:
    """A product with a weight of its own for each head: x [.., H, K] @ weight[h] = [.., H, N]."""

    value: Value
    x: View
    heads: Size
    hidden: Size
    features: Size


def absorbed_products(flow: Dataflow) -> Iterator[Value]:
    """The product that makes q_latent, once per attention."""
    products = [p for value in flow.values if (p := _per_head(value)) is not None]
    for up in products:
        for down in products:
            fits = down.heads == up.heads and down.features == up.hidden
            if fits and down.value.position < up.value.position and _attends(up.x, down.value):
                yield down.value
                break


def _per_head(value: Value) -> _PerHead | None:
    found = named_product(value)
    if found is None:
        return None
    operands, names, result = found
    sides = list(zip(operands, names, strict=True))
    sides.sort(key=lambda side: is_weight(side[0]) and not side[0].value.projected)
    (x, x_names), (weight, weight_names) = sides
    if not is_weight(weight) or weight.value.projected or len(weight.shape) != 3:
        return None
    sizes = dict(zip(weight_names, weight.shape, strict=True))
    heads = [n for n in sizes if n in x_names and n in result]
    hidden = [n for n in sizes if n in x_names and n not in result]
    features = [n for n in sizes if n not in x_names and n in result]
    if not len(heads) == len(hidden) == len(features) == 1:
        return None
    return _PerHead(value, x, sizes[heads[0]], sizes[hidden[0]], sizes[features[0]])


def _attends(x: View, product: Value) -> bool:
    """Whether x is the result of an attention that the product goes into."""
    for value in _above(x.value):
        if value.op in _ATTENDS or name_of_op(value):
            return any(v is product for v in _above(value))
    return False


def _above(value: Value) -> Iterator[Value]:
    """What a value is made of, nearest first, so far as it lies near."""
    seen: dict[Value, None] = {value: None}
    front = [value]
    while front and len(seen) < _REACH:
        item = front.pop(0)
        yield item
        for operand in item.operands:
            if operand.value not in seen and operand.value.projected:
                seen[operand.value] = None
                front.append(operand.value)
