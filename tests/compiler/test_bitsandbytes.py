"""Tests bitsandbytes' operators, which are declared: linears of four bits without `prepare`, and
the modules that `prepare` makes of linears of eight bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.agreement import assert_no_worse
from tests.found import matches_of, misses_of, patterns_in
from tests.library_layers import Attention, Mlp, assert_attention_no_worse, attention_args, run
from tests.models import bitsandbytes_ops
from tests.tables import in_turn
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN = 256


def activations(tokens, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype)


def attention(linear=bitsandbytes_ops.Linear, **options):
    return Attention(partial(linear, **options), HIDDEN)


def mlp(linear=bitsandbytes_ops.Linear):
    return Mlp(linear, HIDDEN, 512)


FORMS = {
    "nf4": {},
    "fp4": {"quant_type": "fp4"},
    "bias": {"bias": True},
    "blocks of 128": {"blocksize": 128},
    "stored as bfloat16": {"storage": torch.bfloat16},
}


@pytest.mark.parametrize(
    ("form", "tokens"), [*in_turn(list(FORMS), [1, 3]), (next(iter(FORMS)), 3)]
)
def test_projections_are_fused(form, tokens):
    model, args = attention(**FORMS[form]), attention_args(activations(tokens))
    ours, eager = run(model, *args)
    (site,) = matches_of(reports()[-1], "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", model.q.quant_type)
    assert not reports()[-1].misses
    exact = {name: getattr(model, name).exactly(args[0]) for name in "qkv"}
    assert_attention_no_worse(ours, eager, exact)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_mlp_for_few_tokens_is_fused_and_no_worse(dtype, tokens):
    model, x = mlp(), activations(tokens, dtype)
    (actual, _), (eager, _) = run(model, x)
    assert sorted(patterns_in(reports()[-1], "mlp")) == ["linear_activation", "linear_residual"]
    assert not reports()[-1].misses
    h = F.silu(model.gate.exactly(x)) * model.up.exactly(x)
    assert_no_worse(actual, eager, x.double() + model.down.exactly(h), "mlp")


def test_scales_that_are_codes_are_told_and_run_as_before():
    model, args = attention(nested=True), attention_args(activations(3))
    made, expected = run(model, *args)
    report = reports()[-1]
    assert patterns_in(report, "qkv") == ["cache_store"]
    told = misses_of(report, "declare")
    assert {miss.code for miss in told} == {"DECLARED_FORM"}
    assert all("codes too (double quantisation)" in miss.message for miss in told)
    assert all("tilewright.compiler.prepare(model)" in miss.hint for miss in told)
    for a, b in zip((made[0], *made[1]), (expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("rows", "columns", "code"),
    [(64, 352, "WEIGHT_FORMAT"), (129, 272, "DECLARED_FORM")],
    ids=["blocks across rows", "a last block that is not full"],
)
def test_blocks_that_do_not_lie_in_rows_are_a_miss(rows, columns, code):
    gate, up = (bitsandbytes_ops.Linear(rows, columns, seed) for seed in (0, 1))
    x = torch.randn(2, columns).bfloat16()
    report = lower(lambda x: F.silu(gate(x)) * up(x), (x,))
    assert not report.matches
    assert code in {miss.code for miss in report.misses}, report.misses


# --- eight bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_projections_of_bytes_are_fused(tokens, bias):
    """Projections with 8-bit weights are fused. The library's operator rounds the activation
    once."""
    model = attention(bitsandbytes_ops.ByteLinear, bias=bias)
    args = attention_args(activations(tokens))
    ours, eager = run(model, *args)
    report = reports()[-1]
    (site,) = matches_of(report, "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", "int8")
    assert not report.misses
    (graph,) = lower(model, args).graphs
    called = [n for n in graph.after.graph.nodes if "int8" in str(n.target)]
    assert ["int8_vectorwise_quant" in str(n.target) for n in called] == [True]
    exact = {name: getattr(model, name).exactly(args[0]) for name in "qkv"}
    assert_attention_no_worse(ours, eager, exact)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_mlp_of_bytes_is_fused_and_no_worse(dtype, tokens):
    model, x = mlp(bitsandbytes_ops.ByteLinear), activations(tokens, dtype)
    (actual, _), (eager, _) = run(model, x)
    assert sorted(patterns_in(reports()[-1], "mlp")) == ["linear_activation", "linear_residual"]
    assert not reports()[-1].misses
    h = F.silu(model.gate.exactly(x)) * model.up.exactly(x)
    assert_no_worse(actual, eager, x.double() + model.down.exactly(h.to(dtype)), "mlp")


def test_columns_that_are_multiplied_apart_are_told():
    def call(x):
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(x, 6.0)
        return codes.float() * largest.view(-1, 1)

    if bitsandbytes_ops.INSTALLED:
        pytest.skip("the library's operator gives a tensor of a size that only the data tell")
    (miss,) = misses_of(lower(call, (activations(3, torch.float16),)), "declare")
    assert "with a threshold, some columns are multiplied separately" in miss.message
