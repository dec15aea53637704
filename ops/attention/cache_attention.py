"""`cache_attention`: attention of queries to the keys and values of a cache, where they lie.

    out = softmax(scale * q @ k^T, capped, masked) @ v        fp32, rounded once

Heads that share keys (GQA, MQA) read them once; no key or value is copied or repeated. A block of
keys that no query sees is not read.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.attention.cases import CASES, AttentionCase, sample_attention
from tilewright.ops.attention.checks import (
    attention_obstacle,
    check_attention,
    check_attention_values,
)
from tilewright.ops.attention.reference import attention_reference
from tilewright.ops.contract import FusedOp, Tolerance, emitted_kernel, register
from tilewright.ops.schema import SymInt

NAME = "cache_attention"
ERROR_MODEL = (
    "fp32 accumulation; a kernel's softmax weights are rounded to the queries' dtype: errors of "
    "half a unit in the last place of the terms of each sum, measured against the rms of the "
    "output; then one rounding of the result"
)
TOLERANCES = {
    torch.bfloat16: Tolerance(relative=2.0**-8, of_rms=2.0**-6),
    torch.float16: Tolerance(relative=2.0**-11, of_rms=2.0**-9),
    torch.float32: Tolerance(relative=2.0**-20, of_rms=2.0**-17),
    torch.float64: Tolerance(relative=2.0**-49, of_rms=2.0**-44),
}


@dataclass(frozen=True)
class AttentionArguments:
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
    this attn_mask; made by the call where it is None. A query that sees no key gives zeros.

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
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def validate(a: AttentionArguments) -> None:
    check_attention(NAME, a)


def validate_values(a: AttentionArguments) -> None:
    check_attention_values(NAME, a)


def fake(a: AttentionArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v.shape[3]))


def reference(a: AttentionArguments) -> torch.Tensor:
    """In fp32 (float64 for float64 q), for each head of each sequence, its keys and values where
    they lie:

        logits = scale * q @ k^T                 k of head h // (Hq / Hkv), times k_scale
        logits = softcap * tanh(logits / softcap)
        logits = logits + attn_mask              -inf where a key is hidden
        out = softmax(logits | sink) @ v         times v_scale, rounded to q's dtype
    """
    return attention_reference(a)


def sample_inputs(
    case: AttentionCase, device: str | torch.device = "cpu", seed: int = 0
) -> AttentionArguments:
    """Random arguments of a case."""
    return AttentionArguments(**sample_attention(case, device, seed))


OP = register(
    FusedOp(
        name=NAME,
        arguments=AttentionArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.attention.lowering:attention_steps", attention_obstacle),
        ),
        cases=CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)


def cache_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **options: Any
) -> torch.Tensor:
    """The op, called by hand: attention of q [T, Hq, D] to a cache k, v [N, P, Hkv, width].

    Result [T, Hq, V] of q's dtype. Options: AttentionArguments. Raises ArgumentError. Not
    differentiable.
    """
    return OP.torch_op(q, k, v, scale=scale, **options)
