"""The delta of a LoRA adapter: scale * (x @ A[adapter]^T) @ B[adapter]^T.

Three forms are matched:

1. One adapter for all rows, as two linears.
2. One of G adapters for each row or each sequence. The matrices are looked up in stacks by index,
   and multiplied by bmm, matmul or einsum.
3. Rows that are sorted by adapter, as two grouped products.

Factors may come before, between and after the products, and some rows may have no adapter.

Dimension letters: T rows, B sequences, K hidden, R rank, W columns, G adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Value, View, once
from tilewright.patterns.effects import Size
from tilewright.patterns.lora.factors import Factors, RowMask, peel
from tilewright.patterns.lora.product import Product, match_product
from tilewright.patterns.recognise.outside import (
    Outside,
    both,
    experts_argument,
    is_natural,
)
from tilewright.patterns.recognise.routing import (
    gathered,
    match_ends,
    match_inverse,
    match_order,
)

#: If the inner dimension is larger than this, two consecutive products are a bottleneck MLP and not
#: an adapter.
MAX_RANK = 512


@dataclass(frozen=True)
class Adapters:
    """The adapter of each row.

    Attributes:
        index: The adapter of each row or sequence, [T or B]. If it is None, there is only one
            adapter.
        mask: The mask of the rows that have an adapter. It has the shape of the index, or [T]. It
            is None if all rows have an adapter.
        outside: The meaning of an index that is not the number of an adapter.
        sorted_by: The ends and the permutation of rows that are sorted by adapter.
    """

    index: View | None
    mask: RowMask | None
    outside: Outside
    sorted_by: tuple[View, View] | None = None

    def same(self, other: Adapters) -> bool:
        return (
            _same(self.index, other.index)
            and _same_mask(self.mask, other.mask)
            and self.outside == other.outside
        )

    def argument(self, num_adapters: int) -> View | Computed | None:
        """Returns expert_ids for the LoRA ops. -1 means no adapter, and other negative ids are
        errors."""
        index: Any = self.index
        if index is not None:
            index = experts_argument(index, num_adapters, self.outside, self.sorted_by)
        if self.mask is not None:
            index = self.mask.chosen(0 if index is None else index)
        return index


@dataclass(frozen=True)
class LoraDelta:
    """The delta that is added to a projection.

    Attributes:
        x: The activation, [T, K].
        shrink: The matrices A [G, R, K].
        expand: The matrices B [G, W, R].
        adapters: The adapter of each row.
        scale: A factor of the whole delta.
        scales: [G], a factor for each adapter, or None.
        view: [..., W], the whole delta.
        absorbed: The values that compute the delta.
    """

    x: View
    shrink: View
    expand: View
    adapters: Adapters
    scale: float
    scales: View | None
    view: View
    absorbed: tuple[Value, ...]

    @property
    def end(self) -> Value:
        """The last value of the delta."""
        return self.view.value

    @property
    def rank(self) -> Any:
        return self.shrink.shape[1]


@once
def match_delta(view: View) -> LoraDelta | None:
    """Returns the delta that `view` [..., W] is; None if it is not a delta."""
    try:
        outer = peel(view)
        return _by_rows(view, outer) or _sorted(view, outer)
    except effects.InexpressibleError:
        return None


def _by_rows(view: View, outer: Factors) -> LoraDelta | None:
    second = match_product(outer.view)
    if second is None or second.ends is not None or not _may_be_rank(second.weight.shape[2]):
        return None
    inner = peel(second.x)
    first = match_product(inner.view)
    if first is None or not _same(first.index, second.index) or first.ends is not None:
        return None
    rows = peel(first.x, casts=False)
    # A mask on the rows of x also masks the rows of the delta. Other factors of x stay with x.
    if rows.mask is None or rows.scale != 1 or rows.lookup is not None:
        rows = Factors(first.x)
    return _joined(view, (outer, inner, rows), first, second, rows.view, first.index)


def _sorted(view: View, outer: Factors) -> LoraDelta | None:
    """Matches rows that are sorted by adapter, two grouped GEMMs, and the inverse permutation."""
    back = gathered(outer.view)
    if back is None:
        return None
    after = peel(back[0])
    second = match_product(after.view)
    if second is None or second.ends is None:
        return None
    inner = peel(second.x)
    first = match_product(inner.view)
    if first is None or first.ends is None or not equal_values(first.ends, second.ends):
        return None
    taken, ends = gathered(first.x), match_ends(first.ends)
    order = None if taken is None else match_order(taken[1])
    if taken is None or order is None or order.permutation is None or ends is None:
        return None
    if not match_inverse(back[1], order) or ends != (order.ids, first.weight.shape[0]):
        return None
    # Factors of sorted rows are sorted too, but the op expects them in the original order of the
    # rows.
    if any(f.lookup or f.mask for f in (after, inner)):
        return None
    gathers = (outer.view.value, first.x.value)
    by = (first.ends, order.permutation)
    return _joined(
        view, (outer, after, inner), first, second, taken[0], order.ids, gathers, sorted_by=by
    )


def _joined(
    view: View,
    factors: Sequence[Factors],
    first: Product,
    second: Product,
    x: View,
    index: View | None,
    more: tuple[Value, ...] = (),
    sorted_by: tuple[View, View] | None = None,
) -> LoraDelta | None:
    lookups = [f.lookup for f in factors if f.lookup is not None]
    masks = [f.mask for f in factors if f.mask is not None]
    if len(lookups) > 1 or len(masks) > 1 or not _is_adapter(first, second):
        return None
    outside = both(first.outside, second.outside)
    for lookup in lookups:
        if index is None or not equal_values(lookup.index, index):
            return None
        outside = outside and both(outside, lookup.outside)
    mask = masks[0] if masks else None
    if mask is not None and index is not None and mask.view.shape != index.shape:
        return None
    if outside is None and index is not None and not is_natural(index):
        return None
    scale = effects.product(f.scale for f in factors)
    absorbed = [value for f in factors for value in f.absorbed]
    return LoraDelta(
        x,
        first.weight,
        second.weight,
        Adapters(index, mask, outside or first.outside, sorted_by),
        scale,
        lookups[0].table if lookups else None,
        view,
        tuple(dict.fromkeys((*absorbed, second.value, first.value, *more))),
    )


def _is_adapter(first: Product, second: Product) -> bool:
    rank, hidden, width = first.weight.shape[1], first.weight.shape[2], second.weight.shape[1]
    sizes = (*first.weight.shape, *second.weight.shape)
    if not all(isinstance(size, int) for size in sizes):
        return False
    if first.weight.shape[0] != second.weight.shape[0] or second.weight.shape[2] != rank:
        return False
    return _may_be_rank(rank) and rank < hidden and rank < width


def _may_be_rank(size: Size) -> bool:
    return isinstance(size, int) and size <= MAX_RANK


def _same_mask(one: RowMask | None, other: RowMask | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.hides == other.hides and equal_values(one.view, other.view)


def _same(one: View | None, other: View | None) -> bool:
    if one is None or other is None:
        return one is other
    return equal_values(one, other)
