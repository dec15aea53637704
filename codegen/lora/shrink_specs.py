"""`shrink_qkv_permute_3mn` as plain data, and the specs of the templates `lora_shrink`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.lora.specs import RowCounts, RowForm, lora_spec, tile_bound
from tilewright.codegen.spec import Constant, KernelSpec

# The tensor core's least: rows of a dot, and its inner dim.
DOT_ROWS = 16
# More would not fit the registers.
MAX_COLUMNS = 256


@dataclass(frozen=True)
class ShrinkProblem:
    """The static part of a `shrink_qkv_permute_3mn` call, over the weights that are given.

    rank: N; ranks: each weight's own. weight_strides: (adapter, row, column of K), in elements.
    unaligned: pointers off 16 bytes, and distances from the first weight off 16 elements.
    """

    dtype: str
    hidden: int
    rank: int
    ranks: tuple[int, ...]
    a_stride: int
    weight_strides: tuple[tuple[int, int, int], ...]
    form: RowForm
    unaligned: tuple[str, ...] = ()

    @property
    def planes(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class TiledShrink:
    """`lora_shrink`: block_m rows by the sum of `widths` columns (empty: all of all planes, up to
    MAX_COLUMNS of them), K split over split_k programs."""

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
    """`lora_shrink_few`: block_m rows by `columns`, K split over slices of warps."""

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
    """`lora_shrink_row`: block_m rows by `columns`, block_k products at a time."""

    block_m: int
    columns: int
    block_k: int
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        return f"row {self.block_m}x{self.columns}x{self.block_k} w{self.num_warps}"


ShrinkConfig = TiledShrink | FewShrink | RowShrink


def padded_rank(rank: int) -> int:
    """What a dot has for a rank."""
    return max(next_power_of_2(rank), DOT_ROWS)


def shrink_spec(problem: ShrinkProblem, config: ShrinkConfig, target: str) -> KernelSpec:
    form, pointer, planes = problem.form, f"*{problem.dtype}", problem.planes
    filled = [problem.weight_strides[min(i, planes - 1)] for i in range(3)]
    constants: dict[str, Constant] = {
        "HIDDEN": problem.hidden,
        "N": problem.rank,
        "PLANES": planes,
        "RANKS": tuple(problem.ranks[min(i, planes - 1)] for i in range(3)),
        "A_STRIDE": problem.a_stride,
        "ADAPTER_STRIDES": tuple(strides[0] for strides in filled),
        "ROW_STRIDES": tuple(strides[1] for strides in filled),
        "COLUMN_STRIDES": tuple(strides[2] for strides in filled),
        **form.constants(),
        "ROWS": form.rows,
        "BLOCK_M": config.block_m,
        "COLUMNS": tile_columns(problem, config),
        "BLOCK_K": config.block_k,
    }
    arguments: dict[str, str | None] = {
        "a_ptr": pointer,
        "weight_ptr": pointer,
        **form.pointers(),
        "out_ptr": pointer,
    }
    kernel = "lora_shrink"
    if isinstance(config, TiledShrink):
        constants["WIDTHS"] = (*tile_widths(problem, config), 0, 0)[:3]
        constants["SPLIT_K"] = config.split_k
        split = config.split_k > 1
        arguments["workspace_ptr"] = "*fp32" if split else None
        arguments["counters_ptr"] = "*i32" if split else None
    elif isinstance(config, FewShrink):
        kernel = "lora_shrink_few"
        constants["SLICES"] = config.slices
    else:
        kernel = "lora_shrink_row"
    arguments["second_distance"] = "i64" if planes > 1 else None
    arguments["third_distance"] = "i64" if planes > 2 else None
    arguments |= dict.fromkeys(("num_rows", "num_groups", "rows_per_id"), "i32")
    known = {} if not form.one_each else {"rows_per_id": 1}
    return lora_spec(
        "lora.shrink", kernel, constants, arguments, known, problem.unaligned, config.num_warps,
        config.num_stages, target,
    )  # fmt: skip


def tile_columns(problem: ShrinkProblem, config: ShrinkConfig) -> int:
    """Columns of a tile, over all planes."""
    if isinstance(config, TiledShrink):
        return sum(tile_widths(problem, config))
    return config.columns


def tile_widths(problem: ShrinkProblem, config: TiledShrink) -> tuple[int, ...]:
    """Columns of each accumulator."""
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
    """(fp32 elements, counters) of the memory in which programs exchange parts of sums."""
    tiles = tile_bound(problem.form, counts, config.block_m)
    columns = tile_columns(problem, config)
    places = tiles * cdiv(problem.planes * problem.rank, columns)
    if isinstance(config, TiledShrink) and config.split_k > 1:
        return places * config.split_k * config.block_m * columns, places
    return 0, 0
