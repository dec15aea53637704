"""The static facts about a norm of rows."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.spec import Constant

# The largest number of columns of a layer norm. A program holds a whole row in registers to compute
# mean and variance: 128 numbers in each thread of four warps.
MOST_LAYER_COLUMNS = 16384


@dataclass(frozen=True)
class RowNorm:
    """A norm of rows: (x - mean) / sqrt(mean((x - mean)²) + eps) * (offset + weight) + bias.

    Attributes:
        weight, bias: The operands, with strides (column,); None if the norm has no weight or no
            bias.
        eps, offset: The numbers in the formula.
        kind: "layer" or "rms". "rms" subtracts no mean and has no bias.
    """

    weight: Operand | None
    eps: float
    offset: float
    kind: str = "rms"
    bias: Operand | None = None

    @property
    def follows(self) -> bool:
        """Whether the kernel may multiply by the norm's factor, 1 / sqrt(mean(x²) + eps), after the
        product instead of before it. The kernel then computes the factor in the same loop as the
        product."""
        return self.kind == "rms"

    @property
    def tiles(self) -> int:
        """The number of tiles in shared memory that the norm's vectors take. Each of these tiles
        has the size of a tile of x."""
        return 1 + (self.bias is not None)

    def constants(self, columns: int) -> dict[str, Constant]:
        """Returns the norm's constants in a kernel that multiplies rows of `columns` numbers."""
        made: dict[str, Constant] = {"NORM_EPS": self.eps, "NORM_OFFSET": self.offset}
        if self.follows:
            return made | {"NORM": True}
        # This block holds a whole row, because the statistics of a row are computed before the
        # product.
        return made | {
            "LAYER_ROW": next_power_of_2(columns),
            "NORM_BIAS_STRIDE": first_strides(self.bias)[0],
        }


def takes_columns(kind: str, columns: int) -> bool:
    """Whether a kernel that computes a product can include a norm of rows with this many
    columns."""
    return kind == "rms" or columns <= MOST_LAYER_COLUMNS


def squares_a_row(norm: RowNorm | None) -> bool:
    """Whether a kernel sums the squares of x in addition to the product."""
    return norm is not None and norm.follows
