"""Tests the layer norm of x in front of a linear.

The norm uses the statistics of whole rows, and rounds once before the product. If the kernel cannot
compute the norm, a separate step does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import in_float64, relative_error
from tests.interpreted import Interpreter, interpret
from tilewright.codegen.mlp.kernels import LinearConfig
from tilewright.codegen.mlp.plan import MOST_LAYER_NORMED_TOKENS, MOST_TOKENS
from tilewright.codegen.row_norm import MOST_LAYER_COLUMNS
from tilewright.codegen.targets import SM90, SM100
from tilewright.ops.checks import ArgumentError
from tilewright.ops.mlp import linear_activation
from tilewright.ops.mlp.cases import LinearCase
from tilewright.ops.mlp.lowering import linear_activation_steps
from tilewright.ops.runtime.program import Launch, Library, drive

OP = linear_activation.OP
CASE = LinearCase("up", k=328, n=72, bias=True, norm="layer", activation="relu")
# Rows are made from normal numbers as x * size + offset.
ROWS = {
    "plain": (1.0, 0.0),
    "far from zero": (1.0, 1000.0),
    "nearly constant": (1e-2, 1.0),
    "small": (1e-4, 0.0),
    "large": (3e3, 0.0),
}


def sample(**changes):
    return linear_activation.sample_inputs(replace(CASE, **changes))


def exactly(a):
    return OP.reference(in_float64(a))


def run(a, config, machine=None):
    machine = machine or Interpreter()
    return drive(linear_activation_steps(a, machine.target, config), machine)


def graph(a):
    x, weight = a.x, a.norm_weight
    if weight is not None and a.norm_offset:
        weight = weight + a.norm_offset
    normed = F.layer_norm(x, x.shape[-1:], weight, a.norm_bias, a.norm_eps)
    return F.relu(F.linear(normed, a.weight, a.bias))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(rows, torch.bfloat16) for rows in ROWS]
    + [(rows, torch.float16) for rows in ("far from zero", "large")],
    ids=str,
)
def test_the_kernel_is_no_less_accurate_than_the_graph(rows, dtype):
    """The columns fill no tile and are no power of two; a tile has sixteen rows. The kernel and the
    graph round at the same places, but their sums differ in the last digits of float32. So either
    error may be smaller by a few hundredths."""
    size, offset = ROWS[rows]
    ours, theirs = [], []
    for seed, norm in enumerate(("layer", "layer_unbiased", "layer_bare", "layer")):
        case = replace(CASE, dtype=dtype, norm=norm, num_tokens=16, k=1096)
        a = OP.sample_inputs(case, "cpu", seed)
        a.x.mul_(size).add_(offset)
        exact = exactly(a)
        result = run(a, LinearConfig(64, 16, 128, 2, 4, 2)).outcome.result
        ours.append(relative_error(result, exact))
        theirs.append(relative_error(graph(a), exact))
    assert sum(ours) <= 1.02 * sum(theirs)


def test_float32_rows_far_from_zero_keep_their_variance():
    """Tests float32 rows far from zero, whose variance must not be lost. No kernel supports
    float32, so the reference runs."""
    a = sample(dtype=torch.float32, num_tokens=3)
    a.x.add_(1000)
    program = OP.call(a)
    assert relative_error(program, exactly(a)) <= 1.5 * relative_error(graph(a), exactly(a))


def test_a_constant_row_is_the_norm_s_bias():
    a = sample(num_tokens=2)
    a.x.copy_(torch.tensor([[3.0], [-700.0]]))
    expected = F.relu(F.linear(a.norm_bias.float(), a.weight.float(), a.bias.float()))
    result = run(a, LinearConfig(16, 16, 64, 1, 4, 2)).outcome.result
    torch.testing.assert_close(result.float(), expected.expand(2, -1), rtol=2**-7, atol=2**-7)


TILES = [
    LinearConfig(64, 16, 64, 3, 4, 2),
    LinearConfig(32, 16, 128, 2, 4, 3, prefetch=128, lets_in=True),
    # A part that begins past the last column.
    LinearConfig(64, 16, 128, 5, 4, 2),
]


@pytest.mark.parametrize(
    ("layout", "tokens", "config"),
    [
        (("plain", "separate")[(row + column) % 2], tokens, config)
        for row, tokens in enumerate((1, 5, 20))
        for column, config in enumerate(TILES)
    ],
    ids=str,
)
def test_tiles(layout, tokens, config):
    """The cases are all pairs of a layout, a number of tokens and tiles. The memory of results
    holds NaN before the call. More tokens than a tile holds need several tiles."""
    a = sample(layout=layout, num_tokens=tokens, norm_offset=1.0)
    problem = OP.tolerances[a.x.dtype].problem(run(a, config).outcome.result, OP.reference(a))
    assert problem is None, problem


def test_rows_and_vectors_of_other_strides():
    a = sample(num_tokens=3)
    held = torch.full((3, 2, 328), torch.nan, dtype=torch.bfloat16)
    held[:, 1] = a.x
    vectors = torch.full((328, 3), torch.nan, dtype=torch.bfloat16)
    vectors[:, 0], vectors[:, 2] = a.norm_weight, a.norm_bias
    strided = replace(a, x=held[:, 1], norm_weight=vectors[:, 0], norm_bias=vectors[:, 2])
    config = LinearConfig(16, 16, 64, 1, 4, 2)
    assert torch.equal(run(strided, config).outcome.result, run(a, config).outcome.result)


def test_numbers_that_are_no_numbers_stay_so():
    """Infinity and NaN stay in their row: after a norm, the row is NaN, and no other row is."""
    a = sample(num_tokens=5)
    a.x[1, 3], a.x[2, 5] = torch.inf, torch.nan
    result = run(replace(a, activation="gelu"), LinearConfig(16, 16, 64, 2, 4, 2)).outcome.result
    assert result.isnan().all(1).tolist() == [False, True, True, False, False]
    assert not result[[0, 3, 4]].isnan().any()


FEW = {"num_tokens": MOST_LAYER_NORMED_TOKENS}


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        (FEW, True),
        ({**FEW, "dtype": torch.float16, "norm": "layer_bare"}, True),
        ({**FEW, "weight_format": "int8", "scale_block": (1, 328)}, True),
        ({**FEW, "k": MOST_LAYER_COLUMNS + 8, "n": 8}, False),
        ({"num_tokens": MOST_LAYER_NORMED_TOKENS + 1}, False),
        ({"num_tokens": MOST_TOKENS + 1}, False),
    ],
    ids=["few", "float16", "codes", "long rows", "some tokens", "many tokens"],
)
def test_which_kernel_norms(changes, inside, target):
    """If the kernel does not compute the norm of x, another kernel does, or PyTorch does if rows
    are long. What remains is the call without a norm."""
    a = sample(**changes)
    program = interpret(OP, a, target)
    steps = [step for step, _ in program.steps if isinstance(step, (Launch, Library))]
    first = steps[0].spec.kernel if isinstance(steps[0], Launch) else "library"
    assert (first in ("norm_x", "library")) != inside
    assert any("LAYER_ROW" in dict(spec.constants) for spec in program.specs) == inside
    if not inside:
        plain = replace(a, layer_norm=False, norm_weight=None, norm_bias=None)
        assert (first == "library") == (a.x.shape[1] > MOST_LAYER_COLUMNS)
        bare = program.specs[first == "norm_x" :]
        assert bare == interpret(OP, plain, target).specs
    assert relative_error(program.outcome.result, exactly(a)) < 2.0**-6


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"rms_norm": True}, "layer_norm"),
        ({"layer_norm": False, "norm_weight": None}, "norm_bias"),
        ({"layer_norm": False, "norm_weight": None, "rms_norm": True}, "norm_bias"),
        ({"norm_bias": torch.zeros(72)}, "norm_bias"),
        ({"norm_bias": torch.zeros(328, dtype=torch.float64)}, "norm_bias"),
    ],
    ids=["both", "no norm", "rms", "shape", "dtype"],
)
def test_bad_arguments_are_named(change, argument):
    with pytest.raises(ArgumentError) as raised:
        OP.call(replace(sample(), **change))
    assert raised.value.argument == argument
