"""Parts of layers whose weights are codes: how codes lie in words, zeros, scales, spellings,
activations, parts and near misses, each drawn on its own.

    weight[n, k] = (code[n, k] - zero[n, k]) * scale[n, k]          integers
    weight[n, k] = numbers[code[n, k]] * scale[n, k] * factor       floats

What is nearly a known format, another order of nibbles or the scale of the next group, is one more
entry of a table here: eager says what a program means, whatever it is.
"""

from __future__ import annotations

import random
from typing import Any

from torch import nn

from tests.programs.quantised.experts import experts
from tests.programs.quantised.parts import attention, gated, latents
from tests.programs.quantised.products import products

__all__ = ["build", "products"]

PARTS = (attention, attention, attention, gated, gated, latents, experts)


def build(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    return draw.choice(PARTS)(draw)
