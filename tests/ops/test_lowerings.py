"""Every op's lowering: what is read off its steps, and what they compute on the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.interpreted import Interpreter, interpret
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops import contract
from tilewright.ops.contract import all_ops
from tilewright.ops.runtime.program import Launch, drive

TARGETS = {"sm90": SM90, "sm100": SM100}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}")
    for op in all_ops()
    if op.namespace == "tilewright" and any(lowering.build for lowering in op.lowerings)
    for case in op.cases
]


def twice(tolerance):
    """Of two results that are both rounded."""
    return replace(tolerance, relative=2 * tolerance.relative, absolute=2 * tolerance.absolute)


def results_of(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_steps_of_a_call_compute_what_the_op_means(op, case, target):
    """Results and what is written, on memory that holds NaN before."""
    given, expected = op.sample_inputs(case), op.sample_inputs(case)
    if op.choose("cuda", given).lowering.name == "reference":
        pytest.skip("no kernel takes it: the reference computes it on a GPU too")
    actual = interpret(op, given, TARGETS[target]).outcome.result
    wanted = op.reference(expected)
    for got, want in zip(results_of(actual), results_of(wanted), strict=True):
        problem = twice(op.tolerances[want.dtype]).problem(got, want)
        assert problem is None, problem
    for name in op.mutated:
        got, want = getattr(given, name), getattr(expected, name)
        if want is not None:
            problem = twice(op.tolerances[want.dtype]).problem(got, want)
            assert problem is None, (name, problem)


class Unlaunched(Interpreter):
    """Has memory and libraries, and kernels that do nothing."""

    def perform(self, step):
        return None if isinstance(step, Launch) else super().perform(step)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_plan_has_the_kernels_of_a_call_and_allocates_nothing(op, case):
    a = op.sample_inputs(case)
    lowering = op.choose("cuda", a).lowering
    if lowering.name == "reference":
        pytest.skip("no kernel takes it: the reference computes it on a GPU too")
    for target in TARGETS.values():
        report = op.plan_for(a, target.name)
        ran = drive(contract._loaded(lowering.build)(a, target), Unlaunched(target), keep=True)
        assert set(ran.specs) <= set(report.specs)
