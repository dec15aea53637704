"""Kernel specs of the `moe_codes` template: expert GEMMs that stream weights of 4-bit codes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.specs import GemmConfig, GroupedProblem, make_spec
from tilewright.codegen.spec import Constant, KernelSpec

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


def part_columns(problem: GroupedProblem, config: CodesConfig) -> int:
    """Columns of a part: int4's are those of a scale."""
    most = problem.scale_block[1] if problem.format == "int4" else config.part_k
    return min(config.block_k // config.split, most)


def scale_bytes(problem: GroupedProblem, config: CodesConfig) -> int:
    """Bytes of E2M1 scales that a quarter of a part has."""
    return part_columns(problem, config) // QUARTERS // problem.scale_block[1]


def codes_obstacle(problem: GroupedProblem, config: CodesConfig) -> str | None:
    """Why a GEMM cannot stream codes in these tiles; None where it can."""
    width, block_k = problem.scale_block[1], config.block_k
    if problem.format not in ("nvfp4", "mxfp4", "int4"):
        return f"{problem.format} weights are no 4-bit codes"
    if problem.weight.n_major or problem.weight.row_stride % WORD_BYTES:
        return "rows of the weight are not whole words"
    if problem.inner % width or problem.scale_strides[2] != 1:
        return "scales do not lie as the columns do"
    if config.ordered and problem.inner % part_columns(problem, config):
        return f"{problem.inner} columns are not whole parts to put in order"
    if problem.format == "int4":
        if problem.scale_block[0] != 1 or block_k % width or block_k // width > 4:
            return f"groups of {problem.scale_block} do not fit steps of {block_k} columns"
        return None if problem.inner % WORD_CODES == 0 else "columns are not whole words"
    size, part = scale_bytes(problem, config), part_columns(problem, config)
    if size not in _INTEGERS or problem.inner * QUARTERS % part:
        return f"{problem.inner} columns are not whole quarters of {part}"
    if any(stride % size for stride in problem.scale_strides[:2]):
        return f"scales do not lie in units of {size} bytes"
    if problem.format == "mxfp4" and problem.dtype != "bf16":
        return f"powers of two beyond those of {problem.dtype}"
    return None


def order_of(problem: GroupedProblem, config: GemmConfig) -> tuple[int, int]:
    """(columns of a part, columns that a thread holds in a row) of the order in which a GEMM wants
    its rows, see `rows_in_order`; (0, 0): as they are."""
    if not (isinstance(config, CodesConfig) and config.ordered):
        return 0, 0
    return part_columns(problem, config), thread_run(problem, config)


def thread_run(problem: GroupedProblem, config: CodesConfig) -> int:
    """Columns that a thread of the tensor core holds in a row, as Triton lays out an operand that
    joins bring forth: twice as many as a register holds for the older instruction, four times
    where scales of one byte are loaded on the way to it. Another number would do, at the price of
    exchanges."""
    if config.swapped and config.split == 1:
        return 2
    return 8 if problem.format != "int4" and scale_bytes(problem, config) == 1 else 4


def scale_type(problem: GroupedProblem, config: CodesConfig) -> str:
    """Triton's type of what the kernel loads of the scales: E2M1's by the integer."""
    if problem.format == "int4":
        return problem.scale_dtype
    return _INTEGERS[scale_bytes(problem, config)]


def scale_steps(
    problem: GroupedProblem, strides: tuple[int, int, int], config: CodesConfig
) -> tuple[int, int, int]:
    """Strides of scales in elements of `scale_type`."""
    size = 1 if problem.format == "int4" else scale_bytes(problem, config)
    return strides[0] // size, strides[1] // size, 1


def storage_constants(problem: GroupedProblem, config: CodesConfig) -> dict[str, Constant]:
    """What both kernels know of the weight's storage and of their tiles."""
    return {
        "EXPERT_STRIDE": problem.weight.expert_stride // WORD_BYTES,
        "ROW_STRIDE": problem.weight.row_stride // WORD_BYTES,
        "FORMAT": problem.format,
        "PART_K": part_columns(problem, config),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "RUN": thread_run(problem, config),
        "SWAPPED": config.swapped,
        "SPLIT": config.split,
    }


def row_arguments(config: CodesConfig, id_dtype: str, ends_dtype: str) -> dict[str, str | None]:
    """Types of what says which rows an expert has."""
    if config.by_route:
        return {"ids_ptr": f"*{id_dtype}", "order_ptr": None, "ends_ptr": None}
    return {"ids_ptr": None, "order_ptr": "*i32", "ends_ptr": f"*{ends_dtype}"}


def down_codes_spec(
    problem: GroupedProblem, config: CodesConfig, target: str, id_dtype: str = "i32"
) -> KernelSpec:
    """A grouped GEMM whose groups are the experts. id_dtype: of the experts of routes."""
    groups = problem.num_groups
    rows = row_arguments(config, id_dtype, problem.ends_dtype)
    if not problem.ordered:
        rows["order_ptr"] = None
    arguments: dict[str, str | None] = {
        "x_ptr": f"*{problem.dtype}",
        **rows,
        "weight_ptr": "*i32",
        "scale_ptr": f"*{scale_type(problem, config)}",
        "factor_ptr": "*fp32" if problem.factor else None,
        "bias_ptr": None if problem.bias is None else f"*{problem.bias_dtype}",
        "y_ptr": f"*{problem.out_dtype}",
        "num_rows": "i32",
    }
    constants: dict[str, Constant] = {
        "NUM_EXPERTS": groups,
        "EXPERTS": next_power_of_2(groups if problem.ordered else groups + 1),
        "HIDDEN": problem.rows,
        "INNER": problem.inner,
        "X_STRIDE": problem.x_stride,
        **storage_constants(problem, config),
        "SCALE_STRIDES": scale_steps(problem, problem.scale_strides, config),
        "BIAS_STRIDES": problem.bias or (0, 0),
        "X_IN_ORDER": config.ordered,
    }
    return make_spec(
        "grouped.codes", "moe_down_codes", constants, arguments, problem.unaligned,
        config.num_warps, config.num_stages, target, dependent=True,
    )  # fmt: skip
