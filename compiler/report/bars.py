"""The error bar of a modelled time: how far the model was from steps that it was not fitted to.

A step belongs to one class, by what it does and how its weights are stored. A class's bar is the
least percentage that holds nine of ten of its held-out rows in docs/predictions.md, and no less
than 10 where those are few (`benchmarks/predictions.py`; a test holds these numbers to its rows).
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

#: Percent, by class, on the chip that was measured (sm90: H100 and H200).
BARS = {
    "decode, dense": 10,
    "decode, latent attention": 10,
    "decode, mixture": 14,
    "decode, weights as codes": 27,
    "prompt, dense": 10,
    "prompt, latent attention": 10,
    "prompt, mixture": 28,
    "prompt, weights as codes": 10,
}
#: Percent, for a class without a held-out row: at least the widest bar of the other classes.
UNHELD = 30
#: Percent, on chips without measurements of ours. sm100: by measurements on a B200 that others
#: published (docs/predictions.md, the last table). UNSEEN, a guess: all other chips.
PUBLISHED = {"sm100": 37}
UNSEEN = 50
#: The share of rows that a bar holds, and the least bar of fewer than so many rows.
HELD = 0.9
FEW, LEAST = 10, 10
_DECIMALS = 1e-9


@dataclass(frozen=True)
class Bar:
    """percent: half of a modelled time's range. why: what it follows from, in words."""

    percent: int
    why: str

    def around(self, us: float) -> tuple[float, float]:
        """The ends of the range, in microseconds."""
        return us * (1 - self.percent / 100), us * (1 + self.percent / 100)


def class_of(units: Iterable[Unit]) -> str:
    """The class of a step: "decode, dense" and so on, as in BARS."""
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
    """The bar of a step of a class on a chip."""
    held = BARS.get(kind)
    own = Bar(
        held or UNHELD, f"held-out steps of {kind}" if held else f"no step of {kind} was held out"
    )
    if target.measured:
        return own
    if target.name in PUBLISHED:
        why = f"no kernel of ours ran on {target.name}: published measurements there"
        return Bar(max(own.percent, PUBLISHED[target.name]), why)
    return Bar(max(own.percent, UNSEEN), f"nothing was held to a measurement on {target.name}")


def percent_of(ratios: Sequence[float]) -> int:
    """The least whole percentage that holds nine of ten ratios of modelled to measured."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return math.ceil(100 * errors[math.ceil(HELD * len(errors)) - 1] - _DECIMALS)


def held_percent(ratios: Sequence[float]) -> int:
    """The bar of a class by its held-out rows, whose ratios are given."""
    return max(percent_of(ratios), LEAST if len(ratios) < FEW else 0)
