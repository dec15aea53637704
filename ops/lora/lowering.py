"""The CUDA lowerings of the LoRA ops. Each op has one kernel. If there are many rows whose adapters
are in any order, another kernel sorts the rows first. If all rows have the same adapter, a library
multiplies them where that is faster."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Statics
from tilewright.codegen.lora.kernels import (
    EXPAND,
    ORDER,
    PLANES,
    SHRINK,
    ExpandConfig,
    OrderConfig,
    ShrinkConfig,
    TiledShrink,
    expand_grid,
    order_grid,
    planes_config,
    shrink_grid,
    shrink_scratch,
    tile_columns,
    tile_widths,
)
from tilewright.codegen.lora.library_plan import LibraryShrink, library_shrink
from tilewright.codegen.lora.plan import plan_expand, plan_shrink, planned_rows
from tilewright.codegen.lora.problem import RowCounts, RowForm, ShrinkProblem
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.lora.expand import ExpandArguments, result_shapes
from tilewright.ops.lora.operands import row_counts, row_form, row_values, shrink_problem
from tilewright.ops.lora.shrink import ShrinkArguments, result_shape
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.products import linear, multiply, multiply_batch
from tilewright.ops.runtime.program import Buffer, Library, Outcome, SplitK, Step, Steps

NOTHING = ("nothing", "there are no rows, so nothing is launched")
SORT = OrderConfig()
# Tensors and numbers, by the names of the kernel's parameters.
Values = dict[str, Any]


def shrink_steps(a: ShrinkArguments, target: Target, config: ShrinkConfig | None = None) -> Steps:
    """Performs the steps of a `shrink_qkv_permute_3mn` call. config: the tile sizes of the kernel.
    If it is None, the plan chooses the tile sizes, or decides that a library computes the call."""
    out = yield Buffer(result_shape(a), a.a.dtype)
    if out.numel() == 0:
        return Outcome(out, *NOTHING)
    counts = row_counts(a, a.rows, a.rows)
    problem = shrink_problem(a, counts)
    library = library_choice(a, problem, counts) if config is None else None
    if library is not None:
        yield from library_steps(a, library, problem, out, target)
        return Outcome(out, "library GEMM", library)
    config, statics = _chosen(problem, planned_rows(counts.num_rows), target, config)
    values = {**_weight_values(a), **(yield from _row_values(a, counts, problem.form, target))}
    values |= {"a": a.a, "out": out, "workspace": None, "counters": None}
    tiles, elements = shrink_scratch(problem, config, counts)
    if tiles:
        values["workspace"], values["counters"] = yield SplitK(tiles, elements)
    grid, kernel = shrink_grid(problem, config, counts), SHRINK[type(config)]
    yield launch(kernel, target, grid, values, statics, **problem.form.known)
    return Outcome(out, "shrink kernel", config)


@cache
def _chosen(
    problem: ShrinkProblem, num_rows: int, target: Target, config: ShrinkConfig | None
) -> tuple[ShrinkConfig, Statics]:
    """Returns the tile sizes (`config`, if it is given) and the constants of the kernel, for up to
    `num_rows` rows."""
    config = config or plan_shrink(problem, num_rows, target)
    constants = {**problem.constants, "COLUMNS": tile_columns(problem, config)}
    if isinstance(config, TiledShrink):
        constants["WIDTHS"] = (*tile_widths(problem, config), 0, 0)[:3]
    return config, Statics(config, problem.form, **constants)


def _weight_values(a: ShrinkArguments) -> Values:
    """Returns the first weight, and the number of elements from its address to the address of each
    other weight, by the names of the kernel's parameters."""
    first, *others = [weight for weight in a.weights if weight is not None]
    apart = [(w.data_ptr() - first.data_ptr()) // w.element_size() for w in others]
    second, third = (*apart, None, None)[:2]
    return {"weight": first, "second_distance": second, "third_distance": third}


def expand_steps(a: ExpandArguments, target: Target, config: ExpandConfig | None = None) -> Steps:
    """Performs the steps of a `lora_expand_add` call. config: the tile sizes of the kernel. If it
    is None, the plan chooses them."""
    outputs = []
    for shape in result_shapes(a):
        outputs.append((yield Buffer(shape, a.s.dtype)))
    result = tuple(outputs)
    if not any(out.numel() for out in result):
        return Outcome(result, *NOTHING)
    counts = row_counts(a, a.s.shape[1], a.num_tokens)
    weight = next(weight for weight in a.weights if weight is not None)
    form = row_form(a, counts, weight.shape[0])
    values, constants = _projections(a, result)
    bucket = next_power_of_2(a.num_tokens)
    config = config or plan_expand(max(constants["RANKS"]), TRITON_TYPES[a.s.dtype], bucket)
    values |= {"s": a.s, "scales": contiguous(a.scales), "s_plane_stride": a.s.stride(0)}
    values |= yield from _row_values(a, counts, form, target)
    grid = expand_grid(constants["WIDTHS"], form, config, counts)
    yield launch(EXPAND, target, grid, values, config, form, **constants, **form.known)
    return Outcome(result, "expand kernel", config)


def _projections(
    a: ExpandArguments, outputs: tuple[torch.Tensor, ...]
) -> tuple[Values, dict[str, Any]]:
    """Returns two dicts: the tensors of q, k and v (base, weight and output), and the width, rank,
    factor and plane of s of each projection. For a projection without a result, the tensors are
    None, the factor is 1, and the other numbers are 0."""
    targets = outputs[0].split(list(a.widths), dim=1) if a.packed else outputs
    values: Values = {}
    parts: list[tuple[int, int, float, int]] = []
    plane = 0
    given = zip("qkv", a.weights, a.bases, targets, a.factors, strict=True)
    for letter, weight, base, target, factor in given:
        part: tuple[int, int, float, int] = (0, 0, 1.0, 0)
        made: tuple[torch.Tensor | None, ...] = (None, None, None)
        if target.numel():
            rank = 0 if weight is None else weight.shape[2]
            part = (target.shape[1], rank, factor, plane)
            made = (base, weight if rank else None, target)
        names = (letter, f"{letter}_weight", f"{letter}_out")
        values |= zip(names, made, strict=True)
        parts.append(part)
        plane += weight is not None
    named = zip(("WIDTHS", "RANKS", "SCALES", "PLANES"), zip(*parts, strict=True), strict=True)
    return values, dict(named)


def _row_values(
    a: Any, counts: RowCounts, form: RowForm, target: Target
) -> Generator[Step, Any, Values]:
    """Returns the kernel arguments that give the adapter of each row. If the form is "sorted", also
    sorts the rows by adapter."""
    values = row_values(a, counts, form)
    if form.addressing != "sorted":
        return values
    order = yield Buffer((counts.total_rows,), torch.int32)
    ends = yield Buffer((form.num_adapters,), torch.int32)
    grid, made = order_grid(SORT, counts.total_rows), {"order": order, "ends": ends}
    yield launch(ORDER, target, grid, values | made, SORT, form, **form.known)
    return values | {"order": order, "offsets": ends, "num_groups": form.num_adapters}


# --- one adapter, by a library --------------------------------------------------------------------


def library_choice(
    a: ShrinkArguments, problem: ShrinkProblem, counts: RowCounts
) -> LibraryShrink | None:
    """Returns how a library computes a call; None if the kernels should compute it. Reads only
    metadata and addresses."""
    repeated = any(0 in weight.strides[1:] for weight in problem.weights)
    if problem.form.num_adapters != 1 or repeated:
        return None
    rows = weight_rows(*_matrices(a))
    stacked = rows is not None and rows.firsts == tuple(
        plane * problem.rank for plane in range(problem.planes)
    )
    return library_shrink(problem, stacked, counts.groups == 1, counts.num_rows)


def library_steps(
    a: ShrinkArguments,
    choice: LibraryShrink,
    problem: ShrinkProblem,
    out: torch.Tensor,
    target: Target,
) -> Generator[Step, Any, None]:
    """Performs the steps by which a library computes a shrink. Writes the result to `out` [P, M,
    N]."""
    planes, num_rows, rank = out.shape
    x, columns = a.a[:num_rows], planes * rank
    matrices = _matrices(a)
    if choice.joined:
        weight = yield Buffer((columns, x.shape[1]), x.dtype)
        yield Library(_join, (weight, *matrices))
    else:  # the matrices are stacked in memory already
        weight = matrices[0].as_strided((columns, x.shape[1]), matrices[0].stride())
    if choice.way == "plane":
        yield Library(multiply, (out[0], x, weight))
    elif choice.way == "batch":
        row, column = weight.stride()
        apart = weight.as_strided((planes, rank, x.shape[1]), (rank * row, row, column))
        yield Library(multiply_batch, (out, x.expand(planes, *x.shape), apart.mT))
    else:
        made = yield from linear(x, weight)
        offsets = contiguous(a.a_offsets) if problem.form.offsets else None
        values = {"rows": made, "offsets": offsets, "out": out, "num_rows": num_rows}
        config = planes_config(rank)
        constants: dict[str, Constant] = {"N": rank, "PLANES": planes}
        grid = (cdiv(num_rows, config.block_m), planes)
        yield launch(PLANES, target, grid, values, config, problem.form, **constants)


def _matrices(a: ShrinkArguments) -> list[torch.Tensor]:
    """Returns the given weights of q, k and v as matrices [R, K], if there is only one adapter."""
    return [weight[0] for weight in a.weights if weight is not None]


def _join(out: torch.Tensor, *parts: torch.Tensor) -> None:
    torch.cat(parts, out=out)
