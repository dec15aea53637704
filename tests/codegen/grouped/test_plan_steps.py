"""Compares plans of grouped GEMMs with stored ones, from one row to many."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.codegen.moe.test_plan_steps import PROBLEMS as EXPERTS
from tests.plans import check, steps
from tilewright.codegen.grouped.plan import block_k_obstacle, plan_grouped
from tilewright.codegen.grouped.problem import GroupedProblem
from tilewright.codegen.targets import SM90, SM100, Target

PROBLEMS = {
    name: GroupedProblem(8, 8, p.inner, p.hidden, p.dtype, p.gate, p.coded_rows)
    for name, p in EXPERTS.items()
}


def kernels(problem: GroupedProblem, target: Target, rows: int):
    plan = plan_grouped(problem, problem.num_groups * rows, target)
    return plan.gemm, plan.decode


def test_plans_of_groups(pytestconfig) -> None:
    lines = {}
    for name, problem in PROBLEMS.items():
        for target in (SM90, SM100):
            lines[f"{name} {target.name}"] = steps(partial(kernels, problem, target))
    check("grouped", lines, pytestconfig)


@pytest.mark.parametrize(
    ("columns", "fits"),
    [(16, True), (32, True), (48, False), (64, True), (96, False), (128, True), (192, False)],
)
def test_scales_fit_the_steps_over_the_inner_dimension(columns: int, fits: bool) -> None:
    weight = replace(EXPERTS["int4"].gate, scale_block=(1, columns))
    assert (block_k_obstacle(weight) is None) == fits
