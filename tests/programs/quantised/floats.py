"""Linears whose codes of four bits stand for floats: NVFP4, MXFP4, and the tables of bitsandbytes.

weight[n, k] = numbers[code[n, k]] * scale[n, k / group] * factor
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.programs.quantised.activations import Rounding, draw_rounded
from tests.programs.quantised.blocks import BENT, BLOCKS, WAYS, at_every
from tests.programs.quantised.codes import E4M3, U8, random_words
from tests.programs.quantised.linear import PRODUCTS, Coded, grid_of, held
from tilewright.codegen.formats import TABLES
from tilewright.ops.formats import fp4

E2M1 = (*fp4.MAGNITUDES, *(-m for m in fp4.MAGNITUDES))


def swapped(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Exchanges two numbers that are far apart, so that rounding does not hide the change."""
    return (*numbers[:2], numbers[13], *numbers[3:13], numbers[2], *numbers[14:])


#: The numbers for which the sixteen codes stand.
NUMBERS: dict[str, tuple[float, ...]] = {"e2m1": E2M1, **TABLES}
NUMBERS |= {f"{name}, two swapped": swapped(numbers) for name, numbers in [*NUMBERS.items()]}
NUMBERS |= {
    "e2m1 without signs": fp4.MAGNITUDES * 2,
    "e2m1 doubled": tuple(2 * number for number in E2M1),
    "nf4 rounded": tuple(round(number, 4) for number in TABLES["nf4"]),
    "fp4 negated": tuple(-number for number in TABLES["fp4"]),
}

# --- codes ----------------------------------------------------------------------------------------


def pairs(words: torch.Tensor, order: tuple[int, ...], way: str) -> list[torch.Tensor]:
    """Returns the first and the second code of each byte."""
    low = words % 16 if way == "divided" else words & 15
    high = (
        words // 16 if way == "divided" else (words & 0xF0) >> 4 if way == "masked" else words >> 4
    )
    return [(low, high)[n] for n in order]


def joined(parts: list[torch.Tensor], way: str) -> torch.Tensor:
    """Joins the first and the second code of each pair to [N, K]."""
    if way == "halves":  # the two are not neighbours
        return torch.cat(parts, -1)
    if way != "written":
        return torch.stack(parts, -1).flatten(-2)
    found = parts[0].new_empty(parts[0].shape[0], 2 * parts[0].shape[1])
    found[:, 0::2], found[:, 1::2] = parts
    return found


WAYS_OF_PAIRS = ("stack", "stack", "masked", "divided", "written")

#: Ways to look up the numbers of codes in a table [16].
LOOK_UPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "by int": lambda codes, table: table[codes.int()],
    "by long": lambda codes, table: table[codes.long()],
    "selected": lambda codes, table: table.index_select(0, codes.flatten().int()).view(codes.shape),
    "taken": lambda codes, table: torch.take(table, codes.long()),
    "embedded": lambda codes, table: F.embedding(codes.int(), table[:, None]).squeeze(-1),
    # A negative index counts from the end, and so finds the same number.
    "by signed": lambda codes, table: table[((codes ^ 8).to(torch.int8) - 8).long()],
    # This finds the same number if the second half of the table is the negative of the first.
    "by sign": lambda codes, table: (
        table[(codes & 7).long()] * torch.where((codes & 8).to(torch.bool), -1.0, 1.0)
    ).to(table.dtype),
    "by the next code": lambda codes, table: table[((codes + 1) & 15).long()],
    "by three bits": lambda codes, table: table[(codes & 7).int()],
}
_LOOK_UPS = (*LOOK_UPS, *tuple(LOOK_UPS)[:7] * 2)

# --- scales ---------------------------------------------------------------------------------------

#: Ways to compute powers of two whose exponents, biased by 127, are bytes.
POWERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp2": lambda s: torch.exp2(s.float() - 127),
    "power": lambda s: 2.0 ** (s.to(torch.int32) - 127).to(torch.bfloat16),
    "viewed": lambda s: s.view(torch.float8_e8m0fnu).to(torch.float32),
    "bits": lambda s: (s.int() << 23).view(torch.float32),
    "ldexp of one": lambda s: torch.ldexp(torch.ones((), dtype=torch.float32), s.int() - 127),
    "another bias": lambda s: torch.exp2(s.float() - 126),
    "signed": lambda s: torch.exp2(s.view(torch.int8).float() - 127),
}
#: Ways to store scales, and to compute their numbers.
SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3": lambda s: s,
    "e4m3's magnitude": lambda s: s.float().abs(),
    "e4m3 without sign": lambda s: (s.view(U8) & 0x7F).view(E4M3),
    "float": lambda s: s,
    **POWERS,
}
#: The number of bitsandbytes' coded scales that share a second scale.
SHARED = 64
FACTORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "times": lambda scale, factor: scale * factor,
    "over": lambda scale, factor: scale / factor,
    "number": lambda scale, factor: scale * 0.37,
    "negative": lambda scale, factor: scale * -0.37,
    "squared": lambda scale, factor: scale * factor * factor,
}


@dataclass(frozen=True)
class Floats:
    """The axes of a linear with 4-bit floats.

    numbers: a key of NUMBERS.
    stored: whether the table is a buffer of the model.
    order, pairs: the order of a byte's two codes, and the way to join them.
    early: whether codes are looked up before they are joined.
    block, spread: the blocks of scales, and the way to spread scales over codes.
    scale: a key of SCALES, "ldexp" or "two levels".
    factor: one more factor, of all scales or of the weight.
    within: the dtype of the numbers; None for the dtype of x.
    bent: a wrong way to take the scale.
    """

    numbers: str = "e2m1"
    stored: bool = False
    order: tuple[int, ...] = (0, 1)
    pairs: str = "stack"
    looked_up: str = "by int"
    early: bool = False
    block: str = "group"
    spread: str = "grouped"
    scale: str = "e4m3"
    dtype: torch.dtype = torch.float32
    factor: str = ""
    of_weight: bool = False
    within: torch.dtype | None = torch.float32
    bent: str = ""
    product: str = "linear"
    bias: bool = False
    rounded: Rounding | None = None


class FloatLinear(Coded):
    """A linear with 4-bit floats. `codes` are bytes [N, K / 2]."""

    def __init__(self, axes: Floats, rows: int, columns: int, dtype: torch.dtype, seed: int):
        generator = torch.Generator().manual_seed(seed)
        super().__init__(axes, (rows, columns), dtype, generator)
        self.codes = held(random_words((rows, columns // 2), U8, generator))
        grid = grid_of(self.shape, axes.block)
        numbers = torch.tensor(NUMBERS[axes.numbers])
        size = (columns**-0.5 / numbers.square().mean().sqrt()).item()
        self.scale = held(self.scales(grid, size, generator))
        self.factor = held(torch.tensor(0.3)) if axes.factor else None
        self.table = held(numbers) if axes.stored else None
        if axes.scale == "two levels":
            count = -(-self.scale.numel() // SHARED)
            self.of_scales = held(torch.rand(count, generator=generator) * columns**-0.5)
            self.of_codes = held(torch.linspace(-1, 1, 256) ** 3)

    def scales(self, grid: tuple[int, int], size: float, generator: Any) -> torch.Tensor:
        name, random = self.axes.scale, torch.rand(grid, generator=generator)
        if name == "two levels":
            return random_words(grid, U8, generator)
        if name in (*POWERS, "ldexp"):
            return (119 + 10 * random).to(U8)
        if name == "float":
            return (size * (0.5 + random)).to(self.axes.dtype)
        sign = torch.where(torch.rand(grid, generator=generator) < 0.2, -1, 1)
        return ((0.5 + random) / 4 * sign).to(E4M3)

    def scale_of(self, within: torch.dtype) -> torch.Tensor:
        axes = self.axes
        if axes.scale == "ldexp":
            return self.scale.to(torch.int32) - 127
        if axes.scale == "two levels":
            wide = self.of_scales.repeat_interleave(SHARED)[: self.scale.numel()]
            looked = self.of_codes[self.scale.int()]
            scale = looked * wide.view(self.scale.shape) + 0.1
        else:
            scale = SCALES[axes.scale](self.scale)
        scale = (BENT[axes.bent](scale.float()) if axes.bent else scale).to(within)
        if axes.factor and not axes.of_weight:
            scale = FACTORS[axes.factor](scale, self.factor)
        return scale

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        axes, within = self.axes, self.axes.within or dtype
        table = self.table
        if table is None:  # the graph itself makes the table
            table = torch.tensor(NUMBERS[axes.numbers], device=self.codes.device)
        table, look_up = table.to(within), LOOK_UPS[axes.looked_up]
        codes = pairs(self.codes, axes.order, axes.pairs)
        if axes.early:
            values = joined([look_up(part, table) for part in codes], axes.pairs)
        else:
            values = look_up(joined(codes, axes.pairs), table)
        scale = self.scale_of(within)
        op = torch.ldexp if axes.scale == "ldexp" else torch.mul
        weight = at_every(op, values, scale, axes.block, axes.spread)
        if axes.factor and axes.of_weight:
            weight = FACTORS[axes.factor](weight, self.factor)
        return weight.to(dtype)


# --- draws ----------------------------------------------------------------------------------------

#: The axes of each known format.
KNOWN: dict[str, dict[str, Any]] = {
    "nvfp4": {"scale": "e4m3", "factor": "times"},
    "nvfp4 of compressed-tensors": {"scale": "e4m3", "factor": "over", "within": torch.bfloat16},
    "nvfp4 without factor": {"scale": "e4m3"},
    "mxfp4": {"block": "wide group", "scale": "exp2"},
    "mxfp4 in bfloat16": {"block": "wide group", "scale": "power", "within": torch.bfloat16},
    "nf4": {"numbers": "nf4", "order": (1, 0), "scale": "float"},
    "fp4": {"numbers": "fp4", "order": (1, 0), "scale": "float"},
    "nf4 of two levels": {"numbers": "nf4", "order": (1, 0), "scale": "two levels"},
}
#: Axes that differ in a near miss of a format, or in one of several linears.
APART: dict[str, Callable[[random.Random], Any]] = {
    "numbers": lambda draw: draw.choice(tuple(NUMBERS)),
    "stored": lambda draw: True,
    "order": lambda draw: draw.choice(((0, 1), (1, 0))),
    "pairs": lambda draw: draw.choice((*WAYS_OF_PAIRS, "halves")),
    "looked_up": lambda draw: draw.choice(tuple(LOOK_UPS)),
    "early": lambda draw: draw.random() < 0.5,
    "block": lambda draw: draw.choice(tuple(BLOCKS)),
    "spread": lambda draw: draw.choice(WAYS),
    "scale": lambda draw: draw.choice((*SCALES, "ldexp", "two levels")),
    "factor": lambda draw: draw.choice(("", *FACTORS)),
    "of_weight": lambda draw: draw.random() < 0.5,
    "within": lambda draw: draw.choice((None, torch.float32, torch.bfloat16)),
    "bent": lambda draw: draw.choice(tuple(BENT)),
    "product": lambda draw: draw.choice(tuple(PRODUCTS)),
    "bias": lambda draw: True,
    "rounded": draw_rounded,
}


def draw_floats(draw: random.Random) -> Floats:
    drawn = Floats(
        pairs=draw.choice(WAYS_OF_PAIRS),
        looked_up=draw.choice(_LOOK_UPS),
        early=draw.random() < 0.3,
        spread=draw.choice(WAYS),
        dtype=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
        of_weight=draw.random() < 0.4,
        product=draw.choice(("linear", "linear", *PRODUCTS)),
        bias=draw.random() < 0.2,
        rounded=draw_rounded(draw),
    )
    drawn = replace(drawn, **KNOWN[draw.choice(tuple(KNOWN))])
    if drawn.scale in POWERS and draw.random() < 0.7:
        drawn = replace(drawn, scale=draw.choice(("ldexp", *tuple(POWERS)[:5])))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        name = draw.choice(tuple(APART))
        drawn = replace(drawn, **{name: APART[name](draw)})
    return drawn
