"""The 128x4 layout in which tcgen05 reads block scales (NVFP4, MXFP4, MXFP8), and conversions.

The layout has blocks of 128 rows and 4 scales along K. A block is 512 contiguous bytes, in which
the scale of row r and column c is at byte (r % 32) * 16 + (r // 32) * 4 + c. cuBLAS and
`torch.nn.functional.scaled_mm` with SWIZZLE_32_4_4 use this order. The scales of a product A @ B
(activations and weights) are tensors of these shapes:

    A side  [blocks, ceil(C/4), 32, 4, 4]                5-D; C scales along K
    B side  [E, ceil(N/128), ceil(C/4), 32, 4, 4]        6-D; each expert padded to 128 rows

On the A side of a grouped GEMM, every group starts a new block, so the block of a row depends on
the sizes of earlier groups. Each group has a number, its *delta*. The block of a row is the sum of
the delta and the block that follows from the row's absolute position. `group_scale_offsets` returns
the deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.codegen.arithmetic import cdiv
from tilewright.ops.formats.row_groups import expert_of_rows

BLOCK_ROWS = 128
BLOCK_SCALES = 4
ATOM = (32, 4, 4)


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Converts row-major scales [..., R, C] to [..., ceil(R/128), ceil(C/4), 32, 4, 4], padded with
    zeros."""
    *batch, rows, columns = scales.shape
    row_blocks, column_blocks = cdiv(rows, BLOCK_ROWS), cdiv(columns, BLOCK_SCALES)
    padded = scales.new_zeros(*batch, row_blocks * BLOCK_ROWS, column_blocks * BLOCK_SCALES)
    padded[..., :rows, :columns] = scales
    atoms = padded.view(*batch, row_blocks, 4, 32, column_blocks, BLOCK_SCALES)
    return atoms.transpose(-4, -2).contiguous()


def unswizzle(layout: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Converts [..., Rb, Cb, 32, 4, 4] to row-major [..., rows, columns]. This is the inverse of
    `swizzle`.

    Raises ValueError if the layout has another number of blocks.
    """
    *batch, row_blocks, column_blocks = layout.shape[:-3]
    held = (row_blocks * BLOCK_ROWS, column_blocks * BLOCK_SCALES)
    if layout.shape[-3:] != ATOM or rows > held[0] or columns > held[1]:
        raise ValueError(
            f"layout: expected [..., {cdiv(rows, BLOCK_ROWS)}, "
            f"{cdiv(columns, BLOCK_SCALES)}, 32, 4, 4], got {list(layout.shape)}"
        )
    matrix = layout.transpose(-4, -2).reshape(*batch, *held)
    return matrix[..., :rows, :columns]


def group_scale_offsets(group_offsets: torch.Tensor) -> torch.Tensor:
    """Returns the deltas [G] of a grouped GEMM's A-side scales, for `group_offsets` [G + 1]
    (exclusive sums).

    delta[g] = (sum over i < g of ceil(n_i / 128)) - group_offsets[g] // 128. It is never negative.
    The result is int32, and is computed on the device without a synchronisation.
    """
    starts = group_offsets[:-1].long()
    blocks = (group_offsets.long().diff() + BLOCK_ROWS - 1) // BLOCK_ROWS
    before = blocks.cumsum(0) - blocks
    return (before - starts // BLOCK_ROWS).to(torch.int32)


def scale_rows(group_offsets: torch.Tensor, deltas: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns each token's row in the A-side layout, [T]: 128 * block + (index of the token in its
    group) % 128.

    For tokens after the last group, returns -1.
    """
    group = expert_of_rows(group_offsets[1:], None, num_tokens)
    if deltas.shape[0] == 0:
        return group
    own = group.clamp_min(0)
    start = group_offsets.long()[own]
    position = torch.arange(num_tokens, device=group_offsets.device) - start
    block = start // BLOCK_ROWS + position // BLOCK_ROWS + deltas.long()[own]
    return torch.where(group < 0, -1, block * BLOCK_ROWS + position % BLOCK_ROWS)


def max_scale_blocks(num_tokens: int, num_groups: int) -> int:
    """Returns a number of blocks that suffices for any distribution of the tokens over the
    groups."""
    return cdiv(num_tokens, BLOCK_ROWS) + num_groups


def layout_shape(rows: int, columns: int, batch: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the shape of `swizzle`'s result for row-major [*batch, rows, columns]."""
    return (*batch, cdiv(rows, BLOCK_ROWS), cdiv(columns, BLOCK_SCALES), *ATOM)
