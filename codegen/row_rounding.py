"""The static facts about the rounding of rows to float8 codes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.spec import Constant


@dataclass(frozen=True)
class RowRounding:
    """The rounding of rows to e4m3 codes. The scales are computed from the rows, in fp32.

    Attributes:
        group: The number of columns that share a scale.
        zero_scale: A number that replaces a scale of 0; 0 if the scale remains 0.
        least: If the largest magnitude that determines a scale is smaller than this number, the
            scale is computed from this number instead.
        least_divisor: Numbers are divided by their scale, or by this number if the scale is
            smaller.
    """

    group: int
    zero_scale: float
    least: float
    least_divisor: float

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants that a kernel needs to round rows while it reads them."""
        return {
            "ROUND_GROUP": self.group,
            "ZERO_SCALE": self.zero_scale,
            "LEAST": self.least,
            "LEAST_DIVISOR": self.least_divisor,
        }
