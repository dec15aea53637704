"""Cases for tests of the MLA ops. Together they use every option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.formats import AWQ_ORDER
from tilewright.ops.attention.cases import AttentionCase
from tilewright.ops.formats.sample_codes import CodedCase


@dataclass(frozen=True)
class LatentCase:
    """The part of a case that all MLA ops share: latents, their cache and their places.

    Attributes:
        name: The name of the case.
        new_tokens: The number of new tokens of each sequence.
        cached_tokens: The number of tokens of each sequence that are already in the cache.
        rank: The width of a latent.
        rope_dim: The width of a rope key.
        dtype: The dtype of the values.
        pool: The form of the cache: "joint" ([P, S, L + R]), "layers" (one layer of [P, 1, 3, S, 1,
            L + R]), "pair" (two pools) or "static" (two StaticCache tensors [B, 1, S, .], with a
            page for each sequence; all sequences have the same new_tokens and cached_tokens).
        num_pages: The number of pages of the cache.
        page_size: The number of tokens of a page.
        slots: The form in which the places of tokens are given, as in ops/cache/addressing.py.
        index_dtype: The dtype of indices.
        norm: Whether there is a norm.
        norm_dtype: The dtype of the weight of the norm.
        rope_style: The argument of the op; "none" if there is no rope.
        table_width: The width of the tables of cos and sin: the "full" rotated width, or "half" of
            it.
        by_position: Whether the tables have a row for each position, instead of a row for each
            token.
        magnitude: A factor by which the random values are multiplied.
    """

    name: str
    new_tokens: tuple[int, ...] = (3, 0, 9, 1)
    cached_tokens: tuple[int, ...] = (6, 3, 0, 8)
    rank: int = 64
    rope_dim: int = 16
    dtype: torch.dtype = torch.bfloat16
    pool: str = "joint"
    num_pages: int = 8
    page_size: int = 8
    slots: str = "ragged"
    index_dtype: torch.dtype = torch.int64
    norm: bool = True
    norm_dtype: torch.dtype | None = None
    rope_style: str = "interleaved"
    table_width: str = "half"
    by_position: bool = False
    magnitude: float = 1.0

    @property
    def num_tokens(self) -> int:
        return sum(self.new_tokens)


@dataclass(frozen=True)
class StoreCase(LatentCase):
    """One case of `mla_latent_store`."""


@dataclass(frozen=True)
class PrefillCase(LatentCase):
    """One case of `mla_prefill`.

    Attributes:
        num_heads: The number of heads.
        nope: The width of the unrotated part of a head.
        v_dim: The width of the values of a head.
        keys: Where the keys are, as in ops/mla/keys.py. With "given", there is no cache.
        runs: Whether all sequences have the same number of queries, and the call has no
            row_offsets.
        ragged_keys: Whether the call has key_offsets. If not, all slots of all pages in the table
            are keys.
        mask, window, rope_on, attention_dtype: The arguments of `mla_prefill`.
        attn_mask: "none", "bool" or "float".
        listed: Whether the list of blocks of the mask is passed.
        weight: "dense", "fp8" (dequantised), "quantized" (the latents are quantised too) or "codes"
            (the latents are passed as codes).
    """

    num_heads: int = 3
    nope: int = 32
    v_dim: int = 24
    keys: str = "table"
    runs: bool = False
    ragged_keys: bool = True
    mask: str = "causal"
    window: int = 0
    attn_mask: str = "none"
    listed: bool = False
    weight: str = "dense"
    rope_on: str = "qk"
    attention_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class BranchCase(PrefillCase):
    """One case of `mla_prefill_branch_fp8`. buffer_size: the number of rows of a chunk; 0 for one
    chunk with all keys."""

    rank: int = 128
    pool: str = "layers"
    weight: str = "quantized"
    by_position: bool = True
    buffer_size: int = 0
    buffer_pages: bool = False
    granularity: int = 128


@dataclass(frozen=True)
class PlanCase:
    """One case of `mla_prefill_plan`."""

    name: str
    new_tokens: tuple[int, ...] = (10, 30)
    cached_tokens: tuple[int, ...] = (0, 0)
    buffer_size: int = 32
    max_chunks: int = 16
    page_size: int = 1
    index_dtype: torch.dtype = torch.int64
    dtype: torch.dtype = torch.int32


@dataclass(frozen=True)
class DecodeCase(AttentionCase):
    """One case of `mla_decode`, with one head of keys.

    Attributes:
        joined: Whether latents and rope keys are columns of one cache.
        weight: "dense", "apart" (v_weight is given) or "fp8" (with a scale for each block).
        codes: How the weight is stored, if it has codes in another format. The values have the
            dtype of the case.
        rounding: The arguments for a rounding of latents, as pairs of a name and a value. It is
            empty if latents are not rounded.
    """

    num_heads: int = 16
    num_kv_heads: int = 1
    rank: int = 64
    rope_dim: int = 16
    nope: int = 32
    v_dim: int = 24
    joined: bool = False
    weight: str = "dense"
    codes: CodedCase | None = None
    rounding: tuple[tuple[str, Any], ...] = ()


def _rounded(group: int, **options: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the arguments for a rounding of latents with a scale for each `group` columns."""
    named = ((f"latent_{name}", value) for name, value in options.items())
    return ("round_latents", True), ("latent_group", group), *named


STORE_CASES = (
    StoreCase("joint"),
    StoreCase("layers", pool="layers", index_dtype=torch.uint32, by_position=True),
    StoreCase("pair", pool="pair", slots="flat", rope_style="half", table_width="full"),
    StoreCase("static", pool="static", slots="per_sequence", new_tokens=(3, 3),
              cached_tokens=(2, 2), rope_style="interleaved_to_half", table_width="full"),
    StoreCase("block_table", slots="block_table", dtype=torch.float16, norm_dtype=torch.float32),
    StoreCase("plain", norm=False, rope_style="none", dtype=torch.float32),
    StoreCase("odd", rank=40, rope_dim=6, rope_style="half", by_position=True),
    StoreCase("no_tokens", new_tokens=(0, 0), cached_tokens=(3, 0)),
    StoreCase("double", dtype=torch.float64),
)  # fmt: skip

PREFILL_CASES = (
    PrefillCase("paged"),
    PrefillCase("paged_uint", pool="layers", index_dtype=torch.uint32, by_position=True),
    PrefillCase("no_cache", keys="given", slots="none", runs=True, new_tokens=(7, 7),
                cached_tokens=(0, 0), rope_style="half", table_width="full"),
    PrefillCase("no_cache_ragged", keys="given", slots="none", cached_tokens=(0, 0, 0, 0)),
    PrefillCase("static_cache", keys="pages", pool="static", slots="per_sequence", runs=True,
                new_tokens=(5, 5), cached_tokens=(4, 4), page_size=16,
                rope_style="interleaved_to_half", table_width="full"),
    PrefillCase("static_bool_mask", keys="pages", pool="static", slots="per_sequence", runs=True,
                new_tokens=(5, 5), cached_tokens=(0, 0), page_size=8, mask="none",
                attn_mask="bool"),
    PrefillCase("static_float_mask", keys="pages", pool="static", slots="per_sequence", runs=True,
                new_tokens=(5, 5), cached_tokens=(2, 2), page_size=8, mask="none",
                attn_mask="float", dtype=torch.float16),
    PrefillCase("no_cache_listed", keys="given", slots="none", runs=True, new_tokens=(130, 130),
                cached_tokens=(0, 0), page_size=130, attn_mask="bool", listed=True),
    PrefillCase("key_slots", keys="slots", slots="flat", pool="pair"),
    PrefillCase("whole_table", keys="table", ragged_keys=False, slots="block_table", norm=False,
                rope_style="none"),
    PrefillCase("sliding_window", mask="sliding_window", window=4),
    PrefillCase("chunked", mask="chunked", window=5, dtype=torch.float32),
    PrefillCase("unmasked", mask="none", rope_on="q"),
    PrefillCase("fp8_weight", weight="fp8", rank=160),
    PrefillCase("quantized", weight="quantized", rank=128, magnitude=3000.0, norm=False),
    PrefillCase("codes", keys="given", slots="none", weight="codes", rank=128, norm=False,
                rope_on="q", cached_tokens=(0, 0, 0, 0)),
    PrefillCase("no_tokens", new_tokens=(0, 0), cached_tokens=(3, 0)),
    PrefillCase("no_sequences", new_tokens=(), cached_tokens=()),
    PrefillCase("double", dtype=torch.float64),
)  # fmt: skip

BRANCH_CASES = (
    BranchCase("plain"),
    BranchCase("uint", index_dtype=torch.uint32, rope_style="half"),
    BranchCase("chunks", buffer_size=8, index_dtype=torch.int32),
    BranchCase("page_chunks", buffer_size=16, buffer_pages=True, mask="sliding_window", window=6),
    BranchCase("fine_scales", granularity=64, rank=160, mask="chunked", window=4),
    BranchCase("large", magnitude=3000.0, dtype=torch.float16, mask="none"),
    BranchCase("no_tokens", new_tokens=(0, 0), cached_tokens=(3, 0)),
    BranchCase("no_sequences", new_tokens=(), cached_tokens=()),
    BranchCase("double", dtype=torch.float64),
)
PLAN_CASES = (
    PlanCase("tight"),
    PlanCase("pages", (160, 200), buffer_size=256, page_size=128, index_dtype=torch.uint32),
    PlanCase("cached", (0, 3, 9), (6, 0, 8), buffer_size=5, index_dtype=torch.int32),
    PlanCase("nothing", (), ()),
)

TENSOR_MASK: dict[str, Any] = {"mask": "none", "positions": "none"}
DECODE_CASES = (
    DecodeCase("decode"),
    DecodeCase("decode_joined", joined=True, pool="tokens"),
    DecodeCase("decode_masked", attn_mask="bool", **TENSOR_MASK),
    DecodeCase("decode_mask_of_heads", attn_mask="heads", num_heads=20, **TENSOR_MASK),
    DecodeCase("decode_padding", attn_mask="padding", **TENSOR_MASK),
    DecodeCase("decode_float_mask", attn_mask="float", dtype=torch.float16, **TENSOR_MASK),
    DecodeCase("decode_lowest_mask", attn_mask="lowest", num_heads=3, **TENSOR_MASK),
    DecodeCase("decode_window", mask="sliding_window", window=20, num_heads=40),
    DecodeCase("decode_chunked", mask="chunked", window=24),
    DecodeCase("decode_lengths", mask="none", lengths=True, positions="none"),
    DecodeCase("decode_many_heads", num_heads=128, rank=512, rope_dim=64, key_lengths=(9, 70),
               new_tokens=(1, 1)),
    DecodeCase("decode_odd_widths", rank=40, rope_dim=6, num_heads=20, positions="each"),
    DecodeCase("decode_fp8", weight="fp8", rank=160),
    DecodeCase("decode_weights_apart", weight="apart"),
    DecodeCase("int4", codes=CodedCase(weight_format="int4_k", scale_block=(1, 32), zero_point=8)),
    DecodeCase("int4_rows", dtype=torch.float16,
               codes=CodedCase(weight_format="int4_n", scale_block=(1, 16), nibble_order=AWQ_ORDER,
                               zeros="packed")),
    DecodeCase("int8", rank=40, codes=CodedCase(weight_format="int8", scale_block=(1, 40))),
    DecodeCase("nvfp4", codes=CodedCase(weight_format="nvfp4", scale_block=(1, 16), factor=True,
                                        words=torch.uint8)),
    DecodeCase("rounded", weight="fp8", rank=256, rounding=_rounded(128, least_divisor=1e-12)),
    DecodeCase("rounded_rows", rank=96, rounding=_rounded(0, zero_scale=2.0**-8)),
    DecodeCase("rounded_pages", pool="paged", joined=True, rank=160, lengths=True, mask="none",
               positions="none", dtype=torch.float16, rounding=_rounded(32, least=1e-4)),
    DecodeCase("rounded_masked", attn_mask="bool", rank=128, **TENSOR_MASK,
               rounding=_rounded(64)),
    DecodeCase("paged", pool="paged", joined=True, lengths=True, mask="none", positions="none",
               index_dtype=torch.int32),
    DecodeCase("paged_window", pool="paged", mask="sliding_window", window=17),
    DecodeCase("several_tokens", new_tokens=(3, 3, 3), num_heads=20),
    DecodeCase("several_tokens_masked", new_tokens=(4, 4, 4), attn_mask="bool", **TENSOR_MASK),
    DecodeCase("several_ragged", new_tokens=(3, 0, 6), key_lengths=(37, 4, 70), ragged=True,
               pool="paged", lengths=True),
    DecodeCase("shared_positions", new_tokens=(2, 2, 2), key_lengths=(9, 9, 9),
               positions="shared"),
    DecodeCase("no_tokens", new_tokens=(0, 0), key_lengths=(4, 9)),
    DecodeCase("single_precision", dtype=torch.float32),
    DecodeCase("double", dtype=torch.float64, new_tokens=(2, 2, 2)),
)  # fmt: skip
