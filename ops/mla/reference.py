"""What `mla_prefill` and `mla_decode` mean, in plain PyTorch; fp32, or float64 where q is."""

from __future__ import annotations

import torch

from tilewright.ops.attention.arguments import as_attention
from tilewright.ops.attention.masks import mask_numbers, visible
from tilewright.ops.attention.positions import positions_of, sequences, token_sequences
from tilewright.ops.attention.reference import attend, attention_reference
from tilewright.ops.checks import given
from tilewright.ops.contract import rounded_once
from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.fp8 import saturating_cast
from tilewright.ops.mla.arguments import (
    FP8,
    MlaDecodeArguments,
    MlaPrefillArguments,
    UpArguments,
    halves,
    widths,
)
from tilewright.ops.mla.keys import gathered_keys, key_places
from tilewright.ops.mla.latents.reference import finished_latents, rotated, write_latents

# How far a kernel may be from it.
TOLERANCES = rounded_once(3 * 2.0**-6, 3 * 2.0**-9, 2.0**-17, 2.0**-44)


def prefill_reference(a: MlaPrefillArguments) -> torch.Tensor:
    """[T, H, V]; writes the new latents into the cache first, where there is one."""
    positions = positions_of(a)
    latent, k_rope = a.latent, a.k_rope
    if latent is not None:
        by_position = positions if a.rope_by_position else None
        rotates = "k" in a.rope_on
        latent, k_rope = finished_latents(a, by_position, rotates=rotates)
        if a.slots != "none":
            write_latents(a, latent, k_rope)
    if a.keys != "given":
        latent, k_rope = gathered_keys(a)
    out = a.q.new_zeros((a.q.shape[0], a.q.shape[1], a.v_dim))
    if out.numel() == 0:
        return out
    q = _queries(a, positions)
    key_sequence, key_position = key_places(a)
    sequence, _ = token_sequences(a.q.shape[0], a.row_offsets, a.num_sequences, a.q.device)
    lengths = None if a.key_lengths is None else a.key_lengths.to(torch.int64)
    weight, latent = up_weight(a, q.dtype), _key_latents(a, given(latent), q.dtype)
    for b in range(sequences(a)):
        queries, keys = sequence == b, key_sequence == b
        limit = None if lengths is None else lengths[b]
        seen = visible(a, positions[queries], key_position[keys], limit)
        # Keys that no query may see are not looked at: their rows may hold anything.
        used = int(seen.any(0).nonzero().max()) + 1 if bool(seen.any()) else 0
        rows = keys.nonzero().flatten()[:used]
        kv = _up_projected(a, latent[rows], weight)
        bias = None if a.attn_mask is None else mask_numbers(a.attn_mask, b, used, q.dtype)
        out[queries] = _attention(a, q[queries], kv, given(k_rope)[rows], seen[:, :used], bias)
    return out


def decode_reference(a: MlaDecodeArguments) -> torch.Tensor:
    """[T, H, V]."""
    nope = widths(a)[0]
    q = a.q.to(torch.promote_types(a.q.dtype, torch.float32))
    k_weight, v_weight = halves(a, dense_weight(a, q.dtype))
    q_latent = torch.einsum("thn,hnl->thl", q[..., :nope], k_weight)
    keys = torch.cat((a.latent, a.rope_keys), dim=-1)
    call = as_attention(a, torch.cat((q_latent, q[..., nope:]), dim=-1), keys)
    latents = attention_reference(call)[..., : a.latent.shape[2]]
    out = torch.einsum("thl,hvl->thv", latents, v_weight.to(q.dtype))
    return out.to(a.q.dtype).contiguous()


def _queries(a: MlaPrefillArguments, positions: torch.Tensor) -> torch.Tensor:
    """[T, H, N + R] in compute precision, rotated."""
    q = a.q.to(torch.promote_types(a.q.dtype, torch.float32))
    if a.rope_style == "none" or "q" not in a.rope_on:
        return q
    nope = widths(a)[0]
    turned = rotated(a, q[..., nope:], positions if a.rope_by_position else None)
    return torch.cat((q[..., :nope], turned), dim=-1)


def up_weight(a: MlaPrefillArguments, compute: torch.dtype) -> torch.Tensor:
    """kv_b_weight, dequantised; rounded to q's dtype then, where latents are not quantised."""
    if a.quantize_latent or a.latent_scale is not None:
        return _dequantized(a, compute)
    return dense_weight(a, compute)


def dense_weight(a: UpArguments, compute: torch.dtype) -> torch.Tensor:
    """kv_b_weight, rounded to q's dtype where it has codes."""
    if a.kv_b_scale is None:
        return a.kv_b_weight.to(compute)
    return _dequantized(a, compute).to(a.q.dtype).to(compute)


def _dequantized(a: UpArguments, compute: torch.dtype) -> torch.Tensor:
    block = (a.scale_block[0], a.scale_block[1])
    return fp8_block.dequantize(a.kv_b_weight, given(a.kv_b_scale), block, compute)


def _key_latents(
    a: MlaPrefillArguments, latent: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """The latents of all keys, [K, L]; quantised where they are to be, and dequantised."""
    if not a.quantize_latent and a.latent_scale is None:
        return latent.to(compute)
    codes, scales, block = latent, a.latent_scale, a.scale_block[1]
    if scales is None:
        codes, scales = fp8_block.quantize_rows(latent, block, a.latent_scale_cap or float("inf"))
    return fp8_block.dequantize(codes, scales, (1, block), compute)


def _up_projected(
    a: MlaPrefillArguments, latent: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """[K, H, N + V] in compute precision, rounded to q's dtype on the way."""
    compute = weight.dtype
    kv = latent @ weight.T
    if a.attention_dtype != FP8:
        kv = kv.to(a.q.dtype).to(compute)
    return kv.unflatten(-1, (a.q.shape[1], -1))


def _attention(
    a: MlaPrefillArguments,
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    seen: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """q [S, H, N + R], kv [K, H, N + V], k_rope [K, R], seen [S, K] -> [S, H, V]."""
    nope, heads = widths(a)[0], q.shape[1]
    rope = k_rope.to(q.dtype).unsqueeze(1).expand(-1, heads, -1)
    k, v = torch.cat((kv[..., :nope], rope), dim=-1), kv[..., nope:]
    if a.attention_dtype == FP8:
        q, k, v = (
            saturating_cast(x / scale, FP8).to(q.dtype) * scale
            for x, scale in ((q, a.q_scale), (k, a.k_scale), (v, a.v_scale))
        )
    return attend(q, k, v, seen[None], bias, a.scale).to(a.q.dtype)
