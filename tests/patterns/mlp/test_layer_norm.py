"""Tests a layer norm in front of `linear_activation`.

The norm in every spelling is part of the op if there are few tokens and no other node reads its
result. Other norms stay in the graph.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse
from tests.found import matches_of
from tests.patterns.mlp.test_linears import K, inputs, run, site_of
from tilewright.compiler import lower

FEW = 6


@pytest.fixture
def six_tokens_are_few(monkeypatch):
    """Treats six tokens as few. The kernel exists only for a single token, but six tokens have more
    numbers that can differ."""
    monkeypatch.setattr("tilewright.codegen.mlp.plan.MOST_LAYER_NORMED_TOKENS", FEW)


def by_hand(x, weight, bias):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (weight.float() * ((wide - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def by_variance(x, weight, bias):
    variance, mean = x.var(-1, keepdim=True, correction=0), x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def rounded_between(x, weight, bias):
    """Rounds to x's dtype before the weight, and again after it. The op rounds only once."""
    return F.layer_norm(x.float(), (K,), eps=1e-5).to(x.dtype) * weight + bias


def epsilon_in_a_tensor(x, weight, bias):
    wide = x.float() - x.float().mean(-1, keepdim=True)
    eps = torch.full((), 1e-5, device=x.device)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(K, eps=1e-3)
        nn.init.normal_(self.norm.weight), nn.init.normal_(self.norm.bias)

    def forward(self, x, weight, bias):
        norm = self.norm.to(x.dtype)
        return F.layer_norm(x, (K,), norm.weight, norm.bias, norm.eps)


SPELLINGS = {
    "functional": lambda x, w, b: F.layer_norm(x, (K,), w, b),
    "no bias": lambda x, w, b: F.layer_norm(x, (K,), w),
    "no weight": lambda x, w, b: F.layer_norm(x, (K,), None, b),
    "torch": lambda x, w, b: torch.layer_norm(x, [K], w, b, 1e-3),
    "native": lambda x, w, b: torch.native_layer_norm(x, (K,), w, b, 1e-5)[0],
    "float32": lambda x, w, b: F.layer_norm(x.float(), (K,), w.float(), b.float()).to(x.dtype),
    "bare, in float32": lambda x, w, b: F.layer_norm(x.float(), (K,), eps=1e-5).to(x.dtype),
    "weight from one": lambda x, w, b: F.layer_norm(x, (K,), w + 1, b, 1e-5),
    "by hand": by_hand,
    "by variance": by_variance,
    "rounded between": rounded_between,
    "epsilon in a tensor": epsilon_in_a_tensor,
    "bias apart": lambda x, w, b: b + F.layer_norm(x, (K,), w),
}


def mlp_of(norm, also=lambda x, normed: 0):
    def mlp(x, both, down, bias, shift, weight, residual):
        normed = norm(x, weight, shift)
        return F.gelu(F.linear(normed, both, bias)) + also(x, normed)

    return mlp


def norm_of(function, args=None):
    return site_of(run(function, inputs() if args is None else args), "linear_activation")


@pytest.mark.usefixtures("six_tokens_are_few")
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_part_of_it(name):
    args = inputs()
    args[0] += 3
    assert norm_of(mlp_of(SPELLINGS[name]), args).shapes["norm"] == "layer"


@pytest.mark.usefixtures("six_tokens_are_few")
def test_a_float16_norm_is_taken_however_large_its_row_is():
    args = inputs(dtype=torch.float16)
    args[0] *= 1e4
    assert norm_of(mlp_of(SPELLINGS["functional"]), args).shapes["norm"] == "layer"


@pytest.mark.usefixtures("six_tokens_are_few")
def test_who_reads_the_native_norm_s_mean_still_gets_it():
    def both(x, weights, down, bias, shift, weight, residual):
        normed, mean, _ = torch.native_layer_norm(x, (K,), weight, shift, 1e-5)
        return F.gelu(F.linear(normed, weights)) + mean.to(x.dtype)

    assert norm_of(both).shapes["norm"] == "layer"


@pytest.mark.parametrize(("tokens", "norm"), [(1, "layer"), (2, "no")])
def test_one_token_is_few(tokens, norm):
    args = inputs()
    args[0] = args[0].flatten(0, 1)[:tokens]
    assert norm_of(mlp_of(SPELLINGS["functional"]), args).shapes["norm"] == norm


def two_dimensions(x, weight, bias):
    return F.layer_norm(x.unflatten(-1, (8, 8)), (8, 8)).flatten(-2)


def half_rows(x, weight, bias):
    return F.layer_norm(x.unflatten(-1, (2, -1)), (K // 2,)).flatten(-2)


def epsilon_of_the_model(x, weight, bias):
    wide = x.float() - x.float().mean(-1, keepdim=True)
    eps = bias[0].float().square()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def corrected(x, weight, bias):
    variance, mean = x.var(-1, keepdim=True), x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def another_s_mean(x, weight, bias):
    wide = x.float()
    apart = wide - (2 * wide).mean(-1, keepdim=True)
    return (apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def a_weight_for_each_token(x, weight, bias):
    return F.layer_norm(x, (K,)) * (weight * x[..., :1])


def a_bias_for_each_token(x, weight, bias):
    return F.layer_norm(x, (K,), weight) + bias.expand_as(x) * 1


def rms_with_a_bias(x, weight, bias):
    return F.rms_norm(x, (K,), weight, 1e-5) + bias


def of_another_dtype(x, weight, bias):
    """Computes the norm in another dtype than that of the op's x."""
    return F.layer_norm(x.float() * 1.1, (K,)).to(x.dtype)


def through_eight_bits(x, weight, bias):
    return F.layer_norm(x, (K,), weight, bias).to(torch.float8_e4m3fn).to(x.dtype)


STAYS = [
    two_dimensions, half_rows, epsilon_of_the_model, corrected, another_s_mean,
    a_weight_for_each_token, a_bias_for_each_token, rms_with_a_bias, of_another_dtype,
    through_eight_bits,
]  # fmt: skip


@pytest.mark.usefixtures("six_tokens_are_few")
@pytest.mark.parametrize("norm", STAYS, ids=lambda norm: norm.__name__)
def test_another_norm_stays_in_the_graph(norm):
    assert norm_of(mlp_of(norm)).shapes["norm"] == "no"


@pytest.mark.usefixtures("six_tokens_are_few")
def test_a_norm_that_another_reads_stays_too():
    """A norm that another value reads, too, stays in the graph, as in a block whose attention and
    MLP share one norm."""
    beside = mlp_of(SPELLINGS["functional"], lambda x, normed: normed.sum())
    assert norm_of(beside).shapes["norm"] == "no"


@pytest.mark.usefixtures("six_tokens_are_few")
def test_a_bias_that_changes_before_the_op_stays_with_its_norm():
    def step(x, both, down, bias, shift, weight, residual):
        normed = F.layer_norm(x, (K,), weight, shift)
        made = F.linear(normed, both)
        shift.mul_(2)
        return F.gelu(made) + shift.sum()

    assert norm_of(step).shapes["norm"] == "no"


@pytest.mark.usefixtures("six_tokens_are_few")
def test_rows_longer_than_registers_hold_are_normed_apart(monkeypatch):
    monkeypatch.setattr("tilewright.codegen.row_norm.MOST_LAYER_COLUMNS", K - 1)
    assert norm_of(mlp_of(SPELLINGS["functional"])).shapes["norm"] == "no"


def square_norm(wide, weight):
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight.float() * wide


@pytest.mark.parametrize("columns", [False, True])
def test_a_norm_over_tokens_is_none_though_tokens_are_as_many_as_columns(columns, monkeypatch):
    """A norm over tokens is no norm of rows, even if there are as many tokens as columns. Before a
    fix, such a norm with a cast after the transposition was taken for one."""
    monkeypatch.setattr("tilewright.codegen.mlp.plan.MOST_NORMED_TOKENS", K)
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, both = (torch.randn(n, K, generator=generator).bfloat16() for n in (K, 96))
    weight = torch.randn(K, generator=generator).bfloat16()

    def step(x, both, weight):
        normed = square_norm(x.to(torch.promote_types(x.dtype, torch.float32)), weight)
        normed = normed.t() if columns else normed
        return F.relu(F.linear(normed.to(x.dtype), both))

    args = x, both, weight
    exact = step(*(a.double() for a in args))
    sites = matches_of(lower(step, args), "linear_activation")
    assert [site.shapes["norm"] for site in sites] == ([] if columns else ["rms"])
    torch._dynamo.reset()
    actual = torch.compile(step, backend="tilewright", options={"inner": "eager"})(*args)
    assert_no_worse(actual, step(*args), exact, "output")
