"""Tests linears of transformers' own NVFP4, with stand-ins for the hub's kernels.

The library's linears compute with activations as they are, or with rounded activations, and
`prepare` keeps both. Without `prepare`, their operators are fused or reported.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers.integrations.nvfp4")

from transformers.integrations import nvfp4 as library

from tests.agreement import assert_no_worse, cloned
from tests.found import matches_of, misses_of, patterns_in
from tests.library_layers import Attention, Mlp, assert_attention_no_worse, attention_args, run
from tests.models import nvfp4
from tests.tables import in_turn
from tilewright.compiler import lower, prepare, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "kernel")

HIDDEN = 256


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(library, "load_nvfp4_kernel", lambda: nvfp4.KERNEL)


def activations(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def attention():
    return Attention(nvfp4.linear, HIDDEN)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn(
        [(1, 256), (2, 256), (3, 256), (2, 2, 256), (0, 256), (5, 256), (2, 256)],
        [torch.bfloat16, torch.float16],
    ),
)
def test_a_prepared_linear_is_the_librarys(shape, dtype):
    """The results agree up to a rounding: the library scales its sums, and PyTorch scales the
    codes, in bfloat16."""
    model = nn.Sequential(nvfp4.linear(64, HIDDEN, 0))
    x = activations(*shape).to(dtype)
    theirs = model(x)
    (one,) = prepare(model).replaced
    assert isinstance(one.original, library.NVFP4Linear)
    y = model(x)
    assert (y.dtype, y.shape) == (theirs.dtype, theirs.shape)
    rows = x.bfloat16().reshape(-1, HIDDEN)
    if len(rows):
        exact = nvfp4.exactly(one.original, rows)
        assert_no_worse(y.reshape(-1, 64), theirs.reshape(-1, 64), exact, "linear")


def test_a_large_row_changes_how_the_others_are_rounded():
    """A large row changes how other rows are rounded, because all rows share one factor."""
    model = nn.Sequential(nvfp4.linear(64, HIDDEN, 0))
    prepare(model)
    x = activations(3, HIDDEN)
    larger = torch.cat([x[:2], x[2:] * 4096])
    assert not torch.equal(model(larger)[:2], model(x)[:2])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_prepared_projections_are_fused(tokens):
    library_model, args = attention(), attention_args(activations(tokens, HIDDEN))
    model = prepare(library_model, copy=True).model
    ours, _ = run(model, *args)
    (site,) = matches_of(reports()[-1], "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", "nvfp4")
    assert not reports()[-1].misses
    eager_args = cloned(args)
    eager = library_model(*eager_args), eager_args
    exact = {n: nvfp4.exactly(getattr(library_model, n), args[0]) for n in "qkv"}
    assert_attention_no_worse(ours, eager, exact)


@pytest.mark.parametrize(
    ("build", "arguments", "fused"),
    [
        (attention, attention_args, "fused_qkv_paged"),
        (lambda: Mlp(nvfp4.linear, HIDDEN, 512), lambda x: (x,), "linear_activation"),
    ],
    ids=["attention", "mlp"],
)
def test_no_step_computes_a_factor(build, arguments, fused):
    """No step computes a factor: the reciprocals are stored. The reciprocals of q, k and v are in
    one tensor, which the op reads."""
    model = prepare(build(), copy=True).model
    (graph,) = lower(model, arguments(activations(1, HIDDEN))).graphs
    assert fused in [match.op for match in graph.matches]
    named = [str(node.target) for node in graph.after.graph.nodes]
    assert not [name for name in named if "reciprocal" in name or "div" in name or "cat" in name]


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_prepared_mlp_is_fused(tokens):
    library_model, x = Mlp(nvfp4.linear, HIDDEN, 512), activations(tokens, HIDDEN)
    model = prepare(library_model, copy=True).model
    (actual, _), _ = run(model, x)
    assert sorted(patterns_in(reports()[-1], "mlp")) == ["linear_activation", "linear_residual"]
    assert not misses_of(reports()[-1], "mlp")
    h = F.silu(nvfp4.exactly(library_model.gate, x)) * nvfp4.exactly(library_model.up, x)
    exact = x.double() + nvfp4.exactly(library_model.down, h.bfloat16())
    assert_no_worse(actual, library_model(x), exact, "mlp")


# --- without `prepare` ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_that_are_not_rounded_need_no_preparation(tokens):
    model, args = attention(), attention_args(activations(tokens, HIDDEN))
    ours, eager = run(model, *args)
    (site,) = matches_of(reports()[-1], "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", "nvfp4")
    assert not reports()[-1].misses
    exact = {name: nvfp4.exactly(getattr(model, name), args[0]) for name in "qkv"}
    assert_attention_no_worse(ours, eager, exact)


def test_rows_that_an_operator_rounds_are_told_and_run_as_before():
    model, args = attention(), attention_args(activations(3, HIDDEN))
    made, expected = run(model, *args)
    report = reports()[-1]
    assert patterns_in(report, "qkv") == ["cache_store"]
    told = misses_of(report, "declare")
    assert {miss.code for miss in told} == {"DECLARED_FORM"}
    assert all("tilewright.compiler.prepare(model)" in miss.hint for miss in told)
    for a, b in zip((made[0], *made[1]), (expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)


def test_a_factor_for_each_row_is_not_the_formats():
    """The operator is called with a factor for each row, for several matrices in one, which the
    format does not have."""
    module, op = nvfp4.linear(64, HIDDEN, 0), getattr(torch.ops, nvfp4.LIBRARY).nvfp4_gemv

    def call(x, alpha):
        return op(x, module.weight, module.weight_sf_rowmajor, alpha) + 1

    run(call, activations(1, HIDDEN), torch.rand(64))
    (miss,) = misses_of(reports()[-1], "declare")
    assert "for one factor for all rows; here there are 64" in miss.message
