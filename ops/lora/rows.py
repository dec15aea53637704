"""The parts that both LoRA ops share: dtypes, tolerances, and the adapter of each row of a batch,
in the forms that engines and models use.

    a_offsets   expert_ids
    none        none          all rows have one adapter
    none        [B]           row m has adapter expert_ids[m // (M / B)]. If B = M, each row has
                              its own id; otherwise, each sequence of M / B rows has one
    [n + 1]     [>= n]        rows [a_offsets[g], a_offsets[g + 1]) have adapter expert_ids[g]
    [n + 1]     none          group g has adapter g

With `inclusive_offsets`, a_offsets has only the end of each group, [n] (torch's `offs`). If
`num_active_experts` is given, it is the number of groups, and later elements of the vectors are not
read. A row has no adapter if its id is -1, or if it belongs to no group.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.checks import ArgumentError, check_operand, holds, readable
from tilewright.ops.contract import rounded_once
from tilewright.ops.formats.row_groups import (
    INDEX_DTYPES,
    OFFSET_DTYPES,
    check_expert_values,
    check_offset_values,
    expert_of_rows,
)

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCES = rounded_once(2.0**-16, 2.0**-16, 2.0**-16, 2.0**-46)
ERROR_MODEL = "Products are exact, sums are accumulated in fp32, and the result is rounded once."


def num_groups(a: Any) -> Any:
    """Returns the number of groups of rows in a call with a_offsets."""
    if a.num_active_experts is not None:
        return a.num_active_experts
    return a.a_offsets.shape[0] - (0 if a.inclusive_offsets else 1)


def check_rows(op: str, a: Any, num_rows: Any, num_adapters: Any, device: torch.device) -> None:
    """Checks the metadata of a_offsets and expert_ids. Raises ArgumentError."""
    for name, dtypes in (("a_offsets", OFFSET_DTYPES), ("expert_ids", INDEX_DTYPES)):
        vector = getattr(a, name)
        if vector is not None:
            check_operand(op, name, vector, "[n]", (None,), dtypes, device)
    if a.a_offsets is not None:
        return _check_groups(op, a, num_adapters)
    for name in ("num_active_experts", "inclusive_offsets"):
        if getattr(a, name):
            raise ArgumentError(op, name, "no value, because a_offsets is None", getattr(a, name))
    if a.expert_ids is None:
        if not holds(num_adapters == 1):
            expected = f"the adapter of each row, because there are {num_adapters} adapters"
            raise ArgumentError(op, "expert_ids", expected, None)
        return None
    count = a.expert_ids.shape[0]
    if not (holds(count > 0) and holds(num_rows % count == 0)) and not holds(num_rows == 0):
        expected = f"one id for each of {num_rows} rows, or for sequences of equal length"
        raise ArgumentError(op, "expert_ids", expected, f"{count} ids")
    return None


def _check_groups(op: str, a: Any, num_adapters: Any) -> None:
    groups = num_groups(a)
    if a.num_active_experts is not None and not holds(groups >= 0):
        expected = "a number of groups that is not negative"
        raise ArgumentError(op, "num_active_experts", expected, groups)
    least = groups if a.inclusive_offsets else groups + 1
    if not (holds(groups >= 0) and holds(a.a_offsets.shape[0] >= least)):
        expected = f"at least {least} offsets for {groups} groups"
        raise ArgumentError(op, "a_offsets", expected, a.a_offsets.shape[0])
    if a.expert_ids is not None and not holds(a.expert_ids.shape[0] >= groups):
        expected = f"at least {groups} ids for {groups} groups"
        raise ArgumentError(op, "expert_ids", expected, a.expert_ids.shape[0])
    if a.expert_ids is None and not holds(groups <= num_adapters):
        expected = f"ids, because {groups} groups are more than {num_adapters} adapters"
        raise ArgumentError(op, "expert_ids", expected, None)


def check_row_values(op: str, a: Any, num_rows: int, num_adapters: int) -> None:
    """Checks that offsets start at 0, do not decrease and do not exceed the number of rows, and
    that ids are from -1 to the last adapter. Raises ArgumentError."""
    if not readable([a.a_offsets, a.expert_ids]):
        return
    ids = a.expert_ids
    if a.a_offsets is not None:
        groups, ends = num_groups(a), a.inclusive_offsets
        offsets = a.a_offsets[: groups + (0 if ends else 1)]
        check_offset_values(op, "a_offsets", offsets, num_rows, ends=ends)
        ids = None if ids is None else ids[:groups]
    check_expert_values(op, "expert_ids", ids, num_adapters)


def group_ends(a: Any) -> torch.Tensor:
    """Returns the inclusive ends of the groups, int64 [n]."""
    first = 0 if a.inclusive_offsets else 1
    ends: torch.Tensor = a.a_offsets.long()[first : first + num_groups(a)]
    return ends


def adapter_of_rows(a: Any, num_rows: int, device: torch.device) -> torch.Tensor:
    """Returns the adapter of each row, int64 [num_rows]; -1 for a row without an adapter."""
    if a.a_offsets is not None:
        return expert_of_rows(group_ends(a), a.expert_ids, num_rows)
    if a.expert_ids is None or num_rows == 0:
        return torch.zeros(num_rows, dtype=torch.int64, device=device)
    return a.expert_ids.long().repeat_interleave(num_rows // a.expert_ids.shape[0])
