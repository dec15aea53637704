"""The `mask_blocks` kernel, and how a mask is divided among its programs, so that enough loads are
in flight."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.blocks import KEYS, LOWEST, ORDINARY, mask_kind
from tilewright.codegen.kernel import Kernel
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target

# The fewest entries of a list that a program writes at a time.
LEAST_LISTED = 16
# The most entries of a list that a program writes at a time.
MOST_LISTED = 1024
# How many bytes of the mask a program loads at a time.
STEP_BYTES = 16384
# The fewest bytes of the mask that a part has.
PART_BYTES = 2 * STEP_BYTES
# How many programs a multiprocessor needs at the same time to have enough loads in flight.
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
    """The static part of a call of `mask_blocks`.

    Attributes:
        mask: The dtype of the mask: "u8" for booleans, or a float dtype for a mask that is added.
        rows: The number of rows of the mask, at most QUERIES, rounded up to a power of two.
        key_blocks: The number of blocks of keys, rounded up to a power of two.
        unit: If lowest numbers of the mask hide keys too, the largest power of two of the mask's
            dtype (E in `blocks.py`); else 0.
    """

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
        """The constants that distinguish lowest numbers from ordinary numbers. There are no such
        constants if lowest numbers do not hide keys."""
        unit = self.unit
        return {"LOWEST": LOWEST * unit, "ORDINARY": ORDINARY * unit} if unit else {}


@dataclass(frozen=True)
class MaskConfig:
    """The tile sizes of `mask_blocks`.

    Attributes:
        blocks: The number of blocks of keys that a program reads in one step.
        parts: The number of programs that share the blocks of a tile.
        num_warps: The number of warps of a program.
    """

    blocks: int
    parts: int
    num_warps: int = 8

    @property
    def split(self) -> bool:
        return self.parts > 1

    def __str__(self) -> str:
        return f"{self.blocks} blocks at a time, {self.parts} parts"


def mask_config(problem: MaskProblem, tiles: int, target: Target) -> MaskConfig:
    """Returns the tile sizes of a call. If there are few tiles, their keys are divided into parts,
    so that all multiprocessors have work."""
    block_bytes = problem.rows * KEYS * ELEMENT_BYTES[problem.mask]
    blocks = min(max(STEP_BYTES // block_bytes, 1), problem.key_blocks)
    wanted = cdiv(PROGRAMS_PER_SM * target.num_sms, max(tiles, 1))
    worth = problem.key_blocks * block_bytes // PART_BYTES
    return MaskConfig(blocks, max(min(wanted, worth, problem.key_blocks // blocks), 1))


def blocks_per_part(config: MaskConfig, key_blocks: int) -> int:
    """Returns the number of blocks of each part, which is a whole number of steps. The last part
    has only the blocks that remain of all `key_blocks` blocks."""
    return max(cdiv(cdiv(key_blocks, config.parts), config.blocks), 1) * config.blocks


def numbers_per_tile(problem: MaskProblem, config: MaskConfig, key_blocks: int) -> int:
    """Returns how many numbers the programs of a tile exchange.

    The programs exchange a flag for each block. If lowest numbers hide keys, the programs also
    exchange a flag for each row of each part, which says whether the row has an ordinary number in
    the part.
    """
    return key_blocks + (config.parts * problem.rows if problem.unit and config.parts > 1 else 0)
