"""The arguments of `cache_attention`, and the arguments that it shares with other ops."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import torch

from tilewright.ops.cache.read import CacheRead, Work
from tilewright.ops.schema import SymInt


@dataclass(frozen=True, kw_only=True)
class BatchArguments:
    """The arguments of `cache_attention` and `mla_decode` that describe the sequences of a batch.
    They say where the keys of each sequence are, and which of these keys the queries of the
    sequence attend to. AttentionArguments explains each field."""

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
    """The arguments of `cache_attention`, for T queries of B sequences. There are Hq heads of
    queries, which share Hkv heads of keys and values. D and V are the widths of a key and a value.

    - `q` [T, Hq, D]: the queries. Their dtype is bf16, fp16, fp32 or fp64, and their last dimension
      is contiguous.
    - `row_offsets` [B + 1]: the index of the first query of each sequence, and T at the end. If it
      is None, each of num_sequences sequences has the same number of queries.
    - `k` [N, P, Hkv, D], `v` [N, P, Hkv, V]: the cache. It may have any strides, but the last
      dimension is contiguous. It has q's dtype or an 8-bit float dtype.
    - `k_scale`, `v_scale`: fp32, one number or [Hkv]. The numbers of an 8-bit cache are multiplied
      by these scales.
    - `block_table` [B, columns]: key j of sequence b is k[block_table[b, j // P], j % P]. Without
      it, N = B, and key j of sequence b is k[b, j].
    - `positions` [T] or [T / B] (the same for every sequence): the position of each query. Without
      it, query i of sequence b has the position cache_lengths[b] + i, or i if cache_lengths is None
      too.

    A query attends to a key if all of these conditions hold:

    - The index j of the key is less than `key_lengths` [B] of the sequence, if that is given.
    - `mask` allows the key for the query's position p: "causal" (j <= p), "sliding_window" (p -
      window < j <= p), "chunked" (j <= p and j // window == p // window) or "none".
    - `attn_mask` [B or 1, Hq or 1, S or 1, K] allows the key. K is at least the number of keys of a
      sequence, and each sequence must have the same number S of queries. A bool mask has True for a
      visible key. A mask of numbers (q's dtype or fp32) is added to the logits after scale and cap,
      and -inf hides a key.

    If a query attends to no key, its result is zeros.

    - `mask_blocks`: the result of `mask_blocks` for this attn_mask. If it is None, the call
      computes it. A result that `mask_blocks` computed with hide_lowest is allowed only if mask is
      "none", key_lengths is None, attn_mask has one column for each key, and the logits are
      bounded. A softcap bounds them, and so does a scale of at most 1 / 4, because the products
      q @ k^T are finite in q's dtype.
    - `softcap`: if c is not 0, logits become c * tanh(logits / c) before they are masked.
    - `sinks` [Hq]: one more logit for each head. It takes part in the softmax and has no value.

    Keys that no query attends to may have any values, even NaN. Bad offsets, lengths and pages
    raise ArgumentError. If they are on a GPU, they are checked only with TILEWRIGHT_DEBUG=1.
    Without this check, queries do not attend to a key on a page that does not exist.
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
    """Returns the arguments of `cache_attention` for queries q [T, H, ..] and keys [P, S, ..]. All
    heads share the keys, which are also the values."""
    k = keys.unsqueeze(2)
    return AttentionArguments(q, k, k, **{name: getattr(a, name) for name in BATCH_NAMES})


def cache_read(a: AttentionArguments) -> CacheRead:
    """Returns how much of the keys and values a call reads. Each key is read once for all queries
    of its sequence."""
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
    """Returns the Work of a call: its reads of the caches."""
    return Work(cache_read(a))


def present_of(a: BatchArguments, keys: torch.Tensor) -> tuple[int, int]:
    """Returns (number of sequences, largest number of tokens that are read for one sequence) for a
    cache [N, P, ..]."""
    pages, page_size = keys.shape[:2]
    if a.block_table is None:
        sequences, capacity = pages, page_size
    else:
        sequences, capacity = a.block_table.shape[0], a.block_table.shape[1] * page_size
    windowed = a.mask in ("sliding_window", "chunked")
    return sequences, min(capacity, a.window) if windowed else capacity
