"""Block-scaled float8_e4m3fn as in DeepSeek-V3. There is one fp32 scale for each 128 columns of a
row of an activation, and one for each block of 128 rows and 128 columns of a weight.

    scale = min(amax, cap) / 448        cap: optional, infinite by default
    code  = e4m3(clamp(x / scale, ±448))        all zeros if 1 / scale is zero or not finite

Therefore blocks of zeros, and blocks below the normal range of fp32, become zeros, and no number
becomes NaN. The quotient x / scale is computed as x * (1 / scale) in fp32, and each of these two
operations rounds once.
"""

from __future__ import annotations

import torch

from tilewright.ops.formats.division import divided

BLOCK = 128
E4M3_MAX = 448.0


def quantize_rows(
    x: torch.Tensor, block: int = BLOCK, cap: float = float("inf")
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (codes float8_e4m3fn [..., K], scales fp32 [..., ceil(K/block)]) of x [..., K]."""
    blocks = _pad(x.float(), 1, block).unflatten(-1, (-1, block))
    codes, scale = _quantize(blocks, (-1,), cap)
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scale


def quantize_blocks(
    w: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (codes [..., N, K], scales fp32 [..., ceil(N/bn), ceil(K/bk)]) of w [..., N, K]."""
    rows, columns = w.shape[-2:]
    tiles = _pad(w.float(), *block).unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    codes, scale = _quantize(tiles, (-3, -1), float("inf"))
    whole = codes.flatten(-4, -3).flatten(-2)
    return whole[..., :rows, :columns].contiguous(), scale


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int] = (BLOCK, BLOCK),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns codes [..., N, K] times the scale of each block. For activations, use the block (1,
    128)."""
    wide = torch.promote_types(dtype, torch.float32)
    rows, columns = codes.shape[-2:]
    # A block may be larger than the tensor.
    repeats = (min(block[0], rows), min(block[1], columns))
    factor = scales.to(wide).repeat_interleave(repeats[0], -2).repeat_interleave(repeats[1], -1)
    return (codes.to(wide) * factor[..., :rows, :columns]).to(dtype)


def _quantize(
    blocks: torch.Tensor, dims: tuple[int, ...], cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    amax = blocks.abs().amax(dims, keepdim=True)
    scale = divided(amax.clamp_max(cap), E4M3_MAX)
    inverse = torch.where(amax == 0, 0.0, 1.0 / scale)
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    codes = (blocks * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale.squeeze(dims)


def _pad(x: torch.Tensor, row_block: int, column_block: int) -> torch.Tensor:
    """Pads the last two dimensions of x with zeros to whole blocks. If row_block is 1, pads only
    the last dimension."""
    columns = -x.shape[-1] % column_block
    rows = -x.shape[-2] % row_block if row_block > 1 else 0
    return torch.nn.functional.pad(x, (0, columns, 0, rows) if rows else (0, columns))
