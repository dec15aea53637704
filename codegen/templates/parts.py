"""Splits the columns of a tile into 1, 2 or 4 equal parts."""

import triton
import triton.language as tl


@triton.jit
def part_of(values, part: tl.constexpr, PARTS: tl.constexpr):
    """Divides the columns of [rows, columns] into PARTS (1, 2 or 4) equal parts, and returns the
    part with the number `part`."""
    if PARTS > 1:
        ROWS: tl.constexpr = values.shape[0]
        WIDTH: tl.constexpr = values.shape[1] // 2
        first, second = tl.split(tl.permute(tl.reshape(values, (ROWS, 2, WIDTH)), (0, 2, 1)))
        values = first if part < PARTS // 2 else second
        if PARTS == 4:
            halves = tl.permute(tl.reshape(values, (ROWS, 2, WIDTH // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            values = first if part % 2 == 0 else second
    return values
