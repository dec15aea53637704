"""Norms of q and k, and of rows, as the fused ops define them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_number,
    check_operand,
)
from tilewright.ops.groups import ArgumentGroup

NORM_KINDS = ("rms", "layer")
NORM_WIDTHS = ("head", "row")


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
    """Checks the weight of a norm. For a norm of each head, it is [D] (the same for all heads) or
    [H, D]. For a norm of the row of all heads, it is [H, D]."""
    if weight is None:
        return
    shared = norm_width == "head" and weight.dim() == 1
    letters, sizes = ("[D]", (head_dim,)) if shared else ("[H, D]", (heads, head_dim))
    dtypes = (dtype, torch.float32)
    check_operand(op, argument, weight, letters, sizes, dtypes, device, dense=True)


@dataclass(frozen=True)
class HeadNorm(ArgumentGroup):
    """A norm of projected heads [T, H, D].

    The norm is applied if a weight is given or weightless_norm is set.

    - `norm_kind`: "rms", or "layer", which also subtracts the mean.
    - `norm_width`: "head", or "row" for all heads of a token together.
    - `weight` [D] or [H, D] (for "row", [H, D]): the result is multiplied by norm_offset + weight.
    - `bias`, of the same shape as `weight`: added to the result at the end.
    - `norm_after_rope`: whether the norm comes after the rotation.

    Vectors have the heads' dtype or float32.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    weightless_norm: bool
    norm_kind: str
    norm_width: str
    norm_eps: float
    norm_offset: float
    norm_after_rope: bool

    def check(
        self, op: str, heads: Any, head_dim: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Checks the norm of these heads. Raises ArgumentError."""
        check_choice(op, "norm_kind", self.norm_kind, NORM_KINDS)
        check_choice(op, "norm_width", self.norm_width, NORM_WIDTHS)
        check_number(op, "norm_eps", self.norm_eps, 0)
        check_number(op, "norm_offset", self.norm_offset)
        for field, vector in (("weight", self.weight), ("bias", self.bias)):
            form = self.norm_width, heads, head_dim, dtype, device
            check_norm_weight(op, self.named(field), vector, *form)
        if self.bias is not None and self.weight is None and not self.weightless_norm:
            expected = f"None, since {self.named('weight')} is None, and weightless_norm is False"
            raise ArgumentError(op, self.named("bias"), expected, "a tensor")

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [T, H, D] after the norm, in its dtype. If there is no norm, returns x
        itself."""
        if self.weight is None and not self.weightless_norm:
            return x
        given = self.weight, self.norm_eps, self.norm_kind, self.norm_width
        x = apply_norm(x, *given, offset=self.norm_offset)
        return x if self.bias is None else x + self.bias.to(x.dtype)


@dataclass(frozen=True)
class RowNorm(ArgumentGroup):
    """An optional norm of rows of N numbers.

    - `rms_norm`: x is divided by the root of (the mean of its squares plus norm_eps). If
      norm_weight [N] is given, the result is multiplied by norm_offset + norm_weight.
    - `layer_norm`: like rms_norm, but the mean of the row is first subtracted from x. If norm_bias
      [N] is given, it is added to the result at the end.

    Vectors have x's dtype or float32.
    """

    rms_norm: bool = True
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    layer_norm: bool = False
    norm_bias: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """The kind of norm: "rms", "layer" or ""."""
        return "layer" if self.layer_norm else "rms" if self.rms_norm else ""

    def check(self, op: str, x: torch.Tensor, letters: str, size: Any) -> None:
        """Checks the norm of rows of `size` numbers in a call with this x. Raises ArgumentError."""
        if not self.kind and self.norm_weight is not None:
            since = f"None, since {self.named('rms_norm')} is False"
            raise ArgumentError(op, self.named("norm_weight"), since, "a tensor")
        self._check_vector(op, x, "norm_weight", self.norm_weight, letters, size)
        check_number(op, self.named("norm_eps"), self.norm_eps, 0)
        check_number(op, self.named("norm_offset"), self.norm_offset)
        if self.kind != "layer" and self.norm_bias is not None:
            since = f"None, since {self.named('layer_norm')} is False"
            raise ArgumentError(op, self.named("norm_bias"), since, "a tensor")
        if self.layer_norm and self.rms_norm:
            expected = f"False, since {self.named('rms_norm')} is True"
            raise ArgumentError(op, self.named("layer_norm"), expected, True)
        self._check_vector(op, x, "norm_bias", self.norm_bias, letters, size)

    def _check_vector(
        self, op: str, x: torch.Tensor, field: str, vector: Any, letters: str, size: Any
    ) -> None:
        if vector is not None:
            form = letters, (size,), (x.dtype, torch.float32), x.device
            check_operand(op, self.named(field), vector, *form)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [T, N] after the norm, in its dtype. If there is no norm, returns x itself."""
        if not self.kind:
            return x
        given = self.norm_weight, self.norm_eps, self.kind
        x = apply_norm(x, *given, offset=self.norm_offset)
        return x if self.norm_bias is None else x + self.norm_bias.to(x.dtype)


def apply_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    kind: str = "rms",
    width: str = "head",
    offset: float = 0.0,
) -> torch.Tensor:
    """Normalises x [..., D] over each row or head, or x [T, H, D] over all heads of a token, in x's
    dtype.

    kind: "rms" computes x / sqrt(mean(x²) + eps). "layer" first subtracts the mean from x, and then
    does the same. In both cases, the result is multiplied by `offset + weight`.
    """
    axes = (-2, -1) if width == "row" else (-1,)
    if kind == "layer":
        x = x - x.mean(dim=axes, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + eps)
    return x if weight is None else x * (weight.to(x.dtype) + offset)
