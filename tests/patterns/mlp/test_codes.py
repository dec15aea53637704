"""Tests linears of dense layers whose weights are codes.

The patterns find them in the spellings of checkpoints, and no result is less accurate than eager's.
A linear that no op supports is advice, or is not reported.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, upcast
from tests.found import matches_of, misses_of
from tests.models import quantized
from tests.models.quantized import STORED, QuantizedLinear
from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS
from tilewright.compiler import lower, reports

K, N = 64, 96

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Mlp(nn.Module):
    """A gated MLP with a residual. `forms` are the forms of gate, up and down."""

    def __init__(self, *forms, bias=False):
        super().__init__()
        sizes = ((K, N), (K, N), (N, K))
        self.gate, self.up, self.down = (
            QuantizedLinear(form, *size, seed, bias=bias)
            for seed, (form, size) in enumerate(zip(forms, sizes, strict=True))
        )

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def tokens(count=3):
    return torch.randn(1, count, K, generator=torch.Generator().manual_seed(9)).bfloat16()


def compiled(module, x):
    """Returns the report of a module, after a check that its result is no less accurate than
    eager's."""
    with torch.no_grad():
        expected, exact = module(x), upcast(module)(upcast(x))
        run = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        assert_no_worse(run(x), expected, exact, "out")
    return reports()[-1]


FORMATS = {"nibbles": "int4_k", "gptq": "int4_k", "awq": "int4_n", "int8": "int8", "fp8": "fp8"}
FORMATS |= {"scaled": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "nf4": "nf4", "fp4": "fp4"}
# Forms that are not fused: some CPUs do not support the product, the groups are in a buffer, or the
# codes have another format.
OTHERS = {quantized.scaled_mm_token, quantized.gptq_act_order}
OTHERS |= {quantized.nvfp4_high_first, quantized.nf4_low_first, quantized.nf4_rounded}


def with_a_bias_in_turn():
    """Yields (form, whether there is a bias). The bias alternates among the forms of a format."""
    seen = {}
    for form in (form for form in STORED if form not in OTHERS):
        kind = FORMATS[form.__name__.split("_")[0]]
        seen[kind] = not seen.get(kind, True)
        yield pytest.param(form, seen[kind], id=form.__name__ + "-bias" * seen[kind])


@pytest.mark.parametrize(("form", "bias"), [*with_a_bias_in_turn()])
def test_both_linears_are_found(form, bias):
    """Every form occurs once, and every format occurs with a bias and without one."""
    report = compiled(Mlp(form, form, form, bias=bias), tokens())
    found = {site.pattern: site.shapes for site in matches_of(report, "mlp")}
    assert found.keys() == {"linear_activation", "linear_residual"}
    kind = FORMATS[form.__name__.split("_")[0]]
    for shapes in found.values():
        assert shapes["weights"] == kind
        assert shapes["bias"] == ("yes" if bias else "no")


def test_gate_and_up_in_one_tensor_of_codes():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = QuantizedLinear(quantized.fp8_blocks_repeated, K, 2 * N)

        def forward(self, x):
            gate, up = self.both(x).chunk(2, dim=-1)
            return F.silu(gate) * up

    (site,) = matches_of(compiled(Packed(), tokens()), "mlp")
    assert (site.shapes["gate"], site.shapes["weights"]) == ("packed", "fp8")


def test_blocks_of_different_size_are_cut_to_the_smaller():
    module = Mlp(quantized.fp8_tensor, quantized.fp8_blocks_viewed, quantized.fp8_channel)
    assert len(matches_of(compiled(module, tokens()), "mlp")) == 2


def unscaled(layer, dtype):
    return layer.codes.to(dtype)


unscaled.stored = quantized.int8_buffers


@pytest.mark.parametrize(
    ("forms", "code", "alone"),
    [
        ((quantized.int8, quantized.fp8_channel), "WEIGHT_FORMAT", 2),
        ((quantized.int8, quantized.int8_with_zeros), "WEIGHT_FORMAT", 2),
        ((quantized.nibbles_low_first, quantized.nibbles_high_first), "WEIGHT_FORMAT", 2),
        ((quantized.gptq_act_order, quantized.gptq_act_order), "SCALE_BLOCK", 0),
        ((unscaled, unscaled), "WEIGHT_FORMAT", 0),
    ],
    ids=["dtypes", "zeros", "orders", "groups of a buffer", "no scale"],
)
def test_gate_and_up_that_the_op_does_not_take_together_are_advice(forms, code, alone):
    """If the op cannot compute gate and up together, they are advice. The down projection becomes
    one op, and each of gate and up whose codes are known becomes a separate op."""
    report = compiled(Mlp(*forms, quantized.int8), tokens())
    sites = [site.pattern for site in matches_of(report, "mlp")]
    assert sorted(sites) == ["coded_linear"] * alone + ["linear_residual"]
    (miss,) = misses_of(report, "mlp")
    assert (miss.pattern, miss.code, miss.is_lost) == ("linear_activation", code, False)
    assert miss.nodes


@pytest.mark.parametrize("first", [True, False])
def test_of_two_linears_that_are_added_the_one_that_the_op_takes(first):
    """The graph adds two linears, and the op supports only one of them. The op computes that one.
    The pattern refuses the other one late, when it makes the arguments for the weights, because the
    groups of that weight are in a buffer."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            forms = (quantized.gptq_act_order, quantized.int8)
            self.sides = nn.ModuleList(
                QuantizedLinear(form, K, K, 2) for form in (forms if first else forms[::-1])
            )

        def forward(self, x):
            return self.sides[0](x) + self.sides[1](x)

    (site,) = matches_of(compiled(Both(), tokens()), "mlp")
    assert (site.pattern, site.shapes["weights"]) == ("linear_residual", "int8")


def test_one_dense_weight_beside_codes_is_advice():
    module = Mlp(quantized.int8, quantized.int8, quantized.int8)
    module.up = nn.Linear(K, N, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    (miss,) = misses_of(compiled(module, tokens()), "linear_activation")
    assert (miss.code, miss.is_lost) == ("WEIGHT_FORMAT", False)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (quantized.nf4_of_a_buffer, "its weight is computed in every call"),
    ],
)
def test_products_that_the_op_cannot_read_are_advice(form, why):
    report = compiled(Mlp(form, form, form), tokens())
    assert not matches_of(report, "mlp")
    misses = misses_of(report, "mlp")
    assert sorted(miss.pattern for miss in misses) == ["linear_activation", "linear_residual"]
    assert all(why in miss.message and miss.hint and not miss.is_lost for miss in misses)


@pytest.mark.parametrize("form", [quantized.by_operator, quantized.by_operator_in_place])
def test_linears_by_an_operator_are_advice(form):
    report = lower(Mlp(form, form, form), (tokens(),))
    assert not matches_of(report, "mlp")
    misses = misses_of(report, "mlp")
    assert sorted(miss.pattern for miss in misses) == ["linear_activation", "linear_residual"]
    name = "quantized_tests::linear"
    assert all(name in miss.message and miss.hint and not miss.is_lost for miss in misses)


class CastMlp(nn.Module):
    """Has weights in float32, which are cast to the activation's dtype in each call."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        shapes = ((N, K), (K, N))
        weights = (torch.randn(*shape, generator=generator) / 8 for shape in shapes)
        self.up, self.down = (nn.Parameter(w, requires_grad=False) for w in weights)

    def forward(self, x):
        h = F.relu(F.linear(x, self.up.to(x.dtype))).square()
        return x + F.linear(h, self.down.to(x.dtype))


def test_weights_that_are_cast_are_found():
    found = {site.pattern: site.shapes for site in matches_of(compiled(CastMlp(), tokens()), "mlp")}
    assert found.keys() == {"linear_activation", "linear_residual"}
    assert {shapes["weights"] for shapes in found.values()} == {"cast from float32"}


def test_more_tokens_than_the_kernel_takes_are_left_alone():
    module = Mlp(*[quantized.int8] * 3)
    assert len(matches_of(lower(module, (tokens(MOST_CODED_TOKENS),)), "mlp")) == 2
    torch._dynamo.reset()
    assert matches_of(lower(module, (tokens(MOST_CODED_TOKENS + 1),)), "mlp") == []


def test_a_count_of_tokens_that_is_a_symbol_is_left_alone():
    """A symbolic number of tokens is not fused. test_linears.py has the control with dense
    weights."""
    x = tokens(8)
    torch._dynamo.mark_dynamic(x, 1)
    report = lower(Mlp(*[quantized.int8] * 3), (x,))
    assert matches_of(report, "mlp") == misses_of(report, "mlp") == []
