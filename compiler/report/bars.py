"""The error bar of a modelled time: the error of the cost model for steps to which it was not
fitted.

Each step belongs to one class, according to what it does and how its weights are stored. The bar of
a class is the smallest percentage within which nine of ten held-out rows of the class in
docs/predictions.md lie. It is at least 10 if there are few rows. `benchmarks/predictions.py` prints
the bars, and a test compares the numbers here with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.codegen.targets import Target
from tilewright.compiler.report.times import MANY_QUERIES
from tilewright.compiler.report.traffic import Unit

DECODE, PROMPT = "decode", "prompt"
DENSE, MIXTURE, LATENT, CODES = "dense", "mixture", "latent attention", "weights as codes"
ADAPTERS = "adapters"

#: The bar of each class in percent, on the chip that was measured (sm90: H100 and H200).
BARS = {
    "decode, adapters": 25,
    "decode, dense": 8,
    "decode, latent attention": 13,
    "decode, mixture": 11,
    "decode, weights as codes": 19,
    "prompt, adapters": 21,
    "prompt, dense": 21,
    "prompt, latent attention": 10,
    "prompt, mixture": 35,
    "prompt, weights as codes": 14,
}
#: The bar in percent of a class without held-out rows. It is at least as wide as the widest bar of
#: the other classes.
UNHELD = 35
#: The bars in percent on chips that we did not measure, but for which others published
#: measurements. The bar of sm100 comes from a B200 (docs/predictions.md, the last table).
PUBLISHED = {"sm100": 34}
#: The bar in percent on all other chips. It is a guess.
UNSEEN = 50
#: The share of held-out rows for which a bar holds.
HELD = 0.9
#: A class with fewer held-out rows than this has a bar of at least LEAST percent.
FEW = 10
#: The smallest bar in percent of a class with fewer than FEW held-out rows.
LEAST = 10
_DECIMALS = 1e-9


@dataclass(frozen=True)
class Bar:
    """The range of a modelled time.

    percent: half of the width of the range.
    why: where the range comes from, in words.
    """

    percent: int
    why: str

    def around(self, us: float) -> tuple[float, float]:
        """Returns the ends of the range, in microseconds."""
        return us * (1 - self.percent / 100), us * (1 + self.percent / 100)


def class_of(units: Iterable[Unit]) -> str:
    """Returns the class of a step as a key of BARS, such as "decode, dense"."""
    units = tuple(units)
    reads = [read for unit in units for read in unit.cache_reads]
    many = any(read.queries >= MANY_QUERIES for read in reads)
    families = {unit.family for unit in units}
    if any(unit.stores_codes for unit in units):
        weights = CODES
    elif "lora" in families:
        weights = ADAPTERS
    elif "mla" in families:
        weights = LATENT
    else:
        weights = MIXTURE if "moe" in families else DENSE
    return f"{PROMPT if many else DECODE}, {weights}"


def bar_of(kind: str, target: Target) -> Bar:
    """Returns the bar for a step of a class on a chip."""
    held = BARS.get(kind)
    own = Bar(
        held or UNHELD, f"held-out steps of {kind}" if held else f"no step of {kind} was held out"
    )
    if target.measured:
        return own
    if target.name in PUBLISHED:
        why = (
            f"no kernel of tilewright ran on {target.name}: from measurements there that others "
            "published"
        )
        return Bar(max(own.percent, PUBLISHED[target.name]), why)
    return Bar(
        max(own.percent, UNSEEN),
        f"a guess: no prediction was compared with a measurement on {target.name}",
    )


def percent_of(ratios: Sequence[float]) -> int:
    """Returns the smallest whole percentage that holds for nine of ten ratios of modelled to
    measured time."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return math.ceil(100 * errors[math.ceil(HELD * len(errors)) - 1] - _DECIMALS)


def held_percent(ratios: Sequence[float]) -> int:
    """Returns the bar of a class from the ratios of its held-out rows."""
    return max(percent_of(ratios), LEAST if len(ratios) < FEW else 0)
