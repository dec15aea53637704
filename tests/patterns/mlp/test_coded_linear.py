"""Tests linears with a quantised weight that no other pattern matches.

The pattern finds them in every format, and their results are no worse than eager's. It leaves a
linear to another pattern that can match it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, upcast
from tests.found import matches_of, misses_of
from tests.models import quantized
from tests.models.quantized import QuantizedLinear
from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS
from tilewright.compiler import reports

K, N = 64, 96
FORMS = {
    quantized.nibbles_low_first: "int4_k",
    quantized.awq: "int4_n",
    quantized.int8: "int8",
    quantized.fp8_channel: "fp8",
    quantized.nvfp4: "nvfp4",
    quantized.mxfp4: "mxfp4",
    quantized.nf4: "nf4",
}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Heads(nn.Module):
    """Two linears that read one activation, such as the projections of queries and latents in MLA.

    normed: whether a norm comes before the linears. alone: whether the second linear is left out.
    """

    def __init__(self, form, normed=False, alone=False, bias=False):
        super().__init__()
        self.norm = nn.RMSNorm(K, eps=1e-6, dtype=torch.bfloat16) if normed else nn.Identity()
        sides = [QuantizedLinear(form, K, N, seed, bias=bias) for seed in range(2 - alone)]
        self.sides = nn.ModuleList(sides)
        self.requires_grad_(False)

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([side(x) for side in self.sides])


def tokens(count=3):
    return torch.randn(1, count, K, generator=torch.Generator().manual_seed(9)).bfloat16()


def compiled(module, x):
    """Returns the report of a module, after checking that its results are no worse than eager."""
    with torch.no_grad():
        expected, exact = module(x), upcast(module)(upcast(x))
        run = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        assert_no_worse(run(x), expected, exact, "out")
    return reports()[-1]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_each_format_is_found(form):
    sites = matches_of(compiled(Heads(form), tokens()), "coded_linear")
    assert [site.op for site in sites] == ["linear_activation"] * 2
    assert {site.shapes["weights"] for site in sites} == {FORMS[form]}


def test_a_bias_is_added_by_the_op():
    (site,) = matches_of(compiled(Heads(quantized.int8, alone=True, bias=True), tokens()), "mlp")
    assert site.shapes["bias"] == "yes"


@pytest.mark.parametrize(("alone", "norm"), [(True, "rms"), (False, "no")])
def test_a_norm_that_one_linear_reads_is_absorbed(alone, norm):
    report = compiled(Heads(quantized.int8, normed=True, alone=alone), tokens(1))
    sites = matches_of(report, "coded_linear")
    assert [site.shapes["norm"] for site in sites] == [norm] * (2 - alone)


def test_dense_weights_and_many_tokens_stay_with_the_library():
    dense = Heads(quantized.int8)
    dense.sides = nn.ModuleList(nn.Linear(K, N, dtype=torch.bfloat16) for _ in range(2))
    dense.requires_grad_(False)
    assert matches_of(compiled(dense, tokens()), "mlp") == []
    torch._dynamo.reset()
    many = compiled(Heads(quantized.int8), tokens(MOST_CODED_TOKENS + 1))
    assert (matches_of(many, "mlp"), misses_of(many, "mlp")) == ([], [])


def test_codes_of_an_unknown_format_are_advice():
    (miss,) = misses_of(compiled(Heads(quantized.gptq_act_order, alone=True), tokens()), "mlp")
    assert (miss.pattern, miss.code, miss.is_lost) == ("coded_linear", "SCALE_BLOCK", False)


def test_patterns_whose_kernels_do_more_come_first():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (
                QuantizedLinear(quantized.int8, *size, seed)
                for seed, size in enumerate(((K, N), (N, K)))
            )

        def forward(self, x):
            return x + self.down(F.silu(self.up(x)))

    sites = matches_of(compiled(Both(), tokens()), "mlp")
    assert {site.pattern for site in sites} == {"linear_activation", "linear_residual"}


def test_a_result_of_more_precision_is_cast_by_the_graph():
    """The op's result has the dtype of the activation. The cast of the logits to float32 stays in
    the graph after the op."""

    class Logits(Heads):
        def forward(self, x):
            return super().forward(x).float()

    (site,) = matches_of(compiled(Logits(quantized.int8, alone=True), tokens()), "mlp")
    assert site.pattern == "coded_linear"
