"""`mla_decode`: multi-head latent attention in its absorbed form, for few queries of a long cache.

The up-projection is multiplied into queries and results (DeepSeek-V2, 2024, section 2.1), not into
the keys: each is read once, as it lies in its cache, for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.attention.arguments import BatchArguments, present_of
from tilewright.ops.cache.read import CacheRead
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.mla.cases import DECODE_CASES
from tilewright.ops.mla.decode.checks import check_decode, check_decode_values, decode_obstacle
from tilewright.ops.mla.reference import TOLERANCES, decode_reference
from tilewright.ops.mla.samples import sample_decode
from tilewright.ops.sampling import sampler_of
from tilewright.ops.schema import SymInt

NAME = "mla_decode"
ERROR_MODEL = (
    "fp32 accumulation; queries times W_UK, a kernel's softmax weights and its sums of latents are "
    "rounded to the queries' dtype: errors of half a unit in the last place of the terms of each "
    "sum, measured against the rms of the output; then one rounding of the result"
)


@dataclass(frozen=True, kw_only=True)
class _Width:
    """A base of its own: the schema has v_dim before the arguments of a batch."""

    v_dim: SymInt


@dataclass(frozen=True)
class MlaDecodeArguments(BatchArguments, _Width):
    """The arguments of `mla_decode`: T queries of B sequences; H heads, N, R and V the widths of a
    head's unrotated part, rotated part and values, L the latent rank.

    q [T, H, N + R]: unrotated columns first, the others rotated; bf16, fp16, fp32 or fp64, last
    dimension contiguous. A sequence's queries: row_offsets [B + 1], or num_sequences equal runs.

    latent [P, S, L], rope_keys [P, S, R]: the cache, of q's dtype, any strides, last dimension
    contiguous; normed and rotated. block_table [B, columns]: key j of sequence b is
    latent[block_table[b, j // S], j % S]. None: it is latent[b, j], P = B.

    kv_b_weight [H * (N + V), L]: for each head N rows of keys, W_UK, and V = v_dim rows of values,
    W_UV. Of q's dtype, or float8_e4m3fn with kv_b_scale [ceil(rows / bn), ceil(L / bk)],
    scale_block = [bn, bk]: it is then rounded to q's dtype. With v_weight [H, V, L] it is W_UK
    alone, [H, N, L], and v_weight W_UV; both of q's dtype, any strides.

    key_lengths, positions, cache_lengths, mask, window, attn_mask, mask_blocks: which keys a query
    sees, as for `cache_attention`. A query that sees no key gives zeros. Keys that nobody sees may
    hold anything, NaN too. Bad values (offsets, lengths, pages) raise ArgumentError where they are
    on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; otherwise a key on a page outside the pool is
    not seen.
    """

    q: torch.Tensor
    latent: torch.Tensor
    rope_keys: torch.Tensor
    kv_b_weight: torch.Tensor
    _: KW_ONLY
    v_weight: torch.Tensor | None = None
    kv_b_scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()


def validate(a: MlaDecodeArguments) -> None:
    check_decode(NAME, a)


def validate_values(a: MlaDecodeArguments) -> None:
    check_decode_values(NAME, a)


def fake(a: MlaDecodeArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v_dim))


def reference(a: MlaDecodeArguments) -> torch.Tensor:
    """In fp32 (float64 for float64 q), the weight dequantised and rounded to q's dtype first:

        q_latent = q_nope @ W_UK[h]                          q's first N columns
        logits = scale * (q_latent | q_rope) @ (latent | rope_keys)^T + attn_mask
        o_latent = softmax(logits) @ latent                  -inf where the mask hides
        out = o_latent @ W_UV[h]^T                           rounded to q's dtype

    Latents that no query sees are not looked at.
    """
    return decode_reference(a)


def cache_read(a: MlaDecodeArguments) -> CacheRead:
    """What a call reads of latents and rope keys, each once for all heads."""
    token_bytes = sum(t.shape[2] * t.element_size() for t in (a.latent, a.rope_keys))
    return CacheRead(("latent", "rope_keys"), token_bytes, *present_of(a, a.latent))


sample_inputs = sampler_of(MlaDecodeArguments, sample_decode)

OP = register(
    FusedOp(
        name=NAME,
        arguments=MlaDecodeArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.mla.decode.lowering:decode_steps", decode_obstacle),
        ),
        cases=DECODE_CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        cache_read=cache_read,
    )
)


def mla_decode(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope_keys: torch.Tensor,
    kv_b_weight: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    """The op, called by hand: attention of q [T, H, N + R] to a cache of latents [P, S, L] and rope
    keys [P, S, R].

    Result [T, H, V] of q's dtype. Options: MlaDecodeArguments. Raises ArgumentError. Not
    differentiable.
    """
    return OP.torch_op(q, latent, rope_keys, kv_b_weight, v_dim=v_dim, scale=scale, **options)
