"""From the arguments of the LoRA ops to the problems and run-time values of their kernels."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.lora.plan import UNSORTED_ROWS
from tilewright.codegen.lora.problem import (
    DISTANCES,
    ExpandProblem,
    Projection,
    RowCounts,
    RowForm,
    ShrinkProblem,
)
from tilewright.codegen.operand import Operand
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.lora.expand import ExpandArguments
from tilewright.ops.lora.rows import num_groups
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.runtime.operands import operand, operand_of

# Rows of a sequence from which on its last tile, partly empty, costs little.
LONG_SEQUENCE = 64
# Run-time arguments by the kernels' parameter names.
Values = dict[str, Any]


def row_counts(a: Any, num_rows: int, total_rows: int) -> RowCounts:
    """a: of either op."""
    ids = a.expert_ids
    alone = ids is not None and a.a_offsets is None and num_rows
    return RowCounts(
        num_rows,
        total_rows,
        0 if a.a_offsets is None else num_groups(a),
        num_rows // ids.shape[0] if alone else 1,
    )


def row_form(a: Any, counts: RowCounts, values: Values, num_adapters: int) -> RowForm:
    """How the kernels of a call learn each row's adapter; values: of `row_values`. Metadata and
    addresses only."""
    ids, offsets = operand(values["ids_ptr"]), operand(values["offsets_ptr"])
    one_each = counts.rows_per_id == 1
    if counts.num_rows == 0 or (ids is None and offsets is None):
        return RowForm("single", num_adapters, one_each=one_each)  # and no id is read
    if offsets is not None:
        groups, inclusive = next_power_of_2(counts.groups + 1), a.inclusive_offsets
        return RowForm("groups", num_adapters, ids, offsets, inclusive, one_each, groups)
    groups = next_power_of_2(num_adapters + 1)
    if counts.total_rows <= UNSORTED_ROWS:
        rows = next_power_of_2(counts.total_rows)
        return RowForm("rows", num_adapters, ids, one_each=one_each, groups=groups, rows=rows)
    if counts.rows_per_id >= LONG_SEQUENCE:
        return RowForm("sequences", num_adapters, ids, one_each=one_each)
    ends = Operand("i32")  # of the sorted rows
    return RowForm("sorted", num_adapters, ids, ends, True, one_each, groups)


def row_values(a: Any, counts: RowCounts) -> Values:
    """Tensors and counts of the rows."""
    return {
        "ids_ptr": contiguous(a.expert_ids),
        "offsets_ptr": contiguous(a.a_offsets),
        "num_rows": counts.num_rows,
        "total_rows": counts.total_rows,
        "num_groups": counts.groups,
        "rows_per_id": counts.rows_per_id,
    }


def shrink_problem(a: ShrinkArguments, counts: RowCounts) -> tuple[ShrinkProblem, Values]:
    """The problem of a call, and its values but for the result."""
    first, *others = [weight for weight in a.weights if weight is not None]
    apart = [(w.data_ptr() - first.data_ptr()) // w.element_size() for w in others]
    distances = dict(zip(DISTANCES, apart, strict=False))
    values = {"a_ptr": a.a, "weight_ptr": first, **row_values(a, counts), **distances}
    weight = operand(first, *first.stride())
    problem = ShrinkProblem(
        hidden=a.a.shape[1],
        ranks=tuple(weight.shape[1] for weight in (first, *others)),
        a=operand(a.a, a.a.stride(0)),
        weights=(weight, *(Operand(weight.dtype, w.stride(), aligned=False) for w in others)),
        form=row_form(a, counts, values, first.shape[0]),
        distances16=tuple(name for name in DISTANCES if distances.get(name, 0) % 16 == 0),
    )
    return problem, values


def expand_problem(
    a: ExpandArguments, counts: RowCounts, outputs: tuple[torch.Tensor, ...]
) -> tuple[ExpandProblem, Values]:
    """The problem of a call that fills `outputs`, and its values."""
    values: Values = {
        "s_ptr": a.s,
        "scales_ptr": contiguous(a.scales),
        "s_plane_stride": a.s.stride(0),
    }
    values |= row_values(a, counts)
    targets = outputs[0].split(list(a.widths), dim=1) if a.packed else outputs
    parts: list[Projection] = []
    plane = 0
    given = zip("qkv", a.weights, a.bases, targets, a.factors, strict=True)
    for letter, w, base, target, factor in given:
        part = Projection()
        if target.numel():
            values |= {f"{letter}_ptr": base, f"{letter}_weight_ptr": w}
            values[f"{letter}_out_ptr"] = target
            part = Projection(
                width=target.shape[1],
                rank=0 if w is None else w.shape[2],
                plane=plane,
                scale=factor,
                weight=None if w is None else operand(w, *w.stride()),
                base=operand_of(base, 0),
                out=operand(target, target.stride(0)),
            )
        plane += w is not None
        parts.append(part)
    weight = next(weight for weight in a.weights if weight is not None)
    problem = ExpandProblem(
        s=operand(a.s, a.s.stride(1)),
        projections=(parts[0], parts[1], parts[2]),
        scales=operand(values["scales_ptr"]),
        form=row_form(a, counts, values, weight.shape[0]),
        planes16=a.s.stride(0) % 16 == 0,
    )
    return problem, values
