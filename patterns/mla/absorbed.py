"""Absorbed decode: attention over the latents themselves, kv_b multiplied into query and result.

    q_latent = q_nope @ W_UK[h]              [T, H, L]
    o_latent = attention([q_latent, q_pe], [latents, rope_keys], latents)
    out      = o_latent @ W_UV[h]^T          [T, H, V]

It is reported and never fused: for one or few queries it is the better algorithm already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.patterns.dataflow import Dataflow, Value, View, upstream
from tilewright.patterns.effects import Size
from tilewright.patterns.language import register_code
from tilewright.patterns.recognise.attention_varlen import name_of_op
from tilewright.patterns.recognise.gemm import is_weight, named_product

register_code(
    "ABSORBED_DECODE",
    "attention runs over the latents themselves, with the up-projection multiplied into q",
)

_ATTENDS = ("aten.softmax", "aten.scaled_dot_product_attention")
_REACH = 48


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
    x, stack = sorted(found.sides, key=lambda s: is_weight(s.view) and not s.view.value.projected)
    weight, result = stack.view, found.result
    if not is_weight(weight) or weight.value.projected or len(weight.shape) != 3:
        return None
    sizes = dict(zip(stack.names, weight.shape, strict=True))
    heads = [n for n in sizes if n in x.names and n in result]
    hidden = [n for n in sizes if n in x.names and n not in result]
    features = [n for n in sizes if n not in x.names and n in result]
    if not len(heads) == len(hidden) == len(features) == 1:
        return None
    return _PerHead(value, x.view, sizes[heads[0]], sizes[hidden[0]], sizes[features[0]])


def _attends(x: View, product: Value) -> bool:
    """Whether x is the result of an attention that the product goes into."""
    for value in _above(x.value):
        if value.op in _ATTENDS or name_of_op(value):
            return product in _above(value)
    return False


def _above(value: Value) -> list[Value]:
    """What a value is made of by products, nearest first, as far as it lies near."""
    near = upstream(value, _REACH, lambda v: v.projected)
    return [v for v in near if v is value or v.projected]
