"""From the arguments of the LoRA ops to static problems of their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.lora.expand_specs import ExpandProblem, Projection
from tilewright.codegen.lora.plan import UNSORTED_ROWS
from tilewright.codegen.lora.shrink_specs import ShrinkProblem
from tilewright.codegen.lora.specs import RowCounts, RowForm
from tilewright.ops.formats.row_groups import contiguous as dense
from tilewright.ops.lora.expand import ExpandArguments
from tilewright.ops.lora.rows import num_groups
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.qkv.operands import unaligned
from tilewright.ops.runtime.dtypes import TRITON_TYPES

# Sequences from which on a tile is as good as full.
LONG_SEQUENCE = 64
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


def row_form(a: Any, counts: RowCounts, num_adapters: int) -> RowForm:
    """How the kernels of a call learn each row's adapter. Metadata only."""
    ids, offsets = a.expert_ids, a.a_offsets
    id_dtype = None if ids is None else TRITON_TYPES[ids.dtype]
    form = RowForm("single", num_adapters, id_dtype, one_each=counts.rows_per_id == 1)
    if counts.num_rows == 0:
        # No ids are read, of which there may be none: elsewhere there is a row at least.
        return replace(form, id_dtype=None)
    if offsets is not None:
        return replace(
            form,
            addressing="groups",
            offset_dtype=TRITON_TYPES[offsets.dtype],
            inclusive=a.inclusive_offsets,
            groups=next_power_of_2(counts.groups + 1),
        )
    if ids is None:
        return form
    groups = next_power_of_2(num_adapters + 1)
    if counts.total_rows <= UNSORTED_ROWS:
        rows = next_power_of_2(counts.total_rows)
        return replace(form, addressing="rows", groups=groups, rows=rows)
    if counts.rows_per_id >= LONG_SEQUENCE:
        return replace(form, addressing="sequences")
    return replace(form, addressing="sorted", groups=groups, offset_dtype="i32", inclusive=True)


def row_values(a: Any, counts: RowCounts) -> Values:
    """Tensors and counts of the rows, by the kernels' parameter names."""
    return {
        "ids_ptr": dense(a.expert_ids),
        "offsets_ptr": dense(a.a_offsets),
        "num_rows": counts.num_rows,
        "total_rows": counts.total_rows,
        "num_groups": counts.groups,
        "rows_per_id": counts.rows_per_id,
    }


def shrink_problem(a: ShrinkArguments, counts: RowCounts) -> tuple[ShrinkProblem, Values]:
    """The problem of a call, and its tensors by the kernels' parameter names."""
    weights = [weight for weight in a.weights if weight is not None]
    values: Values = {"a_ptr": a.a, "weight_ptr": weights[0], **row_values(a, counts)}
    steps = {
        name: (weight.data_ptr() - weights[0].data_ptr()) // weight.element_size()
        for name, weight in zip(("second_distance", "third_distance"), weights[1:], strict=False)
    }
    odd = tuple(name for name, step in steps.items() if step % 16)
    values |= steps
    problem = ShrinkProblem(
        dtype=TRITON_TYPES[a.a.dtype],
        hidden=a.a.shape[1],
        rank=a.rank,
        ranks=tuple(weight.shape[1] for weight in weights),
        a_stride=a.a.stride(0),
        weight_strides=tuple(weight.stride() for weight in weights),  # type: ignore[misc]
        form=row_form(a, counts, weights[0].shape[0]),
        unaligned=(*unaligned(values), *odd),
    )
    return problem, values


def expand_problem(
    a: ExpandArguments, counts: RowCounts, outputs: tuple[torch.Tensor, ...]
) -> tuple[ExpandProblem, Values]:
    """The problem of a call that fills `outputs`, and its tensors by parameter name."""
    values: Values = {"s_ptr": a.s, "scales_ptr": dense(a.scales), **row_values(a, counts)}
    values["s_plane_stride"] = a.s.stride(0)
    targets = outputs[0].split(list(a.widths), dim=1) if a.packed else outputs
    parts: list[Projection | None] = []
    plane = 0
    for i, letter in enumerate("qkv"):
        weight, base, target = a.weights[i], a.bases[i], targets[i]
        part = None
        if target.numel():
            values |= {f"{letter}_ptr": base, f"{letter}_weight_ptr": weight}
            values[f"{letter}_out_ptr"] = target
            part = Projection(
                width=target.shape[1],
                rank=0 if weight is None else weight.shape[2],
                plane=plane,
                scale=a.factors[i],
                weight_strides=(0, 0, 0) if weight is None else weight.stride(),  # type: ignore[arg-type]
                base_stride=None if base is None else base.stride(0),
                out_stride=target.stride(0),
            )
        plane += weight is not None
        parts.append(part)
    odd = ("s_plane_stride",) if a.s.stride(0) % 16 else ()
    weight = next(weight for weight in a.weights if weight is not None)
    problem = ExpandProblem(
        dtype=TRITON_TYPES[a.s.dtype],
        s_stride=a.s.stride(1),
        projections=(parts[0], parts[1], parts[2]),
        scales_dtype=None if a.scales is None else TRITON_TYPES[a.scales.dtype],
        form=row_form(a, counts, weight.shape[0]),
        unaligned=(*unaligned(values), *odd),
    )
    return problem, values
