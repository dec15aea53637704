"""Tests the steps of linears without a GPU: tiles of every kind, parts of a sum, repeated calls,
and the part that the library computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret
from tests.tables import all_pairs
from tilewright.codegen.mlp.kernels import LinearConfig
from tilewright.codegen.mlp.plan import MOST_TOKENS
from tilewright.codegen.targets import SM100
from tilewright.ops.checks import ArgumentError
from tilewright.ops.contract import Tolerance
from tilewright.ops.mlp import linear_activation, linear_residual
from tilewright.ops.mlp.cases import LinearCase
from tilewright.ops.mlp.lowering import linear_activation_steps, linear_residual_steps
from tilewright.ops.runtime.program import Launch, Library, SplitK, drive
from tilewright.ops.runtime.replay import repeat

UP = LinearCase("up", layout="separate", k=328, n=72, bias=True, norm="rms")
DOWN = LinearCase("down", k=328, n=72, bias=True, scale=0.5)
# The first four numbers of a tile are its rows, tokens, columns and parts of K. Some tiles are
# larger than the problem in every dimension, and others divide it.
CONFIGS = [
    LinearConfig(16, 16, 64, 1, 4, 2),
    LinearConfig(64, 16, 64, 3, 4, 2),
    LinearConfig(32, 16, 128, 2, 4, 3, prefetch=128, lets_in=True),
    LinearConfig(16, 16, 16, 5, 4, 2),
    # A part of K that begins past the last column.
    LinearConfig(64, 16, 128, 5, 4, 2),
]


def close(module, a, result):
    tolerance = module.OP.tolerances[a.x.dtype]
    problem = replace(tolerance, relative=2 * tolerance.relative).problem(
        result, module.reference(a)
    )
    assert problem is None, problem


@pytest.mark.parametrize(
    ("config", "tokens", "op"),
    all_pairs(
        CONFIGS,
        [1, 5, 40],
        {
            "activation": (linear_activation, linear_activation_steps, UP),
            "residual": (linear_residual, linear_residual_steps, DOWN),
        },
    ),
)
def test_tiles(op, tokens, config):
    """The memory of results holds NaN before the call. More tokens than a tile holds need several
    tiles."""
    module, steps, case = op
    a = module.sample_inputs(replace(case, num_tokens=tokens))
    machine = Interpreter()
    program = drive(steps(a, machine.target, config), machine)
    close(module, a, program.outcome.result)
    for step, answer in program.steps:
        if isinstance(step, SplitK):
            assert (answer[1] == 0).all()  # ready for the next launch


@pytest.mark.parametrize(("n", "k"), [(64, 80), (72, 64), (72, 80)])
def test_what_lies_behind_rows_and_columns_is_not_read(n, k):
    """Nothing outside the rows and columns is read: the weight is surrounded by NaN. Its rows, its
    columns or both fill no whole tile."""
    a = linear_residual.sample_inputs(LinearCase("tiles", k=k, n=n, num_tokens=2))
    around = torch.full((n + 64, k + 64), torch.nan, dtype=a.weight.dtype)
    around[:n, :k] = a.weight
    given = replace(a, weight=around[:n, :k])
    machine = Interpreter()
    steps = linear_residual_steps(given, machine.target, LinearConfig(16, 16, 64, 1, 4, 2))
    close(linear_residual, a, drive(steps, machine).outcome.result)


@pytest.mark.parametrize("name", ["split", "awq"])
def test_gate_and_up_of_sm100(name):
    """Tests the kernel of SM100, in which the second product reads x as a separate value."""
    case = next(case for case in linear_activation.OP.cases if case.name == name)
    a = linear_activation.sample_inputs(replace(case, num_tokens=2))
    (spec,) = linear_activation.OP.plan_for(a, "sm100").specs
    assert spec.constant("APART")
    close(linear_activation, a, interpret(linear_activation.OP, a, SM100).outcome.result)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[1], CONFIGS[3]], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_norm_of_the_result(tokens, config):
    """A separate launch computes the norm. In float16, the sums may leave the range of the dtype
    before the norm."""
    case = replace(DOWN, num_tokens=tokens, norm="rms", dtype=torch.float16)
    a = linear_residual.sample_inputs(case)
    a.weight.mul_(3e4)
    machine = Interpreter()
    program = drive(linear_residual_steps(a, machine.target, config), machine)
    close(linear_residual, a, program.outcome.result)
    launches = [step for step, _ in program.steps if isinstance(step, Launch)]
    assert [step.spec.kernel for step in launches] == ["streamed_linear", "norm_rows"]


@pytest.mark.parametrize("size", ["few", "many"])
@pytest.mark.parametrize(
    ("module", "steps", "case"),
    [
        (linear_activation, linear_activation_steps, UP),
        (linear_residual, linear_residual_steps, DOWN),
    ],
    ids=["activation", "residual"],
)
def test_a_call_made_again_is_the_same_call_over_new_memory(module, steps, case, size):
    tokens = 2 if size == "few" else MOST_TOKENS + 1
    a = module.sample_inputs(replace(case, num_tokens=tokens, k=1096))
    machine = Interpreter()
    program = drive(steps(a, machine.target), machine)
    args, kwargs = module.OP.split(a)
    again = repeat(program, args, kwargs, machine)
    assert again is not None
    kept = program.outcome.result.clone()
    a.x.mul_(0.5).neg_()
    second = again(*args, **kwargs)
    assert torch.equal(program.outcome.result, kept)
    assert torch.equal(second, interpret(module.OP, a).outcome.result)
    assert not torch.equal(second, kept)


@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_many_tokens_with_a_bias_are_rounded_once_more(scale):
    a = linear_residual.sample_inputs(replace(DOWN, num_tokens=MOST_TOKENS + 1, scale=scale))
    program = interpret(linear_residual.OP, a)
    assert [type(step) for step, _ in program.steps if isinstance(step, (Launch, Library))] == [
        Library,
        Library,
    ]
    problem = Tolerance(2.0**-7, 2.0**-7).problem(
        program.outcome.result, linear_residual.reference(a)
    )
    assert problem is None, problem


def test_few_tokens_take_one_kernel_whose_parts_are_for_idle_multiprocessors():
    a = linear_residual.sample_inputs(replace(DOWN, num_tokens=1, n=64, k=4096), "meta")
    (spec,) = linear_residual.OP.plan_for(a, "sm90").specs
    assert spec.constant("SPLIT_K") > 1
    wide = linear_residual.sample_inputs(replace(DOWN, num_tokens=1, n=64 * 400, k=4096), "meta")
    (spec,) = linear_residual.OP.plan_for(wide, "sm90").specs
    assert spec.constant("SPLIT_K") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "no kernel for torch.float32"),
        ({"dtype": torch.float16}, "float16 may overflow"),
        ({"k": 321}, "16 bytes"),
    ],
    ids=str,
)
def test_what_no_kernel_takes(change, reason):
    a = linear_activation.sample_inputs(replace(UP, **change))
    report = linear_activation.OP.plan_for(a, "sm90")
    assert report.name == "reference"
    assert reason in report.reason


def test_float16_without_a_norm_has_a_kernel():
    a = linear_activation.sample_inputs(replace(UP, dtype=torch.float16, norm=""))
    assert linear_activation.OP.plan_for(a, "sm90").specs


def assert_named(op, case, change, argument):
    a = replace(op.sample_inputs(case), **change)
    with pytest.raises(ArgumentError) as raised:
        op.call(a)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"up_weight": None}, "up_bias"),
        ({"rms_norm": False}, "norm_weight"),
        ({"activation": "clamped_swiglu"}, "activation"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"up_weight": torch.zeros(70, 328, dtype=torch.bfloat16)}, "up_weight"),
        ({"bias": torch.zeros(70)}, "bias"),
        ({"norm_weight": torch.zeros(72)}, "norm_weight"),
    ],
    ids=str,
)
def test_bad_arguments_of_an_activation_are_named(change, argument):
    assert_named(linear_activation.OP, UP, change, argument)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"residual": torch.zeros(5, 70, dtype=torch.bfloat16)}, "residual"),
        ({"residual": torch.zeros(5, 72)}, "residual"),
        ({"residual": torch.zeros(72, 5, dtype=torch.bfloat16).t()}, "residual"),
        ({"weight": torch.zeros(72, 320, dtype=torch.bfloat16)}, "weight"),
        ({"scale": float("inf")}, "scale"),
        ({"norm_weight": torch.zeros(72)}, "norm_weight"),
        ({"rms_norm": True, "norm_weight": torch.zeros(70)}, "norm_weight"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_sum_are_named(change, argument):
    assert_named(linear_residual.OP, DOWN, change, argument)


def test_numbers_that_are_no_numbers_stay_so():
    """Infinity and NaN stay in their row: after a norm, the row is NaN, and no other row is."""
    a = linear_activation.sample_inputs(UP)
    a.x[1, 3], a.x[2, 5] = torch.inf, torch.nan
    result = interpret(linear_activation.OP, a).outcome.result
    assert torch.equal(result.isnan(), linear_activation.reference(a).isnan())
    assert result.isnan().all(1).tolist() == [False, True, True, False, False]


def test_one_row_of_a_strided_tensor():
    a = linear_residual.sample_inputs(DOWN)
    held = torch.full((5, 3, 328), torch.nan, dtype=torch.bfloat16)
    held[:, 1] = a.x
    bias = torch.full((72, 2), torch.nan, dtype=torch.bfloat16)
    bias[:, 0] = a.bias
    result = interpret(linear_residual.OP, replace(a, x=held[:, 1], bias=bias[:, 0])).outcome.result
    assert torch.equal(result, interpret(linear_residual.OP, a).outcome.result)
