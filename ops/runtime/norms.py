"""Norms of a call's rows: as a part of its problem, and by PyTorch's library, as steps."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tilewright.codegen.row_norm import RowNorm
from tilewright.ops.reference.norm import row_norm_kind
from tilewright.ops.runtime.operands import operand_of
from tilewright.ops.runtime.program import Buffer, Library, Step


def row_norm_of(a: Any, prefix: str = "") -> RowNorm | None:
    """The norm of rows that a call has; its arguments are those of `check_row_norm`."""
    kind = row_norm_kind(a, prefix)
    if not kind:
        return None
    weight, eps, offset = (getattr(a, f"{prefix}norm_{n}") for n in ("weight", "eps", "offset"))
    bias = getattr(a, f"{prefix}norm_bias", None)
    return RowNorm(operand_of(weight, 0), eps, offset, kind, operand_of(bias, 0))


def without_norm(x: torch.Tensor, prefix: str = "") -> dict[str, Any]:
    """The arguments to change of a call whose x has been normed, by name."""
    names = {"rms_norm": False, "layer_norm": False, "norm_weight": None, "norm_bias": None}
    return {"x": x, **{f"{prefix}{name}": value for name, value in names.items()}}


def normed(a: Any, prefix: str = "") -> Generator[Step, Any, torch.Tensor]:
    """x behind the norm that a call has, in new memory; rounded once."""
    x, kind = a.x, row_norm_kind(a, prefix)
    out = yield Buffer.like(x)
    vectors = {name: getattr(a, f"{prefix}norm_{name}", None) for name in ("weight", "bias")}
    given = {name: vector for name, vector in vectors.items() if vector is not None}
    eps, offset = (getattr(a, f"{prefix}norm_{name}") for name in ("eps", "offset"))
    norm = partial(_norm, names=tuple(given), kind=kind, eps=eps, offset=offset)
    yield Library(norm, (out, x, *given.values()))
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
