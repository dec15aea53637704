"""The kernels that project q, k and v, with their tiles, constants and launch grids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.formats import DOT_LINE, TABLES
from tilewright.codegen.kernel import Kernel, Statics, Strides
from tilewright.codegen.operand import first_strides
from tilewright.codegen.qkv.problem import HeadEpilogue, QkvProblem, tiled_weights
from tilewright.codegen.row_norm import squares_a_row
from tilewright.codegen.rows import ColumnOrder, column_order
from tilewright.codegen.spec import Constant

# Strides of the tensors that the epilogue of all kernels reads and writes.
_STRIDES: Strides = {
    "ADDRESS_STRIDES": (("slots", -1), ("sequences", 0), ("positions", 0)),
}
_OMITTED = ("GATE_RUN", "V_NORMED", "NORM_BIAS_STRIDES", "SATURATES")
# Counts for which kernels rely on a value of at least 1.
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
# The kernel for weights of codes.
SWAPPED_CODES = replace(SWAPPED, dependent=False)
DEQUANTIZE = Kernel(
    "qkv.dequantize",
    "dequantize_weight",
    num_stages=1,
    unaligned=("factor",),
    role="decodes codes",
)
KERNELS = (EPILOGUE, TILED, SWAPPED, DEQUANTIZE)

# Columns of a weight row that are prefetched while the previous kernel ends, if this kernel norms
# x.
PREFETCHED = 256


@dataclass(frozen=True)
class TiledConfig:
    """Tiles of `qkv_projection`, with tokens on the M side.

    epilogue_parts: number of parts in which the epilogue takes a tile; 2 parts take half the
    registers. A tile is divided into heads first, and then the pairs of each head into slices. With
    pairs_first, the pairs of all heads are divided into slices, so that each part of the rope table
    is read once. persistent: programs_per_sm programs per SM loop over all tiles; if not, there is
    a program for each tile. flatten: the loads of a tile start before the epilogue of the previous
    tile.
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
        """Number of slices of the pairs of a head."""
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
    """Tiles of `qkv_projection_swapped`: 2 * block_p weight rows on the M side, block_t tokens on
    the N side.

    ordered_x: an earlier kernel permutes x to the order of the weight's codes.
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
    """Tiles of `qkv_projection_swapped` without tensor cores: 2 * block_p rows of codes by one
    token, in steps of block_k columns. split_k programs share a tile's K."""

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


#: The tiles of `qkv_projection_swapped`.
RowsConfig = SwappedConfig | DotsConfig
#: The tiles of a fused kernel; `kind` is its name in plans.
Config = RowsConfig | TiledConfig
CONFIGS: dict[str, type[Config]] = {
    "swapped": SwappedConfig,
    "dots": DotsConfig,
    "tiled": TiledConfig,
}


@dataclass(frozen=True)
class EpilogueConfig:
    """Tiles of `qkv_epilogue`: block_t tokens by heads_per_tile heads per program.

    If a norm spans a row, a program takes all heads of q, k or v, and heads_per_tile covers them.
    """

    block_t: int
    heads_per_tile: int
    num_warps: int = 4

    def __str__(self) -> str:
        return f"epilogue {self.block_t}x{self.heads_per_tile}h w{self.num_warps}"


def tiled_statics(problem: QkvProblem, config: TiledConfig) -> Statics:
    """Returns the constants of `qkv_projection`. Raises ValueError if a tile splits the heads of a
    norm."""
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
    """Returns the constants of `qkv_projection_swapped`. Raises ValueError if a tile splits the
    heads of a norm."""
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
    """Returns how many stored elements of a weight make a word that the kernel reads: 4 for bytes
    in dot products, else 1."""
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
    """Returns how many fp32 numbers the workspace needs for the parts of one tile."""
    sums = 2 * config.block_p + squares_a_row(problem.input_norm)
    return config.split_k * sums * config.block_t


def swapped_grid(problem: QkvProblem, config: RowsConfig, num_tokens: int) -> tuple[int, int]:
    row_tiles = problem.epilogue.heads_in_all * tiles_per_head(problem, config)
    return row_tiles * config.split_k, cdiv(num_tokens, config.block_t)


def epilogue_statics(heads: HeadEpilogue, config: EpilogueConfig) -> Statics:
    """Returns the constants of `qkv_epilogue`, except for the strides of q, k and v."""
    pairs = next_power_of_2(heads.pairs_per_head)
    return Statics(config, heads, BLOCK_P=pairs, WHOLE_ROWS=heads.row_norm)


def epilogue_grid(heads: HeadEpilogue, config: EpilogueConfig, num_tokens: int) -> tuple[int, int]:
    programs = heads.kinds if heads.row_norm else heads.heads_in_all // config.heads_per_tile
    return cdiv(num_tokens, config.block_t), programs


def order_of(problem: QkvProblem, config: SwappedConfig) -> ColumnOrder:
    """Returns the order of the columns of x for a config with ordered_x."""
    q = problem.codes
    unit = config.block_k // q.groups_in(problem.hidden, config.block_k)
    return column_order(q, problem.hidden, config.block_k, unit)


def dequantize_statics(problem: QkvProblem, index: int) -> Statics:
    """Returns the constants of `dequantize_weight` for the index-th weight of q, k and v."""
    q, heads, weight = problem.codes, problem.epilogue, problem.weights[index]
    assert weight is not None
    columns, number = min(q.block[1], next_power_of_2(problem.hidden)), q.format.number
    # The tiles read words and write numbers contiguously.
    block_r, block_k = (16, 256) if weight.strides[-1] == 1 else (64, 64)
    if q.packed_rows:
        block_r, block_k = 128, 64
    return Statics(
        q,
        NUM_ROWS=(heads.num_kv_heads if index else heads.num_heads) * heads.head_dim,
        HIDDEN=problem.hidden,
        HEAD_DIM=heads.head_dim,
        GROUP=0 if index else heads.group,
        WEIGHT_STRIDES=weight.strides,
        BLOCK_STRIDES=q.block_strides(index),
        PER=q.per_word,
        ORDER=q.order or tuple(range(q.per_word)),
        SCALE_ROWS=q.block[0],
        SCALE_COLUMNS=columns,
        ZERO_ORDER=q.order if len(q.order) == 8 else tuple(range(8)),
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        UNIT=gcd(columns, block_k),
        **({"NUMBER": TABLES.get(number, number)} if number else {}),
        **({"ADDED_ZEROS": True} if q.format.added_zeros else {}),
    )


def dequantize_grid(statics: Statics) -> tuple[int, int]:
    return cdiv(statics.num_rows, statics.block_r), cdiv(statics.hidden, statics.block_k)
