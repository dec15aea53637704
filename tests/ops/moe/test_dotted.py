"""Tests `fused_moe` of a few tokens by dot products on the interpreter.

The tests cover formats, activations, tiles, routes without an expert, NaN and infinity, and calls
that still use the tensor core.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.experts import as_double
from tests.interpreted import Interpreter, interpret
from tests.tables import in_turn
from tilewright.codegen.moe import dots
from tilewright.codegen.moe.dots import DotTiles, dots_obstacle, plan_dots
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.operands import moe_problem
from tilewright.ops.runtime.program import drive

KERNELS = ["moe_up_dotted", "moe_down_dotted"]
# A case whose inner and hidden rows do not fill a tile, and whose columns do not fill a step.
BASE = MoeCase("base", num_tokens=1, hidden=72, inner=40, num_experts=4, num_slots=2)
GPT_OSS = {"layout": "interleaved", "activation": "clamped_swiglu", "limit": 1.0, "bias": True}
CODED = {"weight_format": "fp8", "activation_format": "fp8", "hidden": 176, "inner": 144}
CASES = {
    "dense": BASE,
    "dense fp16": replace(BASE, dtype=torch.float16, activation="gelu", layout="separate"),
    "dense gpt-oss": replace(BASE, **GPT_OSS),
    "dense plain": replace(BASE, layout="plain", activation="relu_squared", bias=True),
    "dense up first": replace(BASE, layout="up_first", activation="gelu_tanh", limit=0.5),
    "fp8": replace(BASE, weight_format="fp8", hidden=144, inner=80, bias=True),
    "fp8 by codes": replace(BASE, **CODED),
    "fp8 by codes gpt-oss": replace(BASE, **GPT_OSS, **CODED),
    "fp8 by codes plain": replace(BASE, layout="plain", activation="relu", **CODED),
    "int4": replace(BASE, weight_format="int4", hidden=128, inner=64),
    "int4 fp16": replace(BASE, weight_format="int4", hidden=128, inner=64, dtype=torch.float16,
                         bias=True, layout="separate"),
    "int4 plain": replace(BASE, weight_format="int4", hidden=128, inner=64, layout="plain",
                          activation="gelu"),
    "nvfp4": replace(BASE, weight_format="nvfp4", hidden=96, inner=64, bias=True),
    "nvfp4 fp16": replace(BASE, weight_format="nvfp4", hidden=96, inner=64,
                          dtype=torch.float16, layout="up_first"),
    "mxfp4": replace(BASE, weight_format="mxfp4", hidden=96, inner=64, **GPT_OSS),
    "mxfp4 fp16": replace(BASE, weight_format="mxfp4", hidden=96, inner=64,
                          dtype=torch.float16, layout="separate"),
}  # fmt: skip


def problem_of(result, a):
    """Returns a description of what is wrong with a result, or None if the result is as the op
    declares.

    Codes of hidden numbers depend on the last bits of these numbers. Such results are compared with
    the op's own precision.
    """
    exact = (
        moe.reference(a).double() if a.activation_format == "fp8" else moe.reference(as_double(a))
    )
    return moe.OP.tolerances[a.x.dtype].problem(result, exact)


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_multiplied_by_two_kernels(name):
    a = moe.sample_inputs(CASES[name], seed=3)
    run = interpret(moe.OP, a)
    assert [spec.kernel for spec in run.specs] == KERNELS
    problem = problem_of(run.outcome.result, a)
    assert problem is None, problem


@pytest.mark.parametrize("routing", ["none", "one"])
@pytest.mark.parametrize("name", ["dense", "fp8 by codes", "mxfp4"])
def test_routes_without_an_expert_and_of_one_expert(name, routing):
    """Tests routes without an expert, whose hidden rows are never written. They hold NaN here."""
    a = moe.sample_inputs(replace(CASES[name], routing=routing))
    result = interpret(moe.OP, a).outcome.result
    problem = problem_of(result, a)
    assert problem is None, problem


def test_a_token_without_experts_is_zero():
    a = moe.sample_inputs(CASES["nvfp4"])
    a = replace(a, expert_ids=torch.full_like(a.expert_ids, -1))
    a.expert_weights.fill_(math.nan)
    assert torch.equal(interpret(moe.OP, a).outcome.result, torch.zeros_like(a.x))


def tiled(a, plan):
    machine = Interpreter()
    program = drive(fused_moe_steps(a, machine.target, plan), machine)
    assert machine.kernels == KERNELS
    return program.outcome.result


TILES = {
    "short steps": (DotTiles(8, 128, 1, early=False), DotTiles(16, 128, 2, early=False)),
    "all slots": (DotTiles(16, 512, 4), DotTiles(16, 256, 4, 4)),
    "two slots": (DotTiles(16, 256, 8), DotTiles(16, 256, 4, 2)),
}


NAMES = ["dense gpt-oss", "fp8 by codes", "int4", "nvfp4", "mxfp4"]


@pytest.mark.parametrize(
    ("name", "tiles"),
    [*in_turn(NAMES, list(TILES)), ("mxfp4", "short steps"), ("int4", "all slots")],
)
def test_any_tiles_take_any_number_of_tokens(name, tiles, monkeypatch):
    """Three slots do not fill a tile of two or four."""
    monkeypatch.setattr(dots, "MOST_TOKENS", dict.fromkeys(dots.MOST_TOKENS, 4))
    a = moe.sample_inputs(replace(CASES[name], num_tokens=2, num_slots=3))
    up, down = TILES[tiles]
    plan = replace(plan_dots(moe_problem(a), 1), up=up, down=down)
    problem = problem_of(tiled(a, plan), a)
    assert problem is None, problem


def rescaled(a, block, scale_dtype):
    """Returns the call with scales for other rows and columns of fp8 or int4."""
    made = {"scale_block": list(block)}
    for name in ("gate", "up", "down"):
        weight: ExpertWeight = getattr(a, name)
        experts, rows, columns = weight.shape
        shape = (experts, -(-rows // block[0]), -(-columns // block[1]))
        scale = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(7))
        made[f"{name}_scale"] = (scale / 64).to(scale_dtype)
    return replace(a, **made)


BLOCKS = {
    "fp8 rows": ("fp8", (1, 128), torch.float32),
    "fp8 tensor": ("fp8", (128, 128), torch.bfloat16),
    "fp8 columns of 32": ("fp8", (64, 32), torch.float32),
    "fp8 columns of 8": ("fp8", (16, 8), torch.bfloat16),
    "int4 rows": ("int4", (1, 128), torch.float32),
    "int4 groups of 16": ("int4", (1, 16), torch.float16),
    "int4 blocks": ("int4", (32, 64), torch.bfloat16),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_of_any_rows_and_columns(name):
    weight_format, block, dtype = BLOCKS[name]
    a = moe.sample_inputs(replace(BASE, weight_format=weight_format, hidden=128, inner=64))
    a = rescaled(a, block, dtype)
    moe.validate(a)
    run = interpret(moe.OP, a)
    assert [spec.kernel for spec in run.specs] == KERNELS
    problem = problem_of(run.outcome.result, a)
    assert problem is None, problem


@pytest.mark.parametrize(
    ("name", "number"),
    in_turn(
        ["dense", "fp8", "fp8 by codes", "int4", "nvfp4", "mxfp4", "int4", "nvfp4"],
        [math.nan, math.inf, -math.inf, math.inf],
    ),
)
def test_numbers_that_are_none_stay_so(name, number):
    a = moe.sample_inputs(CASES[name], seed=3)
    a.x[0, 37] = number
    result = interpret(moe.OP, a).outcome.result
    finite = moe.reference(a).isfinite()
    assert not (result.isfinite() & ~finite).any()
    assert not finite.all()


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_integers_keep_the_digits_of_x_of_any_size(name, size):
    """Integers keep the digits of x, whatever its size is. With a gate of ReLU and no up
    projection, the result is as large as x."""
    plain = {"layout": "plain", "activation": "relu", "bias": False}
    a = moe.sample_inputs(replace(CASES[name], **plain), seed=5)
    a = replace(a, x=(a.x * size).to(a.x.dtype))
    problem = problem_of(interpret(moe.OP, a).outcome.result, a)
    assert problem is None, problem


def test_a_plan_is_chosen_by_tokens_and_format(monkeypatch):
    a = moe.sample_inputs(BASE)
    problem = moe_problem(a)
    assert dots_obstacle(problem, 1) is None
    most = dots.MOST_TOKENS["dense"]
    assert dots_obstacle(problem, most + 1) == f"more than {most} tokens"
    more = moe.sample_inputs(replace(BASE, num_tokens=most + 1))
    assert "moe_up" in [spec.kernel for spec in moe.OP.plan_for(more, "sm90").specs]
    monkeypatch.setattr(dots, "MOST_TOKENS", {})
    assert dots_obstacle(problem, 1) == "more than 0 tokens"


# Maps (experts, experts of a token, tokens) to whether dot products are faster.
OFTEN_READ = {
    "Qwen3-30B-A3B": (128, 8, 4, True),
    "Mixtral, two tokens": (8, 2, 2, True),
    "Mixtral, four tokens": (8, 2, 4, False),
    "every expert": (4, 4, 2, False),
}


@pytest.mark.parametrize("name", OFTEN_READ)
def test_experts_that_several_tokens_choose_are_read_once(name):
    experts, slots, tokens, taken = OFTEN_READ[name]
    problem = replace(moe_problem(moe.sample_inputs(BASE)), num_experts=experts, num_slots=slots)
    assert (dots_obstacle(problem, tokens) is None) == taken


NOT_TAKEN = {
    "the weight is contiguous along N, not along K": replace(BASE, layout="transposed"),
    "runs of 3 words": replace(BASE, weight_format="int4", hidden=96, inner=96),
}


@pytest.mark.parametrize("words", NOT_TAKEN)
def test_other_layouts_keep_the_tensor_cores_kernels(words):
    a = moe.sample_inputs(NOT_TAKEN[words])
    if a.weight_format == "int4":
        a = rescaled(a, (1, 24), torch.float32)
    assert words in dots_obstacle(moe_problem(a), 1)
    control = moe.sample_inputs(replace(NOT_TAKEN[words], layout="halves"))
    assert dots_obstacle(moe_problem(control), 1) is None


def test_rows_of_an_odd_number_of_codes_are_no_words():
    a = moe.sample_inputs(replace(BASE, weight_format="mxfp4", hidden=64, inner=64))
    problem = moe_problem(a)
    odd = replace(problem, hidden=68)
    assert dots_obstacle(odd, 1) == "gate_weight: rows do not fill whole words"


def test_arguments_are_read_where_they_lie():
    """Arguments are read in place: the weights of routes, the biases and the ids are columns of
    other tensors."""
    a = moe.sample_inputs(replace(CASES["mxfp4"], num_tokens=1))
    given = {}
    for name in ("expert_weights", "expert_ids", "gate_bias", "up_bias", "down_bias"):
        tensor = getattr(a, name)
        given[name] = torch.stack([tensor] * 3, -1)[..., 1]
    problem = problem_of(interpret(moe.OP, replace(a, **given)).outcome.result, a)
    assert problem is None, problem
