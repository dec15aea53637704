"""The references of `mla_prefill` and `mla_decode` in plain PyTorch, in fp32, or in float64 for
float64 q."""

from __future__ import annotations

import torch

from tilewright.ops.attention.arguments import as_attention
from tilewright.ops.attention.positions import positions_of, sequences
from tilewright.ops.attention.reference import attend_by_sequence, attention_reference
from tilewright.ops.checks import given
from tilewright.ops.contract import rounded_once
from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.fp8 import saturating_cast
from tilewright.ops.formats.weight import scale_numbers
from tilewright.ops.mla.arguments import (
    FP8,
    MlaDecodeArguments,
    MlaPrefillArguments,
    UpArguments,
    halves,
    rotates_queries,
    widths,
)
from tilewright.ops.mla.keys import gathered_keys, key_places
from tilewright.ops.mla.latents.reference import finished_latents, write_latents

# The allowed difference between the result of a kernel and the reference.
TOLERANCES = rounded_once(3 * 2.0**-6, 3 * 2.0**-9, 2.0**-17, 2.0**-44)


def prefill_reference(a: MlaPrefillArguments) -> torch.Tensor:
    """Writes the new latents to the cache, if there is one, and returns the attention [T, H, V]."""
    positions = positions_of(a)
    latent, k_rope = a.latent, a.k_rope
    if latent is not None:
        by_position = positions if a.rope_by_position else None
        latent, k_rope = finished_latents(a, by_position)
        if a.slots != "none":
            write_latents(a, latent, k_rope)
    if a.keys != "given":
        latent, k_rope = gathered_keys(a)
    out = a.q.new_zeros((a.q.shape[0], a.q.shape[1], a.v_dim))
    q = _queries(a, positions)
    owner, _ = key_places(a)
    weight, latent = up_weight(a, q.dtype), _key_latents(a, given(latent), q.dtype)
    rows = [(owner == b).nonzero().flatten() for b in range(sequences(a))]

    def keys(b: int, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = rows[b][used]
        kv, rope = _up_projected(a, latent[own], weight), given(k_rope)[own].to(q.dtype)
        k, v = kv.split((widths(a)[0], a.v_dim), dim=-1)
        k = torch.cat((k, rope.unsqueeze(1).expand(-1, kv.shape[1], -1)), dim=-1)
        return _rounded(a, k, a.k_scale), _rounded(a, v, a.v_scale)

    counts = [own.numel() for own in rows]
    return attend_by_sequence(a, _rounded(a, q, a.q_scale), out, counts, keys)


def decode_reference(a: MlaDecodeArguments) -> torch.Tensor:
    """Returns the attention [T, H, V]."""
    nope = widths(a)[0]
    q = a.q.to(torch.promote_types(a.q.dtype, torch.float32))
    k_weight, v_weight = halves(a, _numbers(a, q.dtype))
    q_latent = torch.einsum("thn,hnl->thl", q[..., :nope], k_weight)
    latent, rope_keys = a.latent, a.rope_keys
    if a.round_latents:
        latent = a.latent_rounding.decoded(latent, q.dtype)
        rope_keys = rope_keys.to(q.dtype)
    keys = torch.cat((latent, rope_keys), dim=-1)
    call = as_attention(a, torch.cat((q_latent, q[..., nope:]), dim=-1), keys)
    latents = attention_reference(call)[..., : a.latent.shape[2]]
    out = torch.einsum("thl,hvl->thv", latents, v_weight.to(q.dtype))
    return out.to(a.q.dtype).contiguous()


def _queries(a: MlaPrefillArguments, positions: torch.Tensor) -> torch.Tensor:
    """Returns the rotated queries [T, H, N + R], in the precision of the computation."""
    q = a.q.to(torch.promote_types(a.q.dtype, torch.float32))
    if not rotates_queries(a):
        return q
    nope = widths(a)[0]
    turned = a.rope.apply(q[..., nope:], positions if a.rope_by_position else None)
    return torch.cat((q[..., :nope], turned), dim=-1)


def up_weight(a: MlaPrefillArguments, compute: torch.dtype) -> torch.Tensor:
    """Returns kv_b_weight, dequantised. If latents are not quantised, the weight is rounded to q's
    dtype."""
    numbers = _numbers(a, compute)
    if a.quantize_latent or a.latent_scale is not None or a.kv_b_scale is None:
        return numbers
    return numbers.to(a.q.dtype).to(compute)


def _numbers(a: UpArguments, compute: torch.dtype) -> torch.Tensor:
    """Returns kv_b_weight, dequantised if it has codes."""
    if isinstance(a, MlaDecodeArguments):
        return a.kv_b.dequantize(compute)
    if a.kv_b_scale is None:
        return a.kv_b_weight.to(compute)
    block = (a.scale_block[0], a.scale_block[1])
    scale = scale_numbers(a.kv_b_scale, torch.promote_types(compute, torch.float32))
    return fp8_block.dequantize(a.kv_b_weight, scale, block, compute)


def _key_latents(
    a: MlaPrefillArguments, latent: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """Returns the latents of all keys, [K, L]. If the call quantises latents, they are quantised
    and dequantised."""
    if not a.quantize_latent and a.latent_scale is None:
        return latent.to(compute)
    codes, scales, block = latent, a.latent_scale, a.scale_block[1]
    if scales is None:
        codes, scales = fp8_block.quantize_rows(latent, block, a.latent_scale_cap or float("inf"))
    return fp8_block.dequantize(codes, scales, (1, block), compute)


def _up_projected(
    a: MlaPrefillArguments, latent: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Returns keys and values [K, H, N + V] in the precision of the computation, after rounding to
    q's dtype."""
    compute = weight.dtype
    kv = latent @ weight.T
    if a.attention_dtype != FP8:
        kv = kv.to(a.q.dtype).to(compute)
    return kv.unflatten(-1, (a.q.shape[1], -1))


def _rounded(a: MlaPrefillArguments, x: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns x, in its own dtype, rounded as the 8-bit attention kernel reads it. If the call does
    not use this kernel, returns x itself."""
    return x if a.attention_dtype != FP8 else saturating_cast(x / scale, FP8).to(x.dtype) * scale
