"""Tests quantised weights in the kernels of linears, without a GPU: each format with every kind of
tile, and invalid arguments."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from tests.agreement import relative_error
from tests.interpreted import Interpreter, interpret
from tilewright.codegen.mlp.kernels import DotConfig, LinearConfig
from tilewright.codegen.mlp.plan import MOST_GATED_TOKENS, dot_obstacle
from tilewright.codegen.mlp.problem import code_step
from tilewright.codegen.targets import TARGETS
from tilewright.ops.checks import HALVES, ArgumentError
from tilewright.ops.formats import fp4
from tilewright.ops.formats.quantized_weight import pack_nibbles
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp.cases import ACTIVATION_CASES, CODED, RESIDUAL_CASES
from tilewright.ops.mlp.linear_residual import LinearResidualArguments
from tilewright.ops.mlp.lowering import linear_activation_steps, linear_residual_steps
from tilewright.ops.mlp.operands import activation_problem, residual_problem
from tilewright.ops.runtime.norms import without_norm
from tilewright.ops.runtime.program import Planner, drive

OPS = {
    "activation": (
        linear_activation,
        linear_activation_steps,
        activation_problem,
        ACTIVATION_CASES,
    ),
    "residual": (linear_residual, linear_residual_steps, residual_problem, RESIDUAL_CASES),
}
# Rows, tokens and parts of a tile, and whether its steps are as long as the scales allow (1) or
# half as long (2).
TILES = [(64, 16, 3, 1), (32, 16, 1, 2)]


def coded_case(cases, name):
    return next(case for case in cases if case.name == name and case.weight_format != "dense")


@pytest.mark.parametrize(
    ("which", "name", "tiles", "x_in_order"),
    [
        pytest.param(which, name, TILES[(row + column) % 2], ordered, id=f"{which}-{name}")
        for row, which in enumerate(OPS)
        for column, name in enumerate(name for name in CODED if name != "odd_groups")
        for ordered in [(row + column // 2) % 2 == 1]
    ],
)
def test_tiles(which, name, tiles, x_in_order):
    """The cases are all pairs of an op, a format and tiles. Memory holds NaN before. x is in memory
    order with one op, and permuted by an earlier kernel with the other op."""
    module, steps, problem_of, cases = OPS[which]
    a = module.sample_inputs(coded_case(cases, name))
    q, (rows, tokens, parts, divisor) = problem_of(a).quantization, tiles
    block_k = code_step(q, a.x.shape[1])
    if q.step_fits(a.x.shape[1], block_k // divisor):
        block_k //= divisor
    config = LinearConfig(
        rows, tokens, block_k, parts, 4, 2, prefetch=64, lets_in=True, x_in_order=x_in_order
    )
    machine = Interpreter()
    if x_in_order and problem_of(a).quantization.packed_rows:
        pytest.skip("words hold the codes of several rows, which need no order")
    if x_in_order and which == "activation":
        a = replace(a, **without_norm(a.x, a.norm))
    program = drive(steps(a, machine.target, config), machine)
    tolerance = module.OP.tolerances[a.x.dtype]
    allowed = replace(tolerance, relative=2 * tolerance.relative)
    problem = allowed.problem(program.outcome.result, module.reference(a))
    assert problem is None, problem


DOTTED = [
    (which, case.name)
    for which, (module, _, problem_of, cases) in OPS.items()
    for case in cases
    if case.weight_format != "dense"
    and case.dtype in HALVES
    and dot_obstacle(problem_of(module.sample_inputs(case, "meta")), 1) is None
]


@pytest.mark.parametrize(("which", "name"), DOTTED)
def test_dot_products(which, name):
    """Tests every format that is multiplied without tensor cores. The last step is not whole. Each
    token has its own program, so two tokens are enough."""
    module, steps, problem_of, cases = OPS[which]
    case = coded_case(cases, name)
    a = module.sample_inputs(replace(case, num_tokens=min(case.num_tokens, 2)))
    q = problem_of(a).quantization
    config = DotConfig(16, 4 * q.dot_run * q.per_int32, num_warps=4)
    machine = Interpreter()
    made = drive(steps(a, machine.target, config), machine).outcome.result
    problem = module.OP.tolerances[a.x.dtype].problem(made, module.reference(a))
    assert problem is None, problem


def test_dot_products_read_words_that_lie_apart():
    """The words of a row need not be adjacent: the kernel takes their stride. The plan keeps them
    adjacent."""
    a = linear_residual.sample_inputs(replace(coded_case(RESIDUAL_CASES, "int4"), num_tokens=1))
    spread = a.weight.new_full((a.weight.shape[0], 2 * a.weight.shape[1]), -1)
    spread[:, ::2] = a.weight
    a = replace(a, weight=spread[:, ::2])
    _, steps, problem_of, _ = OPS["residual"]
    assert dot_obstacle(problem_of(a), 1) == "the weight is contiguous along N, not along K"
    q = problem_of(a).quantization
    config = DotConfig(16, 4 * q.dot_run * q.per_int32, num_warps=4)
    machine = Interpreter()
    made = drive(steps(a, machine.target, config), machine).outcome.result
    tolerance = linear_residual.OP.tolerances[a.x.dtype]
    assert tolerance.problem(made, linear_residual.reference(a)) is None


def test_one_token_is_multiplied_by_dot_products():
    kernels = {}
    for tokens in (1, 2):
        a = linear_residual.sample_inputs(
            replace(coded_case(RESIDUAL_CASES, "int4"), num_tokens=tokens)
        )
        program = drive(linear_residual_steps(a, TARGETS["sm100"]), Planner(TARGETS["sm100"]))
        kernels[tokens] = [spec.kernel for spec in program.specs]
    assert kernels == {1: ["dotted_linear"], 2: ["streamed_linear"]}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_what_is_no_number_stays_none_in_integers(name, bad):
    """Infinity and NaN in x stay infinity or NaN, although integers have none. If a run of x
    contains one, the sums of its rows become NaN."""
    a = linear_residual.sample_inputs(replace(coded_case(RESIDUAL_CASES, name), num_tokens=1))
    a.x[0, 5] = bad
    made = interpret(linear_residual.OP, a).outcome.result
    assert not made.isfinite().any()


def test_numbers_far_below_the_largest_keep_their_digits():
    """Small numbers keep their digits beside one large number in x, whose codes are zero. The
    result is as exact as a sum in fp32."""
    a = linear_residual.sample_inputs(replace(coded_case(RESIDUAL_CASES, "int4"), num_tokens=1))
    a.x.mul_(2.0**-11)
    a.x[0, 3] = 16.0
    codes = a.weight.view(torch.int32)
    codes &= ~(0xF << 12)
    codes |= a.zero_point << 12
    a.residual.zero_()
    made = interpret(linear_residual.OP, a).outcome.result.double()
    exact = linear_residual.reference(replace(a, x=a.x.double(), residual=a.residual.double()))
    assert (made - exact).norm() < 2.0**-8 * exact.norm()


def test_a_zero_that_is_no_code_keeps_the_tensor_cores_kernel():
    """A zero point beyond the codes is left to the tensor core's kernel: 32 codes minus a zero
    point of 20, times equal numbers, would exceed an int32."""
    a = linear_residual.sample_inputs(replace(coded_case(RESIDUAL_CASES, "int4"), num_tokens=1))
    a.x.fill_(1.9921875)
    a.weight.zero_()
    for zero, kernel in ((15, "dotted_linear"), (16, "streamed_linear"), (20, "streamed_linear"),
                         (-8, "streamed_linear")):  # fmt: skip
        given = replace(a, zero_point=zero)
        program = interpret(linear_residual.OP, given)
        assert [spec.kernel for spec in program.specs] == [kernel]
        tolerance = linear_residual.OP.tolerances[a.x.dtype]
        problem = tolerance.problem(program.outcome.result, linear_residual.reference(given))
        assert problem is None, problem


@pytest.mark.parametrize("tokens", [2, MOST_GATED_TOKENS + 1])
@pytest.mark.parametrize("name", ["int4", "fp8_blocks", "nvfp4_factor", "mxfp4"])
def test_x_of_several_tokens_is_ordered_once_for_both_weights(name, tokens):
    a = linear_activation.sample_inputs(
        replace(coded_case(ACTIVATION_CASES, name), num_tokens=tokens)
    )
    normed = replace(a, rms_norm=True, norm_weight=torch.randn(a.x.shape[1], dtype=a.x.dtype))
    for first, given in (("order_x", replace(a, rms_norm=False)), ("norm_x", normed)):
        program = interpret(linear_activation.OP, given)
        assert [spec.kernel for spec in program.specs] == [first, "streamed_linear"]
        tolerance = linear_activation.OP.tolerances[a.x.dtype]
        problem = tolerance.problem(program.outcome.result, linear_activation.reference(given))
        assert problem is None, problem


def test_codes_of_several_rows_are_multiplied_by_each_weight_alone():
    """Words that hold the codes of several rows are decoded in memory order, so each weight has a
    separate product."""
    case = replace(coded_case(ACTIVATION_CASES, "awq"), num_tokens=MOST_GATED_TOKENS + 1)
    a = linear_activation.sample_inputs(case)
    program = interpret(linear_activation.OP, a)
    kernels = [spec.kernel for spec in program.specs]
    assert kernels[-3:] == ["streamed_linear", "streamed_linear", "activate_products"]
    tolerance = linear_activation.OP.tolerances[a.x.dtype]
    problem = tolerance.problem(program.outcome.result, linear_activation.reference(a))
    assert problem is None, problem


def test_a_gate_with_contiguous_rows_leaves_the_order_of_x_to_its_up_projection():
    case = coded_case(ACTIVATION_CASES, "int8")
    a = linear_activation.sample_inputs(replace(case, num_tokens=MOST_GATED_TOKENS + 1))
    a = replace(a, weight=a.weight.t().contiguous().t())
    program = interpret(linear_activation.OP, a)
    kernels = [spec.kernel for spec in program.specs]
    assert kernels == ["streamed_linear", "order_x", "streamed_linear", "activate_products"]
    tolerance = linear_activation.OP.tolerances[a.x.dtype]
    problem = tolerance.problem(program.outcome.result, linear_activation.reference(a))
    assert problem is None, problem


@pytest.mark.parametrize("name", ["nvfp4_factor", "int8_factor", "mxfp4"])
def test_a_factor_is_that_of_all_scales(name):
    """One weight has a factor. In another weight, all scales are multiplied by this factor instead.
    The results are equal, because the factor is a power of two, which changes no rounding."""
    for module, cases in ((linear_activation, ACTIVATION_CASES), (linear_residual, RESIDUAL_CASES)):
        a = module.sample_inputs(replace(coded_case(cases, name), num_tokens=2))
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
    """Returns scales multiplied exactly by a power of two."""
    if scale.dtype == torch.uint8:
        return scale + exponent
    return scale.float() * 2.0**exponent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e2m1_number_by_every_e4m3_scale(dtype):
    """The products are exact. Each token selects one code, and each row has one of the scales in
    its last group. NaN is left out, because the interpreter takes it for 480."""
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
    """Compares the op's reference on codes with the op on the dense weight, which is decoded by
    hand in float64."""
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
    assert "the number of columns that share a scale is 24" in report.reason


def test_a_row_of_several_tensors_of_codes():
    """The tensors are halves of one tensor, and so are their scales."""
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


def test_bytes_that_fill_no_words_are_not_dotted():
    """Bytes that do not fill words are not multiplied by dot products. Codes in words of eight need
    no alignment of bytes."""
    for per_int32, whole, said in (
        *((4, False, "the codes do not form whole 32-bit words"), (4, True, None)),
        *((8, False, None), (8, True, None)),
    ):
        codes = SimpleNamespace(per_int32=per_int32, dot_obstacle=lambda k: None)
        problem = SimpleNamespace(quantization=codes, norm=None, k_major=True, k=64)
        assert dot_obstacle(problem, 1, whole) == said


@pytest.mark.parametrize("powers", [True, False])
def test_decoded_activations_cost_at_most_one_rounding_more_than_codes(powers):
    """An op without scales of x reads float8 activations as numbers of bfloat16. Codes times powers
    of two are such numbers. Other numbers are rounded, which costs less than the rounding of the
    weight in a graph that decodes it. A library that multiplies codes by codes rounds neither."""
    generator = torch.Generator().manual_seed(5)
    x, codes = torch.randn(16, 512, generator=generator), torch.randn(64, 512, generator=generator)
    codes, scale = codes.mul(60).to(torch.float8_e4m3fn), torch.rand(1, 4, generator=generator)
    x_scale = x.unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True) / 448
    x_scale = x_scale.log2().ceil().exp2() if powers else x_scale
    x_codes = (x.unflatten(-1, (4, 128)) / x_scale).to(torch.float8_e4m3fn)
    numbers = (x_codes.double() * x_scale.double()).flatten(-2)
    weight = codes.double() * scale.double().repeat_interleave(128, 1)
    exact = numbers @ weight.T
    a = LinearResidualArguments(
        (x_codes.float() * x_scale).flatten(-2).bfloat16(),
        codes,
        torch.zeros(16, 64, dtype=torch.bfloat16),
        weight_format="fp8",
        weight_scale=scale,
        scale_block=[64, 128],
    )
    made = interpret(linear_residual.OP, a).outcome.result
    graph = linear(a.x, weight.bfloat16())
    by_library = relative_error(exact.bfloat16(), exact)
    assert relative_error(made, exact) < relative_error(graph, exact)
    if powers:
        assert torch.equal(a.x.double(), numbers)
        assert relative_error(made, exact) < 1.01 * by_library
    else:
        assert 1.1 * by_library < relative_error(made, exact) < 1.5 * by_library
