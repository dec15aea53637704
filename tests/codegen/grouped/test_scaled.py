"""Tests products of codes with codes: the emitted kernels for e4m3 activations are compared with
the ops' references on Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.experts import ONE_ROUNDING, SMALL_SM100, as_double
from tests.interpreted import Interpreter
from tilewright.codegen.grouped.kernels import (
    QUANTIZE_ROWS,
    quantize_rows_grid,
    quantize_rows_statics,
)
from tilewright.codegen.grouped.plan import GroupedPlan
from tilewright.codegen.grouped.tiles import QuantizeConfig, ScaledConfig
from tilewright.codegen.moe.dots import MOST_TOKENS
from tilewright.codegen.moe.plan import plan_moe
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.contract import Tolerance
from tilewright.ops.formats import fp8_block
from tilewright.ops.grouped.cases import GROUPED_CASES
from tilewright.ops.grouped.lowering import grouped_matmul_steps
from tilewright.ops.grouped.matmul import reference, sample_inputs
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.operands import moe_problem
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import drive

SWAPPED = ScaledConfig(16, 64, 128, 4, 2, swapped=True)
TILED = ScaledConfig(64, 64, 128, 4, 2)
HALVES = ScaledConfig(64, 256, 128, 8, 2, parts=2)
# The reference computes in the same dtype, because the hidden row and the result are both rounded,
# and may otherwise be rounded differently.
TWO_ROUNDINGS = {
    torch.bfloat16: Tolerance(2.0**-7, 2.0**-6), torch.float16: Tolerance(2.0**-10, 2.0**-9),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_quantised_to_the_bit(dtype):
    """The rows contain zeros, subnormal blocks, saturated numbers, columns that fill no block, and
    a number of rows that no tile divides."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] *= 60000.0 / float(x[0].abs().max())
    x[1, :128] = 0
    x[2, 128:256] = 2.0**-20 if dtype == torch.float16 else 2.0**-130
    x[3, 5] = 448.0
    codes = torch.full((5, 384), 9.0).to(torch.float8_e4m3fn)
    scales = torch.full((5, 3), -1.0)
    config = QuantizeConfig(2, 256, 4)
    values = {"x": x, "codes": codes, "scale": scales, "num_rows": 5}
    statics, grid = quantize_rows_statics(300, config), quantize_rows_grid(300, config, 5)
    Interpreter(SM100).perform(launch(QUANTIZE_ROWS, SM100, grid, values, statics))
    want, want_scales = fp8_block.quantize_rows(x)
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes[:, :300].view(torch.uint8), want.view(torch.uint8))
    assert not codes[:, 300:].float().any()


@pytest.mark.parametrize(
    ("config", "experts"),
    [(SWAPPED, None), (SWAPPED, (3, 1, 0, 3, -1)), (TILED, None), (HALVES, (4, 2, 2, 0, 1))],
    ids=str,
)
def test_grouped_codes_by_codes(config, experts):
    a = sample_inputs(replace(next(c for c in GROUPED_CASES if c.coded_rows), ids=experts))
    steps = grouped_matmul_steps(a, SMALL_SM100, GroupedPlan(config, None, ""))
    program = drive(steps, Interpreter())
    assert [spec.kernel for spec in program.specs] == ["grouped_scaled"]
    exact = reference(as_double(a))
    problem = ONE_ROUNDING[a.result_dtype].problem(program.outcome.result, exact)
    assert problem is None, problem


BASE = MoeCase("base", weight_format="fp8", activation_format="fp8", hidden=160, inner=144)
CODES = replace(TILED, block_n=128, codes=True)
CASES = [
    (BASE, SWAPPED, SWAPPED),
    (replace(BASE, layout="interleaved", inner=256, bias=True, activation="clamped_swiglu",
             limit=1.0), CODES, HALVES),
    (replace(BASE, layout="plain", bias=True, activation="relu_squared"), CODES, TILED),
    (replace(BASE, layout="up_first", inner=128, dtype=torch.float16), TILED, HALVES),
    (replace(BASE, layout="separate", routing="none"), CODES, SWAPPED),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "up", "down"), CASES, ids=lambda item: getattr(item, "layout", "")
)
def test_kernels_compute_the_op(case, up, down):
    a = moe.sample_inputs(case)
    plan = replace(plan_moe(moe_problem(a), 8, SM90), up=up, down=down)
    program = drive(fused_moe_steps(a, SMALL_SM100, plan), Interpreter())
    kernels = [spec.kernel for spec in program.specs]
    assert kernels.count("quantize_rows") == (1 if up.codes else 2)
    wrong = TWO_ROUNDINGS[case.dtype].problem(program.outcome.result, moe.reference(a))
    assert wrong is None, wrong


def test_activations_of_the_graph_are_codes_for_fp8_weights_alone():
    a = moe.sample_inputs(MoeCase("dense"))
    for bad in (
        replace(a, activation_format="fp8"),
        replace(moe.sample_inputs(replace(BASE, weight_format="nvfp4")), activation_format="fp8"),
        replace(a, activation_format="int8"),
    ):
        with pytest.raises(moe.ArgumentError, match=r"^fused_moe: activation_format: "):
            moe.OP.call(bad)


def test_a_call_is_planned_for_both_chips():
    for target in ("sm90", "sm100"):
        few = moe.OP.plan_for(moe.sample_inputs(replace(BASE, num_tokens=1)), target)
        assert few.name == "dot products"
        for tokens in (MOST_TOKENS["fp8"] + 1, 100, 2000):
            a = moe.sample_inputs(replace(BASE, num_tokens=tokens))
            report = moe.OP.plan_for(a, target)
            assert report.name == "grouped kernels"
            assert report.specs[0].kernel == "quantize_rows"
