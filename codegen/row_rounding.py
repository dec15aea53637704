"""A rounding of rows to float8 codes, as a part of a problem."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.spec import Constant


@dataclass(frozen=True)
class RowRounding:
    """A rounding of rows to e4m3 codes with scales computed from the rows.

    group: the columns that share a scale. rounded: scales and quotients are rounded to the rows'
    dtype. zero_scale: takes the place of a scale of 0, if positive. least: the smallest magnitude
    that a scale is computed from. least_divisor: the smallest number by which numbers are divided.
    """

    group: int
    rounded: bool
    zero_scale: float
    least: float
    least_divisor: float

    @property
    def constants(self) -> dict[str, Constant]:
        """The constants of a kernel that rounds rows while it reads them."""
        return {
            "ROUND_GROUP": self.group,
            "ROUNDED": self.rounded,
            "ZERO_SCALE": self.zero_scale,
            "LEAST": self.least,
            "LEAST_DIVISOR": self.least_divisor,
        }
