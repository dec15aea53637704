"""`mla_prefill`: multi-head latent attention, with keys and values computed from latents.

The keys are computed from the latents of this call, or from a cache, which may be paged or have a
page for each sequence. The output of the projection is never split or concatenated in memory.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.contract import FusedOp, emitted_kernel, get_op, register
from tilewright.ops.mla.arguments import MlaPrefillArguments
from tilewright.ops.mla.cases import PREFILL_CASES
from tilewright.ops.mla.latents.checks import pool_windows
from tilewright.ops.mla.prefill.checks import check_prefill, check_prefill_values, prefill_obstacle
from tilewright.ops.mla.reference import TOLERANCES, prefill_reference
from tilewright.ops.mla.samples import sample_prefill
from tilewright.ops.sampling import sampler_of

NAME = "mla_prefill"
LOWERING = "tilewright.ops.mla.prefill.lowering"
ERROR_MODEL = (
    "Sums are accumulated in fp32, then the result is rounded once. Latents, keys and values are "
    "rounded to the values' dtype, and a kernel rounds the softmax weights, too: each term of a sum"
    " errs by up to half a unit in the last place, measured against the rms of the output."
)


def validate(a: MlaPrefillArguments) -> None:
    check_prefill(NAME, a)


def validate_values(a: MlaPrefillArguments) -> None:
    check_prefill_values(NAME, a)


def fake(a: MlaPrefillArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v_dim))


def reference(a: MlaPrefillArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 q) for each head of each sequence:

        latent, k_rope = norm(latent), rope(k_rope)            of new tokens; rounded and stored
        q = q_nope | rope(q_rope)                              q's first N and last R columns
        k_nope | v = latents of all keys @ kv_b_weight^T       rounded to q's dtype
        logits = scale * q @ (k_nope | k_rope)^T + attn_mask   -inf where a key is hidden
        out = softmax(logits) @ v                              rounded to q's dtype

    A step whose arguments are None is omitted. Quantised latents and weights are dequantised first.
    If attention_dtype is float8_e4m3fn, q, k and v are rounded to this dtype instead.
    """
    return prefill_reference(a)


sample_inputs = sampler_of(MlaPrefillArguments, sample_prefill)

OP = register(
    FusedOp(
        name=NAME,
        without_writes="mla_prefill_dense",
        arguments=MlaPrefillArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(f"{LOWERING}:prefill_steps", prefill_obstacle),),
        cases=PREFILL_CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        work=f"{LOWERING}:work",
    )
)


def mla_prefill(
    q: torch.Tensor,
    latent: torch.Tensor | None,
    k_rope: torch.Tensor | None,
    kv_b_weight: torch.Tensor,
    latent_cache: torch.Tensor | None = None,
    rope_cache: torch.Tensor | None = None,
    *,
    v_dim: int,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    """Calls the op: attention of q [T, H, N + R] to keys computed from latents. Returns [T, H, V].

    latent_cache is [num_pages, page_size, L + R], or [.., L] with a rope_cache [.., R]. For other
    layouts, pass `latent_window` and `rope_window` (CacheWindow.to_ints). MlaPrefillArguments
    explains the arguments and options. Raises ArgumentError before anything is written. The op is
    not differentiable.
    """
    caches = latent_cache, rope_cache
    if latent_cache is None:
        options = {"latent_window": [], "rope_window": [], **options}
    windows = pool_windows(NAME, options, caches, "kv_b_weight", kv_b_weight)
    given = (q, latent, k_rope, kv_b_weight, *caches, *windows)
    op = OP if latent_cache is not None else get_op(f"{NAME}_dense")
    return op.torch_op(*given, v_dim=v_dim, scale=scale, **options)
