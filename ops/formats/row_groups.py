"""Functions for rows that are sorted by group, as grouped GEMMs expect them. The functions check
offsets, and return the group or the expert of each row.

`group_ends` [G] are inclusive prefix sums of the group sizes (torch's `offs`). Group g has the rows
[group_ends[g - 1], group_ends[g]). Rows from the last end on belong to no group. `expert_ids` [G]
has the number of each group's weight. -1 means no expert, and the rows of the group become zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.ops.checks import ArgumentError, check_operand, holds

INDEX_DTYPES = (torch.int32, torch.int64)
# Modular MAX stores offsets in uint32.
OFFSET_DTYPES = (*INDEX_DTYPES, torch.uint32)


def check_offsets(
    op: str,
    name: str,
    offsets: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    ends: bool = False,
) -> None:
    """Checks the metadata of row offsets. They are exclusive starts [G + 1] or, with `ends`, the
    end of each group [G]. Raises ArgumentError."""
    check_operand(op, name, offsets, "[G]" if ends else "[G + 1]", (None,), dtypes, device)
    if not ends and not holds(offsets.shape[0] >= 1):
        raise ArgumentError(op, name, "at least one offset, which is 0", "no elements")


def check_offset_values(
    op: str, name: str, offsets: torch.Tensor, num_rows: int, *, ends: bool = False
) -> None:
    """Checks that row offsets (see check_offsets) begin at 0, do not decrease, and do not exceed
    the number of rows. Raises ArgumentError."""
    if not ends and int(offsets[0]) != 0:
        raise ArgumentError(op, name, "0 as the first offset", int(offsets[0]))
    stops = offsets.long() if ends else offsets.long()[1:]
    sizes = stops.diff(prepend=stops.new_zeros(1))
    if bool((sizes < 0).any()):
        group = int((sizes < 0).nonzero()[0])
        actual = f"{int(stops[group])} at {group} after {int(stops[group] - sizes[group])}"
        raise ArgumentError(op, name, "non-decreasing offsets that start at 0 or more", actual)
    if stops.numel() and int(stops[-1]) > num_rows:
        raise ArgumentError(op, name, f"at most {num_rows} rows", int(stops[-1]))


def check_expert_values(op: str, name: str, ids: torch.Tensor | None, num_experts: int) -> None:
    """Checks that expert numbers, if they are given, are in [-1, num_experts). Raises
    ArgumentError."""
    if ids is None:
        return
    wrong = (ids < -1) | (ids >= num_experts)
    if bool(wrong.any()):
        place = [int(i) for i in wrong.nonzero()[0]]
        expected = f"experts from -1 (none) to {num_experts - 1}"
        raise ArgumentError(op, name, expected, f"{int(ids[tuple(place)])} at {place}")


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the tensor, or a contiguous copy of it. The tensor has one number for each group or
    for each expert, and kernels read it with stride 1."""
    return None if tensor is None else tensor.contiguous()


def group_of_rows(group_ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns the group of each row, int64 [num_rows]. For a row that belongs to no group, returns
    G."""
    rows = torch.arange(num_rows, device=group_ends.device)
    return torch.searchsorted(group_ends.long().contiguous(), rows, right=True)


def _from_the_front(group_ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns group ends with the meaning of slice bounds in Python, for `num_rows` rows: negative
    ends count from the last row, and ends are clamped."""
    ends = group_ends.long()
    return torch.where(ends < 0, ends + num_rows, ends).clamp(0, num_rows)


def _last_group_of(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns the last group that contains each row, int64; -1 for a row that belongs to no group.
    `ends` may decrease."""
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))[: ends.shape[0], None]
    inside = (starts <= rows) & (rows < ends[:, None])
    groups = torch.arange(1, ends.shape[0] + 1, device=ends.device, dtype=torch.int32)[:, None]
    if ends.shape[0] == 0:
        return torch.full_like(rows, -1)
    return (inside * groups).amax(0).long() - 1


def last_expert_of_rows(
    group_ends: torch.Tensor, expert_ids: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """Returns the expert of each row, int64 [num_rows]. -1 means no expert.

    The ends may have any order. They have the meaning of slice bounds in Python: negative ends
    count from the last row. If several groups contain a row, the row belongs to the last of these
    groups.
    """
    ends = _from_the_front(group_ends, num_rows)
    return _expert_of(_last_group_of(torch.arange(num_rows, device=ends.device), ends), expert_ids)


def _expert_of(group: torch.Tensor, expert_ids: torch.Tensor | None) -> torch.Tensor:
    """Returns the expert of each group number. The number -1 (no group) gives -1."""
    if expert_ids is None or expert_ids.shape[0] == 0:
        return group
    return torch.where(group < 0, -1, expert_ids.long()[group.clamp_min(0)])


def ends_in_order(group_ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns the ends int32 [G], in ascending order, of new groups that cover the rows of
    `group_ends`.

    `group_ends` may have any order (see last_expert_of_rows). `experts_in_order` returns the expert
    of each new group.
    """
    return _from_the_front(group_ends, num_rows).sort().values.to(torch.int32)


def experts_in_order(group_ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns the expert of each group that `ends_in_order` makes, int32 [G]; -1 if the rows of the
    group have no expert."""
    ends = _from_the_front(group_ends, num_rows)
    starts = torch.nn.functional.pad(ends.sort().values, (1, 0))[:-1]
    return _last_group_of(starts, ends).to(torch.int32)


def expert_of_rows(
    group_ends: torch.Tensor, expert_ids: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """Returns the expert of each row, int64 [num_rows]; -1 for a row without an expert."""
    group = group_of_rows(group_ends, num_rows)
    return _expert_of(torch.where(group < group_ends.shape[0], group, -1), expert_ids)
