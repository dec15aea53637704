"""Operations of MLA ops on latents in plain PyTorch, in fp32, or in float64 for float64 latents."""

from __future__ import annotations

import torch

from tilewright.ops.cache.addressing import resolve_places
from tilewright.ops.cache.writes import write_rows
from tilewright.ops.checks import given
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import LatentArguments, rotates_keys
from tilewright.ops.reference.norm import apply_norm


def finished_latents(
    a: LatentArguments, positions: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (latent [Tk, L], k_rope [Tk, R]) as a cache holds them: normalised and rotated in
    fp32 or float64, and rounded once to their dtypes."""
    latent, k_rope = given(a.latent), given(a.k_rope)
    dtype = k_rope.dtype
    compute = torch.promote_types(dtype, torch.float32)
    if a.norm_weight is not None:
        normed = apply_norm(latent.to(compute).unsqueeze(1), a.norm_weight, a.norm_eps)
        latent = normed.squeeze(1).to(dtype)
    if not rotates_keys(a):
        return latent, k_rope
    return latent, a.rope.apply(k_rope.to(compute).unsqueeze(1), positions).squeeze(1).to(dtype)


def write_latents(a: LatentArguments, latent: torch.Tensor, k_rope: torch.Tensor) -> None:
    """Writes latents that are already normalised and rotated to their places."""
    window = CacheWindow.from_ints(a.latent_window)
    places = resolve_places(a, window, latent.shape[0])
    base = given(a.latent_cache)
    write_rows(latent.unsqueeze(1), base, window, places)
    base = base if a.rope_cache is None else a.rope_cache
    write_rows(k_rope.unsqueeze(1), base, CacheWindow.from_ints(a.rope_window), places)
