"""Compares plans of adapters with stored ones, from one row to many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.codegen.lora.test_plan import problem
from tests.plans import check, steps
from tilewright.codegen.lora.library_plan import library_shrink
from tilewright.codegen.lora.plan import plan_expand, plan_shrink
from tilewright.codegen.lora.problem import RowForm, ShrinkProblem
from tilewright.codegen.operand import Operand
from tilewright.codegen.targets import SM90, SM100

FORMS = {
    "single": RowForm("single", 1),
    "8 groups": RowForm("groups", 8, None, Operand("i32")),
    "32 groups": RowForm("groups", 32, None, Operand("i32")),
    "rows of 8": RowForm("rows", 8, Operand("i64")),
    "one group": RowForm("groups", 1, None, Operand("i32")),
}


def by_library(three: ShrinkProblem, one: ShrinkProblem, stacked: bool, num_rows: int):
    each = (three, one, replace(one, hidden=8192))
    return tuple(library_shrink(given, stacked, True, num_rows) for given in each)


def test_plans_of_adapters(pytestconfig) -> None:
    lines = {}
    for form, rows in FORMS.items():
        for rank in (8, 16, 32, 64, 128):
            for dtype in ("bf16", "fp32"):
                given = problem(rank, rows, (3 * rank * 4096, 4096, 1), dtype)
                for target in (SM90, SM100):
                    lines[f"{form} of rank {rank} {dtype} {target.name}"] = steps(
                        partial(plan_shrink, given, target=target)
                    )
                one = replace(given, ranks=(rank,), weights=given.weights[:1])
                lines[f"{form} of rank {rank} {dtype} alone"] = steps(
                    partial(plan_shrink, one, target=SM90)
                )
                for stacked in (False, True):
                    name = f"library {form} of rank {rank} {dtype} stacked={stacked}"
                    lines[name] = steps(partial(by_library, given, one, stacked))
            across = problem(rank, rows, (rank * 4096, 1, rank))
            lines[f"{form} of rank {rank} across"] = steps(
                partial(plan_shrink, across, target=SM90)
            )
    for rank in (8, 16, 32, 64, 128):
        for dtype in ("bf16", "fp32"):
            lines[f"expand {rank} {dtype}"] = steps(partial(plan_expand, rank, dtype))
    check("lora", lines, pytestconfig)
