"""Which tiles the shrink of many rows gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.codegen.lora.plan import plan_shrink, planned_rows
from tilewright.codegen.lora.shrink_specs import RowShrink, ShrinkProblem, TiledShrink
from tilewright.codegen.lora.specs import RowForm
from tilewright.codegen.targets import SM90


def tile(rank, adapters, rows):
    """(rows of a tile, its columns) of groups, K 4096."""
    strides = (3 * rank * 4096, 4096, 1)
    form = RowForm("groups", adapters, None, "i32")
    problem = ShrinkProblem("bf16", 4096, rank, (rank,) * 3, 4096, (strides,) * 3, form)
    config = plan_shrink(problem, planned_rows(rows), SM90)
    return config.block_m, sum(config.widths)


@pytest.mark.parametrize(
    ("rank", "adapters", "rows", "expected"),
    [
        (64, 8, 8192, (64, 192)),
        (64, 16, 8192, (128, 192)),
        (64, 32, 8192, (128, 192)),
        (64, 32, 6000, (64, 192)),
        (64, 32, 16384, (64, 192)),
        (128, 8, 4096, (128, 128)),
        (128, 32, 4096, (128, 192)),
        (128, 8, 8192, (64, 384)),
        (128, 32, 8192, (128, 128)),
    ],
)
def test_tiles_are_those_that_are_through_first(rank, adapters, rows, expected):
    assert tile(rank, adapters, rows) == expected


def test_few_counts_are_planned_for():
    planned = {planned_rows(rows) for rows in range(8193)}
    assert len(planned) == 13 + 8
    assert all(planned_rows(rows) >= rows for rows in range(8193))
    assert all(planned_rows(rows) == rows for rows in planned)


@pytest.mark.parametrize(
    ("rank", "rows", "expected"),
    [
        (16, 1, RowShrink(1, 4, 4096, 8)),
        (16, 16, RowShrink(1, 4, 4096, 8)),
        (64, 1, RowShrink(1, 4, 4096, 8)),
        (16, 64, TiledShrink(64, 128, 4, 4, 3, (64,))),
        (64, 16, TiledShrink(64, 128, 4, 4, 3, (64,))),
        (128, 256, TiledShrink(64, 128, 4, 4, 3, (64,))),
    ],
)
def test_weights_across_share_what_is_read_of_them(rank, rows, expected):
    """Weights [K, R] seen as [R, K]."""
    strides = (rank * 4096, 1, rank)
    form = RowForm("single", 1)
    problem = ShrinkProblem("bf16", 4096, rank, (rank,) * 3, 4096, (strides,) * 3, form)
    assert plan_shrink(problem, rows, SM90) == expected
    assert isinstance(plan_shrink(replace(problem, dtype="fp32"), 1, SM90), RowShrink)
