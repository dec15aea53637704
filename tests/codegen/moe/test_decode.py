"""Tests weights that are dequantised before the GEMMs of a mixture. The emitted kernels are
compared with the op's reference on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.experts import SMALL_SM100, as_double
from tests.interpreted import Interpreter
from tilewright.codegen.grouped.tiles import GemmConfig
from tilewright.codegen.moe.plan import DECODED_ROWS, plan_moe
from tilewright.codegen.moe.problem import DECODED_BYTES, decodable
from tilewright.codegen.targets import TARGETS
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.operands import moe_problem
from tilewright.ops.runtime.program import drive

BASE = MoeCase("case", num_experts=3)
CASES = [
    replace(BASE, weight_format="fp8", hidden=160, inner=144, layout="up_first", bias=True),
    replace(BASE, weight_format="nvfp4", inner=96, layout="interleaved"),
    replace(BASE, weight_format="mxfp4", inner=64, layout="separate", routing="none"),
    replace(BASE, weight_format="int4", inner=64, layout="plain", activation="relu_squared"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.weight_format)
def test_dequantised_weights_compute_the_op(case):
    a = moe.sample_inputs(case)
    problem = moe_problem(a)
    plan = plan_moe(problem, 2048, SMALL_SM100)
    assert plan.decode
    tiles = GemmConfig(64, 32, 32, 4, 2)
    order = plan_moe(problem, case.num_tokens, SMALL_SM100).order
    plan = replace(plan, up=tiles, down=tiles, order=order)
    machine = Interpreter()
    out = drive(fused_moe_steps(a, SMALL_SM100, plan), machine).outcome.result
    assert machine.kernels.count("dequantize_experts") == (2 if a.up_weight is None else 3)
    wrong = moe.OP.tolerances[case.dtype].problem(out, moe.reference(as_double(a)))
    assert wrong is None, wrong


@pytest.mark.parametrize("name", DECODED_ROWS)
def test_few_rows_are_decoded_in_the_gemm(name):
    problem = moe_problem(moe.sample_inputs(replace(BASE, weight_format=name, inner=96)))
    problem = replace(problem, num_experts=8, num_slots=2)
    for target in TARGETS.values():
        assert not plan_moe(problem, 64, target).decode
        assert plan_moe(problem, 4096, target).decode


def test_layers_that_take_too_much_memory_stay_codes():
    problem = moe_problem(moe.sample_inputs(CASES[0]))
    assert decodable(problem)
    large = replace(problem, num_experts=1 + DECODED_BYTES // (2 * 3 * 160 * 144))
    assert not decodable(large)
    assert not plan_moe(large, 2**20, TARGETS["sm90"]).decode


def test_dense_weights_need_no_decoding():
    assert not decodable(moe_problem(moe.sample_inputs(BASE)))


def test_rows_that_tma_cannot_step_through_stay_codes():
    """Rows of codes may have gaps between them, which TMA cannot step through. Rows of decoded
    numbers may not."""
    problem = moe_problem(moe.sample_inputs(replace(BASE, weight_format="fp8", inner=96)))
    assert decodable(problem)
    assert not decodable(replace(problem, hidden=36))
