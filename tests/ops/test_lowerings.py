"""Every op's lowering: what is read off its steps, and what they compute on the interpreter."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from tests.interpreted import Interpreter, interpret, steps_of
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.contract import all_ops
from tilewright.ops.runtime.program import Launch, Library, Planner, drive

TARGETS = {"sm90": SM90, "sm100": SM100}
SMS = 3
# The interpreter runs programs one by one, some 500 in a second; tests of the families take larger
# tiles where these are too many.
MOST_PROGRAMS = 1500
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}")
    for op in all_ops()
    if op.namespace == "tilewright" and any(lowering.build for lowering in op.lowerings)
    for case in op.cases
]
# Where a library's GEMM has a part, it rounds before the kernel after it, as the graph does that
# the op stands for.
ROUND_BETWEEN = ("fused_qkv_paged", "fused_qkv_matmul_kv_cache_paged_ragged")


def allowed(op, program, dtype):
    """Of two results that are both rounded."""
    tolerance = op.tolerances[dtype]
    by_library = any(
        isinstance(step, Library) and step.function is not torch.Tensor.zero_
        for step, _ in program.steps
    )
    if by_library and op.name in ROUND_BETWEEN:
        tolerance = replace(tolerance, of_rms=4 * min(tolerance.relative, 2.0**-8))
    return replace(tolerance, relative=2 * tolerance.relative, absolute=2 * tolerance.absolute)


def results_of(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


def kernels(op, case, target):
    """The launches of a call: each kernel, but for its target, and its grid."""
    planner = Planner(replace(target, num_sms=SMS))
    steps = drive(steps_of(op, op.sample_inputs(case), planner.target), planner, keep=True).steps
    launches = [step for step, _ in steps if isinstance(step, Launch)]
    return [(replace(launch.spec, target="sm90"), tuple(launch.grid)) for launch in launches]


def skip_where_a_gpu_has_no_kernel(op, case):
    if op.choose("cuda", op.sample_inputs(case)).lowering.name == "reference":
        pytest.skip("no kernel takes it: the reference computes it on a GPU too")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_steps_of_a_call_compute_what_the_op_means(op, case, target):
    """Results and what is written, on memory that holds NaN before."""
    skip_where_a_gpu_has_no_kernel(op, case)
    launches = kernels(op, case, TARGETS[target])
    if target != "sm90" and launches == kernels(op, case, SM90):
        pytest.skip("the kernels are those of sm90")
    if sum(prod(grid) for _, grid in launches) > MOST_PROGRAMS:
        pytest.skip("too many programs for the interpreter")
    given, expected = op.sample_inputs(case), op.sample_inputs(case)
    program = interpret(op, given, TARGETS[target], SMS)
    wanted = op.reference(expected)
    for got, want in zip(results_of(program.outcome.result), results_of(wanted), strict=True):
        problem = allowed(op, program, want.dtype).problem(got, want)
        assert problem is None, problem
    for name in op.mutated:
        got, want = getattr(given, name), getattr(expected, name)
        if want is not None:
            problem = allowed(op, program, want.dtype).problem(got, want)
            assert problem is None, (name, problem)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_plan_has_the_kernels_of_a_call(op, case):
    """Planned without memory, and performed but for the kernels."""
    skip_where_a_gpu_has_no_kernel(op, case)
    for target in TARGETS.values():
        report = op.plan_for(op.sample_inputs(case), target.name)
        machine = Interpreter(target, runs=False)
        ran = drive(steps_of(op, op.sample_inputs(case), target), machine)
        assert set(ran.specs) <= set(report.specs)
