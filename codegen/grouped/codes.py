"""How GEMMs stream weights of 4-bit codes: by words, and parts of their rows."""

from __future__ import annotations

from tilewright.codegen.grouped.problem import TMA_BYTES, WORD_BYTES, GroupedProblem, WeightOperands
from tilewright.codegen.grouped.tiles import CodesConfig, GemmConfig
from tilewright.codegen.spec import Constant

# Codes of a word.
WORD_CODES = 8
# A quarter of the columns of a part belongs to one thread of the tensor core.
QUARTERS = 4
# Bytes of scales that are loaded as one integer.
INTEGERS = (1, 2, 4)


def part_columns(weight: WeightOperands, config: CodesConfig) -> int:
    """Columns of a part: int4's are those of a scale."""
    most = weight.scale_block[1] if weight.format == "int4" else config.part_k
    return min(config.block_k // config.split, most)


def scale_bytes(weight: WeightOperands, config: CodesConfig) -> int:
    """Bytes of E2M1 scales that a quarter of a part has."""
    return part_columns(weight, config) // QUARTERS // weight.scale_block[1]


def codes_obstacle(problem: GroupedProblem, config: CodesConfig) -> str | None:
    """Why a GEMM cannot stream codes in these tiles; None where it can."""
    weight, inner = problem.weight, problem.inner
    width, block_k = weight.scale_block[1], config.block_k
    if weight.format not in ("nvfp4", "mxfp4", "int4"):
        return f"{weight.format} weights are no 4-bit codes"
    if problem.named:
        return "the groups' experts are given"
    if weight.n_major or weight.row_stride % WORD_BYTES:
        return "rows of the weight are not whole words"
    if inner % width or weight.scale_strides[2] != 1:
        return "scales do not lie as the columns do"
    if config.ordered and inner % part_columns(weight, config):
        return f"{inner} columns are not whole parts to put in order"
    if weight.format == "int4":
        if weight.scale_block[0] != 1 or block_k % width or block_k // width > 4:
            return f"groups of {weight.scale_block} do not fit steps of {block_k} columns"
        return None if inner % WORD_CODES == 0 else "columns are not whole words"
    size, part = scale_bytes(weight, config), part_columns(weight, config)
    if size not in INTEGERS or inner * QUARTERS % part:
        return f"{inner} columns are not whole quarters of {part}"
    if any(stride % size for stride in weight.scale_strides[:2]):
        return f"scales do not lie in units of {size} bytes"
    if size > 1 and not (weight.scale and weight.scale.aligned):
        return f"scales do not begin at whole {TMA_BYTES} bytes"
    if weight.format == "mxfp4" and problem.x != "bf16":
        return f"powers of two beyond those of {problem.x}"
    return None


def order_of(weight: WeightOperands, config: GemmConfig) -> tuple[int, int]:
    """(columns of a part, columns that a thread holds in a row) of the order in which a GEMM wants
    its rows, see `rows_in_order`; (0, 0): as they are."""
    if not (isinstance(config, CodesConfig) and config.ordered):
        return 0, 0
    return part_columns(weight, config), thread_run(weight, config)


def thread_run(weight: WeightOperands, config: CodesConfig) -> int:
    """Columns that a thread of the tensor core holds in a row, as Triton lays out an operand that
    joins bring forth: twice as many as a register holds for the older instruction, four times
    where scales of one byte are loaded on the way to it. Another number would do, at the price of
    exchanges."""
    if config.swapped and config.split == 1:
        return 2
    return 8 if weight.format != "int4" and scale_bytes(weight, config) == 1 else 4


def codes_constants(weight: WeightOperands, config: CodesConfig) -> dict[str, Constant]:
    """How the codes of a weight are multiplied."""
    return {
        "PART_K": part_columns(weight, config),
        "RUN": thread_run(weight, config),
    }
