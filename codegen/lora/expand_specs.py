"""`lora_expand_add` as plain data, and the spec of the template `lora_expand`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.lora.specs import RowCounts, RowForm, lora_spec, tile_bound
from tilewright.codegen.spec import Constant, KernelSpec


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
    return lora_spec(
        "lora.expand", "lora_expand", constants, arguments, known, problem.unaligned,
        config.num_warps, config.num_stages, target,
    )  # fmt: skip


def expand_grid(problem: ExpandProblem, config: ExpandConfig, counts: RowCounts) -> tuple[int, int]:
    parts = [part for part in problem.projections if part is not None]
    columns = sum(cdiv(part.width, config.block_n) for part in parts)
    return columns, tile_bound(problem.form, counts, config.block_m)
