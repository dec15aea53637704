"""The arguments of the MLA ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from tilewright.ops.attention.arguments import BatchArguments
from tilewright.ops.formats.activation_codes import RowRounding
from tilewright.ops.groups import Group
from tilewright.ops.reference.rope import RopeTables
from tilewright.ops.schema import SymInt, Written

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentStoreArguments:
    """The arguments of `mla_latent_store`: T tokens, L latent rank, R rope width.

    latent [T, L] and k_rope [T, R]: last dimension contiguous, any row stride, so that slices of
    one projection can be passed; bf16, fp16, fp32 or fp64, the same as the caches. latent_cache,
    rope_cache: base tensors, written; rope_cache None: both parts are in latent_cache.
    latent_window, rope_window: the nine integers of a CacheWindow on the base, of one head and
    head_dim L and R.

    norm_weight [L] (of latent's dtype or float32): the normed latent is norm_weight * latent /
    sqrt(mean(latent²) + norm_eps); None: no norm. cos, sin, rope_style, rope_by_position: a
    rotation, see RopeTables.

    slots, indexing, slot_mapping, lookup_table, sequence_ids, positions, row_offsets,
    cache_lengths: as in ops/cache/addressing.py. The position of a token is `positions` [T] if
    given, else cache_lengths[b] + i for the i-th token of sequence b.

    Bad values (slots, positions, pages; positions without a row of cos) raise ArgumentError before
    anything is written if they are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; otherwise a
    token without a place is not written.
    """

    latent: torch.Tensor
    k_rope: torch.Tensor
    latent_cache: Written
    rope_cache: Written | None
    slot_mapping: torch.Tensor | None
    latent_window: Sequence[SymInt]
    rope_window: Sequence[SymInt]
    _: KW_ONLY
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-06
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rope_style: str = "none"
    rope_by_position: bool = False
    slots: str = "flat"
    indexing: str = "paged"
    lookup_table: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None

    rope = Group(RopeTables)
    # The value of the argument `keys` of `mla_prefill` for a call without keys.
    keys: ClassVar[str] = "none"
    num_sequences: ClassVar[int] = 1
    rope_on: ClassVar[str] = "k"
    latent_scale: ClassVar[None] = None
    attention_dtype: ClassVar[None] = None

    @property
    def entry(self) -> tuple[Any, Any]:
        """L and R, the widths of a cache entry's parts."""
        return self.latent.shape[1], self.k_rope.shape[1]


@dataclass(frozen=True)
class MlaPrefillArguments:
    """The arguments of `mla_prefill`. T queries of B sequences, H heads; N, R and V are the widths
    of a head's unrotated part, rotated part and values; L is the latent rank, K the number of keys.

    q [T, H, N + R]: unrotated columns first; bf16, fp16, fp32 or fp64, last dimension contiguous.
    latent [Tk, L], k_rope [Tk, R]: of q's dtype, last dimension contiguous, any row stride; both
    None: there are no new tokens, and keys are in the cache. Tk = T except with keys="given".
    kv_b_weight [H * (N + V), L]: for each head N rows of keys and V = v_dim rows of values. It has
    q's dtype, or is float8_e4m3fn with kv_b_scale [ceil(rows / bn), ceil(L / bk)], scale_block =
    [bn, bk]. By default, a float8 weight is dequantised to q's dtype. With quantize_latent, latents
    are quantised per 1 x bk instead (ops/formats/fp8_block.py, amax at most latent_scale_cap if
    that is not 0). With latent_scale [Tk, ceil(L / bk)], latent already holds such codes, made of
    normalised and rotated latents (for keys="given" and slots="none" only).

    latent_cache, rope_cache, latent_window, rope_window: as for `mla_latent_store`; None and []
    without a cache. The cache is written unless slots is "none": slots, indexing, slot_mapping,
    lookup_table, sequence_ids, positions, row_offsets, cache_lengths as in ops/cache/addressing.py.

    row_offsets [B + 1] gives the queries of each sequence; without it, sequences have num_sequences
    equal runs. keys, key_offsets [B + 1], key_slots [K], lookup_table [B, columns]: as in
    ops/mla/keys.py, read after this call's tokens are written; num_keys = key_offsets[B] for
    keys="table". With keys="table" and slots="ragged", a sequence with new tokens has rows for all
    its keys, cached and new. key_lengths [B]: keys from this index on are not seen.

    The position p of a query is `positions` [T] or [T / B] (the same for every sequence) if given,
    else cache_lengths[b] + i, else i. The position of a key is its index j among its sequence's
    keys. mask: "causal" (j <= p), "none", "sliding_window" (p - window < j <= p), "chunked" (j <=
    p, and j // window == p // window). attn_mask [B or 1, H or 1, T / B or 1, K / B], for equal
    runs only: bool, True is seen, or numbers (of q's dtype or float32) that are added to the scaled
    logits, where -inf hides. mask_blocks: the result of `mask_blocks` for this attn_mask; None: the
    call computes it. A query that sees no key gives zeros.

    norm_weight, norm_eps, cos, sin, rope_style, rope_by_position: as for `mla_latent_store`;
    rope_on: "qk", "q" or "k", the tensors that are rotated.

    attention_dtype: float8_e4m3fn, or None for q's dtype. With float8_e4m3fn, q, keys and values
    are divided by q_scale, k_scale and v_scale and rounded to float8, saturating; the softmax
    weights, times a power of two, are rounded to float8 as well.

    Bad values (offsets, slots, pages, positions) raise ArgumentError before anything is written if
    they are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU.
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

    rope = Group(RopeTables)

    @property
    def entry(self) -> tuple[Any, Any]:
        """L and R, the widths of a cache entry's parts."""
        return self.kv_b_weight.shape[1], widths(self)[1]


@dataclass(frozen=True)
class MlaBranchArguments:
    """The arguments of `mla_prefill_branch_fp8`. T new tokens of B sequences, H heads; N, R and V
    are the widths of a head's unrotated part, rotated part and values; L is the latent rank, C the
    number of chunks.

    q [T, H, N + R]: unrotated columns first, not rotated yet; bf16, fp16, fp32 or fp64, last
    dimension contiguous. latents [T, L + R]: the new tokens' entries straight from their
    projection, of q's dtype. input_row_offsets [B + 1], cache_lengths [B] (tokens in the cache
    before this call) and lookup_table [B, columns], uint32, int32 or int64, as in
    `fused_qkv_matmul_kv_cache_paged_ragged`; a sequence without new tokens is skipped. freqs_cis
    [positions, R], of q's dtype or float32: cos and sin of each pair, alternating. rope_style:
    "interleaved", "half" or "interleaved_to_half", for q and the cache. kv_norm_gamma [L], of q's
    dtype or float32. blocks [P, 1, layers, page_size, 1, L + R], any strides, of q's dtype, written
    at layer_idx. scale: multiplies the logits. epsilon: the norm's.

    buffer_row_offsets [B + 1] or [C, B + 1]: the offsets of the rows that each sequence's keys take
    in a chunk. cache_offsets [B or B + 1] or [C, ..]: the position of each sequence's first key in
    the chunk. buffer_length: the rows of each chunk, C integers, -1 for a chunk without keys (as
    `mla_prefill_plan` returns them). A sequence's chunks follow each other without a gap from
    position 0 and hold all its keys; rows past them are not seen. If all lengths are below 1,
    nothing is written and the result is zeros.

    kv_b_proj [H * (N + V), L] float8_e4m3fn, kv_b_proj_scale [ceil(rows / g), ceil(L / g)] float32
    for blocks of granularity g = 128 or 64. V = v_dim. mask, window, attention_dtype, q_scale,
    k_scale, v_scale: as for `mla_prefill`.

    Raises ArgumentError before anything is written: for a layer, granularity, shape, dtype or
    device that does not fit; and, on the CPU always and on a GPU under TILEWRIGHT_DEBUG=1, for
    offsets that disagree, a buffer shorter than the keys, pages outside the pool, and positions
    past freqs_cis or past the table.
    """

    q: torch.Tensor
    latents: torch.Tensor
    input_row_offsets: torch.Tensor
    freqs_cis: torch.Tensor
    kv_norm_gamma: torch.Tensor
    blocks: Written
    cache_lengths: torch.Tensor
    lookup_table: torch.Tensor
    layer_idx: int
    scale: float
    epsilon: float
    buffer_row_offsets: torch.Tensor
    cache_offsets: torch.Tensor
    buffer_length: Sequence[SymInt]
    kv_b_proj: torch.Tensor
    kv_b_proj_scale: torch.Tensor
    _: KW_ONLY
    v_dim: SymInt = 128
    mask: str = "causal"
    window: int = 0
    rope_style: str = "interleaved"
    granularity: int = 128
    attention_dtype: torch.dtype | None = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Width:
    """Base class that puts v_dim before the arguments of a batch in the schema."""

    v_dim: SymInt


@dataclass(frozen=True)
class MlaDecodeArguments(BatchArguments, _Width):
    """The arguments of `mla_decode`: T queries of B sequences; H heads; N, R and V are the widths
    of a head's unrotated part, rotated part and values; L is the latent rank.

    q [T, H, N + R]: unrotated columns first, the others rotated; bf16, fp16, fp32 or fp64, last
    dimension contiguous. row_offsets [B + 1] gives the queries of each sequence; without it,
    sequences have num_sequences equal runs.

    latent [P, S, L], rope_keys [P, S, R]: the cache, of q's dtype, any strides, last dimension
    contiguous; normalised and rotated. block_table [B, columns]: key j of sequence b is
    latent[block_table[b, j // S], j % S]. None: it is latent[b, j], P = B.

    kv_b_weight [H * (N + V), L]: for each head N rows of keys, W_UK, and V = v_dim rows of values,
    W_UV. It has q's dtype, or is float8_e4m3fn with kv_b_scale [ceil(rows / bn), ceil(L / bk)],
    scale_block = [bn, bk], and is then rounded to q's dtype. With v_weight [H, V, L], which is
    W_UV, kv_b_weight is W_UK alone, [H, N, L]; both have q's dtype and any strides.

    round_latents: latents are rounded to the numbers that e4m3 codes stand for before they are
    used; the cache is not changed. latent_group, latent_rounded, latent_zero_scale, latent_least,
    latent_least_divisor: the RowRounding of a latent.

    key_lengths, positions, cache_lengths, mask, window, attn_mask, mask_blocks: which keys a query
    sees, as for `cache_attention`. A query that sees no key gives zeros. Keys that no query sees
    may hold anything, also NaN. Bad values (offsets, lengths, pages) raise ArgumentError if they
    are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; otherwise a key on a page outside the
    pool is not seen.
    """

    q: torch.Tensor
    latent: torch.Tensor
    rope_keys: torch.Tensor
    kv_b_weight: torch.Tensor
    _: KW_ONLY
    v_weight: torch.Tensor | None = None
    kv_b_scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    round_latents: bool = False
    latent_group: int = 0
    latent_rounded: bool = False
    latent_zero_scale: float = 0.0
    latent_least: float = 0.0
    latent_least_divisor: float = 0.0

    latent_rounding = Group(
        RowRounding,
        group="latent_group",
        rounded="latent_rounded",
        zero_scale="latent_zero_scale",
        least="latent_least",
        least_divisor="latent_least_divisor",
    )


@dataclass(frozen=True)
class UpWeight:
    """The arguments of a call that concern the up-projection: its weight [H * (N + V), L], the
    weight's scales, and q."""

    q: torch.Tensor
    v_dim: Any
    kv_b_weight: torch.Tensor
    kv_b_scale: torch.Tensor | None
    scale_block: Sequence[int]


LatentArguments: TypeAlias = LatentStoreArguments | MlaPrefillArguments
UpArguments: TypeAlias = MlaPrefillArguments | MlaDecodeArguments | UpWeight


def rotates_keys(a: LatentArguments) -> bool:
    return a.rope_style != "none" and "k" in a.rope_on


def rotates_queries(a: MlaPrefillArguments) -> bool:
    return a.rope_style != "none" and "q" in a.rope_on


def widths(a: UpArguments) -> tuple[Any, Any, Any]:
    """Returns N, R and V: the widths of a head's unrotated part, rotated part and values."""
    shape = a.kv_b_weight.shape
    nope = shape[1] if len(shape) == 3 else shape[0] // a.q.shape[1] - a.v_dim
    return nope, a.q.shape[2] - nope, a.v_dim


def halves(a: MlaDecodeArguments, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (W_UK [H, N, L], W_UV [H, V, L]). weight: kv_b_weight, dequantised."""
    if a.v_weight is not None:
        return weight, a.v_weight
    nope, _, v_dim = widths(a)
    per_head = weight.unflatten(0, (a.q.shape[1], nope + v_dim))
    return per_head[:, :nope], per_head[:, nope:]
