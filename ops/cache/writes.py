"""The cache write of K and V, as the references compute it."""

from __future__ import annotations

import torch

from tilewright.ops.cache.addressing import Places, resolve_places
from tilewright.ops.cache.checks import KvCache, v_base
from tilewright.ops.formats.fp8 import FP8_DTYPES, overflowing_cast, saturating_cast
from tilewright.ops.formats.paged_cache import CacheWindow


def write_kv(a: KvCache, k: torch.Tensor, v: torch.Tensor | None, kv_repeat: int = 1) -> None:
    """Writes k and v [T, Hkv, D], given in the precision of the computation, to their slots. Scales
    them, repeats each head `kv_repeat` times, and rounds once."""
    k_window = CacheWindow.from_ints(a.k_window)
    places = resolve_places(a, k_window, k.shape[0])
    k = _scaled(k, a.k_cache_scale, a.cache_scale_multiplies).repeat_interleave(kv_repeat, dim=1)
    write_rows(k, a.k_cache, k_window, places, a.cache_saturates)
    if v is not None:
        scaled = _scaled(v, a.v_cache_scale, a.cache_scale_multiplies)
        (_, base), window = v_base(a), CacheWindow.from_ints(a.v_window)
        write_rows(
            scaled.repeat_interleave(kv_repeat, dim=1), base, window, places, a.cache_saturates
        )


def _scaled(values: torch.Tensor, scale: torch.Tensor | None, multiplies: bool) -> torch.Tensor:
    if scale is None:
        return values
    factor = scale.to(values.dtype).reshape(-1, 1)
    return values * factor if multiplies else values / factor


def write_rows(
    values: torch.Tensor,
    base: torch.Tensor,
    window: CacheWindow,
    places: Places,
    saturates: bool = True,
) -> None:
    """Writes values [T, H, D] to their places in a window, rounded to the window's dtype."""
    page, offset, written = places
    cast = saturating_cast if saturates else overflowing_cast
    rows, cache = cast(values[written], base.dtype), window.view(base)
    if base.dtype in FP8_DTYPES:
        # Not every backend can index 8-bit floats, but every backend can index bytes.
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
    cache.index_put_((page[written], offset[written]), rows)
