"""Checks shared by the ops that write a K and V cache. Each check raises ArgumentError.

Everything is checked before anything is written. The checks of metadata also run on fake tensors
while a graph is traced. The checks that need real tensors run separately, from `address_checks`:
`check_aliases`, which is defined here, and the checks of slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewright.ops.cache.addressing import CachePlace, check_addressing
from tilewright.ops.checks import (
    ArgumentError,
    check_absent,
    check_device,
    check_dtype,
    check_tensor,
    holds,
    shape_text,
)
from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.ops.formats.paged_cache import CacheWindow, axes_nest, in_bytes, strided_disjoint

CACHE_SCALES = ("k_cache_scale", "v_cache_scale")


@dataclass(frozen=True)
class HeadValues:
    """Describes the K or V that an op writes, before each head is repeated `kv_repeat` times."""

    num_tokens: Any
    num_kv_heads: Any
    head_dim: Any
    dtype: torch.dtype
    device: torch.device
    kv_repeat: int = 1


class KvCache(CachePlace, Protocol):
    """The arguments of an op that writes K and V to a cache. Every op uses these names.

    Attributes:
        k_cache, v_cache: The base tensors. If v_cache is None, V (if it is written) is in k_cache
            too.
        k_window, v_window: The nine integers of a CacheWindow on the base.
        k_cache_scale, v_cache_scale: float32 [], [1] or [Hkv]. The stored number is value / scale.
        cache_scale_multiplies: If True, the stored number is value * scale instead.
        cache_saturates: If True, a number outside the range of an 8-bit float is stored as the
            float's largest number. If False, it is stored as infinity, or as NaN in float8_e4m3fn.
    """

    @property
    def k_cache(self) -> torch.Tensor: ...
    @property
    def v_cache(self) -> torch.Tensor | None: ...
    @property
    def k_window(self) -> Sequence[int]: ...
    @property
    def v_window(self) -> Sequence[int]: ...
    @property
    def k_cache_scale(self) -> torch.Tensor | None: ...
    @property
    def v_cache_scale(self) -> torch.Tensor | None: ...
    @property
    def cache_scale_multiplies(self) -> bool: ...
    @property
    def cache_saturates(self) -> bool: ...


def v_base(a: KvCache) -> tuple[str, torch.Tensor]:
    """Returns the name of the argument that holds V, and its base tensor."""
    return ("k_cache", a.k_cache) if a.v_cache is None else ("v_cache", a.v_cache)


def kv_views(a: KvCache, *, writes_v: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the K and V windows as tensors on their bases. V is None if no V is written."""
    k_view = CacheWindow.from_ints(a.k_window).view(a.k_cache)
    if not writes_v:
        return k_view, None
    return k_view, CacheWindow.from_ints(a.v_window).view(v_base(a)[1])


def check_caches(op: str, a: KvCache, values: HeadValues, *, writes_v: bool = True) -> None:
    """Checks that caches, windows, scales and addresses fit the values to write. Reads only
    metadata."""
    k_window = _check_cache(op, "k", a.k_cache, a.k_window, "k_cache", values)
    if writes_v:
        name, base = v_base(a)
        v_window = _check_cache(op, "v", base, a.v_window, name, values)
        check_dtype(op, name, base, (a.k_cache.dtype,))
        windows = {"k_window": k_window, "v_window": v_window}
        check_pair(op, windows, one_base=a.v_cache is None)
    else:
        check_absent(op, a, ("v_cache", "v_cache_scale"), "no V is written")
    for name, scale in zip(CACHE_SCALES, (a.k_cache_scale, a.v_cache_scale), strict=True):
        check_cache_scale(op, name, scale, values.num_kv_heads, values.device)
    check_addressing(op, a, values.num_tokens, k_window, values.device)


def _check_cache(
    op: str,
    letter: str,
    base: torch.Tensor,
    integers: Sequence[Any],
    base_argument: str,
    values: HeadValues,
) -> CacheWindow:
    check_device(op, base_argument, base, values.device)
    # Values in float64 would be rounded twice on their way to 8 bits.
    narrow = () if values.dtype == torch.float64 else FP8_DTYPES
    check_dtype(op, base_argument, base, (values.dtype, *narrow))
    sizes = values.num_kv_heads * values.kv_repeat, values.head_dim
    return check_window(op, f"{letter}_window", integers, base_argument, base, *sizes)


def check_cache_scale(
    op: str, name: str, scale: torch.Tensor | None, heads: Any, device: torch.device
) -> None:
    """Checks the scale of a cache, if it has one. The scale is one number, or one for each head."""
    if scale is None:
        return
    check_dtype(op, name, scale, (torch.float32,))
    check_device(op, name, scale, device)
    if scale.dim() > 1 or (scale.dim() == 1 and scale.shape[0] not in (1, heads)):
        expected = f"shape [], [1] or [Hkv] = [{heads}]"
        raise ArgumentError(op, name, expected, f"shape {shape_text(scale.shape)}")


def check_pair(op: str, windows: Mapping[str, CacheWindow], *, one_base: bool) -> None:
    """Checks that two windows have the same number of pages and of slots. If both windows are on
    one base, also checks that they share no element."""
    (name, one), (second, other) = windows.items()
    for axis in ("num_pages", "page_size"):
        want, have = getattr(one, axis), getattr(other, axis)
        if not holds(want == have):
            raise ArgumentError(op, second, f"{axis} = {want}, as in {name}", have)
    integers = all(isinstance(value, int) for value in (*one.to_ints(), *other.to_ints()))
    if one_base and integers and one.overlaps(other):
        expected = f"a window that shares no element with {name}"
        raise ArgumentError(op, second, expected, other.to_ints())


def window_integers(
    op: str, argument: str, window: CacheWindow | None, cache: torch.Tensor | None
) -> list[Any]:
    """Returns the nine integers of a window. If `window` is None, it is the whole cache [num_pages,
    page_size, num_kv_heads, head_dim]. Raises ArgumentError."""
    expected = "a CacheWindow, or a cache [num_pages, page_size, num_kv_heads, head_dim]"
    if isinstance(window, CacheWindow):
        return window.to_ints()
    if window is not None:
        raise ArgumentError(op, argument, expected, repr(window))
    check_tensor(op, argument, cache, expected)
    assert cache is not None
    if cache.dim() != 4:
        raise ArgumentError(op, argument, expected, f"shape {list(cache.shape)}")
    return CacheWindow.page_major(cache).to_ints()


def check_aliases(
    op: str, a: object, written: Sequence[tuple[str, torch.Tensor, Sequence[Any]]]
) -> None:
    """Checks that no other tensor among an op's arguments shares memory with a written window.
    written: a (name, base, window) for each written window."""
    storages = {storage_address(base) for _, base, _ in written}
    names = {name for name, _, _ in written}
    for name, source in vars(a).items():
        if not isinstance(source, torch.Tensor) or name in names:
            continue
        if storage_address(source) not in storages:
            continue
        for cache_name, base, window in written:
            if shares_memory(source, base, CacheWindow(*window)):
                expected = f"memory outside of the part of {cache_name} that is written"
                raise ArgumentError(op, name, expected, f"a tensor that aliases {cache_name}")


def storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def shares_memory(tensor: torch.Tensor, base: torch.Tensor, window: CacheWindow) -> bool:
    if (
        storage_address(tensor) != storage_address(base)
        or tensor.numel() == 0
        or window.num_pages == 0
    ):
        return False
    itemsize = base.element_size()
    distance = tensor.data_ptr() - base.data_ptr() - window.offset * itemsize
    # Compare elements of different sizes byte by byte, along an added last axis.
    return not strided_disjoint(
        *in_bytes(window.shape, window.strides, itemsize),
        *in_bytes(tensor.shape, tensor.stride(), tensor.element_size()),
        distance,
    )


def check_window(
    op: str,
    argument: str,
    values: Sequence[Any],
    base_argument: str,
    base: torch.Tensor,
    num_kv_heads: Any,
    head_dim: Any,
) -> CacheWindow:
    """Returns the window, after checking that it has `num_kv_heads` heads of `head_dim` columns, is
    inside the base and does not overlap itself. Raises ArgumentError for `argument`."""
    if len(values) != 9:
        names = ", ".join(CacheWindow.__dataclass_fields__)
        raise ArgumentError(op, argument, f"9 integers ({names})", f"{len(values)} integers")
    window = CacheWindow(*values)
    if not all(holds(value >= 0) for value in values):
        raise ArgumentError(op, argument, "no negative size, stride or offset", list(values))
    if not all(holds(size >= 1) for size in window.shape[1:]):
        raise ArgumentError(op, argument, "at least one slot, head and dim", list(values))
    if not axes_nest(window):
        expected = "strides that give every [page, slot, head, dim] its own element"
        raise ArgumentError(op, argument, expected, f"strides {list(window.strides)}")
    last = sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True))
    elements = last + 1 if holds(base.numel() > 0) else 0
    if holds(window.num_pages > 0) and not holds(window.offset + window.extent <= elements):
        expected = f"a window inside {base_argument}, which spans {elements} elements"
        actual = f"offset {window.offset} and extent {window.extent}: {list(values)}"
        raise ArgumentError(op, argument, expected, actual)
    for axis, want in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if not holds(getattr(window, axis) == want):
            raise ArgumentError(op, argument, f"{axis} = {want}", getattr(window, axis))
    return window
