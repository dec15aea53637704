"""The kernels that project q, k and v, with their tile sizes, constants and launch grids."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.dequantize import DEQUANTIZE, dequantize_statics
from tilewright.codegen.formats import DOT_LINE
from tilewright.codegen.kernel import Kernel, Statics, Strides
from tilewright.codegen.operand import first_strides
from tilewright.codegen.qkv.problem import HeadEpilogue, QkvProblem, tiled_weights
from tilewright.codegen.row_norm import squares_a_row
from tilewright.codegen.rows import ColumnOrder, column_order
from tilewright.codegen.spec import Constant

# The strides of the tensors that the epilogue of all kernels reads and writes.
_STRIDES: Strides = {
    "ADDRESS_STRIDES": (("slots", -1), ("sequences", 0), ("positions", 0)),
}
# The constants that a spec omits if they have their default values.
_OMITTED = ("GATE_RUN", "V_NORMED", "NORM_BIAS_STRIDES", "SATURATES")
# Numbers that kernels assume to be at least 1.
_COUNTS = ("sequence_tokens", "rope_tokens")

EPILOGUE = Kernel(
    "qkv.epilogue", "qkv_epilogue", _STRIDES, ranges=_COUNTS, omitted=_OMITTED, num_stages=1
)
TILED = Kernel(
    "qkv.tiled",
    "qkv_projection",
    _STRIDES,
    types=dict.fromkeys(("second_distance", "third_distance"), "i64"),
    ranges=_COUNTS,
    omitted=_OMITTED,
)
SWAPPED = Kernel(
    "qkv.swapped",
    "qkv_projection_swapped",
    _STRIDES,
    ranges=_COUNTS,
    omitted=_OMITTED,
    unaligned=("factors",),
)
# The same kernel for quantised weights.
SWAPPED_CODES = replace(SWAPPED, dependent=False)
KERNELS = (EPILOGUE, TILED, SWAPPED, DEQUANTIZE)

# If the kernel normalises x, it prefetches this many columns of each weight row while the previous
# kernel ends.
PREFETCHED = 256


@dataclass(frozen=True)
class TiledConfig:
    """The tile sizes of `qkv_projection`, in which tokens are on the M side.

    Attributes:
        block_m: The number of tokens in a tile.
        heads_per_tile: The number of heads in a tile.
        block_k: The number of columns of a step.
        num_warps, num_stages: Triton's options.
        group_m: The number of row tiles that run one after another for the same heads.
        epilogue_parts: The number of parts in which the epilogue computes a tile. With 2 parts, the
            epilogue takes half the registers. A tile is divided into heads first, and then the
            pairs of each head are divided into slices.
        persistent: Whether the launch has programs_per_sm programs for each SM, which loop over all
            tiles. If not, there is a program for each tile.
        flatten: Whether the loads of a tile start before the epilogue of the previous tile.
        warp_specialize: Whether the warps of a program are specialised.
        pairs_first: Whether a tile is divided only into slices of pairs. Each slice has all heads
            of the tile, so that each part of the rope table is read once.
    """

    block_m: int
    heads_per_tile: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    epilogue_parts: int = 1
    persistent: bool = False
    programs_per_sm: int = 1
    flatten: bool = False
    warp_specialize: bool = False
    pairs_first: bool = False

    @property
    def kind(self) -> str:
        return "tiled"

    @property
    def pair_parts(self) -> int:
        """The number of slices that the pairs of a head are divided into."""
        heads = 1 if self.pairs_first else min(self.epilogue_parts, self.heads_per_tile)
        return self.epilogue_parts // heads

    def __str__(self) -> str:
        marks = (
            (f"p{self.programs_per_sm}" if self.persistent else "")
            + ("f" * self.flatten)
            + ("w" * self.warp_specialize)
            + ("q" * self.pairs_first)
        )
        return (
            f"tiled {self.block_m}x{self.heads_per_tile}h x{self.block_k} "
            f"w{self.num_warps} s{self.num_stages} g{self.group_m} e{self.epilogue_parts}"
            f"{' ' + marks if marks else ''}"
        )


@dataclass(frozen=True)
class SwappedConfig:
    """The tile sizes of `qkv_projection_swapped`: 2 * block_p weight rows on the M side, and
    block_t tokens on the N side.

    ordered_x: whether an earlier kernel permutes x to the order of the weight's codes.
    """

    block_p: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    ordered_x: bool = False

    @property
    def kind(self) -> str:
        return "swapped"

    def __str__(self) -> str:
        return (
            f"swapped {2 * self.block_p}x{self.block_t}x{self.block_k} /{self.split_k} "
            f"w{self.num_warps} s{self.num_stages}{' ordered' if self.ordered_x else ''}"
        )


@dataclass(frozen=True)
class DotsConfig:
    """The tile sizes of `qkv_projection_swapped` without tensor cores: 2 * block_p rows of codes
    and one token, in steps of block_k columns. split_k programs share the K of a tile."""

    block_p: int
    block_k: int
    num_warps: int
    split_k: int = 1
    num_stages: int = 1

    @property
    def kind(self) -> str:
        return "dots"

    @property
    def block_t(self) -> int:
        return 1

    def __str__(self) -> str:
        return f"dots {2 * self.block_p}x{self.block_k} /{self.split_k} w{self.num_warps}"


#: The tile sizes of `qkv_projection_swapped`.
RowsConfig = SwappedConfig | DotsConfig
#: The tile sizes of a fused kernel. Plans refer to the kernel by the name `kind`.
Config = RowsConfig | TiledConfig
CONFIGS: dict[str, type[Config]] = {
    "swapped": SwappedConfig,
    "dots": DotsConfig,
    "tiled": TiledConfig,
}


@dataclass(frozen=True)
class EpilogueConfig:
    """The tile sizes of `qkv_epilogue`: block_t tokens and heads_per_tile heads for each program.

    If a norm covers a whole row, a program computes all heads of q, k or v, and heads_per_tile is
    at least the number of these heads.
    """

    block_t: int
    heads_per_tile: int
    num_warps: int = 4

    def __str__(self) -> str:
        return f"epilogue {self.block_t}x{self.heads_per_tile}h w{self.num_warps}"


def tiled_statics(problem: QkvProblem, config: TiledConfig) -> Statics:
    """Returns the constants of `qkv_projection`. Raises ValueError if a norm needs whole heads and
    a tile splits them."""
    heads = problem.epilogue
    if heads.norm_after != "none" and config.pair_parts != 1:
        raise ValueError(
            f"epilogue_parts: a norm after the rotation needs whole heads, got {config}"
        )
    own = {"HIDDEN": problem.hidden, "N_MAJOR": not problem.k_major}
    return Statics(config, tiled_weights(problem), heads, **own)


def tiled_grid(problem: QkvProblem, config: TiledConfig, num_tokens: int, num_sms: int) -> int:
    tiles = cdiv(num_tokens, config.block_m) * (
        problem.epilogue.heads_in_all // config.heads_per_tile
    )
    return min(tiles, num_sms * config.programs_per_sm) if config.persistent else tiles


def tiles_per_head(problem: QkvProblem, config: RowsConfig) -> int:
    return cdiv(problem.epilogue.pairs_per_head, config.block_p)


def swapped_statics(problem: QkvProblem, config: RowsConfig) -> Statics:
    """Returns the constants of `qkv_projection_swapped`. Raises ValueError if a norm needs whole
    heads and a tile splits them."""
    heads, slices = problem.epilogue, tiles_per_head(problem, config)
    if heads.has_norm and slices != 1:
        raise ValueError(
            f"block_p: a norm needs whole heads of {heads.pairs_per_head} pairs in a tile, "
            f"got {config.block_p}"
        )
    q, k, v = problem.weights
    per = words_of(problem, config)
    weights = {
        f"{x}_WEIGHT_STRIDES": (*(stride // per for stride in one.strides[:-1]), one.strides[-1])
        for x, one in zip("QKV", (q, k, v or k), strict=True)
    }
    return Statics(
        config,
        heads,
        HIDDEN=problem.hidden,
        TILES_PER_HEAD=slices,
        **weights,
        **(_input_norm_constants(problem) | _code_constants(problem, config)),
    )


def words_of(problem: QkvProblem, config: RowsConfig) -> int:
    """Returns how many stored elements of a weight make a word that the kernel reads. This is 4 for
    bytes in dot products, else 1."""
    return 4 if isinstance(config, DotsConfig) and problem.codes.per_int32 == 4 else 1


def _input_norm_constants(problem: QkvProblem) -> dict[str, Constant]:
    norm = problem.input_norm
    if norm is None:
        return {}
    return {
        **{f"INPUT_{name}": value for name, value in norm.constants(problem.hidden).items()},
        "INPUT_NORM_STRIDE": first_strides(norm.weight)[0],
        "PREFETCH": PREFETCHED if problem.k_major else 0,
        "LETS_IN": True,
    }


def _code_constants(problem: QkvProblem, config: RowsConfig) -> dict[str, Constant]:
    q = problem.quantization
    if q is None:
        return {}
    there = [index if weight else 1 for index, weight in enumerate(problem.weights)]
    strides: dict[str, Constant] = {
        f"{x}_BLOCK_STRIDES": q.block_strides(at) for x, at in zip("QKV", there, strict=True)
    }
    of_x: dict[str, Constant] = {
        "X_SCALE_STRIDES": q.x_scale.strides if q.x_scale else (0, 0),
        "X_SCALE_BLOCK": q.x_block if q.x_scale else problem.hidden,
    }
    if isinstance(config, DotsConfig):
        own = q.dot_constants(problem.hidden, problem.weights[0].dtype) | strides | of_x
        first_step = max(config.block_k, DOT_LINE * q.per_int32)
        return own | {"LETS_IN": True, "PREFETCH": first_step}
    return {
        "X_IN_ORDER": config.ordered_x,
        **of_x,
        **q.block_constants(problem.hidden, config.block_k),
        **strides,
    }


def workspace_elements(problem: QkvProblem, config: RowsConfig) -> int:
    """Returns how many fp32 numbers the workspace has for one tile, for all parts of K together."""
    sums = 2 * config.block_p + squares_a_row(problem.input_norm)
    return config.split_k * sums * config.block_t


def swapped_grid(problem: QkvProblem, config: RowsConfig, num_tokens: int) -> tuple[int, int]:
    row_tiles = problem.epilogue.heads_in_all * tiles_per_head(problem, config)
    return row_tiles * config.split_k, cdiv(num_tokens, config.block_t)


def epilogue_statics(heads: HeadEpilogue, config: EpilogueConfig) -> Statics:
    """Returns the constants of `qkv_epilogue`, except the strides of q, k and v."""
    pairs = next_power_of_2(heads.pairs_per_head)
    return Statics(config, heads, BLOCK_P=pairs, WHOLE_ROWS=heads.row_norm)


def epilogue_grid(heads: HeadEpilogue, config: EpilogueConfig, num_tokens: int) -> tuple[int, int]:
    programs = heads.kinds if heads.row_norm else heads.heads_in_all // config.heads_per_tile
    return cdiv(num_tokens, config.block_t), programs


def order_of(problem: QkvProblem, config: SwappedConfig) -> ColumnOrder:
    """Returns the order of the columns of x for a config that has ordered_x."""
    q = problem.codes
    unit = config.block_k // q.groups_in(problem.hidden, config.block_k)
    return column_order(q, problem.hidden, config.block_k, unit)


def decoding_statics(problem: QkvProblem, index: int) -> Statics:
    """Returns the constants of `dequantize_weight` for the weight of q, k or v with this index."""
    q, heads, weight = problem.codes, problem.epilogue, problem.weights[index]
    assert weight is not None
    rows = (heads.num_kv_heads if index else heads.num_heads) * heads.head_dim
    return dequantize_statics(
        q,
        index,
        (rows, problem.hidden),
        weight.strides,
        heads.head_dim,
        0 if index else heads.group,
    )
