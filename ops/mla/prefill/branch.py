"""`mla_prefill_branch_fp8`: Modular MAX's op of that name, idempotent, made of `mla_prefill`'s
parts.

The op differs from MAX's op in these ways:

- The raw latents are an argument and q is not changed, so repeating a call has no further effect.
- Norm and RoPE are computed in fp32 and rounded once. MAX computes them in bf16, step by step.
- Numbers beyond the range of the codes saturate. Rows that are zero, or smaller than the normal
  numbers of fp32, get zero codes.
- If a query attends to no key, its result is zeros.
- Keys may come in several chunks, whose results are merged exactly.

As in MAX, the latents of keys are quantised with scale = min(amax, 1200) / 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.ops.checks import ArgumentError, in_words_of, readable
from tilewright.ops.contract import FusedOp, emitted_kernel, register, rounded_once
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import MlaBranchArguments, MlaPrefillArguments
from tilewright.ops.mla.cases import BRANCH_CASES
from tilewright.ops.mla.prefill.branch_checks import (
    NAME,
    PREFILL_WORDS,
    check_branch,
    check_branch_values,
)
from tilewright.ops.mla.prefill.checks import check_prefill_values, prefill_obstacle
from tilewright.ops.mla.reference import TOLERANCES, prefill_reference
from tilewright.ops.mla.samples import sample_branch
from tilewright.ops.sampling import sampler_of

LOWERING = "tilewright.ops.mla.prefill.lowering"
SCALE_CAP = 1200.0
ERROR_MODEL = (
    "As for `mla_prefill`. In addition, a latent close to the midpoint of two 8-bit codes may be "
    "rounded to either code, because it was rounded to q's dtype before. A few terms of each sum "
    "then differ by a sixteenth."
)
BRANCH_TOLERANCES = TOLERANCES | rounded_once(2.0**-3, 2.0**-4)


def validate(a: MlaBranchArguments) -> None:
    check_branch(a, as_mla_prefill)


def validate_values(a: MlaBranchArguments) -> None:
    index = (a.input_row_offsets, a.cache_lengths, a.lookup_table)
    if not readable((*index, a.buffer_row_offsets, a.cache_offsets)):
        return
    if check_branch_values(a):
        with in_words_of(NAME, PREFILL_WORDS):
            check_prefill_values(NAME, with_all_keys(a))


def fake(a: MlaBranchArguments) -> torch.Tensor:
    return a.q.new_empty((a.q.shape[0], a.q.shape[1], a.v_dim))


def reference(a: MlaBranchArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 q) for each head of each sequence:

        latent, k_rope = norm(latents[:, :L]), rope(latents[:, L:])   rounded; stored in `blocks`
        q = q_nope | rope(q_rope)                                     q's first N and last R columns
        k_nope | v = fp8(latents of all keys) @ kv_b_proj^T           rounded to q's dtype
        logits = scale * q @ (k_nope | k_rope)^T                      -inf where masked
        out = softmax(logits) @ v                                     rounded to q's dtype

    fp8(...) quantises each row in blocks of `granularity` columns and dequantises it again.
    kv_b_proj is dequantised by its scales. If no chunk has keys, nothing is written and the result
    is zeros. The reference attends to all keys of a sequence at once. The division into chunks
    changes only the order of sums.
    """
    if all(length <= 0 for length in a.buffer_length):
        return fake(a).zero_()
    return prefill_reference(with_all_keys(a))


def with_all_keys(a: MlaBranchArguments) -> MlaPrefillArguments:
    """Returns the equivalent call of `mla_prefill`. This reads the values of the lengths."""
    lengths = a.cache_lengths.to(torch.int64) + a.input_row_offsets.to(torch.int64).diff()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return replace(as_mla_prefill(a), key_offsets=offsets, num_keys=int(offsets[-1]))


def as_mla_prefill(a: MlaBranchArguments) -> MlaPrefillArguments:
    """Returns the equivalent call of `mla_prefill`, on views of the same tensors. The keys of each
    sequence are all slots of its row of the table, used or not. `with_all_keys` limits them to the
    slots that are used."""
    rank = a.kv_b_proj.shape[1]
    entries = a.blocks[:, 0, a.layer_idx]
    return MlaPrefillArguments(
        q=a.q,
        latent=a.latents[:, :rank],
        k_rope=a.latents[:, rank:],
        kv_b_weight=a.kv_b_proj,
        latent_cache=a.blocks,
        latent_window=CacheWindow.of(entries[..., :rank], a.blocks).to_ints(),
        rope_window=CacheWindow.of(entries[..., rank:], a.blocks).to_ints(),
        v_dim=a.v_dim,
        scale=a.scale,
        row_offsets=a.input_row_offsets,
        keys="table",
        slots="ragged",
        lookup_table=a.lookup_table,
        cache_lengths=a.cache_lengths,
        norm_weight=a.kv_norm_gamma,
        norm_eps=a.epsilon,
        cos=a.freqs_cis[:, ::2],
        sin=a.freqs_cis[:, 1::2],
        rope_style=a.rope_style,
        rope_by_position=True,
        mask=a.mask,
        window=a.window,
        kv_b_scale=a.kv_b_proj_scale,
        scale_block=(a.granularity, a.granularity),
        quantize_latent=True,
        latent_scale_cap=SCALE_CAP,
        attention_dtype=a.attention_dtype,
        q_scale=a.q_scale,
        k_scale=a.k_scale,
        v_scale=a.v_scale,
    )


def _unsupported(a: MlaBranchArguments) -> str | None:
    return prefill_obstacle(as_mla_prefill(a), "kv_b_proj")


sample_inputs = sampler_of(MlaBranchArguments, sample_branch)

OP = register(
    FusedOp(
        name=NAME,
        arguments=MlaBranchArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(emitted_kernel(f"{LOWERING}:branch_steps", _unsupported),),
        cases=BRANCH_CASES,
        sample_inputs=sample_inputs,
        tolerances=BRANCH_TOLERANCES,
        error_model=ERROR_MODEL,
        plan=f"{LOWERING}:plan_branch",
    )
)


def mla_prefill_branch_fp8(
    q: torch.Tensor,
    latents: torch.Tensor,
    input_row_offsets: torch.Tensor,
    freqs_cis: torch.Tensor,
    kv_norm_gamma: torch.Tensor,
    blocks: torch.Tensor,
    cache_lengths: torch.Tensor,
    lookup_table: torch.Tensor,
    layer_idx: int,
    scale: float,
    epsilon: float,
    buffer_row_offsets: torch.Tensor,
    cache_offsets: torch.Tensor,
    buffer_length: int | Sequence[int] | torch.Tensor,
    kv_b_proj: torch.Tensor,
    kv_b_proj_scale: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Calls the op, which computes the prefill branch of multi-head latent attention, [T, H, V].

    The op writes the normalised and rotated latents [T, L + R] of the new tokens to their pages,
    and attends to all keys of each sequence. buffer_length: the number of rows of the only chunk,
    or of each chunk, as `mla_prefill_plan` returns them. (If buffer_length is a tensor, its values
    are read, which waits for a GPU.) MlaBranchArguments explains the arguments and options. Raises
    ArgumentError before anything is written. The op is not differentiable.
    """
    if isinstance(buffer_length, torch.Tensor):
        if buffer_length.is_floating_point() or buffer_length.is_complex():
            raise ArgumentError(NAME, "buffer_length", "integers", buffer_length.dtype)
        buffer_length = buffer_length.flatten().tolist()
    lengths = [buffer_length] if isinstance(buffer_length, int) else buffer_length
    return OP.torch_op(
        q, latents, input_row_offsets, freqs_cis, kv_norm_gamma, blocks, cache_lengths,
        lookup_table, layer_idx, scale, epsilon, buffer_row_offsets, cache_offsets, lengths,
        kv_b_proj, kv_b_proj_scale, **options,
    )  # fmt: skip
