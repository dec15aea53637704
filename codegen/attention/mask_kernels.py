"""The `mask_blocks` kernel, and the partition of a mask into steps with enough loads in flight."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.blocks import KEYS, LOWEST, ORDINARY, mask_kind
from tilewright.codegen.kernel import Kernel
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target

# The fewest and the most entries of a list that are written at a time.
LEAST_LISTED, MOST_LISTED = 16, 1024
# Bytes of the mask that a program loads at a time, and the fewest bytes of a part.
STEP_BYTES = 16384
PART_BYTES = 2 * STEP_BYTES
# Programs on a multiprocessor that together have enough loads in flight.
PROGRAMS_PER_SM = 4

_AXES = ("sequence", "head", "row", "column")
MASK_BLOCKS = Kernel(
    "attention.mask_blocks",
    "mask_blocks",
    launch_strides={f"{axis}_stride": ("mask", dim) for dim, axis in enumerate(_AXES)},
    broadcast=("mask",),
    ranges=("num_heads", "query_tiles", "blocks_per_part", "parts"),
    divisible=("num_keys",),
    unaligned=("counters",),
)


@dataclass(frozen=True)
class MaskProblem:
    """The static part of a call. mask: dtype of the mask, u8 for booleans or a float for numbers
    that are added. rows: its number of rows, at most QUERIES, rounded up to a power of two.
    key_blocks: its number of blocks of keys, rounded up to a power of two. unit: the largest power
    of two of the dtype, if the mask's lowest numbers hide keys too; 0 if they do not."""

    mask: str
    rows: int
    key_blocks: int
    unit: float = 0.0

    @property
    def kind(self) -> str:
        return mask_kind(self.mask)

    @property
    def listed(self) -> int:
        return max(min(self.key_blocks, MOST_LISTED), LEAST_LISTED)

    @property
    def bounds(self) -> dict[str, Constant]:
        """The constants that tell lowest numbers from ordinary ones; empty if lowest numbers do not
        hide keys."""
        unit = self.unit
        return {"LOWEST": LOWEST * unit, "ORDINARY": ORDINARY * unit} if unit else {}


@dataclass(frozen=True)
class MaskConfig:
    """blocks: blocks of keys that a program reads per step. parts: number of programs that share
    the blocks of a tile."""

    blocks: int
    parts: int
    num_warps: int = 8

    @property
    def split(self) -> bool:
        return self.parts > 1

    def __str__(self) -> str:
        return f"{self.blocks} blocks at a time, {self.parts} parts"


def mask_config(problem: MaskProblem, tiles: int, target: Target) -> MaskConfig:
    """Returns the tiles of a call. If there are few tiles, their keys are cut into parts to keep
    the chip busy."""
    block_bytes = problem.rows * KEYS * ELEMENT_BYTES[problem.mask]
    blocks = min(max(STEP_BYTES // block_bytes, 1), problem.key_blocks)
    wanted = cdiv(PROGRAMS_PER_SM * target.num_sms, max(tiles, 1))
    worth = problem.key_blocks * block_bytes // PART_BYTES
    return MaskConfig(blocks, max(min(wanted, worth, problem.key_blocks // blocks), 1))


def blocks_per_part(config: MaskConfig, key_blocks: int) -> int:
    """Returns how many of `key_blocks` each part has, in whole steps. The last part has the
    rest."""
    return max(cdiv(cdiv(key_blocks, config.parts), config.blocks), 1) * config.blocks


def numbers_per_tile(problem: MaskProblem, config: MaskConfig, key_blocks: int) -> int:
    """Returns how many numbers the programs of a tile exchange: a flag for each block and, if the
    lowest numbers hide keys, a flag for each row of each part: whether it has an ordinary
    number."""
    return key_blocks + (config.parts * problem.rows if problem.unit and config.parts > 1 else 0)
