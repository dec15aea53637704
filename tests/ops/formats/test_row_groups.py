"""Tests that ends of groups in any order are put in order, and that each row keeps its expert."""

from __future__ import annotations

import pytest
import torch

from tilewright.ops.formats.row_groups import (
    ends_in_order,
    expert_of_rows,
    experts_in_order,
    last_expert_of_rows,
)


@pytest.mark.parametrize("seed", range(24))
def test_each_row_keeps_its_expert(seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(torch.randint(1, 20, (), generator=generator))
    ends = torch.randint(-num_rows - 3, num_rows + 4, (seed % 6,), generator=generator).int()
    if seed % 4 == 0:
        ends = ends.sort().values
    ordered = ends_in_order(ends, num_rows)
    assert bool((ordered.diff() >= 0).all())
    assert bool((ordered <= num_rows).all())
    got = expert_of_rows(ordered, experts_in_order(ends, num_rows), num_rows)
    assert torch.equal(got, last_expert_of_rows(ends, None, num_rows))
