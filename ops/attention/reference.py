"""The reference of `cache_attention` in plain PyTorch, in fp32, or in float64 if q is float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.ops.attention.arguments import AttentionArguments
from tilewright.ops.attention.masks import mask_numbers, visible
from tilewright.ops.attention.positions import positions_of, room, sequences, token_sequences

# The number of logits that are computed at the same time.
LOGITS = 1 << 26


def attention_reference(a: AttentionArguments) -> torch.Tensor:
    """Returns the attention [T, Hq, V]."""
    compute = torch.promote_types(a.q.dtype, torch.float32)

    def keys(b: int, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (_keys(a, tensor, b, used, compute) for tensor in (a.k, a.v))
        return _scaled(k, a.k_scale), _scaled(v, a.v_scale)

    out = a.q.new_zeros((*a.q.shape[:2], a.v.shape[3]))
    logits = {"softcap": a.softcap, "sinks": a.sinks}
    return attend_by_sequence(a, a.q.to(compute), out, [room(a)] * sequences(a), keys, **logits)


def attend_by_sequence(
    a: Any,
    q: torch.Tensor,
    out: torch.Tensor,
    rooms: Sequence[int],
    keys: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    **logits: Any,
) -> torch.Tensor:
    """Writes the attention of q [T, Hq, D], computed in q's dtype, to `out` [T, Hq, V].

    Args:
        a: Which keys a query attends to, in the fields of BatchArguments.
        rooms: The number of keys that each sequence has room for.
        keys: A function that returns the keys and values [K, Hkv, ..] of a sequence at given
            indices.
        logits: The options of `attend`.
    """
    if out.numel() == 0:
        return out
    device, positions = q.device, positions_of(a)
    sequence, _ = token_sequences(q.shape[0], a.row_offsets, a.num_sequences, device)
    for b, num_places in enumerate(rooms):
        queries = sequence == b
        limit = None if a.key_lengths is None else a.key_lengths[b].to(torch.int64)
        places = torch.arange(num_places, device=device)
        seen, added = visible(a, positions[queries], places, limit)[None], None
        if a.attn_mask is not None:
            added = mask_numbers(a.attn_mask, b, num_places, q.dtype)
            seen = seen & (added != float("-inf"))
        # Do not read keys that no query attends to, because they may have any values, even NaN.
        used = seen.flatten(0, 1).any(0).nonzero().flatten()
        k, v = keys(b, used)
        added = None if added is None else added[..., used]
        attended = attend(q[queries], k, v, seen[..., used], added, a.scale, **logits)
        out[queries] = attended.to(out.dtype)
    return out


def _keys(
    a: AttentionArguments, tensor: torch.Tensor, b: int, used: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """Returns the keys or the values of a sequence at the indices `used`, [K, Hkv, width]."""
    if a.block_table is None:
        return tensor[b, used].to(compute)
    size = tensor.shape[1]
    pages = a.block_table[b].to(torch.int64)[used // size]
    return tensor[pages, used % size].to(compute)


def _scaled(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x if scale is None else x * scale.to(x.dtype).reshape(-1, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    added: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention [S, Hq, V] of q [S, Hq, D], k [K, Hkv, D] and v [K, Hkv, V], in q's
    dtype.

    seen: which keys are visible to each query, [Hq or 1, S or 1, K]. added: numbers that are added
    to the logits, of the same form, or None.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    step = max(LOGITS // max(q.shape[0] * k.shape[0], 1), 1)
    for first in range(0, heads, step):
        part = torch.arange(first, min(first + step, heads), device=q.device)
        own = part // group
        logits = torch.einsum("shd,khd->hsk", q[:, part], k[:, own]) * scale
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        if added is not None:
            logits = logits + (added if added.shape[0] == 1 else added[part])
        visible_here = seen if seen.shape[0] == 1 else seen[part]
        logits = logits.masked_fill(~visible_here, float("-inf"))
        if sinks is not None:
            own_sinks = sinks[part].to(logits.dtype).reshape(-1, 1, 1)
            logits = torch.cat((logits, own_sinks.expand(*logits.shape[:2], 1)), -1)
        blind = (logits == float("-inf")).all(-1, keepdim=True)
        weights = torch.where(blind, 0.0, logits.softmax(-1))[..., : k.shape[0]]
        out[:, part] = torch.einsum("hsk,khd->shd", weights, v[:, own])
    return out
