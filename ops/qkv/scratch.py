"""Makes arguments of `fused_qkv_paged` that are like given arguments, but on new memory. Tuning
measures calls with these new arguments.

The new arguments have the shapes, strides and dtypes of the given arguments, with two exceptions:
the number of tokens may differ, and the caches have only the pages that are needed. The numbers are
random. Only the metadata of the given arguments is read.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from tilewright.ops.cache.addressing import ADDRESS_TENSORS
from tilewright.ops.formats import e8m0
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.qkv.arguments import FusedQkvArguments

#: Arguments that have a row for each token.
_PER_TOKEN = ("x", "x_scale", "delta")
_WEIGHTS = ("q_weight", "k_weight", "v_weight")
#: The approximate magnitude of each kind of scale.
_SCALES = {
    "x_scale": 0.01, "q_scale": 0.01, "k_scale": 0.01, "v_scale": 0.01,
    "k_cache_scale": 1.0, "v_cache_scale": 1.0, "factors": 1.0,
}  # fmt: skip
_ZEROS = ("q_zero", "k_zero", "v_zero")


def scratch_arguments(
    a: FusedQkvArguments, num_tokens: int, device: torch.device, seed: int = 0
) -> FusedQkvArguments:
    """Returns random arguments with the metadata of `a`, whose tensors may be fake or meta tensors.
    The number of tokens is close to `num_tokens`: it fills whole sequences and fits the caches."""
    tokens = _token_count(a, num_tokens)
    draw = partial(_numbers, torch.Generator(device).manual_seed(seed), a.x.shape[1] ** -0.5)
    drawn = vars(a).keys() - {"k_cache", "v_cache", *ADDRESS_TENSORS}
    made: dict[str, Any] = {
        name: _strided(value, draw(name, value.dtype, _shape(a, name, value, tokens)))
        for name, value in vars(a).items()
        if name in drawn and isinstance(value, torch.Tensor)
    }
    made |= _packed_weights({name: made[name] for name in _WEIGHTS if name in made}, a)
    made |= _caches(a, tokens, device)
    return replace(a, **made, **_places(a, tokens, made["k_window"], device))


def argument_bytes(a: FusedQkvArguments) -> int:
    """Returns the number of bytes that a step reads, without the caches."""
    tensors = (getattr(a, f.name) for f in fields(a) if f.name not in ("k_cache", "v_cache"))
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _numbers(
    generator: torch.Generator,
    weight_size: float,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Returns random numbers for an argument."""
    given: dict[str, Any] = {"device": generator.device, "generator": generator}
    if name in _ZEROS:
        return torch.randint(0, 16, shape, **given).to(dtype)
    if name in _SCALES and not dtype.is_floating_point:
        exponent = (torch.rand(shape, **given) * _SCALES[name]).frexp().exponent
        return (exponent + e8m0.BIAS).to(dtype)
    if not dtype.is_floating_point:
        bits = torch.iinfo(dtype)
        whole = torch.randint(bits.min, bits.max + 1, shape, dtype=torch.int64, **given)
        return whole.to(dtype)
    if name in _SCALES:
        return ((0.5 + torch.rand(shape, **given)) * _SCALES[name]).to(dtype)
    size = weight_size if name in _WEIGHTS and dtype.itemsize > 1 else 1.0
    return (torch.randn(shape, **given) * size).to(dtype)


def _token_count(a: FusedQkvArguments, wanted: int) -> int:
    window = CacheWindow.from_ints(a.k_window)
    capacity = window.capacity
    if a.lookup_table is not None:
        used, pages_each = _table_use(a, window)
        capacity = used * pages_each * window.page_size
    units = [window.num_pages if a.slots == "per_sequence" else 1]
    if a.cos is not None and a.cos.shape[0] > 1:
        units.append(a.x.shape[0] // a.cos.shape[0])
    unit = max(math.lcm(*units), 1)
    return max(min(wanted, capacity) // unit, 1) * unit


def _table_use(a: FusedQkvArguments, window: CacheWindow) -> tuple[int, int]:
    """Returns how many sequences of a block table get tokens, and the largest number of pages of a
    sequence."""
    assert a.lookup_table is not None
    used = min(a.lookup_table.shape[0], window.num_pages)
    return used, min(a.lookup_table.shape[1], window.num_pages // used)


def _shape(a: FusedQkvArguments, name: str, tensor: torch.Tensor, tokens: int) -> tuple[int, ...]:
    given, rows = a.x.shape[0], tensor.shape[0] if tensor.dim() else 0
    if name in _PER_TOKEN and rows == given:
        return (tokens, *tensor.shape[1:])
    if name in ("cos", "sin") and (rows > 1 or given == 1):
        return (tokens * rows // given, *tensor.shape[1:])
    return tuple(tensor.shape)


def _packed_weights(made: dict[str, torch.Tensor], a: FusedQkvArguments) -> dict[str, Any]:
    """Returns new weights of Q, K and V that are views of one tensor, like the weights of the call.
    Returns an empty dictionary if the weights of the call are not views of one tensor.
    """
    given = {name: getattr(a, name) for name in made}
    if weight_rows(*given.values()) is None:
        return {}
    lowest = min(weight.storage_offset() for weight in given.values())
    first = {name: weight.storage_offset() - lowest for name, weight in given.items()}
    size = max(first[name] + _extent(weight) for name, weight in given.items())
    whole = a.q_weight.new_empty(size, device=made["q_weight"].device)
    return {
        name: whole.as_strided(weight.shape, weight.stride(), first[name]).copy_(weight)
        for name, weight in made.items()
    }


def _extent(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the first element to the last, inclusive."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _caches(a: FusedQkvArguments, tokens: int, device: torch.device) -> dict[str, Any]:
    """Returns each window on a new base, which has the pages that the tokens need."""
    made: dict[str, Any] = {}
    for letter in "kv":
        values, base = getattr(a, f"{letter}_window"), getattr(a, f"{letter}_cache")
        if not values:
            continue
        window = CacheWindow.from_ints(values)
        pages = window.num_pages
        if a.slots == "flat":
            pages = min(pages, -(-tokens // window.page_size))
        elif a.lookup_table is not None:
            used, _ = _table_use(a, window)
            pages = used * -(-tokens // (used * window.page_size))
        window = replace(window, num_pages=pages, offset=0)
        dtype = a.k_cache.dtype if base is None else base.dtype
        made[f"{letter}_cache"] = torch.zeros(window.extent, dtype=dtype, device=device)
        made[f"{letter}_window"] = window.to_ints()
    return made


def _places(
    a: FusedQkvArguments, tokens: int, k_window: list[int], device: torch.device
) -> dict[str, Any]:
    """Returns a different slot for every token, in the form in which `a` gives slots."""
    window = CacheWindow.from_ints(k_window)
    if a.slot_mapping is not None:
        count = tokens // window.num_pages if a.slots == "per_sequence" else tokens
        slots = torch.arange(count, device=device)
        return {"slot_mapping": _strided(a.slot_mapping, slots)}
    assert a.lookup_table is not None
    used, _ = _table_use(a, CacheWindow.from_ints(a.k_window))
    each = -(-tokens // used)
    row, column = (torch.arange(n, device=device) for n in a.lookup_table.shape)
    pages = (column * used + row.unsqueeze(1)) % window.num_pages
    made = {"lookup_table": _strided(a.lookup_table, pages)}
    token = torch.arange(tokens, device=device)
    if a.sequence_ids is not None and a.positions is not None:
        made["sequence_ids"] = _strided(a.sequence_ids, token // each)
        made["positions"] = _strided(a.positions, token % each)
        return made
    assert a.row_offsets is not None
    assert a.cache_lengths is not None
    offsets = torch.arange(len(row) + 1, device=device) * each
    made["row_offsets"] = _strided(a.row_offsets, offsets.clamp(max=tokens))
    made["cache_lengths"] = _strided(a.cache_lengths, torch.zeros_like(row))
    return made


def _strided(like: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the numbers with the strides and the dtype of a tensor. Along expanded dimensions,
    the first number is repeated."""
    first = numbers[tuple([slice(0, 1) if step == 0 else slice(None) for step in like.stride()])]
    out = torch.empty_strided(first.shape, like.stride(), dtype=like.dtype, device=numbers.device)
    return out.copy_(first.to(like.dtype)).expand(numbers.shape)
