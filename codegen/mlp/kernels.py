"""The kernels of linears for few tokens, their tiles and their launch grids."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, LINE_BYTES, cdiv
from tilewright.codegen.kernel import Kernel, Stride
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.row_norm import squares_a_row
from tilewright.codegen.rows import ColumnOrder, column_order
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target

_STRIDES: dict[str, Stride | tuple[Stride, ...]] = {
    "NORM_STRIDE": ("norm_weight", 0),
    "WEIGHT_STRIDES": (("weight", 0), ("weight", 1)),
    "UP_STRIDES": (("up_weight", 0), ("up_weight", 1)),
    "BIAS_STRIDES": (("bias", 0), ("up_bias", 0)),
}
# Computes a linear and reads each weight once. If the result is normalised, this kernel stores fp32
# sums, and NORM_ROWS reads them.
LINEAR = Kernel(
    "mlp.linear",
    "streamed_linear",
    _STRIDES,
    ranges=("num_tokens",),
    unaligned=("counters", "weight_factor", "up_factor"),
)
# Computes a linear without tensor cores. Each program computes a few rows of the weight for one
# token.
DOTTED = Kernel("mlp.dotted", "dotted_linear", _STRIDES, unaligned=("weight_factor", "up_factor"))
# Normalises rows of fp32 sums that `streamed_linear` or `dotted_linear` stored.
NORM_ROWS = Kernel(
    "mlp.finish",
    "norm_rows",
    {"NORM_STRIDE": ("norm_weight", 0)},
)
# Applies the activation to products that a library computed.
ACTIVATE = Kernel("mlp.linear", "activate_products", types={"num_elements": "i64"})
# Rounds rows to float8 codes. This kernel allows the next kernel to start early, so that the next
# kernel can prefetch its weights while this kernel runs.
ROUND = Kernel(
    "mlp.rounding",
    "round_rows",
    {"NORM_STRIDE": ("norm_weight", 0)},
    unaligned=("given_scale", "scale"),
)
# The number of columns of a row that `norm_rows` reads at a time.
NORM_BLOCK = 2048
# The number of elements that a program of `activate_products` computes.
ACTIVATE_BLOCK = 2048
# The parameters of the kernels for the scales, zeros and factors of the weight and the up weight.
CODE_NAMES = (
    "weight_scale", "up_scale", "weight_zero", "up_zero", "weight_factor", "up_factor",
)  # fmt: skip


@dataclass(frozen=True)
class LinearConfig:
    """The tile sizes and launch options of `streamed_linear`.

    Attributes:
        block_n: The number of rows of each weight in a tile.
        block_t: The number of tokens in a tile.
        block_k: The number of columns that a program multiplies in one step.
        split_k: The number of programs that share the K dimension of a tile.
        num_warps: The number of warps of a program.
        num_stages: The number of pipeline stages.
        prefetch: How many columns of each weight row the kernel prefetches while the previous
            kernel ends; a multiple of 64. If the weight is quantised, the kernel prefetches as many
            bytes as this number of 16-bit columns would take.
        lets_in: Whether the kernel allows the next kernel to start early.
        x_in_order: Whether an earlier kernel permutes the columns of x to the order of the weight's
            codes.
    """

    block_n: int
    block_t: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    prefetch: int = 0
    lets_in: bool = False
    x_in_order: bool = False

    def __str__(self) -> str:
        marks = f" p{self.prefetch}" * bool(self.prefetch) + " early" * self.lets_in
        marks += " ordered" * self.x_in_order
        return (
            f"{self.block_n}x{self.block_t}x{self.block_k} /{self.split_k} "
            f"w{self.num_warps} s{self.num_stages}{marks}"
        )


@dataclass(frozen=True)
class DotConfig:
    """The tile sizes of `dotted_linear`: block_n rows of each weight, in steps of block_k
    columns."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        return f"dots {self.block_n}x{self.block_k} w{self.num_warps}"


@dataclass(frozen=True)
class RoundConfig:
    """The tile sizes of `round_rows`.

    Attributes:
        width: The number of columns of a row that a program rounds.
        row: The size of the block that holds a whole row: a power of two.
        num_warps: The number of warps of a program.
    """

    width: int
    row: int
    num_warps: int

    def __str__(self) -> str:
        return f"{self.width} columns w{self.num_warps}"


def round_grid(config: RoundConfig, columns: int, num_tokens: int) -> tuple[int, int]:
    return num_tokens, cdiv(columns, config.width)


def dot_constants(problem: LinearProblem) -> dict[str, Constant]:
    """Returns the constants of `dotted_linear`, except the strides of its tensors."""
    q = problem.quantization
    assert q is not None
    made = _shared_constants(problem) | q.dot_constants(problem.k, problem.weight)
    made |= {"BLOCK_STRIDES": q.block_strides(0), "UP_BLOCK_STRIDES": q.block_strides(1)}
    if problem.norm is not None:
        own = problem.norm.constants(problem.k)
        made |= {name: own[name] for name in ("NORM", "NORM_EPS", "NORM_OFFSET")}
    return made


def dot_grid(problem: LinearProblem, config: DotConfig, num_tokens: int) -> tuple[int, int]:
    return cdiv(problem.n, config.block_n), num_tokens


def _shared_constants(problem: LinearProblem) -> dict[str, Constant]:
    """Returns the constants that `streamed_linear` and `dotted_linear` have in common. According to
    these constants, x is not normalised."""
    return {
        "N": problem.n,
        "K": problem.k,
        "ACTIVATION": problem.activation,
        # If the result is normalised, `norm_rows` scales it.
        "SCALE": problem.scale if problem.post_norm is None else 1.0,
        "NORM": False,
        "NORM_EPS": 0.0,
        "NORM_OFFSET": 0.0,
    }


def linear_constants(
    problem: LinearProblem, config: LinearConfig, target: Target
) -> dict[str, Constant]:
    """Returns the constants of `streamed_linear`, except the strides of its tensors."""
    norm, q = problem.norm, problem.quantization
    made: dict[str, Constant] = {
        **_shared_constants(problem),
        "LINE": LINE_BYTES // int(ELEMENT_BYTES[problem.weight]),
        "PREFETCH": config.prefetch if problem.k_major else 0,
        # If the kernel itself computes x, both operands of a product come from registers.
        "APART": _makes_x(problem, config) and target.tmem_columns > 0,
    }
    if norm is not None:
        made |= norm.constants(problem.k)
    if q is not None:
        made |= q.block_constants(problem.k, config.block_k)
        made |= {"BLOCK_STRIDES": q.block_strides(0), "UP_BLOCK_STRIDES": q.block_strides(1)}
    return made


def _makes_x(problem: LinearProblem, config: LinearConfig) -> bool:
    """Whether the kernel normalises or permutes x itself."""
    permutes = problem.quantization is not None and not config.x_in_order
    return problem.norm is not None or permutes


def linear_grid(problem: LinearProblem, config: LinearConfig, num_tokens: int) -> tuple[int, int]:
    tiles = cdiv(problem.n, config.block_n)
    return tiles * config.split_k, cdiv(num_tokens, config.block_t)


def order_of(problem: LinearProblem, config: LinearConfig | DotConfig) -> ColumnOrder | None:
    """Returns the column order in which the kernel expects x; None for the order in memory."""
    q = problem.quantization
    if q is None or isinstance(config, DotConfig) or not config.x_in_order:
        return None
    # Columns are permuted within a unit that the kernel knows. The unit has the columns of the
    # words that the kernel loads at a time, or the columns that share a scale if there are fewer of
    # them.
    unit = min(config.block_k, 128) if q.per_word == 8 else config.block_k
    if not q.scales_numbers and q.block[1] < problem.k:
        unit = min(unit, q.block[1])
    return column_order(q, problem.k, config.block_k, unit)


def workspace_elements(problem: LinearProblem, config: LinearConfig) -> int:
    """Returns how many fp32 numbers the workspace of one tile holds. Each of the split_k programs
    stores its sums there."""
    sums = problem.num_weights * config.block_n + squares_a_row(problem.norm)
    return config.split_k * sums * config.block_t


def activate_grid(num_elements: int) -> tuple[int]:
    return (cdiv(num_elements, ACTIVATE_BLOCK),)
