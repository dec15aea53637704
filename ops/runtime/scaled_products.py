"""Products of e4m3 codes that PyTorch's scaled GEMM computes, as steps of a call.

    out [T, N] = (x * x_scale) @ (weight * weight_scale)^T + bias

x [T, K] and weight [N, K] are float8_e4m3fn. x_scale is [T or 1, 1 or K / 128], or None for 1.
weight_scale is [ceil(N / bn), ceil(K / bk)] with block = [bn, bk]. Products are summed in float32:
PyTorch's fast accumulation would keep fewer bits on Hopper.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tilewright.codegen.scales import WIDEN_SCALES, WideScales, widen_grid
from tilewright.codegen.targets import Target
from tilewright.ops.checks import HALVES, proven
from tilewright.ops.formats.activation_codes import ACTIVATION_BLOCK as BLOCK
from tilewright.ops.formats.activation_codes import ACTIVATION_CODES
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import is_aligned
from tilewright.ops.runtime.program import Buffer, Library, Step

#: The kind of scales in which x has one scale, and the weight has one scale.
TENSORS = "tensors"
#: The kind of scales in which each row of x and each row of the weight has a scale.
ROWS = "rows"
#: The kind of scales in which each 128 columns of a row of x have a scale, and each block of
#: 128 x 128 numbers of the weight has a scale.
BLOCKS = "blocks"
# The library requires sizes and strides to be multiples of this number.
_UNIT = 16
# The first release of torch that supports ROWS with a float16 result.
_ROWS_OF_FLOAT16 = "2.10"
# The first release of torch that supports BLOCKS with the strides that cuBLAS reads. Earlier
# releases computed wrong products with BLOCKS if K was not a multiple of 512.
_WITH_BLOCKS = "2.11"
# For BLOCKS, the library requires the number of rows of x to be a multiple of this number.
_ROWS_OF_BLOCKS = 4
# For BLOCKS, the library requires the number of columns of the weight's scales to be a multiple of
# this number.
_COLUMNS_OF_BLOCKS = 4
# The dtypes of scales that a kernel converts to float32. PyTorch converts all other dtypes.
_WIDENED = (*HALVES, torch.float32, torch.uint8)


@dataclass(frozen=True)
class ScaledOperands:
    """The operands of a scaled product. The module's docstring explains them."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    weight: torch.Tensor
    weight_scale: torch.Tensor
    block: Sequence[int]

    @property
    def kind(self) -> str | None:
        """TENSORS, ROWS or BLOCKS; None if the library has no product with such scales."""
        rows, along = (1, 1) if self.x_scale is None else self.x_scale.shape
        groups, columns = self.weight_scale.shape
        if not proven(columns == 1):
            return BLOCKS if tuple(self.block) == (BLOCK, BLOCK) else None
        if not proven(along == 1):
            return None
        return TENSORS if proven(groups == 1) and proven(rows == 1) else ROWS

    def obstacle(self, out_dtype: torch.dtype) -> str | None:
        """Returns why the library cannot compute the product of these operands in `out_dtype`; None
        if it can. Reads only metadata. :func:`chip_obstacle` checks the chip."""
        kind, (rows, columns) = self.kind, self.weight.shape
        if (self.x.dtype, self.weight.dtype) != (ACTIVATION_CODES, ACTIVATION_CODES):
            return f"no scaled product of {self.x.dtype} and {self.weight.dtype}"
        if kind is None:
            return "no scaled product has such scales of x and the weight together"
        unit = BLOCK if kind == BLOCKS else _UNIT
        if not (proven(rows % unit == 0) and proven(columns % unit == 0)):
            return (
                f"a scaled product by {kind} requires weight sizes that are multiples of {unit}, "
                f"not {rows} x {columns}"
            )
        if not all(map(_is_reached, (self.x, self.weight))):
            return (
                "a scaled product requires contiguous rows, at distances that are multiples "
                "of 16 bytes"
            )
        if out_dtype not in HALVES:
            return f"no scaled product has results in {out_dtype}"
        wanted = _WITH_BLOCKS if kind == BLOCKS else ""
        if (kind, out_dtype) == (ROWS, torch.float16):
            wanted = _ROWS_OF_FLOAT16
        if wanted and torch.__version__ < wanted:
            return f"a scaled product by {kind} to {out_dtype} requires torch {wanted}"
        return None


def _is_reached(codes: torch.Tensor) -> bool:
    """Whether the library can read codes [rows, K] with their strides: columns are contiguous, and
    rows are multiples of 16 bytes apart and do not overlap. `_aligned` checks the address."""
    row, column = codes.stride()
    return bool(column == 1 and row % _UNIT == 0 and row >= codes.shape[1])


def _aligned(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes that are aligned to 16 bytes. This is checked at each call, because calls with
    the same metadata may differ in alignment."""
    return codes if is_aligned(codes) else codes.clone(memory_format=torch.contiguous_format)


def chip_obstacle(kind: str | None, target: Target) -> str | None:
    """Returns why a chip cannot compute a product with such scales; None if it can."""
    if kind == BLOCKS and not target.scales_blocks:
        return f"the library scales products by blocks only on Hopper, not on {target.name}"
    return None


def scaled_product(
    operands: ScaledOperands,
    out_dtype: torch.dtype,
    target: Target,
    bias: torch.Tensor | None = None,
) -> Generator[Step, Any, torch.Tensor]:
    """Returns the product in `out_dtype`, rounded once. bias: [N] of `out_dtype`, or None."""
    kind, tokens = operands.kind, operands.x.shape[0]
    assert kind is not None
    rows = operands.weight.shape[0]
    if tokens == 0:
        return (yield Buffer((0, rows), out_dtype))
    weight_scale = yield from _weight_scales(operands, target)
    others = {"x_scale": operands.x_scale, "bias": bias}
    given = {name: tensor for name, tensor in others.items() if tensor is not None}
    names = tuple(given)
    tensors = (operands.x, operands.weight, weight_scale, *given.values())
    if kind == BLOCKS:
        padded = -(-tokens // _ROWS_OF_BLOCKS) * _ROWS_OF_BLOCKS
        by_blocks = partial(_by_blocks, names=names, rows=padded, out_dtype=out_dtype)
        out = yield Library(by_blocks, tensors, makes=Buffer((padded, rows), out_dtype))
        return out if padded == tokens else out[:tokens]
    out = yield Buffer((tokens, rows), out_dtype)
    yield Library(partial(_multiply, names=names, kind=kind), (out, *tensors))
    return out


def _weight_scales(operands: ScaledOperands, target: Target) -> Generator[Step, Any, torch.Tensor]:
    """Returns the scales of the weight in the form that the library needs: float32 and contiguous.
    They are one number, a number for each row [N, 1], or a number for each block, with columns
    padded to a multiple of four. If the model stores the scales in this form, they are not
    copied."""
    scale, kind, (rows, columns) = operands.weight_scale, operands.kind, operands.weight.shape
    if kind == TENSORS:
        wide = WideScales(1, 1, 1, 1)
    elif kind == ROWS:
        wide = WideScales(rows, 1, 1, rows if len(scale) == 1 else operands.block[0])
    else:
        blocks = columns // BLOCK
        wide = WideScales(rows // BLOCK, blocks, blocks + -blocks % _COLUMNS_OF_BLOCKS, 1)
    shape = wide.rows, wide.width
    if scale.dtype == torch.float32 and scale.shape == shape and scale.is_contiguous():
        return scale
    made = yield Buffer(shape, torch.float32)
    if scale.dtype in _WIDENED:
        values = {"scale": scale, "out": made}
        yield launch(WIDEN_SCALES, target, widen_grid(wide), values, wide)
    else:
        yield Library(partial(_widen, wide=wide), (made, scale))
    return made


def _widen(made: torch.Tensor, scale: torch.Tensor, wide: WideScales) -> None:
    each = scale.float().repeat_interleave(wide.group, 0)[: wide.rows]
    made.copy_(functional.pad(each, (0, wide.width - wide.columns)))


def _multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *others: torch.Tensor,
    names: Sequence[str],
    kind: str,
) -> None:
    given = dict(zip(names, others, strict=True))
    x_scale = _numbers(given.get("x_scale"), x)
    if kind == ROWS:
        scale_a = x_scale.expand(len(x), 1).contiguous()
        scale_b = weight_scale.t()
    else:
        scale_a, scale_b = x_scale.reshape(()), weight_scale.reshape(())
    torch._scaled_mm(
        _aligned(x),
        _aligned(weight).t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=contiguous(given.get("bias")),  # the library assumes a contiguous bias
        out_dtype=out.dtype,
        use_fast_accum=False,
        out=out,
    )


def _by_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *others: torch.Tensor,
    names: Sequence[str],
    rows: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiplies with BLOCKS, after padding x with zeros to `rows` rows.

    In the scales of x, the library requires a stride of 1 from row to row. In the scales of the
    weight, it requires a stride of 1 from column to column, and a multiple of four columns.
    """
    given = dict(zip(names, others, strict=True))
    blocks = x.shape[1] // BLOCK
    x_scale = _numbers(given.get("x_scale"), x).expand(len(x), blocks)
    more = rows - len(x)
    if more:
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
        x_scale = functional.pad(x_scale, (0, 0, 0, more))
    recipes = functional.ScalingType
    return functional.scaled_mm(
        _aligned(x),
        _aligned(weight).t(),
        scale_a=x_scale.t().contiguous().t(),
        scale_recipe_a=recipes.BlockWise1x128,
        scale_b=weight_scale.t(),
        scale_recipe_b=recipes.BlockWise128x128,
        bias=contiguous(given.get("bias")),
        output_dtype=out_dtype,
        use_fast_accum=False,
    )


def _numbers(x_scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Returns the scales of x, [T or 1, ...], in float32."""
    if x_scale is None:
        return torch.ones(1, 1, dtype=torch.float32, device=x.device)
    return x_scale.float()
