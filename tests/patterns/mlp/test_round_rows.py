"""Tests activations that are rounded in front of fused linears.

One op computes the norm and the rounding. All linears that read the activation share its codes or
decoded numbers, which have the same bits as the graph's. Other roundings stay in the graph.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tilewright.compiler import lower, reports
from tilewright.ops.mlp.gains import MOST_TOKENS
from tilewright.ops.mlp.round_rows import MOST_ROUNDED_TOKENS

K, N = 256, 384
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def by_token(x):
    scale = torch.maximum(x.amax(-1, True).clamp(min=0), -x.amin(-1, True).clamp(max=0)) / 448
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    codes = (x / scale).clamp(-448, 448).to(E4M3)
    return (codes.to(scale.dtype) * scale).to(x.dtype)


def by_magnitude(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale


def by_block(x, size=128):
    blocks = x.float().unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    codes = (blocks / scale.clamp(min=1e-12)).to(E4M3)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def by_half_block(x):
    return by_block(x, 64)


def most(number):
    def rounds(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / number
        return (x / scale).clamp(-number, number).to(E4M3).to(x.dtype) * scale

    return rounds


def cut_low(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (x / scale).clamp(-448, 400).to(E4M3).to(x.dtype) * scale


def of_largest(x):
    scale = x.amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale


def of_all_tokens(x):
    scale = x.abs().amax().clamp(min=1e-6) / 448
    return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale


def of_other_numbers(x):
    scale = (2 * x).abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return (x / scale).clamp(-448, 448).to(E4M3).to(x.dtype) * scale


def mixed(x):
    """Computes the scale in float32 and the quotient in x's dtype."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    codes = (x / scale.to(x.dtype)).clamp(-448, 448).to(E4M3)
    return (codes.float() * scale).to(x.dtype)


class Linear(nn.Module):
    def __init__(self, columns=K, rows=N, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(rows, columns, generator=generator).mul(40).to(E4M3)
        self.register_buffer("bytes", codes.view(torch.uint8))
        scales = torch.rand(rows, 1, generator=generator) * 1e-3 + 1e-3
        self.scale = nn.Parameter(scales.bfloat16(), requires_grad=False)

    def forward(self, rows):
        codes = self.bytes.view(E4M3)
        return F.linear(rows, codes.to(rows.dtype) * self.scale.to(rows.dtype))


class Layer(nn.Module):
    """Has a norm and a gated MLP, whose linears each round their activation."""

    def __init__(self, rounds):
        super().__init__()
        self.norm = nn.RMSNorm(K, eps=1e-5, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(9)
        self.norm.weight.data.copy_(torch.randn(K, generator=generator))
        self.norm.requires_grad_(False)
        self.gate, self.up = Linear(seed=1), Linear(seed=2)
        self.down, self.rounds = Linear(N, K, seed=3), rounds

    def forward(self, x):
        y = self.norm(x)
        inner = F.silu(self.gate(self.rounds(y))) * self.up(self.rounds(y))
        return x + self.down(self.rounds(inner))


def tokens(count=3, columns=K):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, count, columns, generator=generator).bfloat16()


def compiled(module, *args, **options):
    with torch.no_grad():
        given = {"inner": "eager", "target": "sm90", **options}
        run = torch.compile(module, backend="tilewright", options=given, dynamic=False)
        return run(*args), reports()[-1]


def sites(report):
    return [site.shapes for site in matches_of(report, "round_rows")]


@pytest.mark.parametrize(
    ("rounds", "scales"),
    [(by_token, "token"), (by_magnitude, "token"), (by_block, "128 columns")],
    ids=["token", "magnitude", "block"],
)
@pytest.mark.parametrize("count", [1, 40, 100])
def test_norm_and_rounding_are_one_op_for_all_readers(rounds, scales, count):
    """With few tokens, linears read decoded numbers. With more tokens they read codes, and one op
    computes an activation and its rounding."""
    layer, x = Layer(rounds), tokens(count)
    made, report = compiled(layer, x)
    few = count <= MOST_TOKENS
    result = "numbers" if few else "codes"
    expected = [("rms", "no", result), ("no", "no" if few else "silu", result)]
    found = [(s["norm"], s["activation"], s["result"]) for s in sites(report)]
    assert sorted(found) == sorted(expected), str(report)
    assert {s["scales"] for s in sites(report)} == {scales}
    assert misses_of(report, "round_rows") == []
    alone, without = compiled(layer, x, patterns=["-round_rows"])
    assert sites(without) == []
    if few:
        assert torch.equal(made, alone)
    else:  # the op rounds the activation once and the graph twice, which changes some codes
        assert_no_worse(made, alone, copy.deepcopy(layer).double()(x.double()), "layer")


def test_a_given_scale():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(rows=K)
            self.by = nn.Parameter(torch.tensor([0.02]).bfloat16(), requires_grad=False)

        def forward(self, x):
            codes = (x / self.by).clamp(-448, 448).to(E4M3)
            return x + self.linear((codes.to(x.dtype) * self.by).to(x.dtype))

    layer, x = Given(), tokens()
    made, report = compiled(layer, x)
    assert [s["scales"] for s in sites(report)] == ["given"]
    assert torch.equal(made, compiled(layer, x, patterns=["-round_rows"])[0])


@pytest.mark.parametrize(("shape", "clamps"), [((), True), ((1,), False)])
def test_a_given_scale_whose_codes_may_be_others_stays(shape, clamps):
    """A scalar in float32 would be rounded before it divides. Without a clamp, large numbers give
    NaN."""

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(rows=K)
            by = torch.full(shape, 0.02, dtype=torch.float32 if clamps else torch.bfloat16)
            self.by = nn.Parameter(by, requires_grad=False)

        def forward(self, x):
            quotient = x / self.by
            codes = (quotient.clamp(-448, 448) if clamps else quotient).to(E4M3)
            return x + self.linear((codes.to(x.dtype) * self.by).to(x.dtype))

    _, report = compiled(Given(), tokens())
    assert sites(report) == []
    assert codes_of(report, "round_rows") == {"ACTIVATION_FORMAT"}


class Projected(nn.Module):
    def __init__(self, rounds, more=None):
        super().__init__()
        self.linear, self.rounds, self.more = Linear(rows=K), rounds, more

    def forward(self, x):
        rows = self.rounds(x)
        made = x + self.linear(rows)
        return made if self.more is None else (made, self.more(rows))


@pytest.mark.parametrize(
    "rounds",
    [by_half_block, most(240.0), cut_low, of_largest, of_all_tokens, of_other_numbers, mixed],
    ids=["64 columns", "240", "cut", "signed", "tensor", "others", "mixed"],
)
def test_other_roundings_stay_and_the_miss_says_why(rounds):
    layer, x = Projected(rounds), tokens()
    made, report = compiled(layer, x)
    assert sites(report) == []
    assert codes_of(report, "round_rows") == {"ACTIVATION_FORMAT"}
    assert all(miss.weight == "advice" for miss in misses_of(report, "round_rows"))
    assert "linear_residual" in patterns_in(report, "mlp")
    assert torch.equal(made, compiled(layer, x, patterns=["-round_rows"])[0])


def test_the_control_of_other_roundings():
    assert len(sites(compiled(Projected(by_magnitude), tokens())[1])) == 1


def test_numbers_that_others_read_too():
    """Other operations read the numbers, too. The op computes them for every reader."""
    layer, x = Projected(by_magnitude, more=lambda rows: rows.sum(-1)), tokens()
    made, report = compiled(layer, x)
    assert len(sites(report)) == 1
    alone, _ = compiled(layer, x, patterns=["-round_rows"])
    assert all(torch.equal(one, other) for one, other in zip(made, alone, strict=True))


def test_a_norm_that_others_read_stays():
    class Both(Layer):
        def forward(self, x):
            y = self.norm(x)
            return x + self.down(self.rounds(torch.cat((y, y[..., : N - K]), -1))), y

    layer, x = Both(by_token), tokens()
    made, report = compiled(layer, x)
    assert [s["norm"] for s in sites(report)] == ["no"]
    alone, _ = compiled(layer, x, patterns=["-round_rows"])
    assert all(torch.equal(one, other) for one, other in zip(made, alone, strict=True))


def test_many_tokens_and_symbols_stay():
    layer = Projected(by_magnitude)
    with torch.no_grad():
        few, many = (
            lower(layer, (tokens(n),), target="sm90", dynamic=False)
            for n in (MOST_ROUNDED_TOKENS, MOST_ROUNDED_TOKENS + 1)
        )
        symbols = lower(layer, (tokens(7),), target="sm90", dynamic=True)
    assert [len(sites(found)) for found in (few, many, symbols)] == [1, 0, 0]


def test_what_no_fused_linear_reads_stays():
    with torch.no_grad():
        report = lower(lambda x: by_token(x) + 1, (tokens(),), target="sm90")
    assert sites(report) == []
    assert misses_of(report, "round_rows") == []
