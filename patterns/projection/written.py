"""Checks that a cache write stores whole heads of a projection, and that it stores every token once
and in order."""

from __future__ import annotations

from tilewright.patterns import effects
from tilewright.patterns.cache.address import Address
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.projection.heads import Heads
from tilewright.patterns.recognise.linear import holds_all_tokens


def check_tokens(heads: Heads, place: Address, who: str, stage: Stage) -> int:
    """Returns the number of adjacent heads of the cache that each head of the projection is written
    to.

    The written dimensions must be exactly the tokens of the product in order, the heads, and
    head_dim. Otherwise the function raises Reject.
    """
    source = heads.layout
    if not holds_all_tokens(source, place.token_rank, heads.tokens):
        message = f"the {who} write does not store every token once and in order"
        hint = "write all tokens of the projection at once, in their order"
        reject("SLOT_INDEX", stage, message, heads.product, hint=hint)
    written = place.window.shape[2:]
    repeat = effects.divides(heads.num_heads, written[0])
    if written[1] != heads.head_dim or not isinstance(repeat, int):
        message = (
            f"the cache has {written[0]} heads of {written[1]}, but the {who} projection "
            f"computes {heads.num_heads} of {heads.head_dim}"
        )
        hint = f"allocate a cache that has these heads: [..., {heads.num_heads}, {heads.head_dim}]"
        reject("CACHE_LAYOUT", stage, message, heads.product, hint=hint)
    if source.dims[place.token_rank :] != heads.rows.dims(heads.feature, repeat):
        message = (
            f"the {who} write does not store each head {repeat} times with its features in order"
        )
        reject("LAYOUT", stage, message, heads.product)
    return repeat
