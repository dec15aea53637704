"""The CUDA lowerings of the LoRA ops: one kernel each; many rows in any order are sorted first, and
where all rows have one adapter a library's product may be faster."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.lora.library_plan import LibraryShrink, library_shrink
from tilewright.codegen.lora.plan import plan_expand, plan_shrink, planned_rows
from tilewright.codegen.lora.problem import RowCounts, RowForm, ShrinkProblem
from tilewright.codegen.lora.specs import (
    ExpandConfig,
    OrderConfig,
    ShrinkConfig,
    expand_grid,
    expand_spec,
    order_grid,
    order_spec,
    planes_grid,
    planes_spec,
    shrink_grid,
    shrink_scratch,
    shrink_spec,
)
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.lora.expand import ExpandArguments, result_shapes
from tilewright.ops.lora.operands import Values, expand_problem, row_counts, shrink_problem
from tilewright.ops.lora.shrink import ShrinkArguments, result_shape
from tilewright.ops.runtime.products import linear, multiply, multiply_batch
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    Outcome,
    SplitK,
    Step,
    Steps,
    chooser,
)

NOTHING = ("nothing", "there are no rows, so nothing is launched")
SORT = OrderConfig()


_shrink_kernel = chooser(plan_shrink, shrink_spec)
_expand_kernel = chooser(plan_expand, expand_spec)
_order_spec, _planes_spec = cache(order_spec), cache(planes_spec)


def shrink_steps(a: ShrinkArguments, target: Target, config: ShrinkConfig | None = None) -> Steps:
    """The steps of a `shrink_qkv_permute_3mn` call. config: the kernel's tiles; None: what the plan
    chooses, which may be a library's product."""
    out = yield Buffer(result_shape(a), a.a.dtype)
    if out.numel() == 0:
        return Outcome(out, *NOTHING)
    counts = row_counts(a, a.rows, a.rows)
    problem, values = shrink_problem(a, counts)
    library = library_choice(a, problem, counts) if config is None else None
    if library is not None:
        yield from library_steps(a, library, problem, out, target)
        return Outcome(out, "library GEMM", library)
    bucket = planned_rows(counts.num_rows)
    config, spec = _shrink_kernel(problem, bucket, target, config=config)
    tiles, elements = shrink_scratch(problem, config, counts)
    if tiles:
        values["workspace_ptr"], values["counters_ptr"] = yield SplitK(tiles, elements)
    values |= yield from _sorted_rows(problem.form, counts, values, target)
    yield Launch(spec, shrink_grid(problem, config, counts), values | {"out_ptr": out})
    return Outcome(out, "shrink kernel", config)


def expand_steps(a: ExpandArguments, target: Target, config: ExpandConfig | None = None) -> Steps:
    """The steps of a `lora_expand_add` call. config: the kernel's tiles; None: the plan's."""
    outputs = []
    for shape in result_shapes(a):
        outputs.append((yield Buffer(shape, a.s.dtype)))
    result = tuple(outputs)
    if not any(out.numel() for out in result):
        return Outcome(result, *NOTHING)
    counts = row_counts(a, a.s.shape[1], a.num_tokens)
    problem, values = expand_problem(a, counts, result)
    bucket = next_power_of_2(a.num_tokens)
    config, spec = _expand_kernel(problem, bucket, target, config=config)
    values |= yield from _sorted_rows(problem.form, counts, values, target)
    yield Launch(spec, expand_grid(problem, config, counts), values)
    return Outcome(result, "expand kernel", config)


def _sorted_rows(
    form: RowForm, counts: RowCounts, values: Values, target: Target
) -> Generator[Step, Any, Values]:
    """The sort of a "sorted" form: its results by parameter name; nothing for other forms."""
    if form.addressing != "sorted":
        return {}
    order = yield Buffer((counts.total_rows,), torch.int32)
    ends = yield Buffer((form.num_adapters,), torch.int32)
    spec, grid = _order_spec(form, SORT, target.name), order_grid(SORT, counts.total_rows)
    yield Launch(spec, grid, {**values, "order_ptr": order, "ends_ptr": ends})
    return {"order_ptr": order, "offsets_ptr": ends, "num_groups": form.num_adapters}


# --- one adapter, by a library --------------------------------------------------------------------


def library_choice(
    a: ShrinkArguments, problem: ShrinkProblem, counts: RowCounts
) -> LibraryShrink | None:
    """How a library makes a call; None where the kernels are to. Metadata and addresses only."""
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
    """Fills out [P, M, N]."""
    planes, num_rows, rank = out.shape
    x, columns = a.a[:num_rows], planes * rank
    matrices = _matrices(a)
    if choice.joined:
        weight = yield Buffer((columns, x.shape[1]), x.dtype)
        yield Library(_join, (weight, *matrices))
    else:  # one below the other where they lie
        weight = matrices[0].as_strided((columns, x.shape[1]), matrices[0].stride())
    if choice.way == "plane":
        yield Library(multiply, (out[0], x, weight))
    elif choice.way == "batch":
        row, column = weight.stride()
        apart = weight.as_strided((planes, rank, x.shape[1]), (rank * row, row, column))
        yield Library(multiply_batch, (out, x.expand(planes, *x.shape), apart.mT))
    else:
        made = yield from linear(x, weight)
        offsets = contiguous(a.a_offsets)
        values = {"rows_ptr": made, "offsets_ptr": offsets, "out_ptr": out, "num_rows": num_rows}
        spec = _planes_spec(problem, target.name)
        yield Launch(spec, planes_grid(problem, num_rows), values)


def _matrices(a: ShrinkArguments) -> list[torch.Tensor]:
    """The one adapter's weights [R, K] of q, k and v, those that there are."""
    return [weight[0] for weight in a.weights if weight is not None]


def _join(out: torch.Tensor, *parts: torch.Tensor) -> None:
    torch.cat(parts, out=out)
