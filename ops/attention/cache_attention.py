"""`cache_attention`: attention of queries to the keys and values of a cache, which are read in
place.

Heads that share keys (GQA, MQA) read them once. No key or value is copied or repeated. A block of
keys that no query attends to is not read.
"""

from __future__ import annotations

import torch

from tilewright.ops.attention.arguments import AttentionArguments as AttentionArguments
from tilewright.ops.attention.arguments import work
from tilewright.ops.attention.cases import CASES, sample_attention
from tilewright.ops.attention.checks import (
    attention_obstacle,
    check_attention,
    check_attention_values,
)
from tilewright.ops.attention.reference import attention_reference
from tilewright.ops.checks import HALVES
from tilewright.ops.contract import FusedOp, emitted_kernel, register, rounded_once
from tilewright.ops.sampling import sampler_of

NAME = "cache_attention"
ERROR_MODEL = (
    "Sums are accumulated in fp32, then the result is rounded once. A kernel rounds the softmax "
    "weights to the queries' dtype: each term of a sum errs by up to half a unit in the last place,"
    " measured against the rms of the output."
)
TOLERANCES = rounded_once(2.0**-6, 2.0**-9, 2.0**-17, 2.0**-44)


def validate(a: AttentionArguments) -> None:
    check_attention(NAME, a)


def validate_values(a: AttentionArguments) -> None:
    check_attention_values(NAME, a)


def fake(a: AttentionArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v.shape[3]))


def reference(a: AttentionArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 q) for each head of each sequence:

        logits = scale * q @ k^T                 k of head h // (Hq / Hkv), times k_scale
        logits = softcap * tanh(logits / softcap)
        logits = logits + attn_mask              -inf where a key is hidden
        out = softmax(logits | sink) @ v         times v_scale, rounded to q's dtype

    k and v are the keys and values of this head and sequence. If a query attends to no key, its
    result is zeros.
    """
    return attention_reference(a)


sample_inputs = sampler_of(AttentionArguments, sample_attention)


OP = register(
    FusedOp(
        name=NAME,
        arguments=AttentionArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.attention.lowering:attention_steps", attention_obstacle, HALVES
            ),
        ),
        cases=CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"q"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        work=work,
    )
)
