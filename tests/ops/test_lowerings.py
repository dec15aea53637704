"""Every op's lowering: what is read off its steps, and what they compute on the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import interpret
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.contract import all_ops
from tilewright.ops.runtime.program import Library

# Cases take turns: one with few SMs, whose programs walk over several tiles, one with as many as a
# plan counts on.
TARGETS = (replace(SM90, num_sms=3), SM100)
CASES = [
    pytest.param(op, case, TARGETS[number % 2], id=f"{op.name}-{case.name}")
    for op in all_ops()
    if op.namespace == "tilewright" and any(lowering.build for lowering in op.lowerings)
    for number, case in enumerate(op.cases)
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


@pytest.mark.parametrize(("op", "case", "target"), CASES)
def test_the_steps_of_a_call_compute_what_the_op_means(op, case, target):
    """Results and what is written, on memory that holds NaN before; and a plan has its kernels."""
    given, expected = op.sample_inputs(case), op.sample_inputs(case)
    if op.choose("cuda", given).lowering.name == "reference":
        pytest.skip("no kernel takes it: the reference computes it on a GPU too")
    planned = op.plan_for(given, target.name)
    program = interpret(op, given, target, target.num_sms)
    wanted = op.reference(expected)
    for got, want in zip(results_of(program.outcome.result), results_of(wanted), strict=True):
        problem = allowed(op, program, want.dtype).problem(got, want)
        assert problem is None, problem
    for name in op.mutated:
        got, want = getattr(given, name), getattr(expected, name)
        if want is not None:
            problem = allowed(op, program, want.dtype).problem(got, want)
            assert problem is None, (name, problem)
    if target is SM100:
        assert set(program.specs) <= set(planned.specs)
