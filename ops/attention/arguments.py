"""The arguments of `cache_attention`, and those of another op as its."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch

from tilewright.ops.cache.read import CacheRead, Work
from tilewright.ops.schema import SymInt


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """What `cache_attention` and `mla_decode` are told of the sequences of a batch: where the keys
    of each lie and which of them its queries see. AttentionArguments has what each means."""

    scale: float
    num_sequences: SymInt = 1
    row_offsets: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None
    mask: str = "causal"
    window: int = 0
    attn_mask: torch.Tensor | None = None
    mask_blocks: torch.Tensor | None = None


BATCH_NAMES = tuple(field.name for field in fields(BatchArguments))


@dataclass(frozen=True)
class AttentionArguments(BatchArguments):
    """The arguments of `cache_attention`: T queries of B sequences; Hq heads, which share the Hkv
    heads of keys and values; D and V the widths of a key and a value.

    q [T, Hq, D]: bf16, fp16, fp32 or fp64, last dimension contiguous. A sequence's queries:
    row_offsets [B + 1], or num_sequences equal runs.

    k [N, P, Hkv, D], v [N, P, Hkv, V]: the cache, any strides, last dimension contiguous; of q's
    dtype, or an 8-bit float with k_scale and v_scale (fp32, one number or [Hkv]), which its numbers
    are multiplied by. block_table [B, columns]: key j of sequence b is k[block_table[b, j // P],
    j % P]. None: it is k[b, j], N = B.

    Which keys a query sees: those below key_lengths [B], where given; and by its position p and a
    key's place j, mask "causal" (j <= p), "sliding_window" (p - window < j <= p), "chunked" (j <= p
    and j // window == p // window) or "none"; and attn_mask [B or 1, Hq or 1, S or 1, K or more]:
    bool, True is seen, or numbers (of q's dtype or fp32) that are added to the scaled and capped
    logits, -inf hides. Only for equal runs of S queries. mask_blocks: what `mask_blocks` gives for
    this attn_mask; made by the call where it is None. A query that sees no key gives zeros. With
    hide_lowest only beside mask "none", no key_lengths, and as many columns as keys, where softcap
    or a scale of at most 1 / 4 bounds logits: products q @ k^T are finite in q's dtype.

    A query's position: `positions` [T] or [T / B] (the same for every sequence) where given, else
    cache_lengths[b] + i for the i-th query of sequence b, else i.

    softcap c: logits become c * tanh(logits / c), before they are masked; 0: they do not. sinks
    [Hq]: a logit of each head that takes its share of the softmax and has no value.

    Keys that nobody sees may hold anything, NaN too. Bad values (offsets, lengths, pages) raise
    ArgumentError where they are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; otherwise a key
    on a page outside the pool is not seen.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    _: KW_ONLY
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def as_attention(a: Any, q: torch.Tensor, keys: torch.Tensor) -> AttentionArguments:
    """The attention of queries q [T, H, ..] to keys [P, S, ..], one head of them for all; they are
    the values, too."""
    k = keys.unsqueeze(2)
    return AttentionArguments(q, k, k, **{name: getattr(a, name) for name in BATCH_NAMES})


def cache_read(a: AttentionArguments) -> CacheRead:
    """What a call reads of keys and values, each once for the queries of a sequence."""
    token_bytes = sum(t.shape[2] * t.shape[3] * t.element_size() for t in (a.k, a.v))
    sequences, capacity = present_of(a, a.k)
    queries, pair = a.q.shape[0] // max(sequences, 1), a.k.shape[3] + a.v.shape[3]
    return CacheRead(
        ("k", "v"),
        token_bytes,
        sequences,
        capacity,
        queries=queries,
        pair_flops=2 * a.q.shape[1] * pair,
    )


def work(a: AttentionArguments) -> Work:
    """What a call reads of caches."""
    return Work(cache_read(a))


def present_of(a: BatchArguments, keys: torch.Tensor) -> tuple[int, int]:
    """(sequences, the tokens of one that are read at most) of a cache [N, P, ..]."""
    pages, page_size = keys.shape[:2]
    if a.block_table is None:
        sequences, capacity = pages, page_size
    else:
        sequences, capacity = a.block_table.shape[0], a.block_table.shape[1] * page_size
    windowed = a.mask in ("sliding_window", "chunked")
    return sequences, min(capacity, a.window) if windowed else capacity
