"""The arguments of the attention ops: projection, rotation and cache write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from tilewright.ops.formats.activation_codes import ACTIVATION_CODES
from tilewright.ops.formats.weight import Weight
from tilewright.ops.groups import Group, OptionalGroup, prefixed
from tilewright.ops.reference.norm import HeadNorm, RowNorm
from tilewright.ops.reference.rope import Rope
from tilewright.ops.schema import SymInt, Written

LETTERS = "qkv"
#: The weights of q, k and v.
Projections: TypeAlias = tuple[Weight, Weight, Weight | None]


def _of_weight(letter: str) -> dict[str, str]:
    """Returns the names of the arguments that are the fields of a projection's weight."""
    fields = {name: f"{letter}_{name}" for name in ("scale", "zero", "bias")}
    place = LETTERS.index(letter)
    return {"data": f"{letter}_weight", **fields, "factor": f"factors[{place}]"}


@dataclass(frozen=True)
class FusedQkvArguments:
    """The arguments of `fused_qkv_paged`, for T tokens, K hidden columns and D = head_dim. A
    projection has N = H * D rows. "Values" are numbers of x's dtype, or of `out_dtype` if that is
    given.

    The projection:

    - `x` [T, K], with a contiguous last dimension: values, or float8_e4m3fn codes. Codes require
      weight_format="fp8" and out_dtype; x_scale is then [T or 1, 1 or ceil(K / 128)], or None for
      1.
    - `q_weight` [Hq, D, K], or [Hkv, G, D, K] if the q heads of a group are stored next to other
      heads.
    - `k_weight`, `v_weight` [Hkv, D, K]. If v_weight is None, only K is computed and written. Dense
      weights have K or D contiguous; their other strides may have any value.
    - `q_bias`, `k_bias`, `v_bias` [H, D], or [Hkv, G, D] for a grouped q. Biases and other
      parameters are values or float32.
    - `weight_format`, `scale_block`, `zero_point`, `nibble_order`, and a scale and a zero of each
      weight: the fields of a Weight.
    - `factors`: the factors of q, k and v, in this order: float32 [3], or [2] if there is no
      v_weight.
    - `gate_run`: if it is not 0, the Hq heads alternate between gate_run queries and gate_run gates
      (1 if each query is followed by its gate). Gates are only projected and clipped. If gate_run
      is 0, all heads are queries.
    - `delta` [T, N_q + N_k + N_v], with a contiguous last dimension, values or float32: added to
      the projections. It has the columns of q, then k, then v, like the packed result of
      `lora_expand_add`.
    - `clip`: if it is not 0, values are clamped to [-clip, clip] after bias and delta.

    Norms and rotation:

    - `input_rms_norm`, `input_layer_norm`, `input_norm_weight`, `input_norm_bias`,
      `input_norm_eps`, `input_norm_offset`: a RowNorm of x before the projection. It requires that
      x has no codes.
    - `q_norm_weight`, `q_norm_bias`: a HeadNorm of q. `k_norm_weight`, `k_norm_bias`: a HeadNorm of
      k. The two norms share all other fields.
    - `v_norm`: whether v is normalised too, without a weight. It cannot be combined with gates.
    - `cos`, `sin` [T_rope, R] or [T_rope, R / 2] with R = rotary_dim: the tables of the rotation.
      `apply_rope` explains them and `rope_style`.

    The cache:

    - `k_cache`, `v_cache`: the base tensors, which are written. They hold values, or have the dtype
      float8_e4m3fn or float8_e5m2. If v_cache is None, V is in k_cache too.
    - `k_window`, `v_window`: the nine integers of a CacheWindow on the base, with Hkv * kv_repeat
      heads. Head h is written to kv_repeat heads, starting at h * kv_repeat.
    - `k_cache_scale`, `v_cache_scale`: float32 [], [1] or [Hkv]. The stored number is value /
      scale, or value * scale with cache_scale_multiplies.
    - `cache_saturates`: if it is True, a number outside the range of an 8-bit float is stored as
      the largest number. If not, it is stored as infinity, or NaN in float8_e4m3fn, like PyTorch's
      cast.
    - `slots`, `indexing`, `slot_mapping` [T] or [T / num_pages], `lookup_table` [B, columns],
      `sequence_ids` and `positions` [T], `row_offsets` [B + 1], `cache_lengths` [B]: as in
      `ops.cache.addressing`. They are int32 or int64, and for slots="ragged" also uint32.

    Other options:

    - `static_tokens`: T is a constant of the caller's graph, so that a kernel may be built for this
      T alone.
    - `tune`: whether to measure the lowerings on the GPU when they are first needed.

    Bad values are slots, sequences, positions, offsets and pages that give a token no place, or
    give two tokens the same place. Bad values raise ArgumentError before anything is written. If
    they are on a GPU, they are checked only with TILEWRIGHT_DEBUG=1. Without this check, a token
    without a place is not written. Scales may be any numbers; the results follow IEEE 754.
    """

    x: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    v_weight: torch.Tensor | None
    k_cache: Written
    v_cache: Written | None
    slot_mapping: torch.Tensor | None
    k_window: Sequence[SymInt]
    v_window: Sequence[SymInt]
    _: KW_ONLY
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    delta: torch.Tensor | None = None
    q_norm_weight: torch.Tensor | None = None
    k_norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-06
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rotary_dim: int = 0
    rope_style: str = "none"
    slots: str = "flat"
    indexing: str = "paged"
    static_tokens: bool = False
    kv_repeat: int = 1
    gate_run: int = 0
    clip: float = 0.0
    weightless_norm: bool = False
    norm_kind: str = "rms"
    norm_width: str = "head"
    norm_after_rope: bool = False
    norm_offset: float = 0.0
    q_norm_bias: torch.Tensor | None = None
    k_norm_bias: torch.Tensor | None = None
    v_norm: bool = False
    weight_format: str = "dense"
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_zero: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None
    zero_point: int = 0
    scale_block: Sequence[int] = ()
    nibble_order: Sequence[int] = ()
    x_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    k_cache_scale: torch.Tensor | None = None
    v_cache_scale: torch.Tensor | None = None
    cache_scale_multiplies: bool = False
    cache_saturates: bool = True
    lookup_table: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None
    tune: bool = False
    input_rms_norm: bool = False
    input_norm_weight: torch.Tensor | None = None
    input_norm_eps: float = 1e-06
    input_norm_offset: float = 0.0
    input_layer_norm: bool = False
    input_norm_bias: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    q_projection = Group(Weight, **_of_weight("q"))
    k_projection = Group(Weight, **_of_weight("k"))
    v_projection = OptionalGroup(Weight, **_of_weight("v"))
    q_norm = Group(HeadNorm, weight="q_norm_weight", bias="q_norm_bias")
    k_norm = Group(HeadNorm, weight="k_norm_weight", bias="k_norm_bias")
    input_norm = Group(RowNorm, **prefixed("input_", RowNorm))
    rope = Group(Rope)

    @property
    def projections(self) -> Projections:
        """The weights of q, k and v."""
        return self.q_projection, self.k_projection, self.v_projection

    @property
    def is_coded(self) -> bool:
        """Whether the weights are quantised."""
        return self.weight_format != "dense"

    @property
    def head_dim(self) -> Any:
        """D, the number of columns of a head."""
        return self.q_projection.shape[-2] if self.is_coded else self.q_weight.shape[-2]

    @property
    def num_heads(self) -> Any:
        """Hq, the number of q heads of all groups together."""
        return prod(self.q_weight.shape[:-2])

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of q, and of all values that are not codes."""
        return self.out_dtype if self.has_codes and self.out_dtype else self.x.dtype

    @property
    def has_codes(self) -> bool:
        """Whether x has codes."""
        return self.x.dtype == ACTIVATION_CODES


@dataclass(frozen=True)
class KvStoreArguments:
    """The arguments of `paged_kv_store`, for T tokens and D = head_dim.

    - `k`, `v` [T, Hkv, D], with any strides. If v is None, only K is written, v_cache is None and
      v_window is not read.

    FusedQkvArguments (`fused_qkv_paged`) explains the other arguments.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_cache: Written
    v_cache: Written | None
    slot_mapping: torch.Tensor | None
    k_window: Sequence[SymInt]
    v_window: Sequence[SymInt]
    _: KW_ONLY
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rotary_dim: int = 0
    rope_style: str = "none"
    slots: str = "flat"
    indexing: str = "paged"
    static_tokens: bool = False
    k_cache_scale: torch.Tensor | None = None
    v_cache_scale: torch.Tensor | None = None
    cache_scale_multiplies: bool = False
    cache_saturates: bool = True
    lookup_table: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    row_offsets: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None

    rope = Group(Rope)


@dataclass(frozen=True)
class RaggedQkvArguments:
    """The arguments of `fused_qkv_matmul_kv_cache_paged_ragged`, for T tokens of B sequences and K
    hidden columns.

    - `hidden_state` [T, K]: the new tokens of the sequences, one sequence after another. The dtype
      is bf16, fp16, fp32 or fp64, or float8_e4m3fn with input_scale and out_dtype (bf16, fp16 or
      fp32).
    - `input_row_offsets` [B + 1]: where each sequence starts, from 0 to T. Equal neighbours mean a
      sequence without new tokens.
    - `cache_lengths` [B]: the number of tokens that each sequence already has in the cache.
    - `lookup_table` [B, columns]: entry [b, j] is the page of sequence b that holds its tokens from
      j * page_size to (j + 1) * page_size - 1. Entries that no new token needs may have any values.

    The dtype of input_row_offsets, cache_lengths and lookup_table is uint32, int32 or int64. Token
    i of sequence b is written to page lookup_table[b, p // page_size], slot p % page_size, with p =
    cache_lengths[b] + i.

    - `blocks` [P, 2, layers, page_size, heads, head_dim], with any strides: the cache, written at
      layer_idx. K is at index 0 of the second axis and V at index 1. If the second axis has length
      1 (MLA), all columns past q_dim are K, for head 0. The dtype is the result's, float8_e4m3fn or
      float8_e5m2 (not for fp64). Values outside the range of an 8-bit float become its largest
      number.
    - `k_cache_scale`, `v_cache_scale` float32 [], [1] or [heads]: the stored number is value /
      scale, or value * scale with cache_scale_multiplies.
    - `weight`: N = q_dim + 2 * heads * head_dim rows (for MLA, q_dim + head_dim) of Q, K and V, in
      this order. It has one of three forms:
        - [N, K] of hidden_state's dtype, with either dimension contiguous.
        - [N, K] float8_e4m3fn with weight_scale [1, 1] (per tensor), [N, 1] (per channel) or
          [ceil(N / 128), ceil(K / 128)] (blocks). If hidden_state is float8 too, input_scale is
          [1, 1], [T, 1] or [T, ceil(K / 128)]. A scale per tensor may be [] or [1].
        - uint8 [R, N] with group_size: GPTQ's int4 as in `formats.gptq_buffer`, contiguous. It is
          symmetric (zero point 8) or, with has_zp, has the actual zero points; files of GPTQ v1
          store each zero point minus one.
    - `bias` [N]: has the result's dtype or float32.
    - `static_tokens`, `tune`: as in FusedQkvArguments.

    Raises ArgumentError before anything is written if layer_idx is not a layer, a scale has another
    granularity, the group does not divide K, or a shape, dtype or device is wrong. Also raises
    ArgumentError for offsets that do not start at 0, that decrease, or that do not end at T; for
    positions past the table; for pages outside the pool; and for two tokens with the same slot. If
    these values are on a GPU, they are checked only with TILEWRIGHT_DEBUG=1.
    """

    hidden_state: torch.Tensor
    input_row_offsets: torch.Tensor
    weight: torch.Tensor
    blocks: Written
    cache_lengths: torch.Tensor
    lookup_table: torch.Tensor
    layer_idx: int
    _: KW_ONLY
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    group_size: int = 0
    has_zp: bool = False
    k_cache_scale: torch.Tensor | None = None
    v_cache_scale: torch.Tensor | None = None
    cache_scale_multiplies: bool = False
    static_tokens: bool = False
    tune: bool = False
