"""Tests the steps of `fused_moe` without a GPU: kernels on the interpreter, a repeated call, and
which calls the reference computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter, interpret, interpreter  # noqa: F401
from tilewright.codegen.moe.dots import MOST_TOKENS
from tilewright.ops import calls
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase
from tilewright.ops.moe.lowering import fused_moe_steps
from tilewright.ops.moe.operands import unsupported
from tilewright.ops.runtime.program import drive
from tilewright.ops.runtime.replay import repeat

# More tokens than dot products take.
TOKENS = max(MOST_TOKENS.values()) + 1
CASE = MoeCase("case", num_tokens=TOKENS, hidden=64, inner=32, num_experts=3)


@pytest.mark.parametrize("weight_format", ["dense", "fp8"])
def test_a_call_made_again_is_the_same_call_over_new_memory(weight_format):
    """Tests repeated calls with dense weights, and with quantised activations, whose scratch memory
    has more parts."""
    coded = {"weight_format": "fp8", "activation_format": "fp8", "inner": 128}
    a = moe.sample_inputs(replace(CASE, **(coded if weight_format == "fp8" else {})))
    machine = Interpreter()
    program = drive(fused_moe_steps(a, machine.target), machine)
    result = program.outcome.result
    tolerance = moe.OP.tolerances[CASE.dtype]
    wide = replace(tolerance, relative=2 * tolerance.relative)
    problem = wide.problem(result, moe.reference(a))
    assert problem is None, problem
    args, kwargs = moe.OP.split(a)
    again = repeat(program, args, kwargs, machine)
    assert again is not None
    kept = result.clone()
    a.x.mul_(0.5)
    a.expert_ids.copy_((a.expert_ids + 1) % CASE.num_experts)
    second = again(*args, **kwargs)
    assert torch.equal(result, kept)
    assert torch.equal(second, interpret(moe.OP, a).outcome.result)
    assert not torch.equal(second, kept)


def test_a_call_that_copies_an_argument_is_not_remembered():
    a = moe.sample_inputs(CASE)
    a = replace(a, expert_ids=a.expert_ids.t().contiguous().t())
    machine = Interpreter()
    program = drive(fused_moe_steps(a, machine.target), machine)
    assert repeat(program, *moe.OP.split(a), machine) is None


def test_factors_of_experts_may_be_columns_of_one_tensor():
    a = moe.sample_inputs(replace(CASE, weight_format="nvfp4", inner=64))
    names = ("gate_expert_scale", "up_expert_scale", "down_expert_scale")
    factors = torch.stack([getattr(a, name) for name in names], 1) * torch.tensor([1.0, 0.5, 2.0])
    a = replace(a, **dict(zip(names, factors.unbind(1), strict=True)))
    result = interpret(moe.OP, a).outcome.result
    problem = moe.OP.tolerances[CASE.dtype].problem(result, moe.reference(a))
    assert problem is None, problem


def turned(weight):
    """Returns the weight, stored in memory with its dimensions exchanged."""
    return weight.mT.contiguous().mT


def spread(weight):
    """Returns the weight, with seven other elements in memory between any two of its elements."""
    return torch.stack([weight] * 8, -1)[..., 0]


DENSE = moe.sample_inputs(replace(CASE, layout="separate", bias=True))
FP8 = moe.sample_inputs(replace(CASE, weight_format="fp8"))
INT4 = moe.sample_inputs(replace(CASE, weight_format="int4", hidden=192, inner=96))
UNEVEN = {
    "up_weight: strides": (DENSE, {"up_weight": turned(DENSE.up_weight)}),
    "down_weight: with strides": (DENSE, {"down_weight": spread(DENSE.down_weight)}),
    "gate_weight: with strides": (
        DENSE, {name: spread(getattr(DENSE, name)) for name in ("gate_weight", "up_weight")},
    ),
    "up_bias, down_bias: dtypes": (DENSE, {"down_bias": DENSE.down_bias.float()}),
    "up_scale, down_scale: dtypes": (FP8, {"down_scale": FP8.down_scale.bfloat16()}),
    "columns that divide 64 or are divided by it, got 48": (
        INT4,
        {
            "scale_block": [1, 48], "gate_scale": torch.ones(3, 96, 4),
            "up_scale": torch.ones(3, 96, 4), "down_scale": torch.ones(3, 192, 2),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", UNEVEN)
def test_weights_that_one_problem_cannot_describe_are_left_to_the_reference(words):
    a, others = UNEVEN[words]
    assert unsupported(a) is None
    other = replace(a, **others)
    moe.validate(other)
    assert words in unsupported(other)


def moved(weight, elements):
    """Returns the weight, starting `elements` elements after the start of an allocation."""
    memory = torch.empty(weight.numel() + elements, dtype=weight.dtype, device=weight.device)
    view = memory[elements:].view(weight.shape)
    return view.copy_(weight)


def in_one(gate, up, gap):
    """Returns gate and up in one storage, with `gap` elements between them."""
    memory = torch.empty(2 * gate.numel() + gap, dtype=gate.dtype)
    views = memory[: gate.numel()], memory[gate.numel() + gap :]
    return [v.view(w.shape).copy_(w) for v, w in zip(views, (gate, up), strict=True)]


MISALIGNED = ("gate_weight", "up_weight", "down_weight", "distance")


def misaligned(a, which):
    """Returns the same weights. One of them is at an address that neither TMA nor loads of words
    can reach."""
    gate, up = a.gate_weight.clone(), a.up_weight.clone()
    if which == "distance":
        gate, up = in_one(gate, up, 3)
    a = replace(a, gate_weight=gate, up_weight=up)
    return a if which == "distance" else replace(a, **{which: moved(getattr(a, which), 1)})


@pytest.mark.parametrize("weight_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("which", MISALIGNED)
def test_weights_that_start_anywhere_are_left_to_the_reference(which, weight_format, interpreter):  # noqa: F811
    """Weights at unaligned addresses are left to the reference. The choice of a lowering is
    remembered by metadata, which aligned calls have, too."""
    a = moe.sample_inputs(replace(CASE, weight_format=weight_format, inner=64))
    a = replace(a, gate_weight=a.gate_weight.clone(), up_weight=a.up_weight.clone())
    want = moe.reference(a)
    run = calls.Calls(moe.OP, "cuda")
    for arguments in (a, misaligned(a, which)):
        args, kwargs = moe.OP.split(arguments)
        with torch.no_grad():
            result = run(*args, **kwargs)
        assert len(interpreter.kernels) == 4
    assert torch.equal(result, want)


@pytest.mark.parametrize("which", MISALIGNED[:3])
def test_a_plan_says_that_the_reference_computes(which):
    report = moe.OP.plan_for(misaligned(moe.sample_inputs(CASE), which), "sm90")
    assert report.name == "reference"
    assert report.reason.startswith(f"{which}: its address")
    assert report.specs == ()
    assert moe.OP.plan_for(moe.sample_inputs(CASE), "sm90").name == "grouped kernels"


def test_the_plan_of_a_report_computes_nothing():
    """The plan of a report computes nothing: its meta tensors have no data with which the reference
    could compute. Their offsets are known."""
    a = moe.sample_inputs(CASE)
    meta = {name: t.to("meta") for name, t in vars(a).items() if isinstance(t, torch.Tensor)}
    joint = torch.empty(3, 2 * 32, 64, dtype=a.x.dtype, device="meta")
    meta |= dict(zip(("gate_weight", "up_weight"), joint.chunk(2, 1), strict=True))
    a = replace(a, **meta)
    planned = moe.OP.plan_for(a, "sm90")
    kernels = [spec.kernel for spec in planned.specs]
    assert kernels == ["moe_order", "moe_up", "grouped_gemm", "moe_combine"]
    report = moe.OP.plan_for(replace(a, down_weight=moved(a.down_weight, 1)), "sm90")
    assert (report.name, report.specs) == ("reference", ())
    assert report.reason.startswith("down_weight: its address")
