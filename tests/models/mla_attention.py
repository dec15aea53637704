"""Attention to expanded latent keys and values, in the spellings of engines.

Each function takes q [T, H, n + r], keys [K, H, n + r], values [K, H, v], positions [T] and a
scale, and returns [T, H, v]. Query t sees the keys up to its position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def seen(keys, positions):
    return torch.arange(keys.shape[0], device=keys.device) <= positions[:, None]


def masked(q, keys, values, positions, scale):
    """Attends in one sequence as a batch of one, with a mask computed from positions."""
    q, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, keys, values))
    mask = seen(keys[0, 0], positions)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)


def masked_float(q, keys, values, positions, scale):
    """Uses a mask of numbers that is added."""
    mask = torch.zeros(q.shape[0], keys.shape[0], dtype=q.dtype, device=q.device)
    mask = mask.masked_fill(~seen(keys, positions), -1e4)
    q, keys, values = (t.transpose(0, 1) for t in (q, keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.transpose(0, 1)


def causal(q, keys, values, positions, scale):
    """Attends to the new tokens only."""
    q, keys, values = (t.permute(1, 0, 2)[None] for t in (q, keys[: len(q)], values[: len(q)]))
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale)
    return out.squeeze(0).permute(1, 0, 2)


def causal_later(q, keys, values, positions, scale):
    """Attends with queries that are the last tokens, so that the causal mask ends at the last
    key."""
    return causal(q, keys[-len(q) :], values[-len(q) :], positions, scale)


def unmasked(q, keys, values, positions, scale):
    q, keys, values = (t.transpose(0, 1) for t in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, scale=scale).transpose(0, 1)


def default_scale(q, keys, values, positions, scale):
    q, keys, values = (t.transpose(0, 1) for t in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, seen(keys[0], positions)).transpose(0, 1)


def eager(q, keys, values, positions, scale):
    """Computes a softmax in fp32 between two products."""
    q, keys, values = (t.transpose(0, 1) for t in (q, keys, values))
    scores = torch.matmul(q, keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~seen(keys[0], positions), float("-inf"))
    weights = F.softmax(scores, dim=-1, dtype=wide(q)).to(q.dtype)
    return torch.matmul(weights, values).transpose(0, 1)


def einsum(q, keys, values, positions, scale):
    scores = torch.einsum("thd,khd->htk", q, keys) * scale
    scores = scores.masked_fill(~seen(keys, positions), float("-inf"))
    weights = scores.float().softmax(-1).to(q.dtype)
    return torch.einsum("htk,khv->thv", weights, values)


def apart(q, keys, values, positions, scale):
    """Computes the two parts of the logits by separate products. `keys` holds the two parts."""
    k_nope, rope_key = keys
    width = k_nope.shape[-1]
    scores = torch.einsum("thd,khd->htk", q[..., :width], k_nope)
    scores = (scores + torch.einsum("thr,kr->htk", q[..., width:], rope_key)) * scale
    scores = scores.masked_fill(~seen(k_nope, positions), float("-inf"))
    return torch.einsum("htk,khv->thv", scores.float().softmax(-1).to(q.dtype), values)


def apart_rope_first(q, keys, values, positions, scale):
    k_nope, rope_key = keys
    width = k_nope.shape[-1]
    q_nope, q_pe = (part.transpose(0, 1) for part in q.split([width, rope_key.shape[-1]], dim=-1))
    scores = q_pe @ rope_key.t() + q_nope @ k_nope.permute(1, 2, 0)
    scores = torch.where(seen(k_nope, positions), scores * scale, float("-inf"))
    return (scores.softmax(-1, dtype=wide(q)).to(q.dtype) @ values.transpose(0, 1)).transpose(0, 1)


def wide(x):
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


@torch.library.custom_op("mla_idioms::varlen", mutates_args=())
def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Calls an engine's own operator, whose causal mask is aligned to the last key, as in
    FlashAttention."""
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    for b in range(len(cu_seqlens_q) - 1):
        rows, columns = (slice(int(c[b]), int(c[b + 1])) for c in (cu_seqlens_q, cu_seqlens_k))
        count, length = rows.stop - rows.start, columns.stop - columns.start
        mask = torch.arange(length) <= torch.arange(count)[:, None] + length - count
        parts = (t.transpose(0, 1) for t in (q[rows], k[columns], v[columns]))
        some = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=softmax_scale)
        out[rows] = some.transpose(0, 1)
    return out


@varlen.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    return q.new_empty(*q.shape[:2], v.shape[-1])


def _ends(rows):
    return torch.tensor([0, rows.shape[0]], dtype=torch.int32, device=rows.device)


def own_varlen(q, keys, values, positions, scale):
    return varlen(q, keys, values, _ends(q), _ends(keys), scale)


def own_varlen_padded(q, keys, values, positions, scale):
    """Pads values to the width of the keys, and cuts the padding off the result."""
    width = values.shape[-1]
    values = F.pad(values, (0, keys.shape[-1] - width))
    return varlen(q, keys, values, _ends(q), _ends(keys), scale)[..., :width]


ATTENTIONS = {
    f.__name__: f
    for f in (
        masked,
        masked_float,
        causal,
        causal_later,
        unmasked,
        default_scale,
        eager,
        einsum,
        apart,
        apart_rope_first,
        own_varlen,
        own_varlen_padded,
    )
}


# --- other algorithms -----------------------------------------------------------------------------


def absorbed(q_nope, q_pe, rows, weight, positions, axes):
    """Attends over the latents themselves, with kv_b multiplied into q and into the result."""
    per_head = weight.view(axes.num_heads, axes.nope + axes.v_dim, axes.kv_rank)
    up_k, up_v = per_head[:, : axes.nope], per_head[:, axes.nope :]
    latents, rope_keys = rows.split([axes.kv_rank, axes.rotated], dim=-1)
    q_latent = torch.einsum("thn,hnr->thr", q_nope, up_k)
    scores = torch.einsum("thr,kr->htk", q_latent, latents)
    scores = (scores + torch.einsum("thp,kp->htk", q_pe, rope_keys)) * axes.scale
    scores = scores.masked_fill(~seen(rows, positions), float("-inf"))
    weights = scores.float().softmax(-1).to(rows.dtype)
    return torch.einsum("thr,hvr->thv", torch.einsum("htk,kr->thr", weights, latents), up_v)


def chunked(module, q, caches, all_slots, block_table, positions):
    """Attends to the keys in two chunks, and merges the results by their log-sum-exp."""
    rows = module.gather(caches, all_slots, block_table)
    half = rows.shape[0] // 2
    parts = []
    for first, chunk in ((0, rows[:half]), (half, rows[half:])):
        keys, values = module.up_projected(chunk)
        scores = torch.einsum("thd,khd->htk", q, keys).float() * module.scale
        visible = torch.arange(first, first + chunk.shape[0]) <= positions[:, None]
        scores = scores.masked_fill(~visible, -1e30)
        total = scores.logsumexp(-1)
        weights = (scores - total[..., None]).exp().to(q.dtype)
        parts.append((torch.einsum("htk,khv->htv", weights, values), total))
    (one, a), (other, b) = parts
    top = torch.maximum(a, b)
    a, b = (a - top).exp()[..., None], (b - top).exp()[..., None]
    return ((one * a + other * b) / (a + b)).to(q.dtype).transpose(0, 1)
