"""Rows sorted by group, as grouped GEMMs take them: whose row is whose, and checks of it.

`group_ends` [G] are inclusive prefix sums of the group sizes (torch's `offs`): group g owns rows
[group_ends[g - 1], group_ends[g]). Rows from the last end on belong to no group. `expert_ids` [G]
names each group's weight; -1: no expert, the group's rows give zeros.
"""

from __future__ import annotations

import torch

from tilewright.ops.checks import ArgumentError

INDEX_DTYPES = (torch.int32, torch.int64)


def check_group_values(
    op: str,
    group_ends: torch.Tensor,
    expert_ids: torch.Tensor | None,
    num_experts: int,
    num_rows: int,
    name: str = "group_ends",
) -> None:
    """Ends must not decrease nor pass the rows; ids lie in [-1, num_experts). name: of the ends."""
    ends = group_ends.long()
    sizes = ends.diff(prepend=ends.new_zeros(1))
    if bool((sizes < 0).any()):
        group = int((sizes < 0).nonzero()[0])
        raise ArgumentError(
            op, name, "non-decreasing row counts from 0 on",
            f"{int(ends[group])} at {group} after {int(ends[group] - sizes[group])}",
        )  # fmt: skip
    if ends.numel() and int(ends[-1]) > num_rows:
        raise ArgumentError(op, name, f"at most {num_rows} rows", int(ends[-1]))
    if expert_ids is not None:
        check_expert_values(op, "expert_ids", expert_ids, num_experts)


def check_expert_values(op: str, name: str, ids: torch.Tensor, num_experts: int) -> None:
    """Expert numbers lie in [-1, num_experts)."""
    wrong = (ids < -1) | (ids >= num_experts)
    if bool(wrong.any()):
        place = [int(i) for i in wrong.nonzero()[0]]
        expected = f"experts from -1 (none) to {num_experts - 1}"
        raise ArgumentError(op, name, expected, f"{int(ids[tuple(place)])} at {place}")


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as kernels read one of a number per group or expert: one after the other."""
    return None if tensor is None else tensor.contiguous()


def group_of_rows(group_ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Group of each row, int64 [num_rows]; rows of no group get G."""
    rows = torch.arange(num_rows, device=group_ends.device)
    return torch.searchsorted(group_ends.long().contiguous(), rows, right=True)


def expert_of_rows(
    group_ends: torch.Tensor, expert_ids: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """Expert of each row, int64 [num_rows]; -1 where the row has none."""
    group = group_of_rows(group_ends, num_rows)
    num_groups = group_ends.shape[0]
    if num_groups == 0:
        return torch.full_like(group, -1)
    inside = group < num_groups
    group = group.clamp_max(num_groups - 1)
    expert = group if expert_ids is None else expert_ids.long()[group]
    return torch.where(inside, expert, -1)
