"""Checks of the arguments of `mla_prefill_branch_fp8`. Each check raises ArgumentError, with the
argument names of this op, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.ops.attention.positions import check_positions, token_positions
from tilewright.ops.cache.ragged_batch import check_batch, check_layer, check_row_offsets
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_choice,
    check_dtype,
    check_operand,
    check_shape,
    holds,
    in_words_of,
    shape_text,
)
from tilewright.ops.mla.arguments import FP8, MlaBranchArguments, UpWeight
from tilewright.ops.mla.checks import check_weight
from tilewright.ops.mla.prefill.checks import check_prefill
from tilewright.ops.reference.rope import ROPE_STYLES

NAME = "mla_prefill_branch_fp8"
GRANULARITIES = (128, 64)
#: The names that this op uses for arguments of `mla_prefill`.
PREFILL_WORDS = {
    "latent": "latents",
    "k_rope": "latents",
    "kv_b_weight": "kv_b_proj",
    "kv_b_scale": "kv_b_proj_scale",
    "scale_block": "granularity",
    "latent_cache": "blocks",
    "latent_window": "blocks",
    "rope_window": "blocks",
    "row_offsets": "input_row_offsets",
    "key_offsets": "buffer_length",
    "num_keys": "buffer_length",
    "norm_weight": "kv_norm_gamma",
    "norm_eps": "epsilon",
    "cos": "freqs_cis",
    "sin": "freqs_cis",
}


def check_branch(a: MlaBranchArguments, as_mla_prefill: Callable[[Any], Any]) -> None:
    """Checks an MlaBranchArguments. Reads only metadata."""
    check_operand(NAME, "q", a.q, "[T, H, N + R]", (None, None, None), FLOAT_DTYPES)
    rank, rope_dim = _check_weight(a)
    _check_blocks(a, rank, rope_dim)
    num_tokens, device = a.q.shape[0], a.q.device
    sizes, dtypes = (num_tokens, rank + rope_dim), (a.q.dtype, torch.float32)
    check_operand(NAME, "latents", a.latents, "[T, L + R]", sizes, dtypes[:1], device, dense=True)
    letters = "[positions, R]"
    check_operand(NAME, "freqs_cis", a.freqs_cis, letters, (None, rope_dim), dtypes, device)
    check_shape(NAME, "kv_norm_gamma", a.kv_norm_gamma, "[L]", (rank,))
    check_choice(NAME, "rope_style", a.rope_style, ROPE_STYLES[1:])
    check_batch(NAME, a, a.q.device, ("buffer_row_offsets", "cache_offsets"))
    _check_chunks(a)
    # If a size is a symbol, the weight cannot be split, so these checks run only at run time.
    sizes = (*a.kv_b_proj.shape, *a.blocks.shape, *a.q.shape[1:], a.v_dim)
    if all(isinstance(size, int) for size in sizes):
        with in_words_of(NAME, PREFILL_WORDS):
            check_prefill(NAME, as_mla_prefill(a))


def _check_weight(a: MlaBranchArguments) -> tuple[Any, Any]:
    """Checks the weight and returns L and R."""
    if a.granularity not in GRANULARITIES:
        expected = " or ".join(map(str, GRANULARITIES))
        raise ArgumentError(NAME, "granularity", expected, a.granularity)
    check_dtype(NAME, "kv_b_proj", a.kv_b_proj, (FP8,))
    check_dtype(NAME, "kv_b_proj_scale", a.kv_b_proj_scale, (torch.float32, torch.float64))
    block = (a.granularity, a.granularity)
    weight = UpWeight(a.q, a.v_dim, a.kv_b_proj, a.kv_b_proj_scale, block)
    with in_words_of(NAME, PREFILL_WORDS):
        rope_dim = check_weight(NAME, weight)
    return a.kv_b_proj.shape[1], rope_dim


def _check_blocks(a: MlaBranchArguments, rank: Any, rope_dim: Any) -> None:
    letters = "[P, 1, layers, page_size, 1, L + R]"
    sizes, dtypes = (None, 1, None, None, 1, rank + rope_dim), (a.q.dtype,)
    check_operand(NAME, "blocks", a.blocks, letters, sizes, dtypes, a.q.device)
    check_layer(NAME, a)


def _check_chunks(a: MlaBranchArguments) -> None:
    batch, chunks = a.lookup_table.shape[0], len(a.buffer_length)
    rows, starts = a.buffer_row_offsets, a.cache_offsets
    if rows.dim() == 1:
        check_shape(NAME, "buffer_row_offsets", rows, "[B + 1]", (batch + 1,))
        if chunks != 1:
            expected = "one length, since buffer_row_offsets describes one chunk"
            raise ArgumentError(NAME, "buffer_length", expected, list(a.buffer_length))
    else:
        check_shape(NAME, "buffer_row_offsets", rows, "[C, B + 1]", (chunks, batch + 1))
        if starts.dim() == 2:
            check_shape(NAME, "cache_offsets", starts, "[C, B + 1]", (chunks, None))
    fits = starts.dim() == rows.dim() and any(
        holds(starts.shape[-1] == batch + more) for more in (0, 1)
    )
    if not fits:
        expected = f"shape {'' if rows.dim() == 1 else '[C] x '}[{batch}] or [{batch + 1}]"
        raise ArgumentError(NAME, "cache_offsets", expected, f"shape {shape_text(starts.shape)}")
    for length in a.buffer_length:
        if not holds(length >= -1):
            raise ArgumentError(NAME, "buffer_length", "rows, or -1", list(a.buffer_length))


def check_branch_values(a: MlaBranchArguments) -> bool:
    """Checks the values of offsets, chunks and positions. Returns whether any chunk has keys."""
    if all(length <= 0 for length in a.buffer_length):
        return False
    batch, num_tokens = a.lookup_table.shape[0], a.q.shape[0]
    given = a.input_row_offsets
    check_row_offsets(NAME, "input_row_offsets", given, num_tokens, "the number of tokens")
    lengths = a.cache_lengths.to(torch.int64)
    totals = lengths + given.to(torch.int64).diff()
    covered = torch.zeros_like(totals)
    starts, offsets = a.cache_offsets.reshape(len(a.buffer_length), -1), a.buffer_row_offsets
    for chunk, length in enumerate(a.buffer_length):
        if length <= 0:
            continue
        rows = offsets.reshape(len(a.buffer_length), -1)[chunk]
        check_row_offsets(NAME, "buffer_row_offsets", rows, length, "buffer_length")
        sizes = rows.to(torch.int64).diff()
        start = starts[chunk, :batch].to(torch.int64)
        wrong = ((start != covered) & (sizes > 0)).nonzero().flatten()
        if wrong.numel():
            b = int(wrong[0])
            where = "the end of its keys in earlier chunks" if chunk else "its first key"
            expected = f"{int(covered[b])} for sequence {b} in chunk {chunk} ({where})"
            raise ArgumentError(NAME, "cache_offsets", expected, int(start[b]))
        covered = covered + sizes
    short = (covered < totals).nonzero().flatten()
    if short.numel():
        b = int(short[0])
        expected = f"rows for all {int(totals[b])} keys of sequence {b}"
        raise ArgumentError(NAME, "buffer_length", expected, f"{int(covered[b])} rows")
    if num_tokens:
        position = token_positions(num_tokens, given, 1, None, a.cache_lengths, a.q.device)
        check_positions(NAME, "freqs_cis", position, a.freqs_cis.shape[0])
    return True
