"""Norms of q and k, and of rows, as the fused ops define them."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_absent,
    check_choice,
    check_number,
    check_operand,
)

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
    """Checks a norm of rows that a call may have: the arguments rms_norm, norm_weight, norm_eps and
    norm_offset, and where the op has them layer_norm and norm_bias, their names with a prefix.
    Raises ArgumentError."""
    kind = row_norm_kind(a, prefix)
    if not kind:
        check_absent(op, a, [f"{prefix}norm_weight"], f"{prefix}rms_norm is False")
    check_row_norm_values(op, a, letters, size, prefix)
    if not hasattr(a, f"{prefix}layer_norm"):
        return
    if kind != "layer":
        check_absent(op, a, [f"{prefix}norm_bias"], f"{prefix}layer_norm is False")
    elif getattr(a, f"{prefix}rms_norm"):
        raise ArgumentError(op, f"{prefix}layer_norm", f"False, since {prefix}rms_norm is", True)
    _check_vector(op, a, f"{prefix}norm_bias", letters, size)


def row_norm_kind(a: Any, prefix: str = "") -> str:
    """Which norm of rows a call has: "rms", "layer" or ""."""
    if getattr(a, f"{prefix}layer_norm", False):
        return "layer"
    return "rms" if getattr(a, f"{prefix}rms_norm") else ""


def check_row_norm_values(op: str, a: Any, letters: str, size: Any, prefix: str = "") -> None:
    """The same of a norm of so many numbers that every call has. The weight is of x's dtype or
    float32, or absent."""
    _check_vector(op, a, f"{prefix}norm_weight", letters, size)
    check_number(op, f"{prefix}norm_eps", getattr(a, f"{prefix}norm_eps"), 0)
    check_number(op, f"{prefix}norm_offset", getattr(a, f"{prefix}norm_offset"))


def _check_vector(op: str, a: Any, name: str, letters: str, size: Any) -> None:
    vector = getattr(a, name)
    if vector is not None:
        dtypes = (a.x.dtype, torch.float32)
        check_operand(op, name, vector, letters, (size,), dtypes, a.x.device)


def apply_row_norm(x: torch.Tensor, a: Any, prefix: str = "") -> torch.Tensor:
    """x [T, N] behind the norm of rows that a call has, in x's dtype; x itself where it has none.
    The arguments are those of `check_row_norm`."""
    kind = row_norm_kind(a, prefix)
    if not kind:
        return x
    weight, eps, offset = (getattr(a, f"{prefix}norm_{n}") for n in ("weight", "eps", "offset"))
    bias = getattr(a, f"{prefix}norm_bias", None)
    x = apply_norm(x, weight, eps, kind, offset=offset)
    return x if bias is None else x + bias.to(x.dtype)


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
