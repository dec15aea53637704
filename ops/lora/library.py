"""The shrink of one adapter by a library's product: where the plan finds that faster."""

from __future__ import annotations

from functools import cache

import torch

from tilewright.codegen.lora.library_plan import (
    LibraryShrink,
    library_shrink,
    planes_grid,
    planes_spec,
)
from tilewright.codegen.lora.shrink_specs import ShrinkProblem
from tilewright.codegen.lora.specs import RowCounts
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.formats.weight_rows import weight_rows
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.runtime.launch import launch
from tilewright.ops.runtime.recording import call_library, noted_scratch

cached_planes_spec = cache(planes_spec)


def library_choice(
    a: ShrinkArguments, problem: ShrinkProblem, counts: RowCounts
) -> LibraryShrink | None:
    """How a library makes a call; None where the kernels are to. Metadata and addresses only."""
    repeated = any(0 in strides[1:] for strides in problem.weight_strides)
    if problem.form.num_adapters != 1 or repeated:
        return None
    rows = weight_rows(*_matrices(a))
    stacked = rows is not None and rows.firsts == tuple(
        plane * problem.rank for plane in range(problem.planes)
    )
    return library_shrink(problem, stacked, counts.groups == 1, counts.num_rows)


def library_specs(
    choice: LibraryShrink, problem: ShrinkProblem, target: str
) -> tuple[KernelSpec, ...]:
    """The kernels beside the library's."""
    return (cached_planes_spec(problem, target),) if choice.way == "rows" else ()


def run_library(
    a: ShrinkArguments,
    choice: LibraryShrink,
    problem: ShrinkProblem,
    counts: RowCounts,
    out: torch.Tensor,
    target: str,
) -> None:
    """Fills out [P, M, N]."""
    planes, num_rows, rank = out.shape
    x = a.a[:num_rows]
    weight = _joined(a) if choice.joined else _stack(a, planes * rank)
    if choice.way == "plane":
        call_library(_product, x, weight, out[0])
    elif choice.way == "batch":
        row, column = weight.stride()
        apart = weight.as_strided((planes, rank, x.shape[1]), (rank * row, row, column))
        call_library(_products, x.expand(planes, *x.shape), apart, out)
    else:
        made = noted_scratch(out.new_empty((num_rows, planes * rank)))
        call_library(_product, x, weight, made)
        values = {
            "rows_ptr": made,
            "offsets_ptr": None if a.a_offsets is None else a.a_offsets.contiguous(),
            "out_ptr": out,
            "num_rows": num_rows,
        }
        spec = cached_planes_spec(problem, target)
        launch(spec, planes_grid(problem, num_rows), values, out.device)


def _matrices(a: ShrinkArguments) -> list[torch.Tensor]:
    """The one adapter's weights [R, K] of q, k and v, those that there are."""
    return [weight[0] for weight in a.weights if weight is not None]


def _stack(a: ShrinkArguments, columns: int) -> torch.Tensor:
    """The weights of q, k and v, one below the other where they lie: [columns, K]."""
    first = _matrices(a)[0]
    return first.as_strided((columns, first.shape[1]), first.stride())


def _joined(a: ShrinkArguments) -> torch.Tensor:
    """The same of weights that lie apart, copied."""
    matrices = _matrices(a)
    shape = (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])
    joined = noted_scratch(matrices[0].new_empty(shape))
    call_library(_join, joined, *matrices)
    return joined


def _product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, weight.T, out=out)


def _products(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    torch.bmm(x, weights.mT, out=out)


def _join(out: torch.Tensor, *parts: torch.Tensor) -> None:
    torch.cat(parts, out=out)
