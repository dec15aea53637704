"""Plans that use a cuBLAS GEMM to compute the shrink for the rows of one adapter.

cuBLAS is fast for one matrix and many rows, but its result does not have a plane for each of q, k
and v. The bounds below are the numbers of rows at which cuBLAS and tilewright's kernels took equal
time on an H200 with torch 2.11 (docs/lora-performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.lora.problem import ShrinkProblem

LIBRARY_DTYPES = ("bf16", "fp16")
# If strides are multiples of this number of elements, rows of 16-bit elements begin at multiples of
# 16 bytes.
ALIGNED = 8

# Pairs (number of rows, the fastest way from this number of rows on). The way "kernels" means
# tilewright's kernels, which are also the fastest for fewer rows than the first pair has.
Steps = tuple[tuple[int, str], ...]
# Maps the smallest K (outer key) and the largest number of columns of all planes together (inner
# key) to `Steps`.
Bounds = dict[int, dict[int, Steps]]

# No shrink has this many columns.
MOST_COLUMNS = 1 << 30
#: The bounds for weights that are parts of one matrix.
STACKED: Bounds = {
    0: {
        32: (),
        64: ((1025, "batch"), (3585, "kernels")),
        128: ((513, "batch"), (2561, "rows")),
        256: ((129, "batch"), (3585, "rows")),
        MOST_COLUMNS: ((65, "batch"), (3585, "rows")),
    },
    3072: {
        32: ((5121, "rows"),),
        64: ((1025, "batch"), (2049, "kernels"), (4097, "rows")),
        128: ((257, "rows"), (513, "batch"), (1793, "rows")),
        256: ((129, "rows"), (449, "batch"), (1793, "rows")),
        MOST_COLUMNS: ((89, "rows"), (225, "batch"), (1793, "rows")),
    },
    5120: {
        32: ((129, "rows"),),
        64: ((65, "rows"),),
        128: ((33, "rows"),),
        256: ((17, "rows"),),
        MOST_COLUMNS: ((9, "rows"), (897, "batch"), (1793, "rows")),
    },
    12288: {32: ((65, "rows"),), MOST_COLUMNS: ((9, "rows"),)},
}
#: The bounds for separate weights, which are first copied into one matrix.
APART: Bounds = {
    0: {
        96: (),
        256: ((2049, "rows"), (6145, "kernels")),
        MOST_COLUMNS: ((4097, "rows"),),
    },
    3072: {
        64: (),
        96: ((1025, "rows"), (2049, "kernels")),
        256: ((2049, "rows"),),
        MOST_COLUMNS: ((1025, "rows"),),
    },
    5120: {
        32: ((65, "rows"), (769, "kernels")),
        64: ((65, "rows"), (3073, "kernels"), (6145, "rows")),
        96: ((33, "rows"),),
        128: ((33, "rows"), (385, "kernels"), (2049, "rows")),
        192: ((129, "rows"),),
        256: ((129, "rows"), (257, "kernels"), (1025, "rows")),
        MOST_COLUMNS: ((65, "rows"),),
    },
}
#: The bounds for a single weight.
ALONE: Bounds = {
    0: {32: ((3073, "plane"),), 64: ((1025, "plane"),), MOST_COLUMNS: ((449, "plane"),)},
    3072: {32: ((4097, "plane"),), 64: ((769, "plane"),), MOST_COLUMNS: ((385, "plane"),)},
    5120: {32: ((65, "plane"),), 64: ((33, "plane"),), MOST_COLUMNS: ((17, "plane"),)},
}


@dataclass(frozen=True)
class LibraryShrink:
    """A way to compute the shrink with a library.

    Attributes:
        way: "plane", "batch" or "rows". "plane" is for one weight, whose product is the plane.
            "batch" computes a product for each plane and stores it directly. "rows" computes one
            product with q, k and v side by side and then calls `lora_planes`.
        joined: Whether the weights are first copied into one matrix.
        least_rows: The smallest number of rows for which this way is used.
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
    """Returns how a library computes the shrink of `num_rows` rows. Returns None if tilewright's
    kernels compute the shrink.

    stacked: whether the weights are rows, or columns, of one matrix. one_group: whether there is
    only one group of rows.
    """
    if not _takes(problem, stacked, one_group):
        return None
    bounds = STACKED if stacked else APART
    if stacked and problem.planes == 1:
        bounds = ALONE
    least, way = _step(bounds, problem.hidden, problem.planes * problem.rank, num_rows)
    if way == "kernels":
        return None
    if problem.form.addressing != "single":
        way = "rows"  # the copy to planes can skip rows that have no group
    return LibraryShrink(way, not stacked, least)


def _takes(problem: ShrinkProblem, stacked: bool, one_group: bool) -> bool:
    """Whether the library can compute the shrink at full speed."""
    form = problem.form
    one = form.addressing == "single" or (form.addressing == "groups" and one_group)
    if not one or form.num_adapters != 1 or form.ids is not None:
        return False
    if problem.a.dtype not in LIBRARY_DTYPES or set(problem.ranks) != {problem.rank}:
        return False
    steps = [problem.a.strides[0], problem.hidden, problem.rank]
    for _, row, column in (weight.strides for weight in problem.weights):
        if column == 1:
            steps.append(row)
        elif row == 1 and stacked:
            steps.append(column)
        else:
            return False
    aligned = problem.a.aligned and problem.weights[0].aligned
    return aligned and not any(step % ALIGNED for step in steps)


def _step(bounds: Bounds, hidden: int, columns: int, num_rows: int) -> tuple[int, str]:
    """Returns the last step whose number of rows is at most num_rows: (number of rows, way)."""
    by_columns = bounds[max(least for least in bounds if least <= hidden)]
    steps = next(steps for most, steps in by_columns.items() if columns <= most)
    return max(((0, "kernels"), *(step for step in steps if step[0] <= num_rows)))
