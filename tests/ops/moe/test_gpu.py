"""Compares `fused_moe` on the GPU with the reference in float64, at sizes that reach every form of
tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.experts import as_double
from tilewright.codegen.moe.plan import plan_moe
from tilewright.codegen.targets import SM90
from tilewright.ops.moe import moe
from tilewright.ops.moe.cases import MoeCase
from tilewright.ops.moe.operands import moe_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

BASE = MoeCase("base", hidden=320, inner=192, num_experts=16, num_slots=4)
FORMS = {
    "dense": BASE,
    "interleaved": replace(
        BASE, layout="interleaved", activation="clamped_swiglu", limit=1.0, bias=True
    ),
    "transposed": replace(BASE, layout="transposed", dtype=torch.float16, activation="gelu_tanh"),
    "plain": replace(BASE, layout="plain", activation="relu_squared", bias=True),
    "no expert": replace(BASE, routing="none"),
    "one expert": replace(BASE, routing="one"),
    "fp8": replace(BASE, weight_format="fp8", hidden=384, inner=272),
    "int4": replace(BASE, weight_format="int4", inner=256),
    "nvfp4": replace(BASE, weight_format="nvfp4", hidden=288, inner=256),
    "mxfp4": replace(BASE, weight_format="mxfp4", layout="interleaved"),
    "mxfp4 separate": replace(BASE, weight_format="mxfp4", layout="separate"),
}
# The largest allowed ratio of the root-mean-square error to the root mean square of the result. The
# bound allows four roundings, each with an error of up to one unit in the last place.
TYPICAL = {torch.bfloat16: 2.0**-7.5, torch.float16: 2.0**-10.5}


@pytest.mark.parametrize("num_tokens", [1, 64, 300, 1300])
@pytest.mark.parametrize("name", FORMS)
def test_every_tile_form_computes_the_op(name, num_tokens, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    case = replace(FORMS[name], num_tokens=num_tokens)
    a = moe.sample_inputs(case, "cuda", seed=num_tokens)
    got, exact = moe.OP.call(a), moe.reference(as_double(a))
    # The largest of a million errors may be twice the declared bound, which is for a few hundred
    # numbers.
    declared = moe.OP.tolerances[case.dtype]
    wide = replace(declared, relative=2 * declared.relative, of_rms=2 * declared.of_rms)
    problem = wide.problem(got, exact)
    assert problem is None, problem
    error = float((got.double() - exact).norm() / exact.norm())
    assert error < TYPICAL[case.dtype], error
    assert torch.equal(got, moe.OP.call(a))


FEW = replace(BASE, weight_format="nvfp4", hidden=512, inner=256)
FEW_FORMS = {
    "short": FEW,
    "long": replace(FEW, inner=2048, num_experts=8, num_slots=2),
    "interleaved": replace(FEW, layout="interleaved", activation="clamped_swiglu", limit=1.0),
    "fp16": replace(FEW, dtype=torch.float16, bias=True),
    "plain": replace(FEW, layout="plain", activation="relu"),
    "no expert": replace(FEW, routing="none"),
    "one expert": replace(FEW, routing="one"),
}


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
@pytest.mark.parametrize("name", FEW_FORMS)
def test_warps_with_columns_of_their_own_compute_the_op(name, num_tokens):
    case = replace(FEW_FORMS[name], num_tokens=num_tokens)
    a = moe.sample_inputs(case, "cuda", seed=num_tokens)
    plan = plan_moe(moe_problem(a), num_tokens, SM90)
    assert plan.by_route == (num_tokens == 1)
    assert "split" in plan.reason
    problem = moe.OP.tolerances[case.dtype].problem(moe.OP.call(a), moe.reference(as_double(a)))
    assert problem is None, problem
    assert torch.equal(moe.OP.call(a), moe.OP.call(a))


CODED = replace(
    BASE, weight_format="fp8", activation_format="fp8", hidden=384, inner=272, num_slots=2
)
CODED_FORMS = {
    "halves": CODED,
    "interleaved": replace(CODED, layout="interleaved", inner=256, bias=True),
    "separate": replace(CODED, layout="separate", dtype=torch.float16),
    "plain": replace(CODED, layout="plain", bias=True, activation="relu_squared"),
    "no expert": replace(CODED, routing="none"),
    "one expert": replace(CODED, routing="one", num_experts=4),
}


@pytest.mark.parametrize("num_tokens", [1, 64, 300, 1300, 5000])
@pytest.mark.parametrize("name", CODED_FORMS)
def test_activations_are_quantised_in_the_kernels(name, num_tokens, monkeypatch):
    """The reference has the same dtype. In float64, hidden numbers near the middle between two
    codes would become the other code."""
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    case = replace(CODED_FORMS[name], num_tokens=num_tokens)
    a = moe.sample_inputs(case, "cuda", seed=num_tokens)
    got, want = moe.OP.call(a), moe.reference(a).double()
    error = float((got.double() - want).norm() / want.norm())
    # A few hidden numbers become the other code here, too, because sums are rounded differently.
    assert error < 2.0**-6.5, error
    assert float((got.double() - want).abs().max()) < 0.25 * float(want.square().mean().sqrt())
    assert torch.equal(got, moe.OP.call(a))


@pytest.mark.parametrize("name", ["dense", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 300, 1300])
def test_a_repeated_call_computes_anew(name, num_tokens):
    """A repeated call makes the launches of the first call, with other contents and other
    memory."""
    case = replace(FORMS[name], num_tokens=num_tokens)
    a = moe.sample_inputs(case, "cuda")
    first = moe.OP.call(a)
    kept = first.clone()
    other = moe.sample_inputs(case, "cuda", seed=1)
    for field in ("x", "expert_ids", "expert_weights"):
        getattr(a, field).copy_(getattr(other, field))
    second = moe.OP.call(a)
    fresh = replace(a, x=a.x.clone(), expert_ids=a.expert_ids.clone())
    assert torch.equal(second, moe.OP.call(fresh))
    assert torch.equal(first, kept)
    assert second.data_ptr() != first.data_ptr()
