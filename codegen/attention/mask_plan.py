"""How a mask is read for its list of blocks: in steps that keep the chip's loads in flight."""

from __future__ import annotations

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.mask_kernels import MaskConfig, MaskProblem
from tilewright.codegen.targets import Target

# Bytes of the mask that a program loads at a time, and the least that is worth a program.
STEP_BYTES = 16384
PART_BYTES = 2 * STEP_BYTES
# Programs on a multiprocessor, which together have enough loads in flight.
PROGRAMS_PER_SM = 4


def mask_config(problem: MaskProblem, tiles: int, target: Target) -> MaskConfig:
    """Where tiles are few their keys are cut into parts, to keep the chip busy."""
    block_bytes = problem.rows * KEYS * ELEMENT_BYTES[problem.mask]
    blocks = min(max(STEP_BYTES // block_bytes, 1), problem.key_blocks)
    wanted = cdiv(PROGRAMS_PER_SM * target.num_sms, max(tiles, 1))
    worth = problem.key_blocks * block_bytes // PART_BYTES
    return MaskConfig(blocks, max(min(wanted, worth, problem.key_blocks // blocks), 1))
