"""LoRA problems as plain data, and the kernel specs of the `lora_*` templates.

Nothing here touches torch or a GPU: a problem is what is static about one call site, a config is a
choice of tiles, and the two give a KernelSpec and a launch grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec
from tilewright.codegen.targets import get_target

# The tensor core's least: rows of a dot, and its inner dim.
DOT_ROWS = 16
# Run-time distances in elements; 16 divides them unless a problem's `unaligned` has them.
STEPS = ("second_distance", "third_distance", "s_plane_stride")
# More would not fit the registers.
MAX_COLUMNS = 256


@dataclass(frozen=True)
class RowForm:
    """How a kernel learns which adapter a row has; see the template `lora_rows`.

    addressing: "single", "sequences", "groups", "rows" or "sorted". id_dtype None: groups are
    numbered as their adapters. one_each: an id for every row. groups, rows: the powers of two that
    the template wants.
    """

    addressing: str
    num_adapters: int
    id_dtype: str | None = None
    offset_dtype: str | None = None
    inclusive: bool = False
    one_each: bool = True
    groups: int = 1
    rows: int = 1

    def constants(self) -> dict[str, Constant]:
        return {
            "ADDRESSING": self.addressing,
            "INCLUSIVE": self.inclusive,
            "NUM_ADAPTERS": self.num_adapters,
            "GROUPS": self.groups,
        }

    def pointers(self) -> dict[str, str | None]:
        order = "*i32" if self.addressing == "sorted" else None
        ids = None if self.id_dtype is None else f"*{self.id_dtype}"
        offsets = None if self.offset_dtype is None else f"*{self.offset_dtype}"
        return {"ids_ptr": ids, "offsets_ptr": offsets, "order_ptr": order}


@dataclass(frozen=True)
class RowCounts:
    """The row counts of one call. groups: of a_offsets; rows_per_id: where ids are given alone."""

    num_rows: int
    total_rows: int
    groups: int = 0
    rows_per_id: int = 1


def tile_bound(form: RowForm, counts: RowCounts, block_m: int) -> int:
    """Tiles that cover all rows, whatever the adapters are."""
    rest = cdiv(counts.total_rows - counts.num_rows, block_m)
    if block_m == 1:
        return counts.total_rows
    if form.addressing == "single":
        return cdiv(counts.num_rows, block_m) + rest
    if form.addressing == "sequences":
        sequences = counts.num_rows // max(counts.rows_per_id, 1)
        return sequences * cdiv(counts.rows_per_id, block_m) + rest
    kinds = counts.groups if form.addressing == "groups" else form.num_adapters
    # Each kind of rows has one tile that is not full.
    partial = min(kinds + 1, counts.total_rows)
    return partial + (counts.total_rows - partial) // block_m


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
    return _spec("lora_shrink", kernel, constants, arguments, known, problem.unaligned, config,
                 target)  # fmt: skip


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


@dataclass(frozen=True)
class Projection:
    """One of q, k and v in an expand. plane: of s; rank 0: no weight. weight_strides: (adapter,
    row, rank); base_stride None: no base."""

    width: int
    rank: int = 0
    plane: int = 0
    scale: float = 1.0
    weight_strides: tuple[int, int, int] = (0, 0, 0)
    base_stride: int | None = None
    out_stride: int = 0


@dataclass(frozen=True)
class ExpandProblem:
    """The static part of a `lora_expand_add` call; projections: q, k, v, None where there is none.

    unaligned also has s_plane_stride where 16 does not divide it.
    """

    dtype: str
    s_stride: int
    projections: tuple[Projection | None, Projection | None, Projection | None]
    scales_dtype: str | None
    form: RowForm
    unaligned: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return max(p.rank for p in self.projections if p is not None)


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


_ABSENT = Projection(0)


def expand_spec(problem: ExpandProblem, config: ExpandConfig, target: str) -> KernelSpec:
    form, pointer = problem.form, f"*{problem.dtype}"
    parts = [p or _ABSENT for p in problem.projections]
    arguments: dict[str, str | None] = {"s_ptr": pointer}
    for letter, part in zip("qkv", parts, strict=True):
        arguments[f"{letter}_ptr"] = None if part.base_stride is None else pointer
    for letter, part in zip("qkv", parts, strict=True):
        arguments[f"{letter}_weight_ptr"] = pointer if part.rank else None
    scales = problem.scales_dtype
    arguments |= {"scales_ptr": None if scales is None else f"*{scales}", **form.pointers()}
    for letter, given in zip("qkv", problem.projections, strict=True):
        arguments[f"{letter}_out_ptr"] = None if given is None else pointer
    constants: dict[str, Constant] = {
        "WIDTHS": tuple(part.width for part in parts),
        "RANKS": tuple(part.rank for part in parts),
        "SCALES": tuple(part.scale for part in parts),
        "PLANES": tuple(part.plane for part in parts),
        "S_STRIDE": problem.s_stride,
        "Q_STRIDES": parts[0].weight_strides,
        "K_STRIDES": parts[1].weight_strides,
        "V_STRIDES": parts[2].weight_strides,
        "BASE_STRIDES": tuple(part.base_stride or 0 for part in parts),
        "OUT_STRIDES": tuple(part.out_stride for part in parts),
        **form.constants(),
        "ROWS": form.rows,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_R": config.block_r,
    }
    counts = ("num_rows", "total_rows", "num_groups", "rows_per_id")
    arguments |= {**dict.fromkeys(counts, "i32"), "s_plane_stride": "i64"}
    known = {} if not form.one_each else {"rows_per_id": 1}
    return _spec("lora_expand", "lora_expand", constants, arguments, known, problem.unaligned,
                 config, target)  # fmt: skip


def expand_grid(problem: ExpandProblem, config: ExpandConfig, counts: RowCounts) -> tuple[int, int]:
    parts = [part for part in problem.projections if part is not None]
    columns = sum(cdiv(part.width, config.block_n) for part in parts)
    return columns, tile_bound(problem.form, counts, config.block_m)


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
    constants: dict[str, Constant] = {
        "NUM_ADAPTERS": form.num_adapters,
        "GROUPS": form.groups,
        "CHUNK": config.chunk,
        "ROWS_PER_LOAD": config.rows_per_load,
        "ROWS_PER_STEP": config.rows_per_step,
    }
    arguments: dict[str, str | None] = {
        "ids_ptr": f"*{form.id_dtype}",
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        **dict.fromkeys(("num_rows", "total_rows", "rows_per_id"), "i32"),
    }
    known = {} if not form.one_each else {"rows_per_id": 1}
    unaligned = ("ids_ptr",)
    return _spec("lora_order", "lora_order", constants, arguments, known, unaligned, config, target)


def order_grid(config: OrderConfig, total_rows: int) -> tuple[int]:
    return (cdiv(total_rows, config.chunk),)


def _spec(
    template: str,
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Mapping[str, str | None],
    known: Mapping[str, int],
    unaligned: tuple[str, ...],
    config: ShrinkConfig | ExpandConfig | OrderConfig,
    target: str,
) -> KernelSpec:
    """Absent tensors and known counts become constants, the rest is the signature."""
    pdl = get_target(target).has("dependent_launch")
    fixed: dict[str, Constant] = {**constants, "LAUNCH_PDL": pdl, **known}
    fixed |= {name: None for name, type_name in arguments.items() if type_name is None}
    signature = {
        name: type_name
        for name, type_name in arguments.items()
        if type_name is not None and name not in known
    }
    aligned = [
        name
        for name, type_name in signature.items()
        if (type_name.startswith("*") or name in STEPS) and name not in unaligned
    ]
    ranges = dict.fromkeys(("num_rows", "total_rows", "rows_per_id"), (1, 2**31 - 1))
    return KernelSpec.make(
        template,
        kernel,
        fixed,
        signature,
        divisible16=aligned,
        ranges={name: bounds for name, bounds in ranges.items() if name in signature},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
        launch_pdl=pdl,
    )
