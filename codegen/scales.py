"""The kernel that writes a weight's scales in the layout that a library's scaled GEMM expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.kernel import Kernel

WIDEN_SCALES = Kernel(
    "scales",
    "widen_scales",
    {"SCALE_STRIDES": (("scale", 0), ("scale", 1))},
    unaligned=("scale",),
    num_warps=4,
    num_stages=1,
)
# The number of scales that a program writes. Other numbers were not measured.
BLOCK = 512


@dataclass(frozen=True)
class WideScales:
    """The sizes of a call that writes scales [rows, width].

    Attributes:
        rows: The number of rows of the result.
        columns: The number of scales of a row that are copied. The remaining scales are zero.
        width: The number of columns of the result.
        group: The number of rows that share a scale.
        block: The number of scales that a program writes.
    """

    rows: int
    columns: int
    width: int
    group: int
    block: int = BLOCK


def widen_grid(scales: WideScales) -> Sequence[int]:
    return (cdiv(scales.rows * scales.width, scales.block),)
