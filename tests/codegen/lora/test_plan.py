"""Tests which tiles the shrink of many rows gets."""

from __future__ import annotations

import pytest

from tilewright.codegen.lora.kernels import RowShrink, TiledShrink
from tilewright.codegen.lora.plan import plan_shrink, planned_rows
from tilewright.codegen.lora.problem import RowForm, ShrinkProblem
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import SM90


def problem(rank, form, strides, dtype="bf16"):
    """Returns a problem of three equal ranks with K = 4096."""
    weights = (Operand(dtype, strides),) * 3
    return ShrinkProblem(4096, (rank,) * 3, Operand(dtype, (4096,)), weights, form)


def tile(rank, adapters, rows):
    """Returns (rows of a tile, columns of a tile) for groups."""
    form = RowForm("groups", adapters, None, Operand("i32"))
    given = problem(rank, form, (3 * rank * 4096, 4096, 1))
    config = plan_shrink(given, planned_rows(rows), SM90)
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
    """Tests weights [K, R], which the kernel reads as [R, K] with other strides."""
    form, strides = RowForm("single", 1), (rank * 4096, 1, rank)
    assert plan_shrink(problem(rank, form, strides), rows, SM90) == expected
    assert isinstance(plan_shrink(problem(rank, form, strides, "fp32"), 1, SM90), RowShrink)
