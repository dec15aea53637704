"""Activations that are rounded to codes and decoded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from tilewright.ops.formats import fp4


@dataclass(frozen=True)
class Rounded:
    """The way in which x is rounded to codes and decoded.

    block: the numbers that share a scale: "row", "tensor", "static" or a number of columns.
    most: the code of the largest number.
    by: "over" divides by the scale, and "times" multiplies by its reciprocal.
    """

    block: str | int = "row"
    codes: torch.dtype = torch.float8_e4m3fn
    most: float = 448.0
    least: float = 1e-6
    by: str = "over"
    clamped: bool = True
    wide: bool = False

    def __call__(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        dtype, shape = x.dtype, x.shape
        y = x.float() if self.wide else x
        y = y.unflatten(-1, (-1, self.block)) if isinstance(self.block, int) else y
        scale = self.scale(y, step)
        z = y * (1 / scale) if self.by == "times" else y / scale
        if not self.codes.is_floating_point:
            z = z.round()
        z = z.clamp(-self.limit, self.limit) if self.clamped else z
        return (z.to(self.codes).to(y.dtype) * scale).reshape(shape).to(dtype)

    @property
    def limit(self) -> float:
        return 448.0 if self.codes.is_floating_point else 127.0

    def scale(self, y: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if self.block == "static":
            return step.to(y.dtype)
        size = y.abs()
        size = size.amax() if self.block == "tensor" else size.amax(-1, keepdim=True)
        return size.clamp(min=self.least) / self.most


# --- floats of four bits --------------------------------------------------------------------------


def by_thresholds(x: torch.Tensor) -> torch.Tensor:
    """Rounds as compressed-tensors does, to the nearest E2M1 number. A midpoint goes to the even
    code."""
    size, rounded = x.abs(), torch.zeros_like(x)
    for number, (below, above) in enumerate(pairwise(fp4.MAGNITUDES)):
        middle = (below + above) / 2
        rounded = torch.where(size >= middle if number % 2 else size > middle, above, rounded)
    return rounded * torch.sign(x)


def by_counting(x: torch.Tensor) -> torch.Tensor:
    """Computes a code as the number of smaller midpoints, and looks its number up. A midpoint goes
    to the smaller number."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(fp4.MAGNITUDES)], dtype=x.dtype)
    codes = (x.abs()[..., None] > middles).sum(-1) + 8 * (x < 0)
    table = torch.tensor([*fp4.MAGNITUDES, *(-m for m in fp4.MAGNITUDES)], dtype=x.dtype)
    return table[codes.to(torch.uint8).long()]


def by_codes(x: torch.Tensor) -> torch.Tensor:
    """Rounds to packed codes, two in a byte, as a kernel takes them."""
    return fp4.decode(fp4.unpack(fp4.pack(fp4.encode(x))), x.dtype)


def toward_zero(x: torch.Tensor) -> torch.Tensor:
    """Rounds toward zero instead of to the nearest number."""
    numbers = torch.tensor(fp4.MAGNITUDES[1:], dtype=x.dtype)
    table = torch.tensor(fp4.MAGNITUDES, dtype=x.dtype)
    return table[(x.abs()[..., None] >= numbers).sum(-1)] * x.sign()


NEAREST = (by_thresholds, by_thresholds, by_counting, by_codes, by_codes, toward_zero)


@dataclass(frozen=True)
class FourBits:
    """The way in which x is rounded to E2M1 numbers times the scale of a group of columns, and
    decoded.

    scale: "e4m3" with one more factor for all groups (NVFP4; a static factor is given), "e8m0", a
        power of two (MXFP4), or any "float".
    bent: the way in which the scale of decoding differs from the scale of rounding.
    """

    group: int = 16
    scale: str = "e4m3"
    static: bool = True
    nearest: Callable[[torch.Tensor], torch.Tensor] = by_thresholds
    wide: bool = True
    bent: str = ""

    def __call__(self, x: torch.Tensor, step: torch.Tensor | None = None) -> torch.Tensor:
        dtype = x.dtype
        y = (x.float() if self.wide else x).unflatten(-1, (-1, self.group))
        unit = self.unit(y.abs().amax(-1, keepdim=True), step)
        codes = self.nearest((y / unit).clamp(-fp4.MAX, fp4.MAX))
        unit = FOUR_BITS_BENT[self.bent](unit) if self.bent else unit
        return (codes * unit).flatten(-2).to(dtype)

    def unit(self, largest: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
        if self.scale == "e8m0":
            return torch.exp2(torch.floor(torch.log2(largest.clamp(min=1e-6))) - 2)
        if self.scale == "float":
            return largest.clamp(min=1e-6) / fp4.MAX
        static = self.static and step is not None
        factor = (1 / step).to(largest.dtype) if static else 448 * fp4.MAX / largest.amax()
        scale = (largest / fp4.MAX * factor).clamp(2**-6, 448).to(torch.float8_e4m3fn)
        return scale.to(largest.dtype) / factor


FOUR_BITS_BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "next group": lambda t: t.roll(1, -2),
    "next row": lambda t: t.roll(1, 0),
    "doubled": lambda t: t * 2,
}


def draw_floats_of_four_bits(draw: random.Random) -> FourBits:
    scale = draw.choice(("e4m3", "e4m3", "e4m3", "e8m0", "e8m0", "float"))
    own = 32 if scale == "e8m0" else 16
    return FourBits(
        group=draw.choice((own, own, own, 16, 32)),
        scale=scale,
        static=draw.random() < 0.5,
        nearest=draw.choice(NEAREST),
        wide=draw.random() < 0.6,
        bent=draw.choice(("",) * 8 + tuple(FOUR_BITS_BENT)),
    )


Rounding = Rounded | FourBits


def draw_rounded(draw: random.Random) -> Rounding | None:
    if draw.random() < 0.6:
        return None
    if draw.random() < 0.3:
        return draw_floats_of_four_bits(draw)
    codes = draw.choice((torch.float8_e4m3fn, torch.float8_e4m3fn, torch.int8))
    whole = codes == torch.int8
    return Rounded(
        block=draw.choice(("row", "row", "tensor", "static", 32, 16)),
        codes=codes,
        most=draw.choice((127.0, 127.5) if whole else (448.0, 448.0, 240.0)),
        least=draw.choice((1e-6, 1e-4, 1e-12)),
        by=draw.choice(("over", "times")),
        clamped=whole or draw.random() < 0.7,
        wide=draw.random() < 0.5,
    )
