"""Checks of the arguments of `cache_attention`, and the reasons why no kernel can compute a
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.ops.attention.arguments import AttentionArguments
from tilewright.ops.attention.block_lists import check_mask_blocks, check_mask_blocks_values
from tilewright.ops.attention.masks import check_attn_mask, check_mask, lowest_hides
from tilewright.ops.attention.positions import (
    check_runs,
    positions_of,
    room,
    sequences,
    token_sequences,
)
from tilewright.ops.cache.ragged_batch import INDEX_DTYPES, check_row_offsets
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_absent,
    check_device,
    check_dtype,
    check_number,
    check_operand,
    check_shape,
    first,
    given,
    holds,
    readable,
)
from tilewright.ops.formats.fp8 import FP8_DTYPES

# The widest head that the kernels support.
MAX_WIDTH = 512


def check_attention(op: str, a: AttentionArguments) -> None:
    """Checks an AttentionArguments. Reads only metadata. Raises ArgumentError."""
    check_operand(op, "q", a.q, "[T, Hq, D]", (None, None, None), FLOAT_DTYPES, dense=True)
    _check_cache(op, a)
    check_batch(op, a)
    check_number(op, "softcap", a.softcap, 0)
    if a.sinks is not None:
        sizes, dtypes = (a.q.shape[1],), (a.q.dtype, torch.float32)
        check_operand(op, "sinks", a.sinks, "[Hq]", sizes, dtypes, a.q.device, dense=True)


def _check_cache(op: str, a: AttentionArguments) -> None:
    heads, width = a.q.shape[1], a.q.shape[2]
    sizes, dtypes, device = (None, None, None, width), (a.q.dtype, *FP8_DTYPES), a.q.device
    check_operand(op, "k", a.k, "[N, P, Hkv, D]", sizes, dtypes, device, dense=True)
    num_kv_heads, sizes = a.k.shape[2], (*a.k.shape[:3], None)
    check_operand(op, "v", a.v, "[N, P, Hkv, V]", sizes, (a.k.dtype,), device, dense=True)
    if not (holds(num_kv_heads >= 1) and holds(heads % num_kv_heads == 0)):
        expected = f"a number of heads that divides the {heads} of q"
        raise ArgumentError(op, "k", expected, f"{num_kv_heads} heads")
    scales = ("k_scale", "v_scale")
    if a.k.dtype not in FP8_DTYPES:
        check_absent(op, a, scales, f"the cache has {a.k.dtype}")
    for name, scale in zip(scales, (a.k_scale, a.v_scale), strict=True):
        if scale is None:
            continue
        check_dtype(op, name, scale, (torch.float32,))
        check_device(op, name, scale, a.q.device)
        if scale.numel() != 1 or scale.dim() > 1:
            check_shape(op, name, scale, "[Hkv]", (num_kv_heads,))


def check_batch(op: str, a: AttentionArguments) -> None:
    """Checks the arguments that say where the keys of each sequence are and which keys a query
    attends to. Uses only the shapes of q [T, Hq, ...] and k [N, P, ...]. Reads only metadata.
    Raises ArgumentError."""
    _check_places(op, a, check_runs(op, a))
    check_sight(op, a, room)


def check_sight(
    op: str, a: Any, keys: Callable[[Any], Any], ragged: Sequence[str] = ("row_offsets",)
) -> None:
    """Checks the arguments that say which keys a query attends to. Reads only metadata. Raises
    ArgumentError.

    keys: a function that returns the number of keys of each sequence. It is called only if all
    sequences have the same number of queries. ragged: the arguments that are given only if
    sequences have different numbers of queries.
    """
    check_mask(op, a)
    check_number(op, "scale", a.scale)
    if a.attn_mask is not None:
        for name in (name for name in ragged if getattr(a, name) is not None):
            check_absent(op, a, ["attn_mask"], f"{name} is given")
        check_attn_mask(op, a.attn_mask, a.q, a.num_sequences, keys(a))
    check_mask_blocks(op, a.attn_mask, a.mask_blocks)


def _check_places(op: str, a: AttentionArguments, batch: Any) -> None:
    table, device = a.block_table, a.q.device
    if table is not None:
        form = "[B, columns]", (batch, None), INDEX_DTYPES, device
        check_operand(op, "block_table", table, *form, dense=True)
    elif not holds(a.k.shape[0] == batch):
        expected = f"keys of B = {batch} sequences, since block_table is None"
        raise ArgumentError(op, "k", expected, f"a cache of {a.k.shape[0]} sequences")
    if a.key_lengths is not None:
        check_operand(op, "key_lengths", a.key_lengths, "[B]", (batch,), INDEX_DTYPES, device)


def check_attention_values(op: str, a: AttentionArguments) -> None:
    """Checks the values of offsets, lengths and pages. This needs real tensors, not fake ones.
    Raises ArgumentError."""
    hides = lowest_hides(a, room(a))
    check_mask_blocks_values(op, a.attn_mask, a.mask_blocks, hide_lowest=hides)
    index = a.row_offsets, a.block_table, a.key_lengths, a.positions, a.cache_lengths
    if not readable(index):
        return
    if a.row_offsets is not None:
        check_row_offsets(op, "row_offsets", a.row_offsets, a.q.shape[0], "the number of tokens")
    keys = room(a)
    for name, vector in (("key_lengths", a.key_lengths), ("cache_lengths", a.cache_lengths)):
        if vector is None:
            continue
        # PyTorch does not compare unsigned integers.
        lengths = vector.to(torch.int64)
        where = first((lengths < 0) | (lengths > keys))
        if where is not None:
            expected = f"lengths from 0 to {keys}, the keys that a sequence has room for"
            raise ArgumentError(op, name, expected, f"{int(lengths[where])} at {where}")
    if a.block_table is not None:
        _check_pages(op, a, keys)


def _check_pages(op: str, a: AttentionArguments, keys: int) -> None:
    """Checks that each key that may be visible, according to the positions of the queries, is on a
    page that exists."""
    batch, device = sequences(a), a.q.device
    used = torch.full((batch,), keys, device=device)
    if a.key_lengths is not None:
        used = used.minimum(a.key_lengths.to(torch.int64))
    if a.mask != "none":
        sequence, _ = token_sequences(a.q.shape[0], a.row_offsets, a.num_sequences, device)
        last = torch.zeros(batch, dtype=torch.int64, device=device)
        last.scatter_reduce_(0, sequence, positions_of(a) + 1, "amax")
        used = used.minimum(last)
    table = given(a.block_table).to(torch.int64)
    columns = torch.arange(table.shape[1], device=device) * a.k.shape[1]
    bad = (columns < used[:, None]) & ((table < 0) | (table >= a.k.shape[0]))
    where = first(bad)
    if where is not None:
        b, column = divmod(where, table.shape[1])
        expected = f"pages from 0 to {a.k.shape[0] - 1} where a key may be visible"
        actual = f"{int(table[b, column])} for sequence {b}, column {column}"
        raise ArgumentError(op, "block_table", expected, actual)


def attention_obstacle(a: AttentionArguments) -> str | None:
    """Returns why no kernel can compute a call; None if a kernel can. Reads only metadata."""
    if not a.scale > 0:  # kernels assume that the largest product gives the largest logit
        return f"no kernel for a scale of {a.scale}"
    width = max(a.q.shape[2], a.v.shape[3])
    return None if width <= MAX_WIDTH else f"no kernel for heads of {width} columns"
