"""Linears whose codes are integers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.programs.quantised.activations import Rounding, draw_rounded
from tests.programs.quantised.blocks import BENT, WAYS, WEIGHED, at_every
from tests.programs.quantised.codes import (
    AWQ,
    COUNTING,
    DRAWN,
    I8,
    I32,
    ORDERS,
    PACKINGS,
    SPELLINGS,
    nibbles,
    random_words,
)
from tests.programs.quantised.linear import PRODUCTS, Coded, grid_of, held, plus


@dataclass(frozen=True)
class Integers:
    """The axes of a linear with integer codes.

    order, spelling: the order of nibbles, and the way to unpack them.
    zero: none, a number, or a key of ZEROS.
    block: a key of BLOCKS.
    spread: the way in which a number gets to its codes.
    within: the dtype in which codes are scaled; None for the dtype of x.
    scaled: a key of SCALINGS.
    place: the place at which the scale is applied.
    bent: a wrong way to take the scale, a key of BENT or empty.
    rounded: the rounding of x.
    """

    packing: str = "int8"
    order: tuple[int, ...] = ()
    spelling: str = "stack"
    zero: Any = None
    block: str = "row"
    spread: str = "repeated"
    scale: torch.dtype = torch.float32
    within: torch.dtype | None = None
    scaled: str = "codes * scale"
    place: str = "inside"
    bent: str = ""
    zero_bent: str = ""
    product: str = "linear"
    bias: bool = False
    rounded: Rounding | None = None


SCALINGS: dict[str, Callable[..., torch.Tensor]] = {
    "codes * scale": lambda codes, scale: codes * scale,
    "scale * codes": lambda codes, scale: scale * codes,
    "in place": lambda codes, scale: codes.clone().mul_(scale),
    "over": lambda codes, scale: codes / scale,
    "twice": lambda codes, scale: codes * scale * scale,
    "not": lambda codes, scale: codes * 1.0,
    "negated": lambda codes, scale: -codes * scale,
}
_SCALINGS = ("codes * scale",) * 20 + ("scale * codes",) * 10 + tuple(SCALINGS)
#: Ways to store zeros by block: as integers, as floats, or as nibbles of words.
ZEROS = ("int", "float", "words", "words of awq", "words less one", "behind")


class IntegerLinear(Coded):
    """Computes weight[n, k] = (code[n, k] - zero[n, k]) * scale[n, k]."""

    def __init__(self, axes: Integers, rows: int, columns: int, dtype: torch.dtype, seed: int):
        generator = torch.Generator().manual_seed(seed)
        super().__init__(axes, (rows, columns), dtype, generator)
        packing = PACKINGS[axes.packing]
        shape = rows // packing.per[0], columns // packing.per[1]
        shape = shape[::-1] if packing.turned else shape
        self.codes = held(random_words(shape, packing.stored, generator))
        grid = grid_of(self.shape, axes.block)
        size = columns**-0.5 / packing.size
        scale = size * (0.5 + torch.rand(grid, generator=generator))
        self.scale = held((1 / scale if axes.scaled == "over" else scale).to(axes.scale))
        self.zero = held(self.zeros(grid, size, generator))

    def zeros(self, grid: tuple[int, int], size: float, generator: Any) -> torch.Tensor | None:
        zero, dtype = self.axes.zero, self.axes.scale
        if zero not in ZEROS:
            return None
        if zero == "words":
            return random_words((-(-grid[0] // 8), grid[1]), I32, generator)
        if zero.startswith("words"):
            return random_words((grid[1], -(-grid[0] // 8)), I32, generator)
        if zero == "int":
            return torch.randint(0, 16, grid, generator=generator).to(I8)
        spread = torch.randn(grid, generator=generator)
        return (spread * size if zero == "behind" else 8 + 3 * spread).to(dtype)

    def of_words(self, grid: torch.Size) -> torch.Tensor:
        """Returns the unpacked zeros [N / rows, K / columns]."""
        zero, axes = self.axes.zero, self.axes
        if zero == "words":
            return nibbles(self.zero.t(), COUNTING, axes.spelling).t()[: grid[0]]
        own = axes.order if len(axes.order) == 8 else COUNTING
        order = AWQ if zero == "words of awq" else own
        found = nibbles(self.zero, order, axes.spelling).t()[: grid[0]]
        return found + 1 if zero == "words less one" else found

    def shifted(self, codes: torch.Tensor, within: torch.dtype) -> torch.Tensor:
        """Subtracts the zeros from the codes, in the dtype in which they are scaled."""
        axes, zero = self.axes, self.axes.zero
        if zero is None or zero == "behind":
            return codes.to(within)
        if isinstance(zero, tuple):
            number, early = zero
            return (codes.to(early) - number).to(within)
        if zero in ("int", "float"):
            points = self.zero.to(within)
        else:
            points = self.of_words(self.scale.shape)
        points = BENT[axes.zero_bent](points) if axes.zero_bent else points
        codes = codes if not points.dtype.is_floating_point else codes.to(within)
        return at_every(lambda c, t: c - t, codes, points, axes.block, axes.spread).to(within)

    def decoded(self, within: torch.dtype) -> torch.Tensor:
        """Returns code - zero, [N, K]."""
        packing = PACKINGS[self.axes.packing]
        return self.shifted(packing.codes(self.codes, self.axes.order, self.axes.spelling), within)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        axes, within = self.axes, self.axes.within or dtype
        scale = self.scale_of(within)
        weight = at_every(
            SCALINGS[axes.scaled], self.decoded(within), scale, axes.block, axes.spread
        )
        if axes.zero == "behind":
            zero = self.zero.to(within)
            weight = at_every(lambda w, t: w + t, weight, zero, axes.block, axes.spread)
        return weight.to(dtype)

    def scale_of(self, dtype: torch.dtype) -> torch.Tensor:
        return (BENT[self.axes.bent](self.scale) if self.axes.bent else self.scale).to(dtype)

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        axes, product = self.axes, PRODUCTS[self.axes.product]
        if axes.place == "inside":
            return super().multiplied(x)
        scale = self.scale_of(axes.within or x.dtype)
        if axes.place == "front":  # this is right only if the tensor has a single scale
            x = (x * scale.flatten()[:1]).to(x.dtype)
            return product(x, self.decoded(x.dtype), self.bias)
        y = product(x, self.decoded(x.dtype), None)
        if axes.place == "behind":
            scaled = SCALINGS[axes.scaled](y, scale.flatten())
            return plus(scaled.to(x.dtype), self.bias)
        return (plus(y, self.bias) * scale.flatten()).to(x.dtype)  # the bias is scaled, too


PLACES = ("inside",) * 7 + ("behind",) * 4 + ("front", "behind the bias")


# --- draws ----------------------------------------------------------------------------------------


def draw_integers(draw: random.Random) -> Integers:
    packing = draw.choice(DRAWN)
    nibbles = PACKINGS[packing].order
    number = 8 if nibbles else 128
    early = draw.choice((torch.int8, torch.int32, torch.float32, torch.bfloat16, torch.int16))
    number = draw.choice((number, number, number, number, number - 1))
    if PACKINGS[packing].is_float:
        zero = draw.choice((None,) * 12 + ("float",))
    else:
        zero = draw.choice((None, None, *[(number, early)] * 5, *ZEROS))
    block = draw.choice(WEIGHED)
    place = draw.choice(PLACES) if block in ("tensor", "row") and zero != "behind" else "inside"
    drawn = Integers(
        packing=packing,
        order=draw.choice(ORDERS[nibbles]) if nibbles else (),
        spelling=draw.choice(SPELLINGS),
        zero=zero,
        block=block,
        spread=draw.choice(WAYS),
        scale=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
        within=draw.choice((None, None, torch.float32, torch.bfloat16)),
        scaled=draw.choice(_SCALINGS),
        place=place,
        bent=draw.choice(("",) * 24 + tuple(BENT)),
        zero_bent=draw.choice(("",) * 24 + tuple(BENT)),
        product=draw.choice(("linear", "linear", *PRODUCTS)),
        bias=draw.random() < 0.2,
        rounded=draw_rounded(draw),
    )
    return drawn if draw.random() < 0.85 else nearly_hqq(draw, drawn)


def nearly_hqq(draw: random.Random, drawn: Integers) -> Integers:
    """Draws HQQ's codes of 4 or 8 bits with float zeros, packed as by the library or as neighbours.
    May draw a near miss that differs in one axis."""
    packing, order = draw.choice(HQQ)
    own = {
        "packing": packing,
        "order": order,
        "spelling": draw.choice(("written", "written", "cat")),
        "zero": "float",
        "block": draw.choice(("group", "wide group")),
        "spread": draw.choice(("flat", "flat", "grouped")),
        "scaled": "codes * scale",
        "place": "inside",
        "bent": "",
        "zero_bent": "",
    }
    if draw.random() < 0.4:
        name = draw.choice(("order", "block", "zero_bent", "bent", "spread", "zero", "spelling"))
        near = {
            "order": order[::-1],
            "block": draw.choice(("column", "group of rows", "uneven group")),
            "zero_bent": draw.choice(("one more", "next group", "next row")),
            "bent": draw.choice(("next group", "next row")),
            "spread": "tiles",
            "zero": "int",
            "spelling": "shifts",
        }
        own[name] = near[name]
    return replace(drawn, **own)


HQQ = (
    ("int4 halves", (1, 0)),
    ("int4 halves", (1, 0)),
    ("int4 bytes", (0, 1)),
    ("uint8", ()),
)


#: Axes in which one of several linears may differ from the others.
APART: dict[str, Callable[[random.Random], Any]] = {
    "rounded": draw_rounded,
    "spelling": lambda draw: draw.choice(SPELLINGS),
    "bent": lambda draw: draw.choice(tuple(BENT)),
    "zero_bent": lambda draw: draw.choice(tuple(BENT)),
    "block": lambda draw: draw.choice(("group", "wide group", "row")),
    "product": lambda draw: draw.choice(tuple(PRODUCTS)),
    "scaled": lambda draw: draw.choice(_SCALINGS),
    "bias": lambda draw: True,
    "place": lambda draw: "inside",
    "within": lambda draw: draw.choice((torch.float32, torch.bfloat16)),
}
