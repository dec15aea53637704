"""The `codes` template: expert GEMMs that stream weights of 4-bit codes, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.grouped.kernels import (
    GEMM_STRIDES,
    GemmConfig,
    grouped_statics,
)
from tilewright.codegen.grouped.problem import GroupedProblem, WeightOperands
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.spec import Constant

# A word of the weight's storage is an int32.
WORD_CODES = 8
WORD_BYTES = 4
# A quarter of the columns of a part belongs to one thread of the tensor core.
QUARTERS = 4
# Bytes of scales that are loaded as one integer.
INTEGERS = (1, 2, 4)
# A grouped GEMM whose groups are the experts; its weight and scales are given by words.
DOWN_CODES = Kernel(
    "grouped.codes",
    "moe_down_codes",
    GEMM_STRIDES,
    unaligned=("ends",),
)


@dataclass(frozen=True)
class CodesConfig(GemmConfig):
    """Tiles of a GEMM that streams codes. ordered: the rows it multiplies are written in the order
    of its parts; else it puts them in order itself. part_k: most columns of a part, which are
    unpacked and multiplied together, of the block_k that are loaded together. split: warps that
    have columns of their own of a step; 1: all have the same. by_route: every route is a block of
    rows, in its own place: nothing is sorted."""

    ordered: bool = False
    part_k: int = 128
    split: int = 1
    by_route: bool = False

    def __str__(self) -> str:
        words = [" codes", " split" if self.split > 1 else "", " ordered" if self.ordered else ""]
        words += [" by route" if self.by_route else ""]
        return super().__str__() + "".join(words)


def codes_config(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int,
    programs_per_sm: int = 1, *, ordered: bool = False, swapped: bool = True, part_k: int = 128,
    split: int = 1, by_route: bool = False,
) -> CodesConfig:  # fmt: skip
    """Such tiles. swapped: weights on the M side of the newest instruction; else on the N side of
    the older one, which takes less for 16 rows and far more for 64."""
    return CodesConfig(
        block_m, block_n, block_k, swapped, num_warps, num_stages, programs_per_sm,
        ordered=ordered, part_k=part_k, split=split, by_route=by_route,
    )  # fmt: skip


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
        "FORMAT": weight.format,
        "PART_K": part_columns(weight, config),
        "RUN": thread_run(weight, config),
    }


def down_codes_statics(problem: GroupedProblem, config: CodesConfig) -> Statics:
    """The constants of a grouped GEMM by codes that are no strides of its tensors."""
    own = codes_constants(problem.weight, config) | {
        "ROW_STRIDE": problem.weight.row_stride // WORD_BYTES,
        "NUM_EXPERTS": problem.num_groups,
        "X_IN_ORDER": config.ordered,
    }
    return Statics(grouped_statics(problem, config), **own)
