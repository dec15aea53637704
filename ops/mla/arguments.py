"""The arguments of the MLA ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from tilewright.ops.attention.arguments import BatchArguments
from tilewright.ops.formats.activation_codes import RowRounding
from tilewright.ops.formats.weight import Weight
from tilewright.ops.groups import Group
from tilewright.ops.reference.rope import RopeTables
from tilewright.ops.schema import SymInt, Written

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class LatentStoreArguments:
    """The arguments of `mla_latent_store`, for T tokens. L is the rank of latents, and R the width
    of the rope part.

    - `latent` [T, L], `k_rope` [T, R]: the last dimension is contiguous, and rows may have any
      stride, so that slices of one projection can be passed. The dtype is bf16, fp16, fp32 or fp64,
      the same as that of the caches.
    - `latent_cache`, `rope_cache`: the base tensors, which are written. If rope_cache is None, both
      parts are in latent_cache.
    - `latent_window`, `rope_window`: the nine integers of a CacheWindow on the base, with one head,
      and with head_dim L and R.
    - `norm_weight` [L] of latent's dtype or float32. The normalised latent is norm_weight * latent
      / sqrt(mean(latent²) + norm_eps). If norm_weight is None, there is no norm.
    - `cos`, `sin`, `rope_style`, `rope_by_position`: a rotation, as in RopeTables.
    - `slots`, `indexing`, `slot_mapping`, `lookup_table`, `sequence_ids`, `positions`,
      `row_offsets`, `cache_lengths`: as in ops/cache/addressing.py. The position of a token is
      `positions` [T] if that is given. Otherwise, token i of sequence b has the position
      cache_lengths[b] + i.

    Bad values are slots, positions and pages that do not exist, and positions without a row of cos.
    Bad values raise ArgumentError before anything is written. If they are on a GPU, they are
    checked only with TILEWRIGHT_DEBUG=1. Without this check, a token without a place is not
    written.
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
    # The value of the argument `keys` of `mla_prefill`, for a call without keys.
    keys: ClassVar[str] = "none"
    num_sequences: ClassVar[int] = 1
    rope_on: ClassVar[str] = "k"
    latent_scale: ClassVar[None] = None
    attention_dtype: ClassVar[None] = None

    @property
    def entry(self) -> tuple[Any, Any]:
        """L and R, the widths of the two parts of a cache entry."""
        return self.latent.shape[1], self.k_rope.shape[1]


@dataclass(frozen=True)
class MlaPrefillArguments:
    """The arguments of `mla_prefill`, for T queries of B sequences and H heads. N, R and V are the
    widths of a head's unrotated part, rotated part and values. L is the rank of latents, and K the
    number of keys.

    - `q` [T, H, N + R]: the unrotated columns come first. The dtype is bf16, fp16, fp32 or fp64,
      and the last dimension is contiguous.
    - `latent` [Tk, L], `k_rope` [Tk, R]: of q's dtype. The last dimension is contiguous, and rows
      may have any stride. If both are None, there are no new tokens, and all keys are in the cache.
      Tk = T unless keys="given".
    - `kv_b_weight` [H * (N + V), L]: for each head, N rows of keys and V = v_dim rows of values. It
      has q's dtype, or is float8_e4m3fn with kv_b_scale [ceil(rows / bn), ceil(L / bk)] and
      scale_block = [bn, bk]. By default, a float8 weight is dequantised to q's dtype.
    - `quantize_latent`: whether latents are quantised too, with a scale for each 1 x bk block
      (ops/formats/fp8_block.py). A float8 weight is then multiplied as codes. If latent_scale_cap
      is not 0 and the largest magnitude of a block exceeds it, the scale of the block is computed
      from latent_scale_cap instead.
    - `latent_scale` [Tk, ceil(L / bk)]: if it is given, `latent` consists of such codes. The
      latents were normalised before they were quantised, and k_rope is already rotated. This
      requires keys="given" and slots="none".

    The cache:

    - `latent_cache`, `rope_cache`, `latent_window`, `rope_window`: as in `mla_latent_store`; None
      and [] if there is no cache.
    - `slots`, `indexing`, `slot_mapping`, `lookup_table`, `sequence_ids`, `positions`,
      `row_offsets`, `cache_lengths`: as in ops/cache/addressing.py. The cache is written unless
      slots is "none".

    Queries and keys of each sequence:

    - `row_offsets` [B + 1]: the index of the first query of each sequence, and T at the end. If it
      is None, each of num_sequences sequences has the same number of queries.
    - `keys`, `key_offsets` [B + 1], `key_slots` [K], `lookup_table` [B, columns]: as in
      ops/mla/keys.py. Keys are read after the tokens of this call have been written. For
      keys="table", num_keys = key_offsets[B]. With keys="table" and slots="ragged", key_offsets
      must leave a sequence with new tokens enough rows for all its keys, cached and new.
    - `key_lengths` [B]: keys from this index on are not visible.
    - `positions` [T] or [T / B] (the same for every sequence): the position p of each query.
      Without it, query i of sequence b has the position cache_lengths[b] + i, or i if cache_lengths
      is None too. The position of a key is its index j among the keys of its sequence.
    - `mask`: "causal" (j <= p), "none", "sliding_window" (p - window < j <= p) or "chunked" (j <= p
      and j // window == p // window).
    - `attn_mask` [B or 1, H or 1, T / B or 1, K / B]: it requires that all sequences have the same
      number of queries. A bool mask has True for a visible key. A mask of numbers (q's dtype or
      float32) is added to the scaled logits, and -inf hides a key. If a query attends to no key,
      its result is zeros.
    - `mask_blocks`: the result of `mask_blocks` for this attn_mask. If it is None, the call
      computes it.

    Norm, rotation and dtype:

    - `norm_weight`, `norm_eps`, `cos`, `sin`, `rope_style`, `rope_by_position`: as in
      `mla_latent_store`. `rope_on` says which tensors are rotated: "qk", "q" or "k".
    - `attention_dtype`: float8_e4m3fn, or None for q's dtype. With float8_e4m3fn, q, keys and
      values are divided by q_scale, k_scale and v_scale and rounded to float8, saturating. The
      softmax weights, times a power of two, are rounded to float8 as well.

    Bad values (offsets, slots, pages, positions) raise ArgumentError before anything is written. If
    they are on a GPU, they are checked only with TILEWRIGHT_DEBUG=1.
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
        """L and R, the widths of the two parts of a cache entry."""
        return self.kv_b_weight.shape[1], widths(self)[1]


@dataclass(frozen=True)
class MlaBranchArguments:
    """The arguments of `mla_prefill_branch_fp8`, for T new tokens of B sequences and H heads. N, R
    and V are the widths of a head's unrotated part, rotated part and values. L is the rank of
    latents, and C the number of chunks.

    - `q` [T, H, N + R]: the unrotated columns come first, and nothing has been rotated yet. The
      dtype is bf16, fp16, fp32 or fp64, and the last dimension is contiguous.
    - `latents` [T, L + R] of q's dtype: the entries of the new tokens, as their projection returns
      them.
    - `input_row_offsets` [B + 1], `cache_lengths` [B] (the number of tokens that were in the cache
      before this call) and `lookup_table` [B, columns]: uint32, int32 or int64, as in
      `fused_qkv_matmul_kv_cache_paged_ragged`. A sequence without new tokens is skipped.
    - `freqs_cis` [positions, R] of q's dtype or float32: cos and sin of each pair, alternating.
    - `rope_style`: "interleaved", "half" or "interleaved_to_half", for q and the cache.
    - `kv_norm_gamma` [L] of q's dtype or float32.
    - `blocks` [P, 1, layers, page_size, 1, L + R] of q's dtype, with any strides. It is written at
      layer_idx.
    - `scale`: multiplies the logits.
    - `epsilon`: the epsilon of the norm.
    - `buffer_row_offsets` [B + 1] or [C, B + 1]: the offsets of the rows that the keys of each
      sequence take in a chunk.
    - `cache_offsets` [B or B + 1] or [C, ..]: the position of the first key of each sequence in the
      chunk.
    - `buffer_length`: the number of rows of each chunk, as C integers; -1 for a chunk without keys.

    `mla_prefill_plan` returns buffer_row_offsets, cache_offsets and buffer_length. The chunks of a
    sequence are adjacent, begin at position 0 and have all its keys. Rows past the keys are not
    visible. If all lengths are less than 1, nothing is written and the result is zeros.

    - `kv_b_proj` [H * (N + V), L] float8_e4m3fn, `kv_b_proj_scale` [ceil(rows / g), ceil(L / g)]
      float32, for blocks of granularity g = 128 or 64. V = v_dim.
    - `mask`, `window`, `attention_dtype`, `q_scale`, `k_scale`, `v_scale`: as in `mla_prefill`.

    Raises ArgumentError before anything is written if a layer, granularity, shape, dtype or device
    is wrong. Also raises ArgumentError for offsets that contradict each other, a buffer that is
    shorter than the keys, pages outside the pool, and positions past freqs_cis or past the table.
    If these values are on a GPU, they are checked only with TILEWRIGHT_DEBUG=1.
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
    """A base class that puts v_dim before the arguments of a batch in the schema."""

    v_dim: SymInt


@dataclass(frozen=True)
class MlaDecodeArguments(BatchArguments, _Width):
    """The arguments of `mla_decode`, for T queries of B sequences and H heads. N, R and V are the
    widths of a head's unrotated part, rotated part and values. L is the rank of latents.

    - `q` [T, H, N + R]: the unrotated columns come first, and the other columns are rotated. The
      dtype is bf16, fp16, fp32 or fp64, and the last dimension is contiguous.
    - `row_offsets` [B + 1]: the index of the first query of each sequence, and T at the end. If it
      is None, each of num_sequences sequences has the same number of queries.
    - `latent` [P, S, L], `rope_keys` [P, S, R]: the cache, normalised and rotated, of q's dtype. It
      may have any strides, but the last dimension is contiguous.
    - `block_table` [B, columns]: key j of sequence b is latent[block_table[b, j // S], j % S]. If
      it is None, key j of sequence b is latent[b, j], and P = B.
    - `kv_b_weight` [H * (N + V), L]: for each head, N rows of keys (W_UK) and V = v_dim rows of
      values (W_UV). It has q's dtype, or has codes.
    - `weight_format`, `kv_b_scale`, `kv_b_zero`, `kv_b_factor`, `zero_point`, `scale_block`,
      `nibble_order`: the fields of a Weight of one head of H * (N + V) rows.
    - `v_weight` [H, V, L]: if it is given, it is W_UV, and kv_b_weight is W_UK alone, [H, N, L].
      Both have q's dtype and any strides.
    - `key_lengths`, `positions`, `cache_lengths`, `mask`, `window`, `attn_mask`, `mask_blocks`:
      which keys a query attends to, as in `cache_attention`.
    - `round_latents`: whether latents are rounded to the numbers that e4m3 codes stand for before
      they are used. The cache is not changed.
    - `latent_group`, `latent_zero_scale`, `latent_least`, `latent_least_divisor`: the RowRounding
      of a latent, whose scales are float32.

    If a query attends to no key, its result is zeros. Keys that no query attends to may have any
    values, even NaN. Bad offsets, lengths and pages raise ArgumentError. If they are on a GPU, they
    are checked only with TILEWRIGHT_DEBUG=1. Without this check, queries do not attend to a key on
    a page that does not exist.
    """

    q: torch.Tensor
    latent: torch.Tensor
    rope_keys: torch.Tensor
    kv_b_weight: torch.Tensor
    _: KW_ONLY
    v_weight: torch.Tensor | None = None
    weight_format: str = "dense"
    kv_b_scale: torch.Tensor | None = None
    kv_b_zero: torch.Tensor | None = None
    kv_b_factor: torch.Tensor | None = None
    zero_point: int = 0
    scale_block: Sequence[int] = ()
    nibble_order: Sequence[int] = ()
    round_latents: bool = False
    latent_group: int = 0
    latent_zero_scale: float = 0.0
    latent_least: float = 0.0
    latent_least_divisor: float = 0.0

    kv_b = Group(
        Weight,
        data="kv_b_weight",
        scale="kv_b_scale",
        zero="kv_b_zero",
        factor="kv_b_factor",
    )
    latent_rounding = Group(
        RowRounding,
        group="latent_group",
        zero_scale="latent_zero_scale",
        least="latent_least",
        least_divisor="latent_least_divisor",
    )


@dataclass(frozen=True)
class UpWeight:
    """The arguments of a call that belong to the up-projection: its weight [H * (N + V), L], the
    scales of the weight, and q."""

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
    """Returns N, R and V, the widths of a head's unrotated part, rotated part and values."""
    shape = a.kv_b.shape if isinstance(a, MlaDecodeArguments) else a.kv_b_weight.shape
    nope = shape[1] if len(shape) == 3 else shape[0] // a.q.shape[1] - a.v_dim
    return nope, a.q.shape[2] - nope, a.v_dim


def halves(a: MlaDecodeArguments, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (W_UK [H, N, L], W_UV [H, V, L]). weight: kv_b_weight, after dequantisation."""
    if a.v_weight is not None:
        return weight, a.v_weight
    nope, _, v_dim = widths(a)
    per_head = weight.unflatten(0, (a.q.shape[1], nope + v_dim))
    return per_head[:, :nope], per_head[:, nope:]
