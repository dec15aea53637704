"""The kernel of `all_reduce_residual_norm`, its grid, and the memory that ranks share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.kernel import Kernel

# How many slots a program has for each other rank. The template `collective.reduce` explains the
# slots.
RING = 2
# The number of bytes of a flag.
WORD_BYTES = 8
# How often a kernel reads a flag before it gives up. At half a microsecond or more for each read,
# this is about ten minutes.
PATIENCE = 1 << 30

# Each rank runs this kernel.
REDUCE = Kernel(
    "collective.reduce",
    "all_reduce_residual_norm",
    {
        "NORM_STRIDE": ("norm_weight", 0),
    },
    ranges=("num_tokens",),
)


@dataclass(frozen=True)
class ReduceConfig:
    """The launch parameters of the sum over ranks.

    Attributes:
        blocks: The largest number of programs. Each program has its own slots.
        num_warps: The number of warps of a program.
    """

    blocks: int
    num_warps: int

    def __str__(self) -> str:
        return f"x{self.blocks} w{self.num_warps}"


def reduce_grid(config: ReduceConfig, num_tokens: int) -> tuple[int]:
    return (min(num_tokens, config.blocks),)


def flags_shape(config: ReduceConfig, num_ranks: int) -> tuple[int, int, int]:
    """Returns the shape of the flags. There is one 64-bit word for each slot, and the flags are
    stored before the slots."""
    return config.blocks, RING, num_ranks


def shared_bytes(config: ReduceConfig, num_ranks: int, row_bytes: int) -> int:
    """Returns how many bytes of memory each rank shares with the other ranks. The flags come first,
    then the slots."""
    return math.prod(flags_shape(config, num_ranks)) * (WORD_BYTES + row_bytes)
