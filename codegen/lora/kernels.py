"""The LoRA kernels, their tile sizes and their launch grids.

A shrink returns up to three planes: a matrix [rows, rank] for each of q, k and v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Kernel
from tilewright.codegen.lora.problem import RowCounts, RowForm, ShrinkProblem, tile_bound

# The fewest rows, and the smallest inner dimension, of a product on tensor cores.
DOT_ROWS = 16
# The largest number of columns of a tile. The fp32 sums of more columns would not fit the
# registers.
MAX_COLUMNS = 256
# The number of elements that a program of `lora_planes` copies.
PLANE_ELEMENTS = 2048


def padded_rank(rank: int) -> int:
    """Returns a rank rounded up to a number of columns that tensor cores can multiply."""
    return max(next_power_of_2(rank), DOT_ROWS)


# --- rows sorted by adapter -----------------------------------------------------------------------


@dataclass(frozen=True)
class OrderConfig:
    """The tile sizes of `lora_order`.

    Attributes:
        chunk: The number of rows for which a program finds the sorted places.
        rows_per_load: The number of rows that a program counts at a time.
        rows_per_step: The number of rows that a program places at a time.
        num_warps, num_stages: Triton's options.
    """

    chunk: int = 256
    rows_per_load: int = 2048
    rows_per_step: int = 16
    num_warps: int = 8
    num_stages: int = 1


# Sorts rows by adapter for the kernel after it, whose `RowForm.addressing` is "sorted".
ORDER = Kernel(
    "lora.order",
    "lora_order",
    ranges=("num_rows", "total_rows", "rows_per_id"),
    unaligned=("ids",),
)


def order_grid(config: OrderConfig, total_rows: int) -> tuple[int]:
    return (cdiv(total_rows, config.chunk),)


# --- shrink ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TiledShrink:
    """The tile sizes of `lora_shrink`.

    Attributes:
        block_m: The number of rows in a tile.
        block_k: The number of columns of K in a step.
        split_k: The number of programs that K is split over.
        num_warps, num_stages: Triton's options.
        widths: The number of columns of each accumulator. A tile has the columns of all
            accumulators. If `widths` is empty, there is one accumulator for the columns of all
            planes, at most MAX_COLUMNS.
    """

    block_m: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        widths = "".join(f"x{'+'.join(map(str, self.widths))}" for _ in self.widths[:1])
        tile = f"{self.block_m}{widths}x{self.block_k} /{self.split_k}"
        return f"tiled {tile} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class FewShrink:
    """The tile sizes of `lora_shrink_few`: block_m rows by `columns` columns. A step over K has
    `slices` slices of block_k columns, and each warp computes one slice."""

    block_m: int
    columns: int
    block_k: int
    slices: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.columns}x{self.slices}*{self.block_k}"
        return f"few {tile} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class RowShrink:
    """The tile sizes of `lora_shrink_row`: block_m rows by `columns` columns. A program computes
    block_k products of each sum at a time."""

    block_m: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        return f"row {self.block_m}x{self.columns}x{self.block_k} w{self.num_warps}"


ShrinkConfig = TiledShrink | FewShrink | RowShrink


def _shrink_kernel(name: str) -> Kernel:
    distances = ("second_distance", "third_distance")
    return Kernel(
        "lora.shrink",
        name,
        types=dict.fromkeys(distances, "i64"),
        ranges=("num_rows", "rows_per_id"),
        divisible=distances,
    )


SHRINK: dict[type[ShrinkConfig], Kernel] = {
    TiledShrink: _shrink_kernel("lora_shrink"),
    FewShrink: _shrink_kernel("lora_shrink_few"),
    RowShrink: _shrink_kernel("lora_shrink_row"),
}


def tile_columns(problem: ShrinkProblem, config: ShrinkConfig) -> int:
    """Returns the number of columns of a tile, for all planes together."""
    if isinstance(config, TiledShrink):
        return sum(tile_widths(problem, config))
    return config.columns


def tile_widths(problem: ShrinkProblem, config: TiledShrink) -> tuple[int, ...]:
    """Returns the number of columns of each accumulator."""
    return config.widths or (min(padded_rank(problem.planes * problem.rank), MAX_COLUMNS),)


def shrink_grid(
    problem: ShrinkProblem, config: ShrinkConfig, counts: RowCounts
) -> tuple[int, int, int]:
    tiles = tile_bound(problem.form, counts, config.block_m)
    column_blocks = cdiv(problem.planes * problem.rank, tile_columns(problem, config))
    if isinstance(config, TiledShrink):
        return config.split_k, tiles, column_blocks
    return column_blocks, tiles, 1


def shrink_scratch(
    problem: ShrinkProblem, config: ShrinkConfig, counts: RowCounts
) -> tuple[int, int]:
    """Returns (number of tiles, fp32 elements of a tile) of the memory in which programs that share
    K exchange their sums. Returns (0, 0) if K is not split."""
    if not isinstance(config, TiledShrink) or config.split_k == 1:
        return 0, 0
    _, tiles, column_blocks = shrink_grid(problem, config, counts)
    elements = config.split_k * config.block_m * tile_columns(problem, config)
    return tiles * column_blocks, elements


@dataclass(frozen=True)
class PlanesConfig:
    """The tile sizes of `lora_planes`: block_m rows, and `width` columns, which is the rank rounded
    up."""

    block_m: int
    width: int
    num_warps: int = 4
    num_stages: int = 1


# Copies the result of a library's product, which has q, k and v side by side, to separate planes.
PLANES = Kernel("lora.planes", "lora_planes", ranges=("num_rows",))


def planes_config(rank: int) -> PlanesConfig:
    width = next_power_of_2(rank)
    return PlanesConfig(max(PLANE_ELEMENTS // width, 1), width)


# --- expand ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpandConfig:
    """The tile sizes of `lora_expand`: block_m rows by block_n columns, with the rank in steps of
    block_r."""

    block_m: int
    block_n: int
    block_r: int
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_r} w{self.num_warps}"


def _weight_strides(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"{name}_weight", dim) for dim in range(3))


EXPAND = Kernel(
    "lora.expand",
    "lora_expand",
    {
        "S_STRIDE": ("s", 1),
        "Q_STRIDES": _weight_strides("q"),
        "K_STRIDES": _weight_strides("k"),
        "V_STRIDES": _weight_strides("v"),
        "BASE_STRIDES": (("q", 0), ("k", 0), ("v", 0)),
        "OUT_STRIDES": (("q_out", 0), ("k_out", 0), ("v_out", 0)),
    },
    types={"s_plane_stride": "i64"},
    ranges=("num_rows", "total_rows", "rows_per_id"),
    divisible=("s_plane_stride",),
)


def expand_grid(
    widths: Sequence[int], form: RowForm, config: ExpandConfig, counts: RowCounts
) -> tuple[int, int]:
    columns = sum(cdiv(width, config.block_n) for width in widths)
    return columns, tile_bound(form, counts, config.block_m)
