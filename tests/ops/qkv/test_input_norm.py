"""Tests the norm of x in front of the projection: which kernel computes it, what happens without
such a kernel, and that no result becomes less accurate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import in_float64, relative_error
from tests.interpreted import Interpreter, interpret
from tilewright.codegen.qkv.candidates import fits
from tilewright.codegen.qkv.kernels import SwappedConfig
from tilewright.codegen.qkv.plan import MOST_NORMED_TOKENS, choose, plan_fused_qkv
from tilewright.codegen.qkv.tune import Case, trials
from tilewright.codegen.rows import MOST_NORM_COLUMNS
from tilewright.codegen.targets import SM80, SM90, SM100
from tilewright.ops.contract import get_op
from tilewright.ops.qkv.lowering import fused_qkv_paged_steps
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.samples import AttentionCase
from tilewright.ops.runtime.program import Launch, Library, drive
from tilewright.ops.runtime.replay import repeat

QKV = get_op("fused_qkv_paged")
CASE = AttentionCase("normed", input_norm="rms", num_tokens=1, hidden=328)


def arguments(**changes):
    return replace(QKV.sample_inputs(replace(CASE, **changes)), static_tokens=True)


def problem(**changes):
    return prepare(arguments(**changes)).problem


def hf_norm(x, weight, eps):
    """Computes the norm with two roundings."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def own_norm(x, weight, eps):
    """Computes the norm with one rounding."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@pytest.mark.parametrize("norm", [hf_norm, own_norm])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_the_kernel_is_no_less_accurate_than_the_graph(norm, size, monkeypatch):
    """There are 16 tokens of different magnitude, with a few columns that are larger than the
    others. Kernel and graph round different numbers, and the size of a rounding error depends on
    the number. Over the range from one power of two to the next, both errors are equally large."""
    monkeypatch.setattr("tilewright.codegen.qkv.plan.MOST_NORMED_TOKENS", 16)
    ours, graph = [], []
    for step in range(4):
        a = arguments(hidden=1032, num_tokens=16)
        a.x.mul_(size * 2 ** (step / 4))[:, ::129] *= 3
        exact = QKV.reference(in_float64(a)).flatten(1)
        normed = norm(a.x, a.input_norm_weight, a.input_norm_eps)
        graph.append(relative_error(F.linear(normed, a.q_weight.flatten(0, 1)), exact))
        program = interpret(QKV, a, SM90)
        assert ("INPUT_NORM", True) in program.specs[0].constants
        ours.append(relative_error(program.outcome.result.flatten(1), exact))
    assert sum(ours) <= 1.01 * sum(graph)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_behind_a_layer_norm_it_rounds_as_the_graph_does(dtype, monkeypatch):
    """Some rows are far from zero, so that their mean is much larger than the deviations from
    it."""
    monkeypatch.setattr("tilewright.codegen.qkv.plan.MOST_NORMED_TOKENS", 16)
    ours, graph = [], []
    for offset in (0.0, 1.0, 1000.0):
        a = arguments(hidden=328, num_tokens=16, input_norm="layer", dtype=dtype)
        a.x.add_(offset)
        exact = QKV.reference(in_float64(a)).flatten(1)
        vectors = a.input_norm_weight, a.input_norm_bias
        normed = F.layer_norm(a.x, a.x.shape[-1:], *vectors, a.input_norm_eps)
        graph.append(relative_error(F.linear(normed, a.q_weight.flatten(0, 1)), exact))
        program = interpret(QKV, a, SM90)
        assert "INPUT_LAYER_ROW" in dict(program.specs[0].constants)
        ours.append(relative_error(program.outcome.result.flatten(1), exact))
    assert all(one <= 1.05 * other for one, other in zip(ours, graph, strict=True))


def test_a_layer_norm_s_time_is_modelled_whatever_was_measured_without():
    shape = {"hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    cases = [replace(CASE, **shape, input_norm=norm) for norm in ("rms", "layer")]
    problems = [prepare(QKV.sample_inputs(case, "meta")).problem for case in cases]
    table, model = (choose(one, 1, SM90) for one in problems)
    assert (table.measured, model.measured) == (True, False)
    assert table.norms_x
    assert model.norms_x
    assert "modelled" in model.reason


@pytest.mark.parametrize("target", [SM90, SM100], ids=lambda target: target.name)
def test_few_tokens_are_normed_by_the_kernel_that_projects_them(target):
    for tokens, inside in ((MOST_NORMED_TOKENS, True), (MOST_NORMED_TOKENS + 1, False)):
        normed = problem(num_tokens=tokens)
        choice = choose(normed, tokens, target)
        assert choice.norms_x == inside
        assert ("x is normalised first, then" in choice.reason) != inside
        # If the norm runs separately, the rest is chosen as without a norm.
        plain = choose(problem(num_tokens=tokens, input_norm=""), tokens, target)
        if not inside:
            assert (choice.config, choice.epilogue) == (plain.config, plain.epilogue)
        else:
            assert "that normalises x" in choice.reason


def test_a_chip_without_tma_says_that_x_is_normed_before():
    (choice,) = plan_fused_qkv(problem(), SM80).choices
    assert choice.name == "library"
    assert choice.reason.startswith("x is normalised first, then")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"weight_format": "int4_n", "scale_block": (1, 328)},
        {"qk_norm": True, "norm_width": "row"},
        {"num_tokens": MOST_NORMED_TOKENS + 1},
        {"num_tokens": MOST_NORMED_TOKENS + 1, "input_norm": "layer"},
        {"dtype": torch.float32, "input_norm": "layer"},
        {"input_norm": "layer", "hidden": 16392},
    ],
    ids=[
        "float16",
        "float32",
        "codes",
        "norm of rows",
        "many tokens",
        "layer, many tokens",
        "layer, float32",
        "layer, long rows",
    ],
)
def test_before_any_other_kernel_x_is_normed_by_itself(changes):
    a, exact = arguments(**changes), arguments(**changes)
    program = interpret(QKV, a, SM90)
    steps = [step for step, _ in program.steps if isinstance(step, (Launch, Library))]
    if a.x.shape[1] > MOST_NORM_COLUMNS:
        assert isinstance(steps[0], Library)
        assert steps[0].tensors[1] is a.x
    else:
        assert steps[0].spec.kernel == "norm_x"
    wanted = QKV.reference(in_float64(exact))
    assert relative_error(program.outcome.result, wanted) < 2.0**-6


@pytest.mark.parametrize("tokens", [MOST_NORMED_TOKENS, MOST_NORMED_TOKENS + 1])
def test_a_call_made_again_norms_again(tokens):
    a = arguments(num_tokens=tokens)
    machine = Interpreter()
    program = drive(fused_qkv_paged_steps(a, machine.target), machine)
    args, kwargs = QKV.split(a)
    again = repeat(program, args, kwargs, machine)
    assert again is not None
    kept = program.outcome.result.clone()
    a.x.square_()
    second = again(*args, **kwargs)
    assert torch.equal(second, interpret(QKV, a).outcome.result)
    assert not torch.equal(second, kept)


def test_a_tile_of_the_norm_s_weight_takes_its_share_of_memory():
    """The norm's weight takes its share of shared memory. Numbers of stages that do not fit are no
    candidates."""
    widest = SwappedConfig(64, 32, 128, 4, 5)
    wide = {"head_dim": 128, "hidden": 4096}
    assert fits(problem(**wide, input_norm=""), widest, SM90)
    assert not fits(problem(**wide), widest, SM90)


def test_what_is_measured_is_what_norms():
    """For few tokens, only kernels that compute the norm of x are measured. For more tokens, all
    kernels are measured with an x that was normalised before."""
    few = trials(Case(problem(), 1, SM90, packed=False))
    assert len(few) > 2
    assert all(choice.norms_x for choice in few.values())
    many = MOST_NORMED_TOKENS + 1
    tried = trials(Case(problem(num_tokens=many), many, SM90, packed=False))
    assert (
        tried.keys()
        == trials(Case(problem(num_tokens=many, input_norm=""), many, SM90, False)).keys()
    )
    assert not any(choice.norms_x for choice in tried.values())
