"""Kernel specs of the `codes` template: expert GEMMs that stream weights of 4-bit codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.problem import GroupedProblem, WeightOperands
from tilewright.codegen.grouped.specs import Arguments, GemmConfig, gemm_spec
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, constants_of, operands_of

# A word of the weight's storage is an int32.
WORD_CODES = 8
WORD_BYTES = 4
# A quarter of the columns of a part belongs to one thread of the tensor core.
QUARTERS = 4
_INTEGERS = {1: "u8", 2: "i16", 4: "i32"}


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
    if size not in _INTEGERS or inner * QUARTERS % part:
        return f"{inner} columns are not whole quarters of {part}"
    if any(stride % size for stride in weight.scale_strides[:2]):
        return f"scales do not lie in units of {size} bytes"
    if weight.format == "mxfp4" and problem.x.dtype != "bf16":
        return f"powers of two beyond those of {problem.x.dtype}"
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


def as_words(weight: WeightOperands, config: CodesConfig) -> WeightOperands:
    """The weight as the kernel loads it: codes by the int32, E2M1's scales by the integer of those
    that a quarter of a part has."""
    expert, row, _ = weight.data.strides
    words = replace(weight.data, dtype="i32", strides=(expert // WORD_BYTES, row // WORD_BYTES, 1))
    assert weight.scale is not None
    size = 1 if weight.format == "int4" else scale_bytes(weight, config)
    dtype = weight.scale.dtype if weight.format == "int4" else _INTEGERS[size]
    expert, row, _ = weight.scale.strides
    scale = replace(weight.scale, dtype=dtype, strides=(expert // size, row // size, 1))
    return replace(weight, data=words, scale=scale)


def codes_constants(weight: WeightOperands, config: CodesConfig) -> dict[str, Constant]:
    """What both kernels know of a weight `as_words`, and of how its codes are multiplied."""
    return {
        "EXPERT_STRIDE": weight.data.strides[0],
        **constants_of(weight, "row_stride", "format"),
        "PART_K": part_columns(weight, config),
        "RUN": thread_run(weight, config),
        "SPLIT": config.split,
    }


def row_arguments(
    config: CodesConfig, ids: Operand | None, order: Operand | None, ends: Operand
) -> dict[str, Operand | None]:
    """What says which rows an expert has. ids: the experts of routes."""
    if config.by_route:
        return {"ids_ptr": ids, "order_ptr": None, "ends_ptr": None}
    return {"ids_ptr": None, "order_ptr": order, "ends_ptr": ends}


def down_codes_spec(
    problem: GroupedProblem, config: CodesConfig, target: str, ids: Operand | None = None
) -> KernelSpec:
    """A grouped GEMM whose groups are the experts. ids: the experts of routes, by route."""
    groups, weight = problem.num_groups, as_words(problem.weight, config)
    arguments: Arguments = {
        "x_ptr": problem.x,
        **row_arguments(config, ids, problem.order, problem.ends),
        "weight_ptr": weight.data,
        **operands_of(weight, "scale", "factor", "bias"),
        "y_ptr": problem.out,
        "num_rows": "i32",
    }
    constants: dict[str, Constant] = {
        "NUM_EXPERTS": groups,
        "EXPERTS": next_power_of_2(groups if problem.order else groups + 1),
        "HIDDEN": problem.rows,
        "INNER": problem.inner,
        "X_STRIDE": problem.x.strides[0],
        **codes_constants(weight, config),
        **constants_of(weight, "scale_strides", "bias_strides"),
        "X_IN_ORDER": config.ordered,
    }
    return gemm_spec("grouped.codes", "moe_down_codes", constants, arguments, config, target)
