"""The static part of a grouped GEMM with expert weights. This module needs neither torch nor a GPU.

A `GroupedProblem` describes a call of `grouped_matmul`, and also each of the two GEMMs of a mixture
of experts.
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
    """The weight [E, N, K] of E experts, with its scales.

    Attributes:
        data: The stored weight, with strides (expert, row, column). One of the last two strides is
            1.
        format, scale_block: The format, and how many (rows, columns) share a scale, as
            `ops.formats.expert_weight` explains.
        scale: The operand of the scales, with strides (expert, row block, column block); None if
            the weight has no scales.
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
        """The number of elements from one contiguous row to the next. If N is contiguous, these
        rows are the weight's columns."""
        return self.data.strides[2 if self.n_major else 1]

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.scale is None else self.scale.strides

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of kernels that read the weight: its strides, format and scale block."""
        form = WEIGHT_FORMATS.get(self.format)
        return {
            "EXPERT_STRIDE": self.data.strides[0],
            "ROW_STRIDE": self.row_stride,
            "N_MAJOR": self.n_major,
            "FORMAT": self.format,
            "PER_BYTE": 1 if form is None else form.per_byte,
            "SCALE_BLOCK": self.scale_block,
        }

    def fits(self, dtype: str) -> bool:
        """Whether `dtype` has the range of the weight's scales. Scales that are e8m0 ("u8") have
        the range of bf16 and fp32."""
        form = WEIGHT_FORMATS.get(self.format)
        return dtype != "fp16" or form is None or form.expert_scales != ("u8",)

    @property
    def in_words(self) -> WeightOperands:
        """Describes this weight as rows of 32-bit words."""
        expert, row, _ = self.data.strides
        return replace(self, data=Operand("i32", (expert // WORD_BYTES, row // WORD_BYTES, 1)))


@dataclass(frozen=True)
class GroupedProblem:
    """The static part of a grouped GEMM of x [M, K], whose rows are in groups, with weights [E, N,
    K].

    Attributes:
        num_groups: The number of groups.
        num_experts: The number of experts, E.
        rows: The number of rows of a weight, N.
        inner: The number of columns of a weight, K.
        x: The dtype of x.
        weight: The operands of the weight.
        coded: Whether x has e4m3 codes, with a scale for every 128 columns of each row.
        named: Whether the caller gives the experts of the groups. If not, group g has expert g.
        ordered: Whether a tensor gives the index at which each row of the result is stored.
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
        """Returns the problem that remains after `dequantize_experts` has run. The weights of this
        problem are contiguous and have no scales."""
        strides = (self.rows * self.inner, self.inner, 1)
        return replace(self, weight=WeightOperands(Operand(self.x, strides)))


def weight_obstacle(name: str, weight: WeightOperands) -> str | None:
    """Returns why TMA cannot load the weight `name`; None if it can. Only metadata is checked, not
    the address."""
    steps = (weight.data.strides[0], weight.row_stride)
    if any(step * ELEMENT_BYTES[weight.data.dtype] % TMA_BYTES for step in steps):
        return f"{name}: strides {steps} are not multiples of {TMA_BYTES} bytes"
    if weight.format != "dense" and weight.n_major:
        return f"{weight.format} weights are not contiguous along the inner dimension"
    return None
