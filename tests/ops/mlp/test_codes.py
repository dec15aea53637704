"""Weights of codes in the kernels of linears without a GPU: each format in tiles of every kind, and
arguments that say nothing sensible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret
from tilewright.codegen.mlp.kernels import LinearConfig
from tilewright.codegen.mlp.problem import code_step
from tilewright.ops.checks import ArgumentError
from tilewright.ops.formats import fp4
from tilewright.ops.formats.quantized_weight import pack_nibbles
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp.cases import ACTIVATION_CASES, CODED, RESIDUAL_CASES
from tilewright.ops.mlp.lowering import linear_activation_steps, linear_residual_steps
from tilewright.ops.mlp.operands import activation_problem, residual_problem
from tilewright.ops.runtime.program import drive

OPS = {
    "activation": (
        linear_activation,
        linear_activation_steps,
        activation_problem,
        ACTIVATION_CASES,
    ),
    "residual": (linear_residual, linear_residual_steps, residual_problem, RESIDUAL_CASES),
}
# Rows, tokens and parts, and whether steps are as long as the scales allow, or half as long.
TILES = [(64, 16, 3, 1), (32, 16, 1, 2)]


def coded_case(cases, name):
    return next(case for case in cases if case.name == name and case.weight_format != "dense")


@pytest.mark.parametrize(
    ("which", "name", "tiles"),
    [
        pytest.param(which, name, TILES[(row + column) % 2], id=f"{which}-{name}")
        for row, which in enumerate(OPS)
        for column, name in enumerate(name for name in CODED if name != "odd_groups")
    ],
)
def test_tiles(which, name, tiles):
    """All pairs of an op, a format and tiles, on memory that holds NaN before."""
    module, steps, problem_of, cases = OPS[which]
    a = module.sample_inputs(coded_case(cases, name))
    q, (rows, tokens, parts, divisor) = problem_of(a).quantization, tiles
    block_k = code_step(q, a.x.shape[1])
    if q.step_fits(a.x.shape[1], block_k // divisor):
        block_k //= divisor
    config = LinearConfig(rows, tokens, block_k, parts, 4, 2, prefetch=64, lets_in=True)
    machine = Interpreter()
    program = drive(steps(a, machine.target, config), machine)
    tolerance = module.OP.tolerances[a.x.dtype]
    allowed = replace(tolerance, relative=2 * tolerance.relative)
    problem = allowed.problem(program.outcome.result, module.reference(a))
    assert problem is None, problem


@pytest.mark.parametrize("name", ["nvfp4_factor", "int8_factor", "mxfp4"])
def test_a_factor_is_that_of_all_scales(name):
    """A weight with a factor, and one with all its scales multiplied by it: a power of two, which
    changes no rounding."""
    for module, cases in ((linear_activation, ACTIVATION_CASES), (linear_residual, RESIDUAL_CASES)):
        a = module.sample_inputs(coded_case(cases, name))
        up = {"up_factor": torch.full((1, 1), 0.25)} if module is linear_activation else {}
        given = replace(a, weight_factor=torch.tensor(0.5), **up)
        halved = {"weight_scale": scaled(a.weight_scale, -1)}
        halved |= {"up_scale": scaled(a.up_scale, -2)} if up else {}
        want = replace(a, weight_factor=None, **halved, **dict.fromkeys(up))
        assert torch.equal(module.reference(given), module.reference(want))
        one, other = (interpret(module.OP, a).outcome.result for a in (given, want))
        problem = module.OP.tolerances[a.x.dtype].problem(one, other)
        assert problem is None, problem


def scaled(scale, exponent):
    """Scales multiplied by a power of two, exactly."""
    if scale.dtype == torch.uint8:
        return scale + exponent
    return scale.float() * 2.0**exponent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e2m1_number_by_every_e4m3_scale(dtype):
    """Exact: a token for each code, which it selects, and a row for each scale, which its last
    group has. Not of NaN, which the interpreter takes for 480."""
    codes, k = torch.arange(16), 64
    numbers = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8)
    rows = len(numbers)
    scales = torch.ones(rows, k // 16).to(torch.float8_e4m3fn)
    scales.view(torch.uint8)[:, -1] = numbers
    weight = torch.zeros(rows, k, dtype=torch.long)
    weight[:, -16:] = codes
    a = linear_residual.LinearResidualArguments(
        torch.eye(k, dtype=dtype)[-16:],
        pack_nibbles(weight, torch.uint8, -1),
        torch.zeros(16, rows, dtype=dtype),
        weight_format="nvfp4",
        weight_scale=scales,
        scale_block=[1, 16],
    )
    exact = fp4.decode(codes, torch.float64)[:, None] * scales[:, -1].double()
    found = interpret(linear_residual.OP, a)
    assert dict(found.specs[0].constants)["SCALED"]
    assert torch.equal(found.outcome.result.double(), exact)


@pytest.mark.parametrize("name", ["int8", "int4_in_bytes", "awq"])
def test_numbers_are_those_of_the_dense_weight(name):
    """The reference, against the op with the weight dequantised by hand in float64."""
    a = linear_residual.sample_inputs(coded_case(RESIDUAL_CASES, name))
    made = a.linear.dequantize(torch.float64)
    wide = linear_residual.LinearResidualArguments(
        a.x.double(), made, a.residual.double(), bias=None if a.bias is None else a.bias.float()
    )
    found, wanted = linear_residual.reference(a), linear_residual.reference(wide)
    assert (found.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_scales_of_odd_columns_have_no_kernel():
    a = linear_residual.sample_inputs(coded_case(RESIDUAL_CASES, "odd_groups"))
    report = linear_residual.OP.plan_for(a, "sm90")
    assert report.name == "reference"
    assert "scales of 24 columns" in report.reason


def test_a_row_of_several_tensors_of_codes():
    """Halves of one tensor, the scales too."""
    a = linear_activation.sample_inputs(coded_case(ACTIVATION_CASES, "fp8"))
    words = torch.cat((a.weight, a.up_weight)).chunk(2)
    scales = torch.cat((a.weight_scale, a.up_scale)).chunk(2)
    packed = replace(
        a, weight=words[0], up_weight=words[1], weight_scale=scales[0], up_scale=scales[1]
    )
    results = [interpret(linear_activation.OP, one).outcome.result for one in (a, packed)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"weight_format": "int3"}, "weight_format"),
        ({"weight_format": "int8"}, "weight"),
        ({"weight_format": "dense"}, "scale_block"),
        ({"weight_scale": None}, "weight_scale"),
        ({"weight_scale": torch.ones(3, 2)}, "weight_scale"),
        ({"scale_block": [1]}, "scale_block"),
        ({"scale_block": [1, 7]}, "weight_scale"),
        ({"zero_point": 3}, "zero_point"),
        ({"weight_zero": torch.zeros(80, 1)}, "weight_zero"),
        ({"up_scale": None}, "up_scale"),
        ({"weight_factor": torch.ones(2)}, "weight_factor"),
        ({"up_factor": torch.ones((), dtype=torch.float64)}, "up_factor"),
        ({"weight_factor": torch.ones((), device="meta")}, "weight_factor"),
        ({"up_weight": None, "up_bias": None}, "up_scale"),
        ({"nibble_order": [1, 0]}, "nibble_order"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(change, argument):
    a = linear_activation.sample_inputs(coded_case(ACTIVATION_CASES, "fp8"))
    with pytest.raises(ArgumentError) as raised:
        linear_activation.OP.call(replace(a, **change))
    assert raised.value.argument == argument
