"""Random parts of layers with weights of codes. The packing of codes into words, zeros, scales,
spellings, activations, parts and near misses are each drawn independently.

    weight[n, k] = (code[n, k] - zero[n, k]) * scale[n, k]          integers
    weight[n, k] = numbers[code[n, k]] * scale[n, k] * factor       floats

A format that is similar to a known one (another order of nibbles, the scale of the next group) is
one more entry of a table, since eager defines the result of any program.
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
