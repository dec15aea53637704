"""Keys and values that the graph gathers from pages.

    k = pool[block_table].flatten(1, 2)          [B, C, P, H, D] as [B, K, H, D], K = C * P

There are N pages of P slots, and each sequence has C pages. The other dimension letters are
explained in `patterns/recognise/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, View
from tilewright.patterns.effects import Effect, InexpressibleError, Size
from tilewright.patterns.recognise.outside import LOOKUPS, WRAPPED
from tilewright.patterns.recognise.routing import gathered


@dataclass(frozen=True)
class Pages:
    """A pool of pages, and the block table that gives the pages of each sequence.

    Attributes:
        pool: [N, P, H, D].
        block_table: [B, C], integers.
        wrapped: Whether negative entries count from the end. If not, they are errors.
    """

    pool: View
    block_table: View
    wrapped: bool


@dataclass(frozen=True)
class SamePages:
    """Two pools that use the same table. Valid negative entries of the table, which count from the
    end, have been replaced by nonnegative ones."""

    pools: tuple[View, View]
    block_table: View | Computed


def same_pages(k: View, v: View) -> SamePages | None:
    """Returns the pages of k and v [B, K, H, D], if both use the same table; else None."""
    found = pages_of(k), pages_of(v)
    if found[0] is None or found[1] is None:
        return None
    table = found[0].block_table
    if not equal_values(table, found[1].block_table):
        return None
    pools = found[0].pool, found[1].pool
    if found[0].wrapped != found[1].wrapped:
        return None
    if not found[0].wrapped:
        return SamePages(pools, table)
    # The op does not count negative pages from the end. An entry that is invalid in the graph stays
    # invalid.
    counted = Computed("add", (table, pools[0].shape[0]))
    return SamePages(pools, Computed("where", (Computed("lt", (table, 0)), counted, table)))


def pages_of(keys: View) -> Pages | None:
    """Returns the pages from which k or v [B, K, H, D] is gathered. Returns None if k or v is
    gathered token by token, or is not gathered. `keys` may be a range of the gathered columns."""
    taken = gathered(keys.value.whole)
    if taken is None or len(taken[0].shape) not in (3, 4):
        return None
    pool, index = taken
    try:
        return _pages(keys, pool if len(pool.shape) == 4 else pool.unsqueeze(2), index)
    except InexpressibleError:
        return None


def _pages(keys: View, pool: View, index: View) -> Pages | None:
    batch, _, _, columns = keys.shape
    count = effects.divides(batch, effects.product(index.shape))
    if count is None or index.value.dtype not in (torch.int32, torch.int64):
        return None
    taken = effects.identity(keys.value.shape)
    by_page = effects.reshape(taken, (batch, count, *pool.shape[1:]))
    for order in permutations((1, 2, 3)):
        size, heads, width = (pool.shape[axis] for axis in order)
        ordered = effects.permute(by_page, (0, 1, *(axis + 1 for axis in order)))
        by_key = effects.reshape(ordered, (batch, count * size, heads, width))
        first = _first_column(keys, by_key)
        if size == 1 or first is None:
            continue
        if effects.narrow(by_key, 3, first, columns) == keys.effect:
            ordered_pool = pool.permute(0, *order).narrow(3, first, columns)
            wrapped = LOOKUPS.get(keys.value.op) == WRAPPED
            return Pages(ordered_pool, index.reshape(batch, count), wrapped)
    return None


def _first_column(keys: View, whole: Effect) -> Size | None:
    """Returns the first column of keys [B, K, H, D], counted in the columns of `whole`, which is a
    view of the same value."""
    last = whole.dims[3]
    if len(last) != 1 or last[0].axis is None or last[0].step != 1:
        return 0 if keys.effect == whole else None
    return keys.effect.start[last[0].axis]
