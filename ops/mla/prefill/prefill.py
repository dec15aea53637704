"""`mla_prefill`: multi-head latent attention with its keys and values made from latents.

Keys are this call's latents or lie in a cache, paged or with a page per sequence. The projection's
output is never split or concatenated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.contract import FusedOp, emitted_kernel, get_op, register
from tilewright.ops.mla.cases import PREFILL_CASES
from tilewright.ops.mla.latents.checks import pool_windows
from tilewright.ops.mla.prefill.checks import check_prefill, check_prefill_values, prefill_obstacle
from tilewright.ops.mla.reference import TOLERANCES, prefill_reference
from tilewright.ops.mla.samples import sample_prefill
from tilewright.ops.sampling import sampler_of
from tilewright.ops.schema import SymInt, Written

NAME = "mla_prefill"
LOWERING = "tilewright.ops.mla.prefill.lowering"
ERROR_MODEL = (
    "fp32 accumulation; latents, keys and values are rounded to the values' dtype, as are a "
    "kernel's softmax weights: errors of half a unit in the last place of the terms of each sum, "
    "measured against the rms of the output; then one rounding of the result"
)


@dataclass(frozen=True)
class MlaPrefillArguments:
    """The arguments of `mla_prefill`. T queries of B sequences, H heads, N, R and V the widths of a
    head's unrotated part, rotated part and values, L the latent rank, K keys.

    q [T, H, N + R]: unrotated columns first; bf16, fp16, fp32 or fp64, last dimension contiguous.
    latent [Tk, L], k_rope [Tk, R]: of q's dtype, last dimension contiguous, rows any distance
    apart; None (both): nothing is new, keys are in the cache. Tk = T but for keys="given".
    kv_b_weight [H * (N + V), L]: for each head N rows of keys and V = v_dim rows of values. Of q's
    dtype, or float8_e4m3fn with kv_b_scale [ceil(rows / bn), ceil(L / bk)], scale_block = [bn, bk]:
    it is then rounded to q's dtype; or, quantize_latent, latents are quantised per 1 x bk
    (ops/formats/fp8_block.py, amax at most latent_scale_cap where that is not 0); or, latent_scale
    [Tk, ceil(L / bk)] given, latent has such codes already: of latents that are normed and rotated,
    for keys="given" and slots="none".

    latent_cache, rope_cache, latent_window, rope_window: as for `mla_latent_store`; None and []
    without a cache. Written where slots is not "none": slots, indexing, slot_mapping, lookup_table,
    sequence_ids, positions, row_offsets, cache_lengths as in ops/cache/addressing.py.

    A sequence's queries: row_offsets [B + 1], or num_sequences equal runs.
    keys, key_offsets [B + 1], key_slots [K], lookup_table [B, columns]: as in ops/mla/keys.py,
    read after this call's tokens are written; num_keys = key_offsets[B] for keys="table". There,
    with slots="ragged", a sequence with new tokens has rows for all its keys, cached and new.
    key_lengths [B]: keys from there on are not seen.

    A query's position p: `positions` [T] or [T / B] (the same for every sequence) where given, else
    cache_lengths[b] + i, else i. A key's position is its place j among its sequence's keys. mask:
    "causal" (j <= p), "none", "sliding_window" (p - window < j <= p), "chunked" (j <= p, and
    j // window == p // window). attn_mask [B or 1, H or 1, T / B or 1, K / B]: bool, True is seen,
    or numbers (of q's dtype or float32) that are added to the scaled logits, -inf hides; only
    for equal runs. mask_blocks: what `mask_blocks` gives for this attn_mask; made by the call where
    it is None. A query that sees no key gives zeros.

    norm_weight, norm_eps, cos, sin, rope_style, rope_by_position: as for `mla_latent_store`;
    rope_on: "qk", "q" or "k" is rotated.

    attention_dtype float8_e4m3fn: q, keys and values are divided by q_scale, k_scale and v_scale
    and rounded to it, saturating, and so are the softmax weights, times a power of two; None: q's.

    Bad values (offsets, slots, pages, positions) raise ArgumentError before anything is written
    where they are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU.
    """

    q: torch.Tensor
    latent: torch.Tensor | None
    k_rope: torch.Tensor | None
    kv_b_weight: torch.Tensor
    latent_cache: Written | None = None
    rope_cache: Written | None = None
    latent_window: Sequence[SymInt] = ()
    rope_window: Sequence[SymInt] = ()
    _: KW_ONLY
    v_dim: SymInt
    scale: float
    num_sequences: SymInt = 1
    row_offsets: torch.Tensor | None = None
    keys: str = "given"
    key_offsets: torch.Tensor | None = None
    key_slots: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    num_keys: SymInt = 0
    slots: str = "none"
    indexing: str = "paged"
    slot_mapping: torch.Tensor | None = None
    lookup_table: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-06
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rope_style: str = "none"
    rope_on: str = "qk"
    rope_by_position: bool = False
    mask: str = "causal"
    window: int = 0
    attn_mask: torch.Tensor | None = None
    kv_b_scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    quantize_latent: bool = False
    latent_scale_cap: float = 0.0
    latent_scale: torch.Tensor | None = None
    attention_dtype: torch.dtype | None = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    mask_blocks: torch.Tensor | None = None


def validate(a: MlaPrefillArguments) -> None:
    check_prefill(NAME, a)


def validate_values(a: MlaPrefillArguments) -> None:
    check_prefill_values(NAME, a)


def fake(a: MlaPrefillArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v_dim))


def reference(a: MlaPrefillArguments) -> torch.Tensor:
    """In fp32 (float64 for float64 q), for each head of each sequence:

        latent, k_rope = norm(latent), rope(k_rope)            of new tokens, rounded; to the cache
        q = q_nope | rope(q_rope)                              q's first N and last R columns
        k_nope | v = latents of all keys @ kv_b_weight^T       rounded to q's dtype
        logits = scale * q @ (k_nope | k_rope)^T + attn_mask   -inf where the mask hides
        out = softmax(logits) @ v                              rounded to q's dtype

    A step without its arguments is left out. Quantised latents and weights are dequantised first;
    attention_dtype float8_e4m3fn rounds q, k and v to that dtype instead.
    """
    return prefill_reference(a)


sample_inputs = sampler_of(MlaPrefillArguments, sample_prefill)

OP = register(
    FusedOp(
        name=NAME,
        without_writes="mla_prefill_dense",
        arguments=MlaPrefillArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(f"{LOWERING}:prefill_steps", prefill_obstacle),),
        cases=PREFILL_CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)


def mla_prefill(
    q: torch.Tensor,
    latent: torch.Tensor | None,
    k_rope: torch.Tensor | None,
    kv_b_weight: torch.Tensor,
    latent_cache: torch.Tensor | None = None,
    rope_cache: torch.Tensor | None = None,
    *,
    v_dim: int,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    """The op, called by hand: attention of q [T, H, N + R] to keys made from latents.

    latent_cache [num_pages, page_size, L + R], or [.., L] with a rope_cache [.., R]; other layouts
    by `latent_window` and `rope_window` (CacheWindow.to_ints). Result [T, H, V]. Arguments and
    options: MlaPrefillArguments. Raises ArgumentError before anything is written. Not
    differentiable.
    """
    windows = options.pop("latent_window", None), options.pop("rope_window", None)
    if any(window is None for window in windows):
        windows = ([], [])
        if latent_cache is not None:
            windows = pool_windows(NAME, latent_cache, rope_cache, ("kv_b_weight", kv_b_weight))
    given = (q, latent, k_rope, kv_b_weight, latent_cache, rope_cache, *windows)
    op = OP if latent_cache is not None else get_op(f"{NAME}_dense")
    return op.torch_op(*given, v_dim=v_dim, scale=scale, **options)
