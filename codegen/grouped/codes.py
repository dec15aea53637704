"""Conditions and constants of GEMMs that read 4-bit codes of weights in the form in which they are
stored: 32-bit words of eight codes.

A GEMM loads the columns of one step of its loop together, and multiplies them in several parts.
"""

from __future__ import annotations

from tilewright.codegen.grouped.problem import TMA_BYTES, WORD_BYTES, GroupedProblem, WeightOperands
from tilewright.codegen.grouped.tiles import CodesConfig, GemmConfig
from tilewright.codegen.spec import Constant

# The number of codes in a word.
WORD_CODES = 8
# Four threads hold the columns of a part for the tensor core. Each of them holds a quarter.
QUARTERS = 4
# The numbers of bytes of scales that a thread can load as one integer.
INTEGERS = (1, 2, 4)


def part_columns(weight: WeightOperands, config: CodesConfig) -> int:
    """Returns the number of columns of a part. For int4, all columns of a part share a scale."""
    most = weight.scale_block[1] if weight.format == "int4" else config.part_k
    return min(config.block_k // config.split, most)


def scale_bytes(weight: WeightOperands, config: CodesConfig) -> int:
    """Returns how many bytes the scales of E2M1 codes take for one quarter of a part's columns."""
    return part_columns(weight, config) // QUARTERS // weight.scale_block[1]


def codes_obstacle(problem: GroupedProblem, config: CodesConfig) -> str | None:
    """Returns why a GEMM with these tiles cannot read the codes as they are stored; None if the
    GEMM can."""
    weight, inner = problem.weight, problem.inner
    width, block_k = weight.scale_block[1], config.block_k
    if weight.format not in ("nvfp4", "mxfp4", "int4"):
        return f"{weight.format} weights are not 4-bit codes"
    if problem.named:
        return "the caller gives the experts of the groups"
    if weight.n_major or weight.row_stride % WORD_BYTES:
        return "the weight is contiguous along N, or its rows are not whole words"
    if inner % width or weight.scale_strides[2] != 1:
        return "the layout of the scales differs from the layout of the columns"
    part = part_columns(weight, config)
    if config.ordered and inner % part:
        return f"{inner} columns are not a multiple of the {part} that are permuted together"
    if weight.format == "int4":
        if weight.scale_block[0] != 1 or block_k % width or block_k // width > 4:
            return f"scales of blocks of {weight.scale_block} do not fit steps of {block_k} columns"
        return None if inner % WORD_CODES == 0 else "columns do not fill whole words"
    size = scale_bytes(weight, config)
    if size not in INTEGERS or inner * QUARTERS % part:
        return f"{inner} columns cannot be divided into whole quarters of {part} columns"
    if any(stride % size for stride in weight.scale_strides[:2]):
        return f"the distances of scales are not multiples of {size} bytes"
    if size > 1 and not (weight.scale and weight.scale.aligned):
        return f"the scales do not begin at a multiple of {TMA_BYTES} bytes"
    if weight.format == "mxfp4" and problem.x != "bf16":
        return f"scales may be powers of two beyond the range of {problem.x}"
    return None


def order_of(weight: WeightOperands, config: GemmConfig) -> tuple[int, int]:
    """Returns (columns of a part, neighbouring columns in a thread).

    These numbers determine the order in which the GEMM needs the columns of x (see
    `rows_in_order`). The result is (0, 0) for the natural order.
    """
    if not (isinstance(config, CodesConfig) and config.ordered):
        return 0, 0
    return part_columns(weight, config), thread_run(weight, config)


def thread_run(weight: WeightOperands, config: CodesConfig) -> int:
    """Returns how many neighbouring columns of a row each thread holds for the tensor core. The
    number follows from the layout that Triton gives to an operand made by joins.

    For the newest instruction, the result is the number of columns in a register. For the older
    instruction (mma.sync), the result is twice as large, or four times as large if the scales of a
    quarter take one byte. Other results would also be possible, but threads would then have to
    exchange values.
    """
    if config.swapped and config.split == 1:
        return 2
    return 8 if weight.format != "int4" and scale_bytes(weight, config) == 1 else 4


def codes_constants(weight: WeightOperands, config: CodesConfig) -> dict[str, Constant]:
    """Returns the constants that a kernel needs to multiply the codes of a weight."""
    return {
        "PART_K": part_columns(weight, config),
        "RUN": thread_run(weight, config),
    }
