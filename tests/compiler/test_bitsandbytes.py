"""bitsandbytes' operators, which are declared: linears of four bits without `prepare`, and what
`prepare` makes of those of eight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, cloned
from tests.found import matches_of, misses_of, patterns_in
from tests.models import bitsandbytes_ops
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN, HEAD_DIM = 256, 64


def run(model, *args):
    """(result and arguments) compiled, and eager."""
    ours, eager = cloned(args), cloned(args)
    made = torch.compile(model, backend="tilewright", options={"inner": "eager"})(*ours)
    return (made, ours), (model(*eager), eager)


def activations(tokens, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, HIDDEN, generator=generator).to(dtype)


class Attention(nn.Module):
    """Projections and a cache write."""

    def __init__(self, linear=bitsandbytes_ops.Linear, **options):
        super().__init__()
        for seed, (name, heads) in enumerate({"q": 4, "k": 2, "v": 2}.items()):
            setattr(self, name, linear(heads * HEAD_DIM, HIDDEN, seed, **options))

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (getattr(self, n)(x).unflatten(-1, (-1, HEAD_DIM)) for n in "qkv")
        k_cache.view(-1, 2, HEAD_DIM)[slots] = k
        v_cache.view(-1, 2, HEAD_DIM)[slots] = v
        return q * 2


def attention_args(tokens=3):
    cache = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.bfloat16)
    return activations(tokens), torch.tensor([3, 9, 1])[:tokens], cache, cache.clone()


FORMS = {
    "nf4": {},
    "fp4": {"quant_type": "fp4"},
    "bias": {"bias": True},
    "blocks of 128": {"blocksize": 128},
    "stored as bfloat16": {"storage": torch.bfloat16},
}


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_projections_are_fused(form, tokens):
    model, args = Attention(**FORMS[form]), attention_args(tokens)
    (actual, ours), (eager, theirs) = run(model, *args)
    (site,) = matches_of(reports()[-1], "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", model.q.quant_type)
    assert not reports()[-1].misses
    x, slots, *_ = args
    q, k, v = (m.exactly(x).unflatten(-1, (-1, HEAD_DIM)) for m in (model.q, model.k, model.v))
    assert_no_worse(actual, eager, q * 2, "q")
    for at, new in ((2, k), (3, v)):
        wanted = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.float64)
        wanted.view(-1, 2, HEAD_DIM)[slots] = new
        assert_no_worse(ours[at], theirs[at], wanted, "cache")


class Mlp(nn.Module):
    def __init__(self, linear=bitsandbytes_ops.Linear, **options):
        super().__init__()
        self.gate, self.up = (linear(512, HIDDEN, seed, **options) for seed in (3, 4))
        self.down = linear(HIDDEN, 512, 5, **options)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_mlp_for_few_tokens_is_fused_and_no_worse(dtype, tokens):
    model, x = Mlp(), activations(tokens, dtype)
    (actual, _), (eager, _) = run(model, x)
    assert sorted(patterns_in(reports()[-1], "mlp")) == ["linear_activation", "linear_residual"]
    assert not reports()[-1].misses
    h = F.silu(model.gate.exactly(x)) * model.up.exactly(x)
    assert_no_worse(actual, eager, x.double() + model.down.exactly(h), "mlp")


def test_scales_that_are_codes_are_told_and_run_as_before():
    model, args = Attention(nested=True), attention_args()
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
    """The activation is rounded once, by the library's operator."""
    model, args = Attention(linear=bitsandbytes_ops.ByteLinear, bias=bias), attention_args(tokens)
    (actual, ours), (eager, theirs) = run(model, *args)
    report = reports()[-1]
    (site,) = matches_of(report, "qkv")
    assert (site.pattern, site.shapes["weight"]) == ("qkv_cache", "int8")
    assert not report.misses
    (graph,) = lower(model, args).graphs
    called = [n for n in graph.after.graph.nodes if "int8" in str(n.target)]
    assert ["int8_vectorwise_quant" in str(n.target) for n in called] == [True]
    x, slots, *_ = args
    q, k, v = (m.exactly(x).unflatten(-1, (-1, HEAD_DIM)) for m in (model.q, model.k, model.v))
    assert_no_worse(actual, eager, q * 2, "q")
    for at, new in ((2, k), (3, v)):
        wanted = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.float64)
        wanted.view(-1, 2, HEAD_DIM)[slots] = new
        assert_no_worse(ours[at], theirs[at], wanted, "cache")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_mlp_of_bytes_is_fused_and_no_worse(dtype, tokens):
    model, x = Mlp(linear=bitsandbytes_ops.ByteLinear), activations(tokens, dtype)
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
    assert "with a threshold some are multiplied apart" in miss.message
