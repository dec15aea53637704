"""The projection with library GEMMs, as steps that do not copy weights. Quantised weights are
dequantised first."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from tilewright.codegen.dequantize import DEQUANTIZE, dequantize_grid
from tilewright.codegen.kernel import Statics
from tilewright.codegen.targets import Target
from tilewright.ops.formats.activation_codes import scaled_numbers
from tilewright.ops.formats.weight_rows import WeightRows
from tilewright.ops.qkv.arguments import LETTERS, FusedQkvArguments
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.products import linear, multiply_batch
from tilewright.ops.runtime.program import Buffer, Library, Step
from tilewright.ops.runtime.scaled_products import ScaledOperands, scaled_product

Making = Generator[Step, Any, torch.Tensor]


def project_packed(
    x: torch.Tensor, weights: Sequence[torch.Tensor], rows: WeightRows
) -> Generator[Step, Any, list[torch.Tensor]]:
    """Multiplies x by all rows with one GEMM. Returns q [T, H, D] or [T, Hkv, G, D], k and v, which
    are views of the result."""
    lowest = min(weights, key=lambda weight: weight.storage_offset())
    whole = lowest.as_strided((rows.total, x.shape[1]), lowest.stride()[-2:])
    out = yield from linear(x, whole)
    return [
        out.as_strided((x.shape[0], *weight.shape[:-1]), (rows.total, *steps, 1), first)
        for weight, first, steps in zip(weights, rows.firsts, rows.steps, strict=True)
    ]


def project(x: torch.Tensor, weight: torch.Tensor) -> Making:
    """Multiplies x [T, K] by weight [H, D, K], with the result [T, H, D], or by [Hkv, G, D, K],
    with the result [T, Hkv, G, D]."""
    *heads, dim, _ = weight.shape
    if (rows := _in_rows(weight)) is not None:
        out = yield from linear(x, rows)
        return out.view(-1, *heads, dim)
    if len(heads) == 2:
        parts = []
        for part in weight.unbind(1):
            parts.append((yield from project(x, part)))
        out = yield Buffer((x.shape[0], *heads, dim), x.dtype)
        yield Library(_stack, (out, *parts))
        return out
    out = yield Buffer((*heads, x.shape[0], dim), x.dtype)
    yield Library(multiply_batch, (out, x.expand(heads[0], -1, -1), weight.mT))
    return out.transpose(0, 1)


def _in_rows(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns a weight [.., D, K] as [N, K]; None if the distances between its rows differ."""
    *heads, dim, hidden = weight.shape
    row, column = weight.stride()[-2:]
    in_row = [row * prod(weight.shape[axis + 1 : -1]) for axis in range(len(heads))]
    if list(weight.stride()[:-2]) != in_row:
        return None
    return weight.as_strided((prod(heads) * dim, hidden), (row, column))


def _stack(out: torch.Tensor, *parts: torch.Tensor) -> None:
    torch.stack(parts, dim=2, out=out)


# --- codes with codes -----------------------------------------------------------------------------


def scaled_operands(a: FusedQkvArguments) -> list[ScaledOperands] | None:
    """Returns the operands of the library's products for q, k and v (without v if there is none).
    Returns None unless the library can read the codes of x and the weights in place, with scales of
    the same kind."""
    if not a.has_codes:
        return None
    found = []
    for weight in a.projections:
        if weight is None:
            continue
        rows = _in_rows(weight.data)
        if rows is None or weight.scale is None or weight.factor is not None:
            return None
        found.append(ScaledOperands(a.x, a.x_scale, rows, weight.scale, weight.scale_block))
    if any(one.obstacle(a.value_dtype) for one in found) or len({one.kind for one in found}) > 1:
        return None
    return found


def project_codes(
    a: FusedQkvArguments, operands: Sequence[ScaledOperands], target: Target
) -> Generator[Step, Any, list[torch.Tensor]]:
    """Returns q [T, H, D] or [T, Hkv, G, D], k and v, each computed by a product of codes."""
    there = [weight for weight in a.projections if weight is not None]
    made = []
    for one, weight in zip(operands, there, strict=True):
        out = yield from scaled_product(one, a.value_dtype, target)
        made.append(out.view(-1, *weight.data.shape[:-1]))
    return made


# --- codes as numbers -----------------------------------------------------------------------------


def dequantized_weights(
    a: FusedQkvArguments,
    values: Mapping[str, Any],
    rows: WeightRows,
    statics: Sequence[Statics],
    target: Target,
) -> Generator[Step, Any, list[torch.Tensor]]:
    """Returns the dequantised weights [H, D, K] of q, k and v (without v if there is none). One
    kernel computes each, with the constants in `statics`. values: words, scales, zeros and factors
    by name."""
    dim, hidden = a.head_dim, a.x.shape[1]
    whole = yield Buffer((rows.total, hidden), number_dtype(a))
    weights = []
    there = [letter for letter in LETTERS if values[f"{letter}_weight"] is not None]
    for letter, own, first in zip(there, statics, rows.firsts, strict=True):
        given = {name: values[f"{letter}_{name}"] for name in ("weight", "scale", "zero")}
        given["factor"] = None if a.factors is None else a.factors[LETTERS.index(letter)]
        made = whole[first : first + own.num_rows]
        grid = dequantize_grid(own)
        yield launch(DEQUANTIZE, target, grid, {**given, "out": made}, own)
        weights.append(made.view(*given["weight"].shape[:-2], dim, hidden))
    return weights


def number_dtype(a: FusedQkvArguments) -> torch.dtype:
    """Returns the dtype to which codes are dequantised. It is the same as `number_dtype` of the
    kernels."""
    return torch.float32 if a.x.dtype.itemsize == 1 else a.x.dtype


def dequantized_x(a: FusedQkvArguments) -> Making:
    """Returns x dequantised to fp32, which is its codes times their scales. If x has no codes,
    returns x itself."""
    if a.x.dtype == number_dtype(a):
        return a.x
    x = yield Buffer(a.x.shape, number_dtype(a))
    yield Library(_scale_codes, (x, a.x) if a.x_scale is None else (x, a.x, a.x_scale))
    return x


def _scale_codes(out: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    out.copy_(scaled_numbers(codes.to(out.dtype), scale))
