"""Tests linears of codes with more than 128 tokens.

They match on a chip with a kernel that decodes weights, also if the number of tokens is symbolic.
If the kernel cannot decode a weight, or would be slower, the linear is advice.
"""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, upcast
from tests.found import matches_of, misses_of, patterns_in
from tests.models import quantized
from tests.patterns.mlp.test_codes import K, Mlp, tokens
from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS
from tilewright.codegen.targets import TARGETS
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MANY = MOST_CODED_TOKENS + 1
BOTH = ["linear_activation", "linear_residual"]
# Formats that the kernel decodes. In int8, a row of up to 64 columns has one scale, and a row of 96
# columns has groups of 64.
DECODED = (
    quantized.nibbles_low_first,
    quantized.nibbles_of_words,
    quantized.nvfp4,
    quantized.mxfp4,
    quantized.int8,
    quantized.int8_unsigned,
    quantized.fp8_channel,
    quantized.fp8_blocks_viewed,
)


def lowered(form, x, target="sm90", **options):
    with torch.no_grad():
        return lower(Mlp(form, form, form, **options), (x,), target=target)


def varying(count):
    x = tokens(count)
    torch._dynamo.mark_dynamic(x, 1)
    return x


def refused(report):
    """Returns the text of each miss of a linear after the op's name. All are advice."""
    misses = misses_of(report, "mlp")
    assert {(miss.code, miss.is_lost) for miss in misses} <= {("NO_KERNELS", False)}
    return [miss.message.partition(": ")[2] for miss in misses]


@pytest.mark.parametrize("form", DECODED)
def test_both_linears_are_decoded(form):
    report = lowered(form, tokens(MANY), bias=True)
    assert patterns_in(report, "mlp") == BOTH
    assert misses_of(report, "mlp") == []
    for site in matches_of(report, "mlp"):
        assert site.lowering == "decoding kernel"
        assert site.shapes["bias"] == "yes"


@pytest.mark.parametrize("count", [8, MANY])
def test_a_count_that_is_a_symbol_is_decoded_where_it_is_many(count):
    report = lowered(quantized.fp8_channel, varying(count))
    assert patterns_in(report, "mlp") == BOTH
    wanted = "decoding kernel" if count == MANY else "streaming kernel"
    assert {site.lowering for site in matches_of(report, "mlp")} == {wanted}


@pytest.mark.parametrize("target", [name for name, chip in TARGETS.items() if chip.is_gpu])
@pytest.mark.parametrize("tokens_of", [tokens, varying])
def test_on_other_chips_nothing_changes(target, tokens_of):
    report = lowered(quantized.int8_after, tokens_of(MANY), target)
    assert bool(matches_of(report, "mlp")) == TARGETS[target].has("wgmma")
    assert misses_of(report, "mlp") == []


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (quantized.nf4, "16 columns of codes of a table share a scale"),
        (quantized.awq, "the weight is contiguous along N, not along K"),
        (quantized.gptq, "the weight is contiguous along N, not along K"),
        (quantized.int8_with_zeros, "the zeros are not integers of four bits"),
        (quantized.nibbles_scaled_by_column, "the number of columns that share a scale is 1"),
    ],
)
def test_codes_that_no_kernel_decodes_are_advice(form, why):
    report = lowered(form, tokens(MANY))
    assert matches_of(report, "mlp") == []
    assert refused(report) == [f"more than 128 tokens, and {why}: the library's GEMM is faster"] * 2
    torch._dynamo.reset()
    assert patterns_in(lowered(form, tokens(MOST_CODED_TOKENS)), "mlp") == BOTH


def test_float16_is_advice():
    class Half(Mlp):
        def forward(self, x):
            return super().forward(x.half())

    with torch.no_grad():
        report = lower(Half(*[quantized.int8_after] * 3), (tokens(MANY),), target="sm90")
    assert matches_of(report, "mlp") == []
    assert ["x is fp16" in said for said in refused(report)] == [True, True]


@pytest.mark.parametrize(
    ("form", "most"),
    [(quantized.nvfp4, 1024), (quantized.mxfp4, 2048), (quantized.nibbles_low_first, 2048)],
)
def test_decoding_before_is_faster_for_more_tokens(form, most):
    assert patterns_in(lowered(form, tokens(most)), "mlp") == BOTH
    torch._dynamo.reset()
    assert refused(lowered(form, tokens(most + 1))) == [
        f"more than {most} tokens of such codes: the library's GEMM is faster"
    ] * 2  # fmt: skip
    torch._dynamo.reset()
    assert refused(lowered(form, varying(8))) == [
        f"perhaps more than {most} tokens of such codes: the library's GEMM is faster"
    ] * 2  # fmt: skip


def test_a_norm_before_many_tokens_stays_in_the_graph():
    class Normed(Mlp):
        def forward(self, x):
            return super().forward(torch.nn.functional.rms_norm(x, (K,)))

    with torch.no_grad():
        report = lower(Normed(*[quantized.int8_after] * 3), (tokens(MANY),), target="sm90")
    norms = {site.pattern: site.shapes.get("norm") for site in matches_of(report, "mlp")}
    assert norms == {"linear_activation": "no", "linear_residual": None}


@pytest.mark.parametrize("form", [quantized.scaled_mm_token, quantized.scaled_mm_tensor])
def test_codes_by_codes_stay_with_the_library(form):
    report = lowered(form, tokens(MANY))
    assert not set(BOTH).intersection(patterns_in(report, "mlp"))


def test_the_rewritten_graph_is_no_worse():
    module, x = Mlp(*[quantized.fp8_channel] * 3), varying(8)
    options = {"inner": "eager", "everywhere": True, "target": "sm90"}
    with torch.no_grad():
        run = torch.compile(module, backend="tilewright", options=options)
        for count in (8, MANY):
            given = x if count == 8 else tokens(count)
            assert_no_worse(run(given), module(given), upcast(module)(upcast(given)), "out")
    assert patterns_in(reports()[0], "mlp") == BOTH
