"""Norms of q and k, and of rows, as the fused ops define them."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.checks import check_absent, check_choice, check_number, check_operand

NORM_KINDS = ("rms", "layer")
NORM_WIDTHS = ("head", "row")


def check_norm(
    op: str, norm_kind: str, norm_width: str, norm_eps: float, norm_offset: float
) -> None:
    """Checks what q and k share. Raises ArgumentError."""
    check_choice(op, "norm_kind", norm_kind, NORM_KINDS)
    check_choice(op, "norm_width", norm_width, NORM_WIDTHS)
    check_number(op, "norm_eps", norm_eps, 0)
    check_number(op, "norm_offset", norm_offset)


def check_norm_weight(
    op: str,
    argument: str,
    weight: torch.Tensor | None,
    norm_width: str,
    heads: Any,
    head_dim: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks a norm weight: [D] for all heads, or [H, D]; always [H, D] for a norm over the row."""
    if weight is None:
        return
    shared = norm_width == "head" and weight.dim() == 1
    letters, sizes = ("[D]", (head_dim,)) if shared else ("[H, D]", (heads, head_dim))
    dtypes = (dtype, torch.float32)
    check_operand(op, argument, weight, letters, sizes, dtypes, device, dense=True)


def check_row_norm(op: str, a: Any, letters: str, size: Any, prefix: str = "") -> None:
    """Checks an RMS norm of rows that a call may have: the arguments rms_norm, norm_weight,
    norm_eps and norm_offset, their names with a prefix. Raises ArgumentError."""
    if not getattr(a, f"{prefix}rms_norm"):
        check_absent(op, a, [f"{prefix}norm_weight"], f"{prefix}rms_norm is False")
    check_row_norm_values(op, a, letters, size, prefix)


def check_row_norm_values(op: str, a: Any, letters: str, size: Any, prefix: str = "") -> None:
    """The same of a norm of so many numbers that every call has. The weight is of x's dtype or
    float32, or absent."""
    weight_name, weight = f"{prefix}norm_weight", getattr(a, f"{prefix}norm_weight")
    if weight is not None:
        dtypes = (a.x.dtype, torch.float32)
        check_operand(op, weight_name, weight, letters, (size,), dtypes, a.x.device)
    check_number(op, f"{prefix}norm_eps", getattr(a, f"{prefix}norm_eps"), 0)
    check_number(op, f"{prefix}norm_offset", getattr(a, f"{prefix}norm_offset"))


def apply_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: str = "rms",
    width: str = "head",
    offset: float = 0.0,
) -> torch.Tensor:
    """Normalises x [..., D] over each row or head, x [T, H, D] over a token's heads; in x's dtype.

    rms: x / sqrt(mean(x²) + eps). layer: the same of x - mean(x). Then times `offset + weight`.
    """
    axes = (-2, -1) if width == "row" else (-1,)
    if kind == "layer":
        x = x - x.mean(dim=axes, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + eps)
    return x if weight is None else x * (weight.to(x.dtype) + offset)
