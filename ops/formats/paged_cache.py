"""The geometry of a K or V cache: a 4-D strided window on the caller's tensor.

All layouts in use differ only in strides and offset: `[P, S, H, D]` (vLLM, flat slots), `[P, H, S,
D]`, a StaticCache `[B, H, L, D]` (a page for each sequence), and one tensor for both K and V (`[2,
P, S, H, D]`, `[P, 2, L, S, H, D]`). A fused op takes the caller's own tensor, the *base*, together
with the nine integers of a window. The op never takes a view of the base, because under
functionalisation, a mutated view costs a copy of the whole cache, while a mutated graph input costs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from tilewright.ops.checks import holds, proven


@dataclass(frozen=True)
class CacheWindow:
    """A window with axes [num_pages, page_size, num_kv_heads, head_dim] on a base tensor.

    Strides and `offset` count elements. `offset` is relative to the first element of the base. The
    fields may be symbolic integers while a graph is traced.
    """

    num_pages: Any
    page_size: Any
    num_kv_heads: Any
    head_dim: Any
    page_stride: Any
    slot_stride: Any
    head_stride: Any
    dim_stride: Any
    offset: Any = 0

    @classmethod
    def from_ints(cls, values: Sequence[Any]) -> CacheWindow:
        """Makes a window from nine integers. This is the inverse of `to_ints`. Raises ValueError
        for another number of integers."""
        if len(values) != 9:
            raise ValueError(
                "a cache window is 9 integers (num_pages, page_size, num_kv_heads, head_dim, "
                f"page_stride, slot_stride, head_stride, dim_stride, offset), got {len(values)}"
            )
        return cls(*values)

    @classmethod
    def of(cls, view: torch.Tensor, base: torch.Tensor) -> CacheWindow:
        """Returns the window of a 4-D view [num_pages, page_size, num_kv_heads, head_dim] of
        `base`.

        Permute and slice `base` until its axes have this order. Raises ValueError if the view has
        another rank.
        """
        if view.dim() != 4:
            raise ValueError(f"view: expected 4 axes [P, S, H, D], got shape {list(view.shape)}")
        offset = view.storage_offset() - base.storage_offset()
        return cls.from_ints((*view.shape, *view.stride(), offset))

    @classmethod
    def page_major(cls, base: torch.Tensor) -> CacheWindow:
        """Returns the window of a whole base [num_pages, page_size, num_kv_heads, head_dim]."""
        return cls.of(base, base)

    @classmethod
    def head_major(cls, base: torch.Tensor) -> CacheWindow:
        """Returns the window of a whole base [num_pages, num_kv_heads, page_size, head_dim]."""
        return cls.of(base.transpose(1, 2), base)

    @classmethod
    def static_cache(cls, base: torch.Tensor) -> CacheWindow:
        """Returns the window of a Hugging Face StaticCache tensor [batch, num_kv_heads, max_len,
        head_dim]."""
        return cls.head_major(base)

    @classmethod
    def vllm_pair(cls, base: torch.Tensor) -> tuple[CacheWindow, CacheWindow]:
        """Returns the windows of K and V in one base [2, num_pages, page_size, num_kv_heads,
        head_dim]."""
        return cls.of(base[0], base), cls.of(base[1], base)

    @classmethod
    def max_pair(cls, base: torch.Tensor, layer: int) -> tuple[CacheWindow, CacheWindow]:
        """Returns the windows of K and V of one layer in a base [num_pages, 2, num_layers,
        page_size, num_kv_heads, head_dim]. This is the block pool of Modular MAX."""
        return cls.of(base[:, 0, layer], base), cls.of(base[:, 1, layer], base)

    def to_ints(self) -> list[Any]:
        return list(vars(self).values())

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def strides(self) -> tuple[Any, ...]:
        return (self.page_stride, self.slot_stride, self.head_stride, self.dim_stride)

    @property
    def capacity(self) -> Any:
        """The number of tokens that the window has room for."""
        return self.num_pages * self.page_size

    @property
    def extent(self) -> Any:
        """The number of elements from the window's first element to its last, inclusive. The window
        must not be empty."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """Returns the window as a tensor that shares the base's memory."""
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset)

    def provably_disjoint(self, other: CacheWindow) -> bool:
        """Whether two windows on the same base certainly share no element.

        The answer is exact for integer windows whose axes nest. With symbolic sizes, True means
        that this is proven.
        """
        apart = other.offset - self.offset
        return strided_disjoint(self.shape, self.strides, other.shape, other.strides, apart)

    def overlaps(self, other: CacheWindow) -> bool:
        """Whether two windows on the same base share an element, or may share one."""
        return not self.provably_disjoint(other)


def in_bytes(
    shape: Sequence[Any], strides: Sequence[Any], itemsize: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the shape and strides of an array that is viewed as bytes. The last axis has the
    bytes of an element."""
    return (*shape, itemsize), (*(stride * itemsize for stride in strides), 1)


def strided_disjoint(
    shape_a: Sequence[Any],
    strides_a: Sequence[Any],
    shape_b: Sequence[Any],
    strides_b: Sequence[Any],
    apart: Any,
) -> bool:
    """Whether two strided arrays share no element. b starts `apart` elements after a."""
    if any(proven(size == 0) for size in (*shape_a, *shape_b)):
        return True
    reach_a = sum((n - 1) * s for n, s in zip(shape_a, strides_a, strict=True))
    reach_b = sum((n - 1) * s for n, s in zip(shape_b, strides_b, strict=True))
    if proven(apart > reach_a) or proven(-apart > reach_b):
        return True
    # Maps the strides of the axes of both arrays to the range [low, high] of the difference between
    # two indices along the axis.
    bounds: dict[Any, tuple[Any, Any]] = {}
    for size, stride in zip(shape_a, strides_a, strict=True):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = (low, high + size - 1)
    for size, stride in zip(shape_b, strides_b, strict=True):
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = (low - (size - 1), high)
    return not _may_meet([(stride, low, high) for stride, (low, high) in bounds.items()], apart)


_Term = tuple[Any, Any, Any]


def _may_meet(terms: list[_Term], target: Any) -> bool:
    """Whether `target` can be the sum of one multiple of each term's stride, with the multiples
    within the bounds of the terms. The search begins with the largest stride. For nested axes, each
    stride has only one or two multiples to try."""
    if not isinstance(target, int) or not all(isinstance(term[0], int) for term in terms):
        return True
    ordered = sorted((term for term in terms if term[0] > 0), reverse=True, key=lambda t: t[0])
    # A symbolic size may be any number, so only the outermost axis may have a symbolic bound.
    if not all(isinstance(bound, int) for term in ordered[1:] for bound in term[1:]):
        return True
    budget = [4096]
    return _reachable(ordered, target, budget)


def _reachable(terms: list[_Term], target: int, budget: list[int]) -> bool:
    if not terms:
        return target == 0
    budget[0] -= 1
    if budget[0] < 0:
        return True
    (stride, low, high), rest = terms[0], terms[1:]
    if target % gcd(stride, *(term[0] for term in rest)):
        return False
    rest_low = sum(s * bound for s, bound, _ in rest)
    rest_high = sum(s * bound for s, _, bound in rest)
    first = -((rest_high - target) // stride)
    last = (target - rest_low) // stride
    first = max(first, low) if isinstance(low, int) else first
    last = min(last, high) if isinstance(high, int) else last
    return any(_reachable(rest, target - n * stride, budget) for n in range(first, last + 1))


def axes_nest(window: CacheWindow) -> bool:
    """Whether different indices always give different elements, because each stride is larger than
    the extent of all axes with smaller strides. The result is False only if this is known not to
    hold."""
    axes = [
        (stride, size)
        for size, stride in zip(window.shape, window.strides, strict=True)
        if not proven(size <= 1)
    ]
    if not all(isinstance(stride, int) for stride, _ in axes):
        return True
    reach: Any = 0
    for stride, size in sorted(axes, key=lambda axis: axis[0]):
        if not holds(stride > reach):
            return False
        reach = reach + (size - 1) * stride
    return True


def slot_limit(window: CacheWindow, slots: str) -> Any:
    """Returns the number of slots that a number in `slot_mapping` can name. With the form "flat",
    slots are numbered through the whole cache; with "per_sequence", within a page."""
    return window.page_size if slots == "per_sequence" else window.capacity
