"""Determines which keys a query attends to, according to positions and a mask tensor."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.codegen.attention.blocks import LOGIT
from tilewright.codegen.spec import Constant
from tilewright.ops.checks import (
    INT32_MAX,
    ArgumentError,
    check_choice,
    check_device,
    check_dtype,
    holds,
    proven,
)

MASKS = ("causal", "none", "sliding_window", "chunked")
WINDOWED = ("sliding_window", "chunked")


def check_mask(op: str, a: Any) -> None:
    """Checks mask and window. Reads only metadata. Raises ArgumentError."""
    check_choice(op, "mask", a.mask, MASKS)
    windowed = a.mask in WINDOWED
    if windowed and not 1 <= a.window <= INT32_MAX:
        expected = f"at least 1 and at most {INT32_MAX}, since mask is {a.mask!r}"
        raise ArgumentError(op, "window", expected, a.window)
    if not windowed and a.window != 0:
        raise ArgumentError(op, "window", f"0, since mask is {a.mask!r}", a.window)


def check_attn_mask(op: str, mask: torch.Tensor, q: torch.Tensor, batch: Any, keys: Any) -> None:
    """Checks a mask tensor [B or 1, H or 1, S or 1, K], where K is at least `keys`. The queries q
    [T, H, ...] belong to `batch` sequences with the same number of queries. Reads only metadata.
    Raises ArgumentError."""
    check_dtype(op, "attn_mask", mask, (torch.bool, q.dtype, torch.float32))
    check_device(op, "attn_mask", mask, q.device)
    heads, queries = q.shape[1], q.shape[0] // batch
    fits = mask.dim() == 4 and all(
        holds(have == want) or holds(have == 1)
        for have, want in zip(mask.shape[:3], (batch, heads, queries), strict=True)
    )
    if not fits or not holds(mask.shape[3] >= keys):
        expected = f"shape [{batch} or 1, {heads} or 1, {queries} or 1, {keys}]"
        raise ArgumentError(op, "attn_mask", expected, f"shape {list(mask.shape)}")


def largest_power(dtype: torch.dtype) -> float:
    """Returns E, the largest power of two of a float dtype. All numbers of the dtype are less than
    2 E."""
    return 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1)


def bounds_logits(scale: float, softcap: float, dtype: torch.dtype) -> bool:
    """Whether no logit exceeds LOGIT * E, where E is the `largest_power` of the mask's dtype.
    softcap bounds the logits. Without softcap, `scale` bounds them, because products of queries and
    keys are finite in the mask's dtype or a smaller dtype, and therefore less than 2 E."""
    if softcap:
        return abs(softcap) <= LOGIT * largest_power(dtype)
    return abs(scale) <= LOGIT / 2


def lowest_hides(a: Any, keys: Any) -> bool:
    """Whether the lowest numbers of a call's mask may hide keys (see hide_lowest of `mask_blocks`).
    They may hide keys if attn_mask alone determines which of the `keys` are visible, attn_mask has
    one column for each key, and the logits are bounded."""
    mask = a.attn_mask
    if mask is None or mask.dtype == torch.bool or a.mask != "none" or a.key_lengths is not None:
        return False
    softcap = getattr(a, "softcap", 0.0)
    return proven(mask.shape[3] == keys) and bounds_logits(a.scale, softcap, mask.dtype)


def visible(
    a: Any, queries: torch.Tensor, keys: torch.Tensor, limit: torch.Tensor | None
) -> torch.Tensor:
    """Returns whether the query at each position [S] attends to the key at each position [K], as
    [S, K]."""
    p, j = queries[:, None], keys[None, :]
    seen = torch.ones_like(p - j, dtype=torch.bool) if a.mask == "none" else j <= p
    if a.mask == "sliding_window":
        seen = seen & (j > p - a.window)
    elif a.mask == "chunked":
        seen = seen & (j // a.window == p.div(a.window, rounding_mode="floor"))
    return seen if limit is None else seen & (j < limit)


def mask_numbers(
    mask: torch.Tensor, sequence: int, keys: int, compute: torch.dtype
) -> torch.Tensor:
    """Returns a sequence's attn_mask as numbers that are added, [H or 1, S or 1, keys]."""
    own = mask[sequence if mask.shape[0] > 1 else 0, :, :, :keys]
    if own.dtype != torch.bool:
        return own.to(compute)
    zeros = torch.zeros(own.shape, dtype=compute, device=own.device)
    return zeros.masked_fill(~own, float("-inf"))


def known_strides(mask: torch.Tensor | None) -> dict[str, Constant]:
    """Returns the strides that are known when the kernel is compiled. In most masks, the dimension
    of the keys has stride 1."""
    if mask is None or mask.shape[3] <= 1 or mask.stride(3) != 1:
        return {}
    return {"mask_column_stride": 1}
