"""The static part of a grouped GEMM over expert weights, without torch or a GPU.

It describes `grouped_matmul`, and each of the two GEMMs of a mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant

# TMA needs strides and base addresses that are multiples of 16 bytes.
TMA_BYTES = 16
# A word of codes is an int32.
WORD_BYTES = 4


@dataclass(frozen=True)
class WeightOperands:
    """A weight [E, N, K] of E experts with its scales.

    data: the stored weight, strides (expert, row, column); one of the last two is 1. format,
    scale_block: see ops.formats.expert_weight. scale: the scales, strides (expert, row block,
    column block).
    """

    data: Operand
    format: str = "dense"
    scale_block: tuple[int, int] = (1, 1)
    scale: Operand | None = None

    @property
    def n_major(self) -> bool:
        """Whether N is the contiguous dimension; if not, K is."""
        return self.data.strides[2] != 1

    @property
    def row_stride(self) -> int:
        """Elements from one contiguous row to the next: along N, or along K if N is contiguous."""
        return self.data.strides[2 if self.n_major else 1]

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.scale is None else self.scale.strides

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of kernels that read the weight: its strides, format and scale blocks."""
        form = WEIGHT_FORMATS.get(self.format)
        return {
            "EXPERT_STRIDE": self.data.strides[0],
            "ROW_STRIDE": self.row_stride,
            "N_MAJOR": self.n_major,
            "FORMAT": self.format,
            "PER_BYTE": 1 if form is None else form.per_byte,
            "SCALE_BLOCK": self.scale_block,
        }

    @property
    def in_words(self) -> WeightOperands:
        """The weight as rows of 32-bit words."""
        expert, row, _ = self.data.strides
        return replace(self, data=Operand("i32", (expert // WORD_BYTES, row // WORD_BYTES, 1)))


@dataclass(frozen=True)
class GroupedProblem:
    """The static part of a grouped GEMM: x [M, K] in groups of rows, weights [E, N, K].

    num_groups: number of groups. rows: N. inner: K. x: dtype of x. coded: x has e4m3 codes, with a
    scale for each row and 128 columns. named: the experts of the groups are given; if not, the
    expert of group g is g. ordered: a tensor gives the row to which each row of the result is
    stored.
    """

    num_groups: int
    num_experts: int
    rows: int
    inner: int
    x: str
    weight: WeightOperands
    coded: bool = False
    named: bool = False
    ordered: bool = False

    def dequantized(self) -> GroupedProblem:
        """Returns the problem after `dequantize_experts`, whose result is contiguous and has no
        scales."""
        strides = (self.rows * self.inner, self.inner, 1)
        return replace(self, weight=WeightOperands(Operand(self.x, strides)))


def weight_obstacle(name: str, weight: WeightOperands) -> str | None:
    """Returns why TMA cannot load the weight called `name`; None if it can. Uses only metadata."""
    steps = (weight.data.strides[0], weight.row_stride)
    if any(step * ELEMENT_BYTES[weight.data.dtype] % TMA_BYTES for step in steps):
        return f"{name}: strides {steps} are not whole {TMA_BYTES} bytes"
    if weight.format != "dense" and weight.n_major:
        return f"{weight.format} weights are not contiguous along the inner dimension"
    return None
