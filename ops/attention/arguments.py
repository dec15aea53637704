"""The arguments of `cache_attention`, and the parts that other ops share with it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch

from tilewright.ops.cache.read import CacheRead, Work
from tilewright.ops.schema import SymInt


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """Arguments of `cache_attention` and `mla_decode` that describe the sequences of a batch: where
    the keys of each sequence lie, and which of these keys its queries see. AttentionArguments
    explains each field."""

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
    heads of keys and values; D and V are the widths of a key and a value.

    q [T, Hq, D]: bf16, fp16, fp32 or fp64, last dimension contiguous. row_offsets [B + 1] gives the
    queries of each sequence; without it, sequences have num_sequences equal runs of queries.

    k [N, P, Hkv, D], v [N, P, Hkv, V]: the cache, any strides, last dimension contiguous. It has
    q's dtype, or is an 8-bit float with k_scale and v_scale (fp32, one number or [Hkv]) that its
    numbers are multiplied by. block_table [B, columns]: key j of sequence b is k[block_table[b, j
    // P], j % P]. None: it is k[b, j], with N = B.

    A query sees a key if all of the following conditions hold. The key's index j is below
    key_lengths [B], if given. For the query's position p, `mask` allows it: "causal" (j <= p),
    "sliding_window" (p - window < j <= p), "chunked" (j <= p and j // window == p // window) or
    "none". attn_mask [B or 1, Hq or 1, S or 1, K or more] allows it, for equal runs of S queries
    only: bool, True is seen; or numbers (of q's dtype or fp32) that are added to the scaled and
    capped logits, where -inf hides. A query that sees no key gives zeros.

    mask_blocks: the result of `mask_blocks` for this attn_mask; None: the call computes it. A
    result made with hide_lowest is allowed only with mask "none", without key_lengths, with as many
    columns in attn_mask as keys, and with logits bounded by softcap or by a scale of at most 1 / 4.
    The bound by scale suffices because products q @ k^T are finite in q's dtype.

    The position of a query is `positions` [T] or [T / B] (the same for every sequence) if given,
    else cache_lengths[b] + i for the i-th query of sequence b, else i.

    softcap c: logits become c * tanh(logits / c) before masking; 0: no cap. sinks [Hq]: an extra
    logit of each head, which takes part in the softmax and has no value.

    Keys that no query sees may hold anything, also NaN. Bad values (offsets, lengths, pages) raise
    ArgumentError if they are on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; otherwise a key on
    a page outside the pool is not seen.
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
    """Returns the attention of queries q [T, H, ..] to keys [P, S, ..]. All heads share the keys,
    and the keys are also the values."""
    k = keys.unsqueeze(2)
    return AttentionArguments(q, k, k, **{name: getattr(a, name) for name in BATCH_NAMES})


def cache_read(a: AttentionArguments) -> CacheRead:
    """Returns the reads of a call's keys and values. The queries of a sequence share one read of
    each key."""
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
    """Returns the reads of caches of a call."""
    return Work(cache_read(a))


def present_of(a: BatchArguments, keys: torch.Tensor) -> tuple[int, int]:
    """Returns (number of sequences, largest number of tokens read for one sequence) for a cache [N,
    P, ..]."""
    pages, page_size = keys.shape[:2]
    if a.block_table is None:
        sequences, capacity = pages, page_size
    else:
        sequences, capacity = a.block_table.shape[0], a.block_table.shape[1] * page_size
    windowed = a.mask in ("sliding_window", "chunked")
    return sequences, min(capacity, a.window) if windowed else capacity
