"""Checks of the arguments of `mla_prefill`, which raise ArgumentError before anything is written,
and the reasons why no emitted kernel can compute a call."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention.block_lists import check_mask_blocks_values
from tilewright.ops.attention.checks import check_sight
from tilewright.ops.attention.masks import lowest_hides
from tilewright.ops.attention.positions import check_positions, check_runs, positions_of
from tilewright.ops.cache.address_checks import check_address_values
from tilewright.ops.cache.addressing import SLOT_FORMS, address_tensors, check_addressing
from tilewright.ops.cache.checks import check_aliases
from tilewright.ops.cache.ragged_batch import check_row_offsets
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_absent,
    check_choice,
    check_number,
    check_operand,
    given,
    holds,
    readable,
)
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import FP8, MlaPrefillArguments, widths
from tilewright.ops.mla.checks import check_weight, refuse_codes
from tilewright.ops.mla.keys import check_key_values, check_keys, run_keys
from tilewright.ops.mla.latents.checks import (
    check_finish,
    check_latent_cache,
    check_latents,
    width_obstacle,
    written_windows,
)

ROPE_ON = ("qk", "q", "k")
# The dtypes that the kernels support.
VALUE_DTYPES = (torch.bfloat16, torch.float16)


def check_prefill(op: str, a: MlaPrefillArguments) -> None:
    """Checks an MlaPrefillArguments. Reads only metadata."""
    check_operand(op, "q", a.q, "[T, H, N + R]", (None, None, None), FLOAT_DTYPES, dense=True)
    rope_dim = check_weight(op, a)
    _check_uncoded(op, a)
    batch = check_runs(op, a, each=a.slots == "block_table")
    if not (holds(a.num_sequences == 1) or holds(a.num_sequences == batch)):
        expected = f"1 or B = {batch}, since row_offsets is given"
        raise ArgumentError(op, "num_sequences", expected, a.num_sequences)
    check_choice(op, "rope_on", a.rope_on, ROPE_ON)
    rank, num_tokens = a.kv_b_weight.shape[1], a.q.shape[0]
    check_finish(op, a, num_tokens, rank, rope_dim, a.q)
    if a.latent is None:
        check_absent(op, a, ("k_rope", "latent_scale"), "latent is None")
    else:
        rows = check_latents(op, a, rank, rope_dim, a.q)
        _check_new(op, a, rows)
        if a.latent_scale is not None:
            _check_codes(op, a, rows, rank)
    _check_cache(op, a, rank, rope_dim, num_tokens)
    check_keys(op, a)
    check_sight(op, a, run_keys, ("row_offsets", "key_offsets"))
    if a.attention_dtype not in (None, a.q.dtype, FP8):
        expected = f"None, {a.q.dtype} or {FP8}"
        raise ArgumentError(op, "attention_dtype", expected, a.attention_dtype)
    for name, number in (("q_scale", a.q_scale), ("k_scale", a.k_scale), ("v_scale", a.v_scale)):
        check_number(op, name, number, above=True)
    check_number(op, "latent_scale_cap", a.latent_scale_cap, 0)


def _check_uncoded(op: str, a: MlaPrefillArguments) -> None:
    """Checks that latents are quantised only if the weight is quantised."""
    if a.kv_b_weight.dtype != FP8:
        codes = {"latent_scale": a.latent_scale is not None, "quantize_latent": a.quantize_latent}
        refuse_codes(op, codes, a.kv_b_weight.dtype)


def _check_codes(op: str, a: MlaPrefillArguments, rows: Any, rank: Any) -> None:
    """Checks latents that are passed as codes. They must be normalised and rotated keys."""
    form = "[Tk, ceil(L / bk)]", (rows, -(-rank // a.scale_block[1])), FLOAT_DTYPES, a.q.device
    check_operand(op, "latent_scale", a.latent_scale, *form)
    unfit = {
        "keys": a.keys != "given",
        "slots": a.slots != "none",
        "norm_weight": a.norm_weight is not None,
        "quantize_latent": a.quantize_latent,
    }
    for name, wrong in unfit.items():
        if wrong:
            raise ArgumentError(op, name, "its default, since latent_scale is given", "another")


def _check_new(op: str, a: MlaPrefillArguments, rows: Any) -> None:
    """Checks that there is one new latent for each query, unless the latents are all the keys and
    are already normalised and rotated."""
    rotated = a.rope_style != "none" and "k" in a.rope_on
    if rotated or a.slots != "none" or a.keys != "given":
        num_tokens = a.q.shape[0]
        if not holds(rows == num_tokens):
            expected = f"a row for each of T = {num_tokens} tokens"
            raise ArgumentError(op, "latent", expected, f"{rows} rows")


def _check_cache(
    op: str, a: MlaPrefillArguments, rank: Any, rope_dim: Any, num_tokens: Any
) -> None:
    if a.latent_cache is None:
        for name in ("rope_cache", "latent_window", "rope_window"):
            value = getattr(a, name)
            if value is not None and (name == "rope_cache" or len(value)):
                raise ArgumentError(op, name, "none, since latent_cache is None", "one")
        if a.slots != "none":
            raise ArgumentError(op, "slots", "'none', since latent_cache is None", repr(a.slots))
    else:
        window = check_latent_cache(op, a, rank, rope_dim, a.q)
        if a.slots != "none":
            if a.latent is None:
                raise ArgumentError(op, "slots", "'none', since latent is None", repr(a.slots))
            check_addressing(op, a, num_tokens, window, a.q.device, others=True)
    used = SLOT_FORMS.get(a.slots, ()) + (("lookup_table",) if a.keys == "table" else ())
    unused = {"slot_mapping", "sequence_ids", "lookup_table"}.difference(used)
    check_absent(op, a, sorted(unused), f"slots is {a.slots!r} and keys {a.keys!r}")


def check_prefill_values(op: str, a: MlaPrefillArguments) -> None:
    """Checks aliases, and the values of offsets, places, pages and positions. This needs real
    tensors, not fake ones."""
    if a.latent_cache is not None and a.slots != "none":
        check_aliases(op, a, written_windows(a))
    if not readable((*address_tensors(a), a.key_offsets, a.key_slots, a.key_lengths)):
        return
    num_tokens = a.q.shape[0]
    if a.row_offsets is not None:
        check_row_offsets(op, "row_offsets", a.row_offsets, num_tokens, "the number of tokens")
    if a.slots != "none":
        window = CacheWindow.from_ints(a.latent_window)
        check_address_values(op, a, window, num_tokens)
    check_key_values(op, a)
    if a.slots == "ragged" and a.keys == "table" and a.key_offsets is not None:
        _check_room(op, a)
    if a.rope_by_position:
        check_positions(op, _position_source(a), positions_of(a), given(a.cos).shape[0])
    hides = a.attn_mask is not None and lowest_hides(a, run_keys(a))
    check_mask_blocks_values(op, a.attn_mask, a.mask_blocks, hide_lowest=hides)


def _check_room(op: str, a: MlaPrefillArguments) -> None:
    """Checks that every sequence has rows for its cached keys and its new keys."""
    new = given(a.row_offsets).to(torch.int64).diff()
    wanted = new + given(a.cache_lengths).to(torch.int64)
    rows = given(a.key_offsets).to(torch.int64).diff()
    short = ((rows < wanted) & (new > 0)).nonzero().flatten()
    if short.numel():
        b = int(short[0])
        expected = f"rows for all {int(wanted[b])} keys of sequence {b}"
        raise ArgumentError(op, "key_offsets", expected, f"{int(rows[b])} rows")


def _position_source(a: MlaPrefillArguments) -> str:
    if a.positions is not None:
        return "positions"
    return "q" if a.cache_lengths is None else "cache_lengths"


def prefill_obstacle(a: MlaPrefillArguments, weight: str = "kv_b_weight") -> str | None:
    """Returns why no kernel can compute a `mla_prefill` call; None if kernels can. Reads only
    metadata. weight: the argument name of the weight."""
    if a.q.dtype not in VALUE_DTYPES:
        return f"no kernel for {a.q.dtype}"
    if not a.scale > 0:  # kernels assume that the largest product gives the largest logit
        return f"no kernel for a scale of {a.scale}"
    rank = a.kv_b_weight.shape[1]
    obstacle = width_obstacle(rank, widths(a)[1])
    if obstacle is None and _coded(a):
        obstacle = _coded_obstacle(a)
    row = a.kv_b_weight.stride(0)
    if obstacle is None and row * a.kv_b_weight.element_size() % 16:
        obstacle = f"{weight}: the stride of rows, {row} elements, is not a multiple of 16 bytes"
    return obstacle


def _coded(a: MlaPrefillArguments) -> bool:
    """Whether the up-projection multiplies quantised operands."""
    return a.quantize_latent or a.latent_scale is not None


def _coded_obstacle(a: MlaPrefillArguments) -> str | None:
    columns, rows = a.scale_block[1], a.kv_b_weight.shape[0]
    if columns not in (32, 64, 128):
        return f"no kernel for scales of {columns} columns"
    if rows * a.q.element_size() % 16:
        return f"the rows of keys and values, {rows} elements, are not a multiple of 16 bytes"
    if a.latent_scale is not None and (row := given(a.latent).stride(0)) % 16:
        return f"latent: the stride of rows, {row} bytes, is not a multiple of 16 bytes"
    return None
