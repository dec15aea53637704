"""Checks of the latents in MLA ops: the norm of the latent part, the RoPE of the rope part, and
their cache.

A latent cache consists of two windows with one head, [num_pages, page_size, 1, L] and [.., 1, R].
They are on one base (with entries `[latent | rope]`), or on two (Hugging Face's "keys" and
"values").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.ops.cache.checks import check_pair, check_window
from tilewright.ops.checks import (
    ArgumentError,
    check_device,
    check_dtype,
    check_number,
    check_operand,
    check_shape,
    check_tensor,
    given,
)
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import (
    FP8,
    LatentArguments,
    LatentStoreArguments,
)

# The highest rank of latents that the kernels support.
MAX_RANK = 2048


def check_latents(op: str, a: LatentArguments, rank: Any, rope_dim: Any, like: torch.Tensor) -> Any:
    """Checks latent and k_rope, both [Tk, .], against the dtype and the device of `like`. Returns
    Tk. Raises ArgumentError."""
    coded = a.latent_scale is not None
    sizes: tuple[Any, Any] = (None, rank)
    form = "[Tk, L]", sizes, (FP8 if coded else like.dtype,), like.device
    check_operand(op, "latent", a.latent, *form, dense=True)
    rows = given(a.latent).shape[0]
    if a.k_rope is None:
        raise ArgumentError(op, "k_rope", "a tensor, since latent is given", None)
    form = "[Tk, R]", (rows, rope_dim), (like.dtype,), like.device
    check_operand(op, "k_rope", a.k_rope, *form, dense=True)
    return rows


def check_finish(
    op: str, a: LatentArguments, num_tokens: Any, rank: Any, rope_dim: Any, like: torch.Tensor
) -> None:
    """Checks the norm and the rope. Raises ArgumentError."""
    check_number(op, "norm_eps", a.norm_eps, 0)
    if a.norm_weight is not None:
        dtypes = (like.dtype, torch.float32)
        check_operand(
            op, "norm_weight", a.norm_weight, "[L]", (rank,), dtypes, like.device, dense=True
        )
    a.rope.check(op, num_tokens, rope_dim, like.dtype, like.device)


def check_latent_cache(
    op: str, a: LatentArguments, rank: Any, rope_dim: Any, like: torch.Tensor
) -> CacheWindow:
    """Checks the bases and windows of the cache, and returns the window of latents. Raises
    ArgumentError."""
    windows, widths = {}, {"latent_window": rank, "rope_window": rope_dim}
    for (argument, width), (name, base, integers) in zip(
        widths.items(), written_windows(a), strict=True
    ):
        check_device(op, name, base, like.device)
        check_dtype(op, name, base, (like.dtype,))
        windows[argument] = check_window(op, argument, integers, name, base, 1, width)
    check_pair(op, windows, one_base=a.rope_cache is None)
    return windows["latent_window"]


def pool_windows(
    op: str, options: dict[str, Any], caches: Sequence[torch.Tensor | None], ranked: str, like: Any
) -> Sequence[Any]:
    """Removes the windows from `options` and returns them. If there are none, returns the windows
    of a pool [num_pages, page_size, L + R], or of two pools.

    ranked: the argument name of `like` [.., L], for error messages. Raises ArgumentError.
    """
    windows = options.pop("latent_window", None), options.pop("rope_window", None)
    if None not in windows:
        return windows
    expected = "windows, or a cache [num_pages, page_size, width]"
    check_tensor(op, "latent_cache", caches[0], expected)
    for name, cache in zip(("latent_cache", "rope_cache"), caches, strict=True):
        if cache is not None and cache.dim() != 3:
            raise ArgumentError(op, name, expected, f"shape {list(cache.shape)}")
    check_shape(op, ranked, like, "[.., L]", (None, None))
    base, other = given(caches[0]), caches[1]
    rope, rank = (base, like.shape[1]) if other is None else (other, 0)
    latent = CacheWindow.of(base[..., : like.shape[1]].unsqueeze(2), base)
    return latent.to_ints(), CacheWindow.of(rope[..., rank:].unsqueeze(2), rope).to_ints()


def written_windows(a: LatentArguments) -> list[tuple[str, torch.Tensor, Any]]:
    """Returns the name, the base and the window of each part that is written."""
    base = ("latent_cache", given(a.latent_cache))
    rope_base = base if a.rope_cache is None else ("rope_cache", a.rope_cache)
    return [(*base, a.latent_window), (*rope_base, a.rope_window)]


def store_obstacle(a: LatentStoreArguments) -> str | None:
    """Returns why no kernel can compute a `mla_latent_store` call; None if a kernel can. Reads only
    metadata."""
    return width_obstacle(a.latent.shape[1], a.k_rope.shape[1])


def width_obstacle(rank: int, rope_dim: int) -> str | None:
    if rope_dim % 2:
        return f"no kernel for {rope_dim} rope columns"
    return None if rank <= MAX_RANK else f"no kernel for latents of rank {rank}"
