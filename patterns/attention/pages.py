"""Keys and values that the graph gathers from pages.

    k = pool[block_table].flatten(1, 2)          [B, C, P, H, D] as [B, K, H, D], K = C * P

Dimension letters: N pages of P slots, C of them for each sequence; others as in
`patterns/recognise/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch

from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.recognise.routing import gathered


@dataclass(frozen=True)
class Pages:
    """pool [N, P, H, D]; block_table [B, C], integers, negative ones counted from the end."""

    pool: View
    block_table: View


def pages_of(keys: View) -> Pages | None:
    """The pages of k or v [B, K, H, D]; None where it is not gathered, or by tokens."""
    taken = gathered(keys.value.whole)
    if taken is None or len(taken[0].shape) != 4:
        return None
    try:
        return _pages(keys, *taken)
    except InexpressibleError:
        return None


def _pages(keys: View, pool: View, index: View) -> Pages | None:
    batch = keys.shape[0]
    columns = effects.divides(batch, effects.product(index.shape))
    if columns is None or index.value.dtype not in (torch.int32, torch.int64):
        return None
    taken = effects.identity(keys.value.shape)
    by_page = effects.reshape(taken, (batch, columns, *pool.shape[1:]))
    for order in permutations((1, 2, 3)):
        size, heads, width = (pool.shape[axis] for axis in order)
        ordered = effects.permute(by_page, (0, 1, *(axis + 1 for axis in order)))
        by_key = effects.reshape(ordered, (batch, columns * size, heads, width))
        if size != 1 and by_key == keys.effect:
            return Pages(pool.permute(0, *order), index.reshape(batch, columns))
    return None
