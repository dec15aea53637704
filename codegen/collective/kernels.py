"""The kernel of `all_reduce_residual_norm`, its grid, and the memory that ranks share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.kernel import Kernel

# Slots of a program; see the template.
RING = 2
WORD_BYTES = 8
# Polls of a flag before a kernel gives up: about ten minutes, at half a microsecond or more each.
PATIENCE = 1 << 30

# The kernel of one rank; all ranks run the same one.
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
    """Launch parameters of the sum over ranks. blocks: the most programs; each has slots of its
    own."""

    blocks: int
    num_warps: int

    def __str__(self) -> str:
        return f"x{self.blocks} w{self.num_warps}"


def reduce_grid(config: ReduceConfig, num_tokens: int) -> tuple[int]:
    return (min(num_tokens, config.blocks),)


def flags_shape(config: ReduceConfig, num_ranks: int) -> tuple[int, int, int]:
    """Returns the shape of the flags, which lie before the slots: one 64-bit word for each slot."""
    return config.blocks, RING, num_ranks


def shared_bytes(config: ReduceConfig, num_ranks: int, row_bytes: int) -> int:
    """Returns the bytes of the memory that each rank shares with the others: flags, then slots."""
    return math.prod(flags_shape(config, num_ranks)) * (WORD_BYTES + row_bytes)
