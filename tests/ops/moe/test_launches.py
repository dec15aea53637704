"""The launches of `fused_moe`, without a GPU: kernels interpreted, and a call made again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tilewright.codegen.build import load_interpreted
from tilewright.codegen.targets import TARGETS
from tilewright.ops import contract
from tilewright.ops.moe import lowering as moe_lowerings
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase
from tilewright.ops.moe.operands import unsupported
from tilewright.ops.runtime.recording import note_launch

CASE = MoeCase("case", num_tokens=3, hidden=64, inner=32, num_experts=3)


def interpret(known, spec, grid, values, device):
    """Runs a launch on the CPU; `known` tensors by address stand for what a launch is given."""
    given = tuple(values[name] for name, _ in spec.signature)
    full_grid = (*grid, *(1,) * (3 - len(grid)))

    def run(arguments):
        tensors = [known(value, like) for value, like in zip(arguments, given, strict=True)]
        load_interpreted(spec)[full_grid](*tensors)

    load_interpreted(spec)[full_grid](*given)
    note_launch(run, given)


@pytest.fixture
def on_the_cpu(monkeypatch):
    memory = {}
    empty = torch.empty

    def kept(*args, **kwargs):
        made = empty(*args, **kwargs)
        memory[made.data_ptr()] = made
        return made

    def known(value, like):
        """The tensor at an address: a part of memory made since, else the argument itself."""
        if not isinstance(like, torch.Tensor):
            return value
        for start, whole in memory.items():
            if start <= value < start + whole.nbytes:
                part = whole.view(-1).view(torch.uint8)[value - start :][: like.nbytes]
                return part.view(like.dtype).view(like.shape)
        assert value == like.data_ptr()
        return like

    monkeypatch.setattr(torch, "empty", kept)
    monkeypatch.setattr(moe_lowerings, "launch", partial(interpret, known))
    monkeypatch.setattr(moe_lowerings, "device_target", lambda device: TARGETS["sm90"])
    few = type("Properties", (), {"multi_processor_count": 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_call_made_again_is_the_same_call_over_new_memory():
    a = moe.sample_inputs(CASE)
    args, kwargs = moe.OP.split(a)
    result, again = moe_lowerings.repeatable_fused_moe(*args, **kwargs)
    problem = moe.OP.tolerances[CASE.dtype].problem(result, moe.reference(a))
    assert problem is None, problem
    assert again is not None
    kept = result.clone()
    a.x.mul_(0.5)
    a.expert_ids.copy_((a.expert_ids + 1) % CASE.num_experts)
    second = again()
    assert torch.equal(result, kept)
    assert torch.equal(second, moe_lowerings.launch_fused_moe(*args, **kwargs))
    assert not torch.equal(second, kept)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_call_that_copies_an_argument_is_not_remembered():
    a = moe.sample_inputs(CASE)
    args, kwargs = moe.OP.split(a)
    args[1] = args[1].t().contiguous().t()
    assert moe_lowerings.repeatable_fused_moe(*args, **kwargs)[1] is None


@pytest.mark.usefixtures("on_the_cpu")
def test_factors_of_experts_may_be_columns_of_one_tensor():
    a = moe.sample_inputs(replace(CASE, weight_format="nvfp4", inner=64))
    names = ("gate_expert_scale", "up_expert_scale", "down_expert_scale")
    factors = torch.stack([getattr(a, name) for name in names], 1) * torch.tensor([1.0, 0.5, 2.0])
    a = replace(a, **dict(zip(names, factors.unbind(1), strict=True)))
    args, kwargs = moe.OP.split(a)
    result = moe_lowerings.launch_fused_moe(*args, **kwargs)
    problem = moe.OP.tolerances[CASE.dtype].problem(result, moe.reference(a))
    assert problem is None, problem


def turned(weight):
    """The weight, stored the other way round."""
    return weight.mT.contiguous().mT


def spread(weight):
    """The weight with seven elements between any two."""
    return torch.stack([weight] * 8, -1)[..., 0]


DENSE = moe.sample_inputs(replace(CASE, layout="separate", bias=True))
FP8 = moe.sample_inputs(replace(CASE, weight_format="fp8"))
INT4 = moe.sample_inputs(replace(CASE, weight_format="int4", hidden=192, inner=96))
UNEVEN = {
    "up_weight: strides": (DENSE, {"up_weight": turned(DENSE.up_weight)}),
    "down_weight: strides": (DENSE, {"down_weight": spread(DENSE.down_weight)}),
    "gate_weight: strides": (
        DENSE, {name: spread(getattr(DENSE, name)) for name in ("gate_weight", "up_weight")},
    ),
    "bias: of": (DENSE, {"down_bias": DENSE.down_bias.float()}),
    "scale: of": (FP8, {"down_scale": FP8.down_scale.bfloat16()}),
    "48 columns": (
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
    """The weight, so many elements past the start of an allocation."""
    memory = torch.empty(weight.numel() + elements, dtype=weight.dtype)
    view = memory[elements:].view(weight.shape)
    return view.copy_(weight)


def in_one(gate, up, gap):
    """Gate and up in one storage, `gap` elements between them."""
    memory = torch.empty(2 * gate.numel() + gap, dtype=gate.dtype)
    views = memory[: gate.numel()], memory[gate.numel() + gap :]
    return [v.view(w.shape).copy_(w) for v, w in zip(views, (gate, up), strict=True)]


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("weight_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("which", ["gate_weight", "up_weight", "down_weight", "distance"])
def test_weights_that_start_anywhere_are_left_to_the_reference(which, weight_format, monkeypatch):
    """Neither TMA nor words reach them. The choice of a lowering is remembered by metadata, which
    is that of other calls."""
    a = moe.sample_inputs(replace(CASE, weight_format=weight_format, inner=64))
    gate, up = a.gate_weight.clone(), a.up_weight.clone()
    a = replace(a, gate_weight=gate, up_weight=up)
    if which == "distance":
        gate, up = in_one(gate, up, 3)
        other = replace(a, gate_weight=gate, up_weight=up)
    else:
        other = replace(a, **{which: moved(getattr(a, which), 1)})
    want, launched = moe.reference(a), []
    monkeypatch.setattr(moe_lowerings, "launch", lambda *given: launched.append(given))
    run = contract._implementation(moe.OP, "cuda")
    for arguments, count in ((a, 4), (other, 4)):
        args, kwargs = moe.OP.split(arguments)
        with torch.no_grad():
            result = run(*args, **kwargs)
        assert len(launched) == count
    assert torch.equal(result, want)
