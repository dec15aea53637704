"""`mla_decode`: multi-head latent attention in its absorbed form, for few queries of a long cache.

The weights of the up-projection are multiplied into the queries and the results, instead of into
the keys and values (DeepSeek-V2, 2024, section 2.1). Each key is read once for all heads, in place
in the cache.
"""

from __future__ import annotations

import torch

from tilewright.ops.attention.arguments import present_of
from tilewright.ops.cache.read import CacheRead, Work
from tilewright.ops.checks import HALVES
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.mla.arguments import MlaDecodeArguments, widths
from tilewright.ops.mla.cases import DECODE_CASES
from tilewright.ops.mla.decode.checks import check_decode, check_decode_values, decode_obstacle
from tilewright.ops.mla.reference import TOLERANCES, decode_reference
from tilewright.ops.mla.samples import sample_decode
from tilewright.ops.sampling import sampler_of

NAME = "mla_decode"
ERROR_MODEL = (
    "Sums are accumulated in fp32, then the result is rounded once. The products of queries and "
    "W_UK are rounded to the queries' dtype, and so are a kernel's softmax weights and sums of "
    "latents: each term of a sum errs by up to half a unit in the last place, measured against the "
    "rms of the output. The decoded numbers of a quantised weight are rounded to the queries' "
    "dtype too, as in a graph that decodes the weight; float8 codes in blocks are multiplied "
    "exactly. Rounded latents, times their scales, are rounded to the queries' dtype."
)


def validate(a: MlaDecodeArguments) -> None:
    check_decode(NAME, a)


def validate_values(a: MlaDecodeArguments) -> None:
    check_decode_values(NAME, a)


def fake(a: MlaDecodeArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v_dim))


def reference(a: MlaDecodeArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 q) for each head h:

        q_latent = q_nope @ W_UK[h]                          q's first N columns
        logits = scale * (q_latent | q_rope) @ (latent | rope_keys)^T + attn_mask
        o_latent = softmax(logits) @ latent
        out = o_latent @ W_UV[h]^T                           rounded to q's dtype

    The logit of a hidden key is -inf. A quantised weight is dequantised first. With round_latents,
    each latent is first rounded to e4m3 codes times their scales. Latents that no query attends to
    are not read.
    """
    return decode_reference(a)


def work(a: MlaDecodeArguments) -> Work:
    """Returns the Work of a call: the reads of latents and rope keys, and the FLOPs of the products
    of all heads with the up-projection. Latents and rope keys are read once for all heads."""
    token_bytes = sum(t.shape[2] * t.element_size() for t in (a.latent, a.rope_keys))
    sequences, capacity = present_of(a, a.latent)
    (tokens, heads, _), (nope, rope, v_dim) = a.q.shape, widths(a)
    rank = a.latent.shape[2]
    read = CacheRead(
        ("latent", "rope_keys"),
        token_bytes,
        sequences,
        capacity,
        queries=tokens // max(sequences, 1),
        pair_flops=2 * heads * (2 * rank + rope),
    )
    return Work(read, flops=2 * tokens * heads * rank * (nope + v_dim))


sample_inputs = sampler_of(MlaDecodeArguments, sample_decode)

OP = register(
    FusedOp(
        name=NAME,
        arguments=MlaDecodeArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.mla.decode.lowering:decode_steps", decode_obstacle, HALVES
            ),
        ),
        cases=DECODE_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"q"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        work=work,
    )
)
