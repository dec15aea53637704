"""Checks of the arguments of `mla_decode`, and why no kernel takes a call."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention.cache_attention import AttentionArguments
from tilewright.ops.attention.checks import (
    MAX_WIDTH,
    attention_obstacle,
    check_attention_values,
    check_batch,
)
from tilewright.ops.cache.checks import readable
from tilewright.ops.cache.scale_values import check_scale_values
from tilewright.ops.checks import (
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
    in_words_of,
)
from tilewright.ops.mla.checks import check_weight
from tilewright.ops.mla.latents import DTYPES

# Arguments that `cache_attention` has, too.
SHARED = (
    *("scale", "num_sequences", "row_offsets", "block_table", "key_lengths", "positions"),
    *("cache_lengths", "mask", "window", "attn_mask", "mask_blocks"),
)
OWN_NAMES = {"k": "latent"}
MAX_ROPE = 128


def as_attention(a: Any, q: torch.Tensor, keys: torch.Tensor) -> AttentionArguments:
    """The attention of queries q [T, H, ..] to keys [P, S, ..], one head of them for all; they are
    the values, too."""
    k = keys.unsqueeze(2)
    return AttentionArguments(q, k, k, **{name: getattr(a, name) for name in SHARED})


def check_decode(op: str, a: Any) -> None:
    """Checks an MlaDecodeArguments. Metadata only; raises ArgumentError."""
    check_shape(op, "q", a.q, "[T, H, N + R]", (None, None, None))
    check_dtype(op, "q", a.q, DTYPES)
    check_last_dim_dense(op, "q", a.q)
    rope_dim = check_weight(op, a)
    check_shape(op, "latent", a.latent, "[P, S, L]", (None, None, a.kv_b_weight.shape[1]))
    check_shape(op, "rope_keys", a.rope_keys, "[P, S, R]", (*a.latent.shape[:2], rope_dim))
    for name in ("latent", "rope_keys"):
        tensor = getattr(a, name)
        check_dtype(op, name, tensor, (a.q.dtype,))
        check_device(op, name, tensor, a.q.device)
        check_last_dim_dense(op, name, tensor)
    with in_words_of(op, OWN_NAMES):
        check_batch(op, as_attention(a, a.q, a.latent))


def check_decode_values(op: str, a: Any) -> None:
    """Checks what only real memory shows: offsets, lengths, pages, scales. Raises ArgumentError."""
    with in_words_of(op, OWN_NAMES):
        check_attention_values(op, as_attention(a, a.q, a.latent))
    if a.kv_b_scale is not None and readable([a.kv_b_scale]):
        check_scale_values(op, "kv_b_scale", a.kv_b_scale)


def decode_obstacle(a: Any) -> str | None:
    """Why no kernel takes a call; None where one does. Metadata only."""
    rank, rope_dim = a.latent.shape[2], a.rope_keys.shape[2]
    if rank > MAX_WIDTH or rope_dim > MAX_ROPE:
        return f"no kernel for latents of rank {rank} with {rope_dim} rope columns"
    return attention_obstacle(as_attention(a, a.q, a.latent))
