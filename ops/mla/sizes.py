"""How wide the parts of the heads of an MLA op are."""

from __future__ import annotations

from typing import Any

import torch

FP8 = torch.float8_e4m3fn


def widths(a: Any) -> tuple[Any, Any, Any]:
    """N, R and V: the widths of a head's unrotated part, rotated part and values."""
    shape = a.kv_b_weight.shape
    nope = shape[1] if len(shape) == 3 else shape[0] // a.q.shape[1] - a.v_dim
    return nope, a.q.shape[2] - nope, a.v_dim


def halves(a: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(W_UK [H, N, L], W_UV [H, V, L]) of an MlaDecodeArguments, whose kv_b_weight, dequantised, is
    the weight."""
    if a.v_weight is not None:
        return weight, a.v_weight
    nope, _, v_dim = widths(a)
    per_head = weight.unflatten(0, (a.q.shape[1], nope + v_dim))
    return per_head[:, :nope], per_head[:, nope:]
