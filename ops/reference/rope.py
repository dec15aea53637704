"""Rotary position embedding, as the fused ops define it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
    given,
    holds,
)
from tilewright.ops.groups import ArgumentGroup

ROPE_STYLES = ("none", "half", "interleaved", "interleaved_to_half")


@dataclass(frozen=True)
class Rope(ArgumentGroup):
    """A rotation of heads by tables.

    - `cos`, `sin` [T_rope, rotary_dim] or [T_rope, rotary_dim / 2]: the tables. T_rope divides T.
    - `rope_style`: one of ROPE_STYLES, which `apply_rope` explains.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rotary_dim: Any = 0
    rope_style: str = "none"

    def check(
        self,
        op: str,
        num_tokens: Any,
        head_dim: Any,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_position: bool = False,
    ) -> None:
        """Checks that the fields fit each other. The tables must have `dtype` or float32. Raises
        ArgumentError. by_position: whether the tables have a row for each position, and may have
        any strides."""
        cos, sin, rotary_dim, rope_style = self.cos, self.sin, self.rotary_dim, self.rope_style
        check_choice(op, "rope_style", rope_style, ROPE_STYLES)
        if rope_style == "none":
            given = "cos" if cos is not None else "sin" if sin is not None else None
            if given is not None:
                raise ArgumentError(op, given, 'None, since rope_style is "none"', "a tensor")
            if rotary_dim != 0:
                raise ArgumentError(op, "rotary_dim", '0, since rope_style is "none"', rotary_dim)
            return
        if not holds((rotary_dim > 0) & (rotary_dim % 2 == 0)) or not holds(rotary_dim <= head_dim):
            expected = f"an even number from 2 to head_dim = {head_dim}"
            raise ArgumentError(op, "rotary_dim", expected, rotary_dim)
        if cos is None or sin is None:
            missing = "cos" if cos is None else "sin"
            raise ArgumentError(op, missing, f"a tensor, since rope_style is {rope_style!r}", None)
        _check_table(op, cos, rotary_dim)
        if not by_position:
            _check_rows(op, num_tokens, cos.shape[0])
        check_shape(op, "sin", sin, "of cos", cos.shape)
        for name, table in (("cos", cos), ("sin", sin)):
            check_dtype(op, name, table, (dtype, torch.float32))
            check_device(op, name, table, device)
            if not by_position:
                check_last_dim_dense(op, name, table)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [T, H, D] rotated, in its dtype. If there are no tables, returns x itself."""
        if self.cos is None or self.sin is None:
            return x
        return apply_rope(x, self.cos, self.sin, self.rotary_dim, self.rope_style)


@dataclass(frozen=True)
class RopeTables(ArgumentGroup):
    """A rotation of vectors of R numbers by tables.

    - `cos`, `sin` [T_rope, R] or [T_rope, R / 2]: the tables. `apply_rope` explains their rows and
      the styles.
    - `rope_by_position`: whether a token at position p uses row p of the tables. The tables may
      then have any strides.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    rope_style: str = "none"
    rope_by_position: bool = False

    def check(
        self, op: str, num_tokens: Any, width: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Checks the tables for vectors of `width` numbers. The tables must have `dtype` or
        float32. Raises ArgumentError."""
        check_choice(op, "rope_style", self.rope_style, ROPE_STYLES)
        turns, by_position = self.rope_style != "none", self.rope_by_position
        if turns and not (holds(width >= 2) and holds(width % 2 == 0)):
            expected = f"'none', because {width} columns cannot be divided into pairs"
            raise ArgumentError(op, "rope_style", expected, repr(self.rope_style))
        if by_position and not turns:
            raise ArgumentError(op, "rope_by_position", 'False, since rope_style is "none"', True)
        rope = Rope(self.cos, self.sin, width if turns else 0, self.rope_style)
        rope.check(op, num_tokens, width, dtype, device, by_position=by_position)

    def apply(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Returns x [T, H, R] rotated, in its dtype. positions [T]: the rows of the tables, or
        None."""
        cos, sin = self.cos, self.sin
        if cos is None or sin is None:
            return x
        if positions is not None:
            rows = positions.clamp(0, max(cos.shape[0] - 1, 0))
            cos, sin = cos[rows], sin[rows]
        return apply_rope(x, cos, sin, x.shape[-1], self.rope_style)

    @property
    def paired(self) -> bool:
        """Whether cosines and sines alternate in memory, like the parts of complex numbers."""
        cos, sin = given(self.cos), given(self.sin)
        alike = cos.stride() == sin.stride() and cos.dtype == sin.dtype
        after = sin.data_ptr() - cos.data_ptr() == cos.element_size()
        return alike and after and cos.stride(-1) == 2


def _check_table(op: str, cos: torch.Tensor, rotary_dim: int) -> None:
    widths = (rotary_dim, rotary_dim // 2)
    if cos.dim() != 2 or not any(holds(cos.shape[1] == width) for width in widths):
        expected = f"shape [T_rope, {widths[0]}] or [T_rope, {widths[1]}]"
        raise ArgumentError(op, "cos", expected, f"shape {list(cos.shape)}")


def _check_rows(op: str, num_tokens: Any, rows: Any) -> None:
    divides = holds(rows > 0) and holds(num_tokens % rows == 0)
    if not divides and holds(num_tokens != 0):
        expected = f"T_rope rows with T % T_rope == 0 for T = {num_tokens}"
        raise ArgumentError(op, "cos", expected, f"{rows} rows")


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int, rope_style: str
) -> torch.Tensor:
    """Rotates the first `rotary_dim` numbers of each head, and leaves the other numbers unchanged.
    Computes in x's dtype.

    x is [T, H, D], and cos and sin are [T_rope, R] or [T_rope, R/2]. Token t uses row t % T_rope.
    In a table of width R, each member of a pair uses the column of its place in the output. In a
    table of width R/2, both members use the column of the pair.

    rope_style: "half" rotates the pairs (i, i + R/2). "interleaved" rotates the pairs (2i, 2i + 1).
    "interleaved_to_half" rotates the pairs (2i, 2i + 1) of the input, and stores them at (i, i +
    R/2) of the output.
    """
    tokens, heads, _ = x.shape
    if tokens == 0:
        return x
    rows = cos.shape[0]
    turns = x[..., :rotary_dim].reshape(tokens // rows, rows, heads, rotary_dim)
    a, b = _members(turns, rope_style == "half")
    cos_a, cos_b = _columns(cos.to(x.dtype), rotary_dim, rope_style)
    sin_a, sin_b = _columns(sin.to(x.dtype), rotary_dim, rope_style)
    turned = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    join = torch.stack if rope_style == "interleaved" else torch.cat
    out = join(turned, dim=-1)
    return torch.cat((out.reshape(tokens, heads, rotary_dim), x[..., rotary_dim:]), dim=-1)


def _members(x: torch.Tensor, in_halves: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and the second members of all pairs on the last axis."""
    if in_halves:
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., ::2], x[..., 1::2]


def _columns(
    table: torch.Tensor, rotary_dim: int, rope_style: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the columns of a table for the first members and for the second members of all pairs,
    each [T_rope, 1, R/2]."""
    table = table.unsqueeze(1)
    if table.shape[-1] != rotary_dim:
        return table, table
    return _members(table, rope_style != "interleaved")
