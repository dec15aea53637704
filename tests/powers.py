"""Weights of E2M1 codes with every e8m0 scale, against the definition of the format.

    weight = code * 2 ** (exponent - 127); NaN for the exponent 255

A call multiplies each code by a power of two. Its results are single products, which float64
represents exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilewright.ops.formats.fp4 import MAGNITUDES, pack

CODES = torch.arange(16)
NUMBERS = torch.tensor((*MAGNITUDES, *(-number for number in MAGNITUDES)), dtype=torch.float64)
EXPONENTS = torch.arange(256)
# The code that stands for 1, and the exponent of the scale 1.
UNIT_CODE, UNIT_EXPONENT = 2, 127
# The exponents of the scales that make some code infinite or NaN in fp32: 4 * 2 ** 126, for one.
FIRST_BEYOND = 253
# The columns that share a scale, and the columns and rows of a weight.
BLOCK, SIZE = 32, 256
# The exponents of x. With the first and the last, the products of the largest and the smallest
# scales are near 1, as far as x's dtype permits.
STEPS = {torch.bfloat16: (-104, 0, 127), torch.float16: (-24, 0, 15)}


@dataclass(frozen=True)
class Powers:
    """A call: row t of x multiplies the code `codes[t]` by 2 ** step, or by its negative.

    Attributes:
        exponents: The exponent of the scales of each row of the weight.
        columns: The number of columns of x and of the weight.
    """

    dtype: torch.dtype
    step: int
    codes: torch.Tensor = CODES
    exponents: torch.Tensor = EXPONENTS
    columns: int = SIZE

    @property
    def x(self) -> torch.Tensor:
        """Returns x [codes, columns]. Each row has one number, in another block of columns."""
        x = torch.zeros(len(self.codes), self.columns, dtype=self.dtype)
        rows = torch.arange(len(self.codes))
        signs = torch.where(NUMBERS[self.codes] < 0, -1.0, 1.0)
        columns = BLOCK * (rows % (self.columns // BLOCK)) + self.codes
        x[rows, columns] = (signs * 2.0**self.step).to(self.dtype)
        return x

    @property
    def exact(self) -> torch.Tensor:
        """The products in float64, [codes, rows]. They are not negative."""
        ones = torch.ones(len(self.exponents), dtype=torch.float64)
        powers = torch.ldexp(ones, self.exponents - UNIT_EXPONENT)
        powers = torch.where(self.exponents == 255, torch.nan, powers)
        return NUMBERS[self.codes].abs()[:, None] * powers * 2.0**self.step

    @property
    def weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (packed codes [rows, columns / 2], scales [rows, columns / 32]). Column c has the
        code c % 16."""
        codes = (torch.arange(self.columns) % 16).to(torch.uint8)
        scales = self.exponents.to(torch.uint8)[:, None].repeat(1, self.columns // BLOCK)
        return pack(codes.repeat(len(self.exponents), 1)), scales

    @property
    def finite(self) -> Powers:
        """The call with the smallest scale where a scale makes a product infinite or NaN."""
        fits = self.exact.to(self.dtype).isfinite().all(0) & (self.exponents < FIRST_BEYOND)
        return replace(self, exponents=torch.where(fits, self.exponents, 0))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} 2^{self.step}"


def unit_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (packed codes, scales) of a matrix with ones on the diagonal, as in
    `Powers.weight`."""
    codes = torch.eye(rows, columns, dtype=torch.uint8) * UNIT_CODE
    return pack(codes), torch.full((rows, columns // BLOCK), UNIT_EXPONENT, dtype=torch.uint8)


POWERS = {
    str(powers): powers
    for dtype, steps in STEPS.items()
    for powers in (Powers(dtype, step) for step in steps)
}


def assert_defined(made: torch.Tensor, powers: Powers) -> None:
    """Asserts that results are the products, rounded to their dtype. If a row has a weight beyond
    the range of fp32, its results may also be infinite or NaN."""
    wanted = powers.exact.to(made.dtype)
    beyond = ~made.isfinite() & (powers.exponents >= FIRST_BEYOND)
    torch.testing.assert_close(
        made, torch.where(beyond, made, wanted), rtol=0, atol=0, equal_nan=True
    )
