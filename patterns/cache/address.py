"""The address of a cache write: a window on the cache's memory, and the slot of each token in the
window.

Dimension letters: P pages, S slots in a page, H key-value heads, D head_dim, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.steps import start_and_step
from tilewright.patterns.cache.eight_bit import Written, saturates, scale_argument
from tilewright.patterns.cache.slices import fill_slices
from tilewright.patterns.cache.slots import Slots, block_table, own_slots, paged_slot, slot_table
from tilewright.patterns.cache.states import continues
from tilewright.patterns.cache.writes import CacheWrite
from tilewright.patterns.dataflow import (
    REINTERPRETED,
    WRAPPED,
    Computed,
    Dataflow,
    Value,
    View,
    is_in_package,
)
from tilewright.patterns.effects import Effect, Size
from tilewright.patterns.language import Stage, reject

_Pages = tuple[Size, Size, Size, Size]


@dataclass(frozen=True)
class Address:
    """Where a write stores its tokens in a cache, and what it stores.

    Attributes:
        window: Where pages and slots are in the cache tensor.
        slots: The slot of each token.
        source: The heads that are written, [tokens..., H, D], before the cache's scale and
            rounding.
        token_rank: The number of dimensions of `source` that are tokens.
        dtype: The dtype of the cache.
        scale: The scale of the cache, in the form that the op expects.
        scale_multiplies: Whether values are multiplied by the scale. If not, they are divided by
            it.
        saturates: Whether values outside the range of `dtype` become its largest number.
        absorbed: The graph's values between the source and the cache.
    """

    window: CacheWindow
    slots: Slots
    source: View
    token_rank: int
    dtype: torch.dtype
    scale: View | Computed | None
    scale_multiplies: bool
    saturates: bool
    absorbed: tuple[Value, ...]

    @property
    def tokens(self) -> Size:
        return effects.product(self.source.shape[: self.token_rank])


def place_arguments(k: Address, v: Address | None) -> dict[str, Any]:
    """Returns the windows, the slots and the scales, as arguments with the names that all ops with
    a paged cache use."""
    slots = k.slots if v is None or v.slots.wraps else v.slots
    return {
        "k_window": k.window.to_ints(),
        "v_window": (v or k).window.to_ints(),
        **slots.arguments,
        "k_cache_scale": k.scale,
        "v_cache_scale": None if v is None else v.scale,
        "cache_scale_multiplies": k.scale_multiplies or (v is not None and v.scale_multiplies),
        **({} if k.saturates else {"cache_saturates": False}),
    }


def check_pair(k: Address, v: Address, flow: Dataflow, *culprits: Value) -> None:
    """Raises Reject if one op cannot perform both writes. They must write to the same slots, and
    scale and round their values in the same way."""
    same = k.slots.form == v.slots.form
    sizes = zip(k.window.shape[:2], v.window.shape[:2], strict=True)
    same = same and all(flow.same_size(a, b) for a, b in sizes)
    if k.slots.fact == "slice":
        same = same and k.slots == v.slots
    if not same:
        message, hint = "K and V are written at different slots", "write both by one index tensor"
        reject("SLOT_INDEX", Stage.GUARDS, message, *culprits, hint=hint)
    scaled = [p.scale_multiplies for p in (k, v) if p.scale is not None]
    if len(set(scaled)) > 1:
        message = "one of K and V is multiplied by its cache scale, the other divided by it"
        hint = "multiply both by their scales, or divide both"
        reject("CAST", Stage.GUARDS, message, *culprits, hint=hint)
    if k.saturates != v.saturates:
        message = "one of K and V is clamped to the range of the cache, the other is not"
        reject("CAST", Stage.GUARDS, message, *culprits, hint="clamp both or neither")


def address(write: CacheWrite, flow: Dataflow) -> Address:
    """Returns the window and the slots of one write. Raises Reject if the write addresses the cache
    in an unknown form."""
    store, written = write.record, write.written
    if written is None:
        _reject_unknown(write)
    if store.accumulate:
        _refuse("ACCUMULATED_WRITE", "the write accumulates", write.store)
    if not write.index:
        return _filled(write, written)
    index = dict(write.index)
    if write.along is not None:
        return _own_index(write, written)
    head_axis = _explicit_heads(write, index)
    if len(index) == 1:
        return _one_index(write, written, index, head_axis, flow)
    if len(index) == 2:
        return _two_indices(write, written, index, head_axis, flow)
    _refuse("SLOT_INDEX", f"{len(index)} index tensors, expected one or two", write.store)


def _reject_unknown(write: CacheWrite) -> NoReturn:
    store = write.record
    if any(v.value.dtype == torch.bool for v in store.index.values()):
        message = "a boolean mask selects the slots, so their number is not known"
        _refuse("MASKED_WRITE", message, write.store)
    if store.note == WRAPPED:
        message = f"{store.kind} writes the cache through {WRAPPED}"
        hint = "write through the plain tensor inside (DTensor: to_local())"
        _refuse("SUBCLASS", message, write.store, hint=hint)
    if store.note == REINTERPRETED or store.dtype != store.memory.dtype:
        message = f"{store.kind} writes through {REINTERPRETED} of the cache"
        hint = "give the cache tensor the dtype in which it is written"
        _refuse("CACHE_LAYOUT", message, write.store, hint=hint)
    if store.note:
        _refuse("CACHE_LAYOUT", f"{store.kind}: {store.note}", write.store)
    message = f"{store.kind} writes the cache, but tilewright does not know what it computes"
    _refuse("OPAQUE_WRITE", message, write.store)


#: Kinds of writes for which a negative index is an error.
_EXACT = ("index_copy_", "scatter_")


def _refuse(code: str, message: str, culprit: Value | View, hint: str = "") -> NoReturn:
    """Raises Reject at the first stage (`Stage.ANCHORED`), for a write that no pattern can
    match."""
    reject(code, Stage.ANCHORED, message, culprit, hint=hint)


# --- index tensors --------------------------------------------------------------------------------


def _explicit_heads(write: CacheWrite, index: dict[int, View]) -> int | None:
    """Handles `cache[page, head, slot]` with head = arange(H). Removes the index for heads and
    returns its dimension. Returns None for other writes."""
    if max(len(v.effect.dims) for v in index.values()) == 1:
        return None
    counting = [d for d, view in index.items() if _counts_up(view, write.target.shape[d])]
    if len(counting) != 1:
        return None
    found = counting[0]
    del index[found]
    for dim, view in index.items():
        if view.effect.dims[-1] != ():
            _refuse("SLOT_INDEX", "slots vary from head to head", view)
        index[dim] = View(view.value, effects.squeeze(view.effect, [len(view.effect.dims) - 1]))
    return found


def _counts_up(view: View, length: Size) -> bool:
    """Whether an index is 0, 1, ..., length - 1 along its last dimension, and does not vary along
    its other dimensions."""
    last = len(view.effect.dims) - 1
    whole = Effect(((),) * last + effects.identity((length,)).dims, (0,))
    value = view.value
    if value.op != "aten.arange" or view.effect != whole or value.shape != (length,):
        return False
    return start_and_step(value) == (0, 1)


def _flattened(index: dict[int, View], shape: tuple[Size, ...]) -> dict[int, View]:
    """Returns index tensors flattened to [B * S]. They are [B, S], or broadcast to that shape."""
    flat = {}
    for dim, view in index.items():
        wide = effects.expand(view.effect, shape)
        flat[dim] = View(view.value, effects.reshape(wide, (effects.product(shape),)))
    return flat


def _roles(
    write: CacheWrite, written: Written, index: Mapping[int, View], head_axis: int | None
) -> tuple[int | None, int, int, dict[int, int]]:
    """Returns (page dimension or None, head dimension, element dimension) of the target, and the
    dimensions of the source that correspond to them."""
    rest = [d for d in range(len(write.target.dims)) if d not in index and d != write.along]
    # If there is an index for heads, the source is [tokens, H, other dimensions].
    order = rest if head_axis is None else [head_axis, *[d for d in rest if d != head_axis]]
    lead = len(written.view.effect.dims) - len(order)
    at = {dim: lead + i for i, dim in enumerate(order)}
    wide = [d for d in order if write.target.dims[d] != () or len(order) <= 3]
    if len(wide) < 2 or len(wide) > 3:
        _refuse("CACHE_LAYOUT", f"{len(wide)} dimensions besides the slots", write.store)
    *others, element = wide
    head = others[-1]
    page = others[0] if len(others) == 2 else None
    return page, head, element, at


def _one_index(
    write: CacheWrite,
    written: Written,
    index: dict[int, View],
    head_axis: int | None,
    flow: Dataflow,
) -> Address:
    (slot_dim, slots), *_ = index.items()
    wraps = write.record.kind not in _EXACT
    if write.record.kind == "index_copy_" and slots.value.dtype != torch.int64:
        message = (
            f"index_copy_ does not accept slots of {slots.value.dtype}: the call raises an error"
        )
        _refuse("SLOT_INDEX", message, slots, "give index_copy_ slots of 64 bits: slots.long()")
    page, head, element, at = _roles(write, written, index, head_axis)
    lead = list(range(len(slots.effect.dims)))
    if page is None:
        pages = _flat_slots(write, slot_dim)
        (slots,) = _flattened(index, slots.shape).values()
        table = slot_table(flow, slots, pages[1]) if wraps else None
        found = table or Slots("flat", (slots,), wraps)
        return _address(write, written, pages, (head, element), at, lead, found)
    if len(lead) != 1:
        _refuse("SLOT_INDEX", "the positions differ between sequences", slots)
    num_pages, page_stride = _stride(write, page)
    page_size, slot_stride = _stride(write, slot_dim)
    pages = (num_pages, page_size, page_stride, slot_stride)
    lead = [at[page], *lead]
    found = Slots("per_sequence", (slots,), wraps)
    return _address(write, written, pages, (head, element), at, lead, found)


def _own_index(write: CacheWrite, written: Written) -> Address:
    """Handles a write in which each page has its own slots. A page is a row of dimension
    `write.along`."""
    assert write.along is not None
    ((slot_dim, slots),) = write.index.items()
    page, head, element, at = _roles(write, written, write.index, None)
    if page is not None or len(slots.shape) != 2:
        _refuse("CACHE_LAYOUT", "a dimension besides pages, slots, heads and head_dim", write.store)
    num_pages, page_stride = _stride(write, write.along)
    page_size, slot_stride = _stride(write, slot_dim)
    found = Slots("flat", (own_slots(slots, num_pages, page_size, _device(write)),))
    geometry = (num_pages, page_size, page_stride, slot_stride)
    return _address(write, written, geometry, (head, element), at, [0, 1], found)


def _two_indices(
    write: CacheWrite,
    written: Written,
    index: dict[int, View],
    head_axis: int | None,
    flow: Dataflow,
) -> Address:
    page, head, element, at = _roles(write, written, index, head_axis)
    lead = list(range(min(at.values())))
    tokens = written.view.shape[: len(lead)]
    (page_dim, pages), (slot_dim, offsets) = sorted(_flattened(index, tokens).items())
    if page is not None:
        _refuse("CACHE_LAYOUT", "a dimension besides pages, slots, heads and head_dim", write.store)
    num_pages, page_stride = _stride(write, page_dim)
    page_size, slot_stride = _stride(write, slot_dim)
    found = block_table(flow, pages, offsets, page_size)
    if found is None:
        found = Slots("flat", (paged_slot(pages, offsets, num_pages, page_size),))
    geometry = (num_pages, page_size, page_stride, slot_stride)
    return _address(write, written, geometry, (head, element), at, lead, found)


# --- slices ---------------------------------------------------------------------------------------


def _filled(write: CacheWrite, written: Written) -> Address:
    """Handles `cache[:B, start : start + S] = k`, which writes consecutive slots, the same in every
    page."""
    whole = effects.product(write.target.shape) == effects.product(write.memory.shape)
    if whole and continues(written.view.value, write.memory):
        _refuse(
            "MOVED_CACHE",
            f"{write.record.kind} writes the whole cache anew, old tokens too",
            write.store,
            hint="pass a tilewright.tools.paged_cache.PagedCache to generate(): it keeps every "
            "token in its place, and does not copy the window for each new token"
            if is_in_package(write.node, "transformers")
            else (
                "keep a ring of slots, cache[:, :, positions % window] = k, and compute the "
                "mask from the position that each slot holds; moving the window copies the whole "
                "window"
            ),
        )
    found = fill_slices(write.target, write.memory.shape)
    if isinstance(found, str):
        message = f"{write.record.kind} writes a slice of the cache: {found}"
        hint = "write through an index tensor: index_copy_, or cache[slots] = k"
        _refuse("SLICE_WRITE", message, write.store, hint=hint)
    strides = write.memory.strides
    length = written.view.shape[found.slot]
    begin = write.target.start[found.axis]
    slots = Computed("arange", (begin, begin + length), (("device", _device(write)),))
    capacity, slot_stride = write.memory.shape[found.axis], strides[found.axis]
    at = {d: d for d in range(len(write.target.dims))}
    if found.page is None:
        pages: _Pages = (1, capacity, capacity * slot_stride, slot_stride)
        lead, form = [found.slot], "flat"
    else:
        num_pages, page_stride = _stride(write, found.page)
        pages = (num_pages, capacity, page_stride, slot_stride)
        lead, form = [found.page, found.slot], "per_sequence"
    return _address(
        write,
        written,
        pages,
        (found.head, found.element),
        at,
        lead,
        Slots(form, (slots,)),
        skipped=begin * slot_stride,
    )


# --- windows --------------------------------------------------------------------------------------


def _stride(write: CacheWrite, dim: int) -> tuple[Size, Size]:
    """Returns (length, stride in elements) of a target dimension that has one stride."""
    atoms = write.target.dims[dim]
    if atoms == ():
        return 1, 0
    if len(atoms) != 1 or atoms[0].axis is None:
        _refuse("CACHE_LAYOUT", "a cache dimension is split in memory", write.store)
    return atoms[0].length, atoms[0].step * write.memory.strides[atoms[0].axis]


def _device(write: CacheWrite) -> torch.device:
    held = write.memory.root.meta["example_value"]
    assert isinstance(held, torch.Tensor)
    return held.device


def _offset(write: CacheWrite) -> Size:
    total: Size = 0
    for start, stride in zip(write.target.start, write.memory.strides, strict=True):
        total = total + start * stride
    return total


def _flat_slots(write: CacheWrite, dim: int) -> _Pages:
    """Returns (num_pages, page_size, page_stride, slot_stride) of a flattened slot dimension."""
    atoms = write.target.dims[dim]
    strides = [a.step * write.memory.strides[a.axis] for a in atoms if a.axis is not None]
    if len(strides) != len(atoms) or len(atoms) > 2:
        _refuse(
            "CACHE_LAYOUT", "the slot dimension does not consist of pages of slots", write.store
        )
    if len(atoms) == 2:
        return atoms[0].length, atoms[1].length, strides[0], strides[1]
    if not atoms:
        return 1, 1, 0, 0
    # Slots that are contiguous count as one long page.
    return 1, atoms[0].length, atoms[0].length * strides[0], strides[0]


def _address(
    write: CacheWrite,
    written: Written,
    pages: _Pages,
    head: tuple[int, int],
    at: Mapping[int, int],
    lead: list[int],
    slots: Slots,
    *,
    skipped: Size = 0,
) -> Address:
    """Returns the address. lead: the token dimensions of the source, the outermost first. skipped:
    the number of elements from the start of the window to the start of the target."""
    num_pages, page_size, page_stride, slot_stride = pages
    (_, head_stride), (_, dim_stride) = (_stride(write, d) for d in head)
    view = written.view
    # Use the sizes of the heads that are written. The sizes of the cache may be symbols, which the
    # graph requires to be equal to these sizes.
    num_heads, head_dim = (view.shape[at[d]] for d in head)
    order = [*lead, *(at[d] for d in head)]
    dropped = [d for d in range(len(view.shape)) if d not in order]
    effect = effects.permute(effects.identity(view.shape), [*order, *dropped])
    by_token = written.through(effects.squeeze(effect, range(len(order), len(effect.dims))))
    sizes = (num_pages, page_size, num_heads, head_dim)
    strides = (page_stride, slot_stride, head_stride, dim_stride)
    return Address(
        window=CacheWindow(*sizes, *strides, _offset(write) - skipped),
        slots=slots,
        source=by_token.view,
        token_rank=len(lead),
        dtype=write.memory.dtype,
        scale=scale_argument(by_token, _device(write)),
        scale_multiplies=written.multiplies,
        saturates=saturates(written, write.memory.dtype),
        absorbed=written.between,
    )
