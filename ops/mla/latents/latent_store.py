"""`mla_latent_store`: norm, RoPE and cache write of the latents of multi-head latent attention.

The latents are passed as their projection returns them. They are not changed, so repeating a call
gives the same cache.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention.positions import check_positions, token_positions
from tilewright.ops.cache.address_checks import check_address_values
from tilewright.ops.cache.addressing import address_tensors, check_addressing
from tilewright.ops.cache.checks import check_aliases
from tilewright.ops.cache.ragged_batch import INDEX_DTYPES
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_absent,
    check_device,
    check_dtype,
    check_operand,
    check_shape,
    readable,
)
from tilewright.ops.contract import FusedOp, emitted_kernel, register
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import LatentStoreArguments
from tilewright.ops.mla.cases import STORE_CASES
from tilewright.ops.mla.latents.checks import (
    check_finish,
    check_latent_cache,
    check_latents,
    pool_windows,
    store_obstacle,
    written_windows,
)
from tilewright.ops.mla.latents.reference import finished_latents, write_latents
from tilewright.ops.mla.samples import sample_store
from tilewright.ops.sampling import sampler_of

NAME = "mla_latent_store"
LOWERING = "tilewright.ops.mla.latents.lowering"


def validate(a: LatentStoreArguments) -> None:
    check_operand(NAME, "latent", a.latent, "[T, L]", (None, None), FLOAT_DTYPES)
    check_shape(NAME, "k_rope", a.k_rope, "[T, R]", (None, None))
    rank, rope_dim = a.latent.shape[1], a.k_rope.shape[1]
    num_tokens = check_latents(NAME, a, rank, rope_dim, a.latent)
    check_finish(NAME, a, num_tokens, rank, rope_dim, a.latent)
    window = check_latent_cache(NAME, a, rank, rope_dim, a.latent)
    check_addressing(NAME, a, num_tokens, window, a.latent.device, others=True)
    if a.rope_by_position:
        if a.positions is None and a.slots != "ragged":
            expected = "a tensor, since rope_by_position is set"
            raise ArgumentError(NAME, "positions", expected, None)
        if a.positions is not None:
            check_shape(NAME, "positions", a.positions, "[T]", (num_tokens,))
            check_dtype(NAME, "positions", a.positions, INDEX_DTYPES)
            check_device(NAME, "positions", a.positions, a.latent.device)
    elif a.slots != "block_table":
        since = "neither the slots nor the rows of cos depend on positions"
        check_absent(NAME, a, ["positions"], since)


def validate_values(a: LatentStoreArguments) -> None:
    check_aliases(NAME, a, written_windows(a))
    if readable(address_tensors(a)):
        window = CacheWindow.from_ints(a.latent_window)
        check_address_values(NAME, a, window, a.latent.shape[0])
        if a.rope_by_position and a.cos is not None:
            name = "cache_lengths" if a.positions is None else "positions"
            check_positions(NAME, name, _positions(a), a.cos.shape[0])


def reference(a: LatentStoreArguments) -> None:
    """Computes the following in fp32 (float64 for float64 latents) for each token t:

        latent_cache[slot of t] = norm(latent[t])
        rope_cache[slot of t] = rope(k_rope[t])

    Here, norm(z) = z / sqrt(mean(z²) + norm_eps) * norm_weight. Each number is rounded once, when
    it is stored.
    """
    positions = _positions(a) if a.rope_by_position else None
    write_latents(a, *finished_latents(a, positions))


def _positions(a: LatentStoreArguments) -> torch.Tensor:
    given = (a.row_offsets, 1, a.positions, a.cache_lengths, a.latent.device)
    return token_positions(a.latent.shape[0], *given)


sample_inputs = sampler_of(LatentStoreArguments, sample_store)

OP = register(
    FusedOp(
        name=NAME,
        arguments=LatentStoreArguments,
        returns="()",
        validate=validate,
        validate_values=validate_values,
        reference=reference,
        lowerings=(
            emitted_kernel(f"{LOWERING}:latent_store_steps", store_obstacle, FLOAT_DTYPES[:3]),
        ),
        cases=STORE_CASES,
        sample_inputs=sample_inputs,
    )
)


def mla_latent_store(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Calls the op: writes latents [T, L], normalised, and k_rope [T, R], rotated.

    latent_cache is [num_pages, page_size, L + R], or [.., L] with a rope_cache [.., R]. For other
    layouts, pass `latent_window` and `rope_window` (CacheWindow.to_ints). LatentStoreArguments
    explains the other options. Raises ArgumentError before anything is written.
    """
    windows = pool_windows(NAME, options, (latent_cache, rope_cache), "latent", latent)
    OP.torch_op(latent, k_rope, latent_cache, rope_cache, slot_mapping, *windows, **options)
