"""Converts the arguments of the LoRA ops to the problems and run-time values of their kernels."""

from __future__ import annotations

from typing import Any

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.lora.plan import UNSORTED_ROWS
from tilewright.codegen.lora.problem import RowCounts, RowForm, ShrinkProblem
from tilewright.codegen.operand import Operand
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.lora.rows import num_groups
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.runtime.operands import operand

# If a sequence has at least this many rows, kernels divide each sequence into tiles of its own. The
# last tile of a sequence may be partly empty, which costs little in long sequences.
LONG_SEQUENCE = 64


def row_counts(a: Any, num_rows: int, total_rows: int) -> RowCounts:
    """Returns how many rows, groups and rows per id a call has. Both LoRA ops use this function."""
    ids = a.expert_ids
    alone = ids is not None and a.a_offsets is None and num_rows
    return RowCounts(
        num_rows,
        total_rows,
        0 if a.a_offsets is None else num_groups(a),
        num_rows // ids.shape[0] if alone else 1,
    )


def row_form(a: Any, counts: RowCounts, num_adapters: int) -> RowForm:
    """Returns how the kernels of a call find the adapter of each row. Reads only metadata and
    addresses."""
    ids, offsets = operand(contiguous(a.expert_ids)), operand(contiguous(a.a_offsets))
    one_each = counts.rows_per_id == 1
    if counts.num_rows == 0 or (ids is None and offsets is None):
        return RowForm("single", num_adapters, one_each=one_each)  # no id is read
    if offsets is not None:
        groups, inclusive = next_power_of_2(counts.groups + 1), a.inclusive_offsets
        return RowForm("groups", num_adapters, ids, offsets, inclusive, one_each, groups)
    groups = next_power_of_2(num_adapters + 1)
    if counts.total_rows <= UNSORTED_ROWS:
        rows = next_power_of_2(counts.total_rows)
        return RowForm("rows", num_adapters, ids, one_each=one_each, groups=groups, rows=rows)
    if counts.rows_per_id >= LONG_SEQUENCE:
        return RowForm("sequences", num_adapters, ids, one_each=one_each)
    ends = Operand("i32")  # the end of each adapter's rows, after sorting
    return RowForm("sorted", num_adapters, ids, ends, True, one_each, groups)


def row_values(a: Any, counts: RowCounts, form: RowForm) -> dict[str, Any]:
    """Returns the kernel arguments that give the adapter of each row, by parameter name."""
    return {
        "ids": contiguous(a.expert_ids) if form.ids else None,
        "offsets": contiguous(a.a_offsets) if form.offsets else None,
        "order": None,
        "num_rows": counts.num_rows,
        "total_rows": counts.total_rows,
        "num_groups": counts.groups,
        "rows_per_id": counts.rows_per_id,
    }


def shrink_problem(a: ShrinkArguments, counts: RowCounts) -> ShrinkProblem:
    """Returns the problem of a call."""
    first, *others = [weight for weight in a.weights if weight is not None]
    weight = operand(first, *first.stride())
    return ShrinkProblem(
        hidden=a.a.shape[1],
        ranks=tuple(weight.shape[1] for weight in (first, *others)),
        a=operand(a.a, a.a.stride(0)),
        weights=(weight, *(Operand(weight.dtype, w.stride(), aligned=False) for w in others)),
        form=row_form(a, counts, first.shape[0]),
    )
