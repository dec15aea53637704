"""The kernel that writes a weight's scales in the layout that a library's scaled GEMM reads."""

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
# Scales that a program writes; other numbers were not tried.
BLOCK = 512


@dataclass(frozen=True)
class WideScales:
    """Sizes of a call that writes scales [rows, width]: `columns` scales of a row are copied, and
    the others are zero. group: rows that share a scale."""

    rows: int
    columns: int
    width: int
    group: int
    block: int = BLOCK


def widen_grid(scales: WideScales) -> Sequence[int]:
    return (cdiv(scales.rows * scales.width, scales.block),)
