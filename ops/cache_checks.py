"""Checks shared by the ops that write a K and V cache. Each raises ArgumentError.

Everything is checked before anything is written. What only real memory shows (slots, aliases) is
apart from the metadata, which tracing with fake tensors checks too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from tilewright.ops.checks import ArgumentError, check_choice, check_device, check_dtype, holds
from tilewright.ops.contract import debug_values
from tilewright.ops.formats.paged_cache import (
    CacheWindow,
    axes_nest,
    slot_limit,
    strided_disjoint,
)

SLOT_FORMS = ("flat", "per_sequence")
INDEXINGS = ("paged", "torch")


class CacheArguments(Protocol):
    """The arguments that say where K and V go."""

    @property
    def k_cache(self) -> torch.Tensor: ...
    @property
    def v_cache(self) -> torch.Tensor | None: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...
    @property
    def k_window(self) -> Sequence[Any]: ...
    @property
    def v_window(self) -> Sequence[Any]: ...
    @property
    def slots(self) -> str: ...
    @property
    def indexing(self) -> str: ...


def check_caches(
    op: str,
    a: CacheArguments,
    num_tokens: Any,
    num_kv_heads: Any,
    head_dim: Any,
    like: torch.Tensor,
    writes_v: bool = True,
) -> None:
    """Checks caches, windows and slot_mapping against [num_tokens, num_kv_heads, head_dim] values
    of `like`'s dtype and device. Metadata only."""
    k_window = _check_cache(op, "k", a.k_cache, a.k_window, "k_cache", num_kv_heads, head_dim, like)
    if writes_v:
        base, name = (a.k_cache, "k_cache") if a.v_cache is None else (a.v_cache, "v_cache")
        v_window = _check_cache(op, "v", base, a.v_window, name, num_kv_heads, head_dim, like)
        for axis in ("num_pages", "page_size"):
            k_size, v_size = getattr(k_window, axis), getattr(v_window, axis)
            if not holds(k_size == v_size):
                raise ArgumentError(op, "v_window", f"{axis} = {k_size}, as in k_window", v_size)
        _check_one_base(op, a, k_window, v_window)
    elif a.v_cache is not None:
        raise ArgumentError(op, "v_cache", "None, since v is None", "a tensor")
    check_device(op, "slot_mapping", a.slot_mapping, like.device)
    check_addressing(op, num_tokens, a.slot_mapping, k_window, a.slots, a.indexing)


def _check_cache(
    op: str,
    letter: str,
    base: torch.Tensor,
    values: Sequence[Any],
    base_argument: str,
    num_kv_heads: Any,
    head_dim: Any,
    like: torch.Tensor,
) -> CacheWindow:
    check_device(op, base_argument, base, like.device)
    check_dtype(op, base_argument, base, (like.dtype,))
    window = check_window(op, f"{letter}_window", values, base_argument, base)
    for axis, want in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        if not holds(getattr(window, axis) == want):
            raise ArgumentError(op, f"{letter}_window", f"{axis} = {want}", getattr(window, axis))
    return window


def _check_one_base(op: str, a: CacheArguments, k: CacheWindow, v: CacheWindow) -> None:
    integers = all(isinstance(value, int) for value in (*a.k_window, *a.v_window))
    if a.v_cache is None and integers and k.overlaps(v):
        expected = "a window that shares no element with k_window"
        raise ArgumentError(op, "v_window", expected, list(a.v_window))


def whole_cache(op: str, argument: str, cache: torch.Tensor | None) -> CacheWindow:
    """The window that is all of a cache [num_pages, page_size, num_kv_heads, head_dim]."""
    if cache is None or cache.dim() != 4:
        actual = None if cache is None else f"shape {list(cache.shape)}"
        expected = "a CacheWindow, or a cache [num_pages, page_size, num_kv_heads, head_dim]"
        raise ArgumentError(op, argument, expected, actual)
    return CacheWindow.page_major(cache)


def check_values(
    op: str,
    a: CacheArguments,
    sources: Mapping[str, torch.Tensor | None],
    writes_v: bool = True,
) -> None:
    """Checks the slots, that no source shares memory with a cache, and that K and V share none.

    Slots on a GPU are read, which waits for it, only under TILEWRIGHT_DEBUG=1.
    """
    if a.v_cache is a.k_cache:
        # Two mutated arguments for one tensor: a functionalised graph would update two copies.
        raise ArgumentError(
            op, "v_cache", "None where V lives in k_cache too", "k_cache itself, a second time"
        )
    written = [("k_cache", a.k_cache, a.k_window)]
    if writes_v:
        v_base = ("k_cache", a.k_cache) if a.v_cache is None else ("v_cache", a.v_cache)
        written.append((*v_base, a.v_window))
    storages = [_storage(base) for _, base, _ in written]
    for name, source in (*sources.items(), ("slot_mapping", a.slot_mapping)):
        if source is None or _storage(source) not in storages:
            continue
        for cache_name, base, window in written:
            if _shares_memory(source, base, CacheWindow(*window)):
                expected = f"memory apart from what is written in {cache_name}"
                raise ArgumentError(op, name, expected, f"a tensor that aliases {cache_name}")
    if a.v_cache is not None and len(written) == 2 and storages[0] == storages[1]:
        v_view = CacheWindow(*a.v_window).view(a.v_cache)
        if _shares_memory(v_view, a.k_cache, CacheWindow(*a.k_window)):
            expected = "a window that shares no memory with the window on k_cache"
            raise ArgumentError(op, "v_cache", expected, "overlapping windows on one storage")
    if a.slot_mapping.device.type == "cpu" or debug_values():
        check_slot_values(op, a.slot_mapping, CacheWindow(*a.k_window), a.slots, a.indexing)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shares_memory(tensor: torch.Tensor, base: torch.Tensor, window: CacheWindow) -> bool:
    if _storage(tensor) != _storage(base) or tensor.numel() == 0 or window.num_pages == 0:
        return False
    itemsize = base.element_size()
    distance = tensor.data_ptr() - base.data_ptr() - window.offset * itemsize
    # Elements of another size are compared byte by byte along the last axis.
    return not strided_disjoint(
        (*window.shape, itemsize),
        (*(stride * itemsize for stride in window.strides), 1),
        (*tensor.shape, tensor.element_size()),
        (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
        distance,
    )


def check_window(
    op: str, argument: str, values: Sequence[Any], base_argument: str, base: torch.Tensor
) -> CacheWindow:
    """The window, once it is known to lie inside the base and not to overlap itself.

    Raises ArgumentError naming `argument`.
    """
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
    return window


def check_addressing(
    op: str,
    num_tokens: Any,
    slot_mapping: torch.Tensor,
    window: CacheWindow,
    slots: str,
    indexing: str,
) -> None:
    """Checks the shape and dtype of `slot_mapping` and the two addressing words."""
    check_choice(op, "slots", slots, SLOT_FORMS)
    check_choice(op, "indexing", indexing, INDEXINGS)
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            op, "slot_mapping", "dtype torch.int32 or torch.int64", slot_mapping.dtype
        )
    shape = list(slot_mapping.shape)
    if slot_mapping.dim() != 1:
        raise ArgumentError(op, "slot_mapping", "one axis", f"shape {shape}")
    per_slot = window.num_pages if slots == "per_sequence" else 1
    if not holds(shape[0] * per_slot == num_tokens):
        form = (
            f"[S] with num_pages * S = {per_slot} * S = {num_tokens} tokens"
            if slots == "per_sequence"
            else f"[T] = [{num_tokens}]"
        )
        raise ArgumentError(op, "slot_mapping", f"shape {form}", f"shape {shape}")


def check_slot_values(
    op: str, slot_mapping: torch.Tensor, window: CacheWindow, slots: str, indexing: str
) -> None:
    """Checks the slots themselves; synchronises where they live on a GPU."""
    if slot_mapping.numel() == 0:
        return
    limit = slot_limit(window, slots)
    values = slot_mapping.detach().cpu()
    lowest, highest = int(values.min()), int(values.max())
    if highest >= limit:
        where = int((values >= limit).nonzero()[0])
        expected = f"slots below {limit}"
        raise ArgumentError(op, "slot_mapping", expected, f"{int(values[where])} at {where}")
    if indexing == "torch":
        if lowest < -limit:
            where = int((values < -limit).nonzero()[0])
            expected = f"slots from {-limit} (a negative slot counts from the end)"
            raise ArgumentError(op, "slot_mapping", expected, f"{int(values[where])} at {where}")
        return
    kept = values[values >= 0]
    unique, counts = kept.unique(return_counts=True)
    if unique.numel() != kept.numel():
        expected = "every slot at most once"
        actual = f"slot {int(unique[counts > 1][0])} {int(counts[counts > 1][0])} times"
        raise ArgumentError(op, "slot_mapping", expected, actual)
