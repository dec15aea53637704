"""When a library's product makes the shrink: one adapter of many rows.

One matrix for all rows is what libraries are best at: what they lack is the planar output. The
bounds are where the two took equal time on an H200, torch 2.11 (docs/lora-performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.lora_kernels import lora_spec
from tilewright.codegen.lora_shrink_kernels import ShrinkProblem
from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.spec import Constant, KernelSpec

LIBRARY_DTYPES = ("bf16", "fp16")
#: Bytes, and 16-bit elements, that rows start at whole multiples of.
ALIGNED = 8
#: Rows from which on the library is faster: by K from which on, then by columns up to which.
STACKED_ROWS: dict[int, dict[int, int]] = {
    0: {64: 4097, 128: 257, 256: 129, 1024: 65},
    6144: {64: 129, 128: 65, 1024: 33},
}
#: The same where the weights are joined first.
APART_ROWS: dict[int, dict[int, int]] = {
    0: {64: 1 << 30, 256: 2049, 1024: 1025},
    6144: {64: 8193, 256: 129, 1024: 513},
}
#: Rows, and K, between which a product for each plane in one batch beats one and a copy.
BATCHED_ROWS = range(257, 1025)
BATCHED_HIDDEN = 4096
BATCHED_RANK = 64
# Elements that a program of `lora_planes` copies.
PLANE_ELEMENTS = 2048


@dataclass(frozen=True)
class LibraryShrink:
    """One way to call a library, and the rows from which on it is taken.

    way: "plane": one weight, the product is the plane; "batch": a product for each plane, straight
    to its place; "rows": one product with q, k and v side by side, then `lora_planes`.
    joined: the weights are copied side by side first.
    """

    way: str
    joined: bool
    least_rows: int

    def __str__(self) -> str:
        how = {
            "plane": "one product",
            "batch": "a batch of a product for each plane",
            "rows": "one product, then planes",
        }[self.way]
        joined = ", weights joined before" if self.joined else ""
        return f"{how}{joined}: faster from {self.least_rows} rows of one adapter on"


def library_shrink(
    problem: ShrinkProblem, stacked: bool, one_group: bool, num_rows: int
) -> LibraryShrink | None:
    """How a library makes a shrink of `num_rows` rows; None where the kernels are to.

    stacked: the weights lie as rows, or columns, of one matrix. one_group: all groups of rows are
    one.
    """
    if not _takes(problem, stacked, one_group):
        return None
    columns = problem.planes * problem.rank
    least = _least_rows(STACKED_ROWS if stacked else APART_ROWS, problem.hidden, columns)
    if num_rows < least:
        return None
    if problem.form.addressing == "single" and stacked:
        if problem.planes == 1:
            return LibraryShrink("plane", False, least)
        batched = problem.hidden <= BATCHED_HIDDEN and problem.rank >= BATCHED_RANK
        if batched and num_rows in BATCHED_ROWS:
            return LibraryShrink("batch", False, least)
    return LibraryShrink("rows", not stacked, least)


def _takes(problem: ShrinkProblem, stacked: bool, one_group: bool) -> bool:
    """Whether the library computes the same, at its best speed."""
    form = problem.form
    one = form.addressing == "single" or (form.addressing == "groups" and one_group)
    if not one or form.num_adapters != 1 or form.id_dtype is not None:
        return False
    if problem.dtype not in LIBRARY_DTYPES or set(problem.ranks) != {problem.rank}:
        return False
    steps = [problem.a_stride, problem.hidden, problem.rank]
    for _, row, column in problem.weight_strides:
        if column == 1:
            steps.append(row)
        elif row == 1 and stacked:
            steps.append(column)
        else:
            return False
    aligned = not {"a_ptr", "weight_ptr"} & set(problem.unaligned)
    return aligned and not any(step % ALIGNED for step in steps)


def _least_rows(bounds: dict[int, dict[int, int]], hidden: int, columns: int) -> int:
    by_columns = bounds[max(least for least in bounds if least <= hidden)]
    return next((rows for most, rows in by_columns.items() if columns <= most), 1 << 30)


def planes_spec(problem: ShrinkProblem, target: str) -> KernelSpec:
    """`lora_planes` over the product of a problem."""
    form = problem.form
    constants: dict[str, Constant] = {
        "N": problem.rank,
        "PLANES": problem.planes,
        "WIDTH": next_power_of_2(problem.rank),
        "INCLUSIVE": form.inclusive,
        "BLOCK_M": _block_m(problem),
    }
    arguments: dict[str, str | None] = {
        "rows_ptr": f"*{problem.dtype}",
        "offsets_ptr": form.pointers()["offsets_ptr"],
        "out_ptr": f"*{problem.dtype}",
        "num_rows": "i32",
    }
    return lora_spec(
        "lora_planes", "lora_planes", constants, arguments, {}, problem.unaligned, 4, 1, target
    )


def planes_grid(problem: ShrinkProblem, num_rows: int) -> tuple[int, int]:
    return cdiv(num_rows, _block_m(problem)), problem.planes


def _block_m(problem: ShrinkProblem) -> int:
    return max(PLANE_ELEMENTS // next_power_of_2(problem.rank), 1)
