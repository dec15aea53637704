"""Tests the lowering of every op: the facts that are read from its steps, and the results of the
steps on the interpreter."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from tests.interpreted import Interpreter, interpret, steps_of
from tilewright.codegen.emit import source
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.contract import all_ops
from tilewright.ops.runtime.program import Launch, Library, Planner, drive

TARGETS = (SM90, SM100)
SMS = 3
# The most programs that these tests interpret. The interpreter runs programs one by one, some 500
# in a second. For calls with more programs, the tests of the family use larger tiles.
MOST_PROGRAMS = 150
# Each case runs on one of the targets, in turn.
CASES = [
    pytest.param(op, case, TARGETS[number % 2], id=f"{op.name}-{case.name}")
    for op in all_ops()
    if op.namespace == "tilewright" and any(lowering.build for lowering in op.lowerings)
    for number, case in enumerate(op.cases)
]
# If a library's GEMM takes part, it rounds before the kernel after it, as the replaced graph does.
# A kernel that computes the norm of x also rounds, before the product.
ROUND_BETWEEN = ("fused_qkv_paged", "fused_qkv_matmul_kv_cache_paged_ragged")


def allowed(op, program, dtype):
    """Returns the difference that two rounded results may have."""
    tolerance = op.tolerances[dtype]
    by_library = any(
        isinstance(step, Library) and step.function is not torch.Tensor.zero_
        for step, _ in program.steps
    )
    constants = [dict(spec.constants) for spec in program.specs]
    norms_x = any(spec.kernel == "norm_x" for spec in program.specs)
    norms_x |= any("INPUT_NORM_EPS" in given for given in constants)
    # Numbers of a table are rounded to 16 bits, as a library rounds weights that are made of them.
    rounds_numbers = any(isinstance(given.get("NUMBER"), tuple) for given in constants)
    if (by_library or norms_x or rounds_numbers) and op.name in ROUND_BETWEEN:
        tolerance = replace(tolerance, of_rms=4 * min(tolerance.relative, 2.0**-8))
    return replace(tolerance, relative=2 * tolerance.relative, absolute=2 * tolerance.absolute)


def results_of(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


def programs_of(op, a, target):
    """Returns how many programs the launches of a call have."""
    planner = Planner(replace(target, num_sms=SMS))
    steps = drive(steps_of(op, a, planner.target), planner, keep=True).steps
    return sum(prod(step.grid) for step, _ in steps if isinstance(step, Launch))


def has_gluon(op, a, target):
    """Whether a kernel of a call is written in Gluon. Triton cannot interpret Gluon."""
    specs = drive(steps_of(op, a, target), Planner(target), keep=True).specs
    modules = {spec: source.Library().load(spec.module) for spec in specs}
    return any(
        source.JitFunction(module, module.functions[spec.kernel]).is_gluon
        for spec, module in modules.items()
    )


def skip_where_a_gpu_has_no_kernel(op, a, target):
    if op.choose("cuda", a, target).lowering.name == "reference":
        pytest.skip("no kernel takes it: the reference computes it on a GPU too")


@pytest.mark.parametrize(("op", "case", "target"), CASES)
def test_the_steps_of_a_call_compute_what_the_op_means(op, case, target):
    """Compares the results and the written memory. Memory holds NaN before."""
    given, expected = op.sample_inputs(case), op.sample_inputs(case)
    skip_where_a_gpu_has_no_kernel(op, given, target)
    if programs_of(op, given, target) > MOST_PROGRAMS:
        pytest.skip("too many programs for the interpreter")
    if has_gluon(op, given, target):
        pytest.skip("the interpreter runs no Gluon")
    program = interpret(op, given, target, SMS)
    wanted = op.reference(expected)
    for got, want in zip(results_of(program.outcome.result), results_of(wanted), strict=True):
        problem = allowed(op, program, want.dtype).problem(got, want)
        assert problem is None, problem
    for name in op.mutated:
        got, want = getattr(given, name), getattr(expected, name)
        if want is not None:
            problem = allowed(op, program, want.dtype).problem(got, want)
            assert problem is None, (name, problem)


@pytest.mark.parametrize(("op", "case", "target"), CASES)
def test_a_plan_has_the_kernels_of_a_call(op, case, target):
    """Compares the kernels of a plan with the kernels of a call. The call is planned without
    memory, and then performed without running the kernels."""
    a = op.sample_inputs(case)
    skip_where_a_gpu_has_no_kernel(op, a, target)
    report = op.plan_for(a, target.name)
    ran = drive(steps_of(op, a, target), Interpreter(target, runs=False))
    assert set(ran.specs) <= set(report.specs)
