"""NVFP4: E2M1 elements, with one e4m3 scale for each 16 elements along K, and one fp32 factor for
the whole tensor.

    value = e2m1(code) * scale[k // 16] / tensor_scale

Quantisation computes these steps in this order, in fp32 with IEEE division (not the hardware's
approximate reciprocal). Therefore the results are the same on every device:

    amax  = max |x| over the block
    scale = e4m3((tensor_scale * amax) / 6)         nearest even, saturating at 448; stored
    code  = e2m1(x * (tensor_scale / scale))        0 where the stored scale is 0

If the scale of a block rounds to zero, the whole block becomes zeros, because its elements are
below the format's resolution. NaN and infinities in x saturate. In the 128x4 layout of scales
(`ops.formats.scale_layout`), the scales of rows and columns past the data are zero.
"""

from __future__ import annotations

import torch

from tilewright.ops.formats import fp4
from tilewright.ops.formats.division import divided
from tilewright.ops.formats.row_groups import group_of_rows
from tilewright.ops.formats.scale_layout import (
    BLOCK_ROWS,
    group_scale_offsets,
    max_scale_blocks,
    scale_rows,
    swizzle,
    unswizzle,
)

BLOCK = 16
E4M3_MAX = 448.0


def quantize(
    x: torch.Tensor, tensor_scale: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (packed uint8 [..., K/2], row-major scales float8_e4m3fn [..., K/16]) of x [..., K].

    tensor_scale: a number, or an fp32 tensor that broadcasts to x.shape[:-1]. Raises ValueError
    unless 16 divides K, and unless a given number is positive and finite.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x: expected a last dimension that 16 divides, got {list(x.shape)}")
    if not isinstance(tensor_scale, torch.Tensor):
        if not 0 < tensor_scale < float("inf"):
            raise ValueError(f"tensor_scale: expected a positive number, got {tensor_scale}")
        tensor_scale = torch.tensor(tensor_scale, device=x.device)
    row_scale = tensor_scale.float()[..., None]
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1).nan_to_num(nan=float("inf"))
    scale = divided(row_scale * amax, fp4.MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    stored = scale.float()
    factor = torch.where(stored == 0, 0.0, row_scale / stored)[..., None]
    scaled = torch.where(factor == 0, 0.0, blocks * factor)
    return fp4.pack(fp4.encode(scaled.flatten(-2))), scale


def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns x [..., K] from packed [..., K/2] and row-major scales [..., K/16].

    If tensor_scale is 1, the result is exact in bfloat16 and wider dtypes, because the product of a
    code (2 significant bits) and a scale (4 significant bits) has at most 6 significant bits. The
    sign of a scale is ignored, because the tensor core ignores it too.
    """
    wide = torch.promote_types(dtype, torch.float32)
    values = fp4.decode(fp4.unpack(packed), wide).unflatten(-1, (-1, BLOCK))
    if isinstance(tensor_scale, torch.Tensor):
        tensor_scale = tensor_scale.to(wide)[..., None]
    factor = scales.to(wide).abs() / tensor_scale
    return (values * factor[..., None]).flatten(-2).to(dtype)


def quantize_grouped(
    x: torch.Tensor, group_offsets: torch.Tensor, tensor_scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (packed [T, K/2], 5-D scales [S, ceil(K/64), 32, 4, 4]) for the rows of a grouped
    GEMM.

    x [T, K] has rows sorted by group. S is ceil(T/128) + G blocks, which suffices for any sizes of
    the groups. Rows that belong to no group become zeros.

    group_offsets: int [G + 1]. tensor_scales: fp32 [G]; None for scales of 1.
    """
    group = group_of_rows(group_offsets[1:], x.shape[0])
    num_groups = group_offsets.shape[0] - 1
    x = torch.where((group < num_groups)[:, None], x, 0)
    if tensor_scales is None or num_groups == 0:
        packed, scales = quantize(x)
    else:
        packed, scales = quantize(x, tensor_scales[group.clamp_max(num_groups - 1)])
    return packed, place_scales(scales, group_offsets)


def layout_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns the row-major scales [..., R, C] of weights in the 128x4 layout, padded with
    zeros."""
    return swizzle(scales.view(torch.uint8)).view(scales.dtype)


def place_scales(scales: torch.Tensor, group_offsets: torch.Tensor) -> torch.Tensor:
    """Returns the row-major scales [T, C] of sorted rows in the 5-D layout, in which each group has
    its own blocks."""
    num_tokens, columns = scales.shape
    num_blocks = max_scale_blocks(num_tokens, group_offsets.shape[0] - 1)
    rows = scale_rows(group_offsets, group_scale_offsets(group_offsets), num_tokens)
    # Copy scales as bytes, because not every device can index fp8. Rows that belong to no group are
    # copied to an additional row, which is removed below.
    last = num_blocks * BLOCK_ROWS
    space = torch.zeros(last + 1, columns, dtype=torch.uint8, device=scales.device)
    space[torch.where(rows < 0, last, rows)] = scales.view(torch.uint8)
    return swizzle(space[:last]).view(scales.dtype)


def read_scales(
    layout: torch.Tensor, group_offsets: torch.Tensor, deltas: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Returns row-major scales [T, C] from the 5-D layout. Rows that belong to no group are zero.
    shape: (T, C)."""
    num_tokens, columns = shape
    rows = scale_rows(group_offsets, deltas, num_tokens)
    matrix = unswizzle(layout.view(torch.uint8), layout.shape[0] * BLOCK_ROWS, columns)
    taken = matrix[rows.clamp_min(0)].view(layout.dtype)
    return torch.where(rows[:, None] < 0, torch.zeros_like(taken.float()), taken.float())
