"""Specs and launch grids of the LoRA kernels: of a problem and a config, which is a choice of
tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.lora.problem import (
    ROW_COUNTS,
    ExpandProblem,
    RowCounts,
    RowForm,
    ShrinkProblem,
    tile_bound,
)
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.spec import Constant, KernelSpec, constants_of

# A tensor core multiplies at least so many rows, by as many products.
DOT_ROWS = 16
# The fp32 sums of more columns would not fit the registers.
MAX_COLUMNS = 256
# Elements that a program of `lora_planes` copies.
PLANE_ELEMENTS = 2048


def padded_rank(rank: int) -> int:
    """The columns of a tensor core's product that holds a rank."""
    return max(next_power_of_2(rank), DOT_ROWS)


# --- rows sorted by adapter -----------------------------------------------------------------------


@dataclass(frozen=True)
class OrderConfig:
    """`lora_order`: rows that a program places, and rows that it counts at a time."""

    chunk: int = 256
    rows_per_load: int = 2048
    rows_per_step: int = 16
    num_warps: int = 8
    num_stages: int = 1


def order_spec(form: RowForm, config: OrderConfig, target: str) -> KernelSpec:
    """The sort that comes before a kernel of a "sorted" form."""
    assert form.ids is not None
    return KernelSpec.of(
        "lora.order",
        "lora_order",
        {
            **constants_of(form, "num_adapters", "groups"),
            **constants_of(config, "chunk", "rows_per_load", "rows_per_step"),
        },
        {
            "ids_ptr": replace(form.ids, aligned=False),
            "order_ptr": Operand("i32"),
            "ends_ptr": Operand("i32"),
            "num_rows": "i32",
            "total_rows": "i32",
            "rows_per_id": form.rows_per_id,
        },
        ranges=ROW_COUNTS,
        dependent=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
    )


def order_grid(config: OrderConfig, total_rows: int) -> tuple[int]:
    return (cdiv(total_rows, config.chunk),)


# --- shrink ---------------------------------------------------------------------------------------


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


def shrink_spec(problem: ShrinkProblem, config: ShrinkConfig, target: str) -> KernelSpec:
    form, planes = problem.form, problem.planes
    filled = [min(plane, planes - 1) for plane in range(3)]
    strides = [problem.weights[plane].strides for plane in filled]
    kernel, own = "lora_shrink_row", dict[str, Constant]()
    scratch: dict[str, Operand | None] = {}
    if isinstance(config, TiledShrink):
        kernel = "lora_shrink"
        widths = (*tile_widths(problem, config), 0, 0)[:3]
        own = {"WIDTHS": widths, "SPLIT_K": config.split_k}
        split = config.split_k > 1
        scratch = {
            "workspace_ptr": Operand("fp32") if split else None,
            "counters_ptr": Operand("i32") if split else None,
        }
    elif isinstance(config, FewShrink):
        kernel, own = "lora_shrink_few", {"SLICES": config.slices}
    return KernelSpec.of(
        "lora.shrink",
        kernel,
        {
            "HIDDEN": problem.hidden,
            "N": problem.rank,
            "PLANES": planes,
            "RANKS": tuple(problem.ranks[plane] for plane in filled),
            "A_STRIDE": problem.a.strides[0],
            "ADAPTER_STRIDES": tuple(adapter for adapter, _, _ in strides),
            "ROW_STRIDES": tuple(row for _, row, _ in strides),
            "COLUMN_STRIDES": tuple(column for _, _, column in strides),
            **form.constants,
            **constants_of(config, "block_m", "block_k"),
            "COLUMNS": tile_columns(problem, config),
            **own,
        },
        {
            "a_ptr": problem.a,
            "weight_ptr": problem.weights[0],
            **form.tensors,
            "out_ptr": Operand(problem.a.dtype),
            **scratch,
            "second_distance": "i64" if planes > 1 else None,
            "third_distance": "i64" if planes > 2 else None,
            "num_rows": "i32",
            "num_groups": "i32",
            "rows_per_id": form.rows_per_id,
        },
        divisible=problem.distances16,
        ranges=ROW_COUNTS,
        dependent=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
    )


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
    """(tiles, fp32 elements of each) of the memory in which the programs that split K exchange
    their sums; no tiles where K is not split."""
    if not isinstance(config, TiledShrink) or config.split_k == 1:
        return 0, 0
    _, tiles, column_blocks = shrink_grid(problem, config, counts)
    elements = config.split_k * config.block_m * tile_columns(problem, config)
    return tiles * column_blocks, elements


def planes_spec(problem: ShrinkProblem, target: str) -> KernelSpec:
    """`lora_planes`: what a library's product of q, k and v side by side becomes."""
    return KernelSpec.of(
        "lora.planes",
        "lora_planes",
        {
            "N": problem.rank,
            "PLANES": problem.planes,
            "WIDTH": next_power_of_2(problem.rank),
            "INCLUSIVE": problem.form.inclusive,
            "BLOCK_M": _planes_rows(problem),
        },
        {
            "rows_ptr": Operand(problem.a.dtype),
            "offsets_ptr": problem.form.offsets,
            "out_ptr": Operand(problem.a.dtype),
            "num_rows": "i32",
        },
        ranges=ROW_COUNTS,
        dependent=True,
        num_warps=4,
        num_stages=1,
        target=target,
    )


def planes_grid(problem: ShrinkProblem, num_rows: int) -> tuple[int, int]:
    return cdiv(num_rows, _planes_rows(problem)), problem.planes


def _planes_rows(problem: ShrinkProblem) -> int:
    return max(PLANE_ELEMENTS // next_power_of_2(problem.rank), 1)


# --- expand ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpandConfig:
    """`lora_expand`: block_m rows by block_n columns, ranks in steps of block_r."""

    block_m: int
    block_n: int
    block_r: int
    num_warps: int
    num_stages: int = 1

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_r} w{self.num_warps}"


def expand_spec(problem: ExpandProblem, config: ExpandConfig, target: str) -> KernelSpec:
    form, parts = problem.form, problem.projections
    letters = dict(zip("qkv", parts, strict=True))
    return KernelSpec.of(
        "lora.expand",
        "lora_expand",
        {
            "WIDTHS": tuple(part.width for part in parts),
            "RANKS": tuple(part.rank for part in parts),
            "SCALES": tuple(part.scale for part in parts),
            "PLANES": tuple(part.plane for part in parts),
            "S_STRIDE": problem.s.strides[0],
            **{
                f"{name.upper()}_STRIDES": p.weight.strides if p.weight else (0, 0, 0)
                for name, p in letters.items()
            },
            "BASE_STRIDES": first_strides(*(part.base for part in parts)),
            "OUT_STRIDES": first_strides(*(part.out for part in parts)),
            **form.constants,
            **constants_of(config, "block_m", "block_n", "block_r"),
        },
        {
            "s_ptr": problem.s,
            **{f"{name}_ptr": part.base for name, part in letters.items()},
            **{f"{name}_weight_ptr": p.weight if p.rank else None for name, p in letters.items()},
            "scales_ptr": problem.scales,
            **form.tensors,
            **{f"{name}_out_ptr": part.out for name, part in letters.items()},
            **dict.fromkeys(("num_rows", "total_rows", "num_groups"), "i32"),
            "rows_per_id": form.rows_per_id,
            "s_plane_stride": "i64",
        },
        divisible=("s_plane_stride",) if problem.planes16 else (),
        ranges=ROW_COUNTS,
        dependent=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
    )


def expand_grid(problem: ExpandProblem, config: ExpandConfig, counts: RowCounts) -> tuple[int, int]:
    columns = sum(cdiv(part.width, config.block_n) for part in problem.projections)
    return columns, tile_bound(problem.form, counts, config.block_m)
