"""Norms of the rows of x, as a part of a kernel's problem or as separate steps. The steps can also
permute the columns of x."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tilewright.codegen import row_norm
from tilewright.codegen.rows import (
    MOST_NORM_COLUMNS,
    NORM_X,
    ORDER_X,
    ColumnOrder,
    norm_statics,
    order_grid,
    order_statics,
)
from tilewright.codegen.targets import Target
from tilewright.ops.reference.norm import RowNorm
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import operand_of
from tilewright.ops.runtime.program import Buffer, Library, Step


def row_norm_of(norm: RowNorm) -> row_norm.RowNorm | None:
    """Returns the norm of the rows of x as a part of a kernel's problem; None if there is none."""
    if not norm.kind:
        return None
    weight, bias = operand_of(norm.norm_weight, 0), operand_of(norm.norm_bias, 0)
    return row_norm.RowNorm(weight, norm.norm_eps, norm.norm_offset, norm.kind, bias)


def without_norm(x: torch.Tensor, norm: RowNorm) -> dict[str, Any]:
    """Returns the arguments that have to be replaced in a call whose x has already been normalised,
    by name."""
    off = {"rms_norm": False, "layer_norm": False, "norm_weight": None, "norm_bias": None}
    return {"x": x, **{norm.named(field): value for field, value in off.items()}}


def normed(
    x: torch.Tensor, norm: RowNorm, target: Target, order: ColumnOrder | None = None
) -> Generator[Step, Any, torch.Tensor]:
    """Returns x [T, K] after a norm, in a new tensor, rounded once. If an order is given, the
    columns are permuted to this order."""
    tokens, columns = x.shape
    width = order.width if order else columns
    if x.stride(1) != 1 or width > MOST_NORM_COLUMNS:
        made = yield from _normed_by_torch(x, norm)
        return made if order is None else (yield from ordered(made, order, target))
    out = yield Buffer((tokens, width), x.dtype)
    values = {"x": x, "normed": out, "norm_weight": norm.norm_weight, "norm_bias": norm.norm_bias}
    known = {"NORM_EPS": norm.norm_eps, "NORM_OFFSET": norm.norm_offset}
    known["SUBTRACTS_MEAN"] = norm.kind == "layer"
    yield launch(NORM_X, target, (tokens,), values, norm_statics(columns, order), **known)
    return out


def ordered(
    x: torch.Tensor, order: ColumnOrder, target: Target, static_tokens: bool = False
) -> Generator[Step, Any, torch.Tensor]:
    """Returns x [T, K] with permuted columns, as [T, order.width], padded with zeros.
    static_tokens: whether T is a constant of the kernel."""
    tokens, columns = x.shape
    out = yield Buffer((tokens, order.width), x.dtype)
    known = {"num_tokens": tokens} if static_tokens else {}
    values = {"x": x, "ordered": out, "num_tokens": tokens}
    statics = order_statics(order, columns)
    yield launch(ORDER_X, target, order_grid(order, tokens), values, statics, **known)
    return out


def _normed_by_torch(x: torch.Tensor, norm: RowNorm) -> Generator[Step, Any, torch.Tensor]:
    out = yield Buffer.like(x)
    vectors = {"weight": norm.norm_weight, "bias": norm.norm_bias}
    given = {name: vector for name, vector in vectors.items() if vector is not None}
    made = partial(
        _norm, names=tuple(given), kind=norm.kind, eps=norm.norm_eps, offset=norm.norm_offset
    )
    yield Library(made, (out, x, *given.values()))
    return out


def _norm(
    out: torch.Tensor,
    x: torch.Tensor,
    *vectors: torch.Tensor,
    names: tuple[str, ...],
    kind: str,
    eps: float,
    offset: float,
) -> None:
    wide = dict(zip(names, map(_widened, vectors), strict=True))
    weight, bias = wide.get("weight"), wide.get("bias")
    if weight is not None:
        weight.add_(offset)
    if kind == "layer":
        made = functional.layer_norm(_widened(x), x.shape[-1:], weight, bias, eps)
    else:
        made = functional.rms_norm(_widened(x), x.shape[-1:], weight, eps)
    out.copy_(made)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32).copy_(x)
