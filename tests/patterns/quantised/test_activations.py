"""Tests activations that the graph quantises: the op quantises them if and only if this gives the
same result."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, relative_error
from tests.found import codes_of, matches_of, misses_of
from tests.models.moe_coded import (
    NEAR_MISSES,
    SPELLINGS,
    TOKENS,
    CodedMoe,
    KernelMoe,
    SeparateMoe,
    bounded,
    divided,
    tokens,
)
from tilewright.compiler import lower, reports


def lowered(module):
    torch._dynamo.reset()
    with torch.no_grad():
        return lower(module, (tokens(),))


@pytest.mark.parametrize("first", [False, True], ids=["gathered", "by_token"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_quantised_by_the_op(name, first, fresh_dynamo):
    module = CodedMoe(SPELLINGS[name], SPELLINGS[name], first=first)
    x = tokens()
    with torch.no_grad():
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        fused, eager, exact = compiled(x), module(x), module.exact(x)
        (found,) = reports()
        (site,) = matches_of(found, "fused_moe")
        assert site.op == "fused_moe", str(found)
        assert "activations=fp8" in str(found)
        plain = CodedMoe(lambda rows: rows, lambda rows: rows)(x)
    assert_no_worse(fused, eager, exact, name)
    # Both use the graph's codes. The op is far nearer to the graph than either is to a graph
    # without quantisation.
    assert relative_error(fused, eager) < relative_error(plain, eager) / 3


def test_token_counts_may_be_symbols():
    torch._dynamo.reset()
    module = CodedMoe(SPELLINGS["bounded"], SPELLINGS["repeated"])
    with torch.no_grad():
        compiled = torch.compile(
            module, backend="tilewright", options={"inner": "eager"}, dynamic=True
        )
        for count in (TOKENS, 5):
            x = tokens()[:count]
            assert relative_error(compiled(x), module(x)) < 2**-5
    assert [site.op for site in matches_of(reports()[-1], "fused_moe")] == ["fused_moe"]


@pytest.mark.parametrize("spelling", NEAR_MISSES, ids=lambda f: f.__name__)
def test_other_quantisation_stays_the_graphs_own(spelling):
    assert_refused(lowered(CodedMoe(spelling, spelling)), "ACTIVATION_FORMAT")


def test_the_hidden_rows_alone_decide_too():
    assert_refused(lowered(CodedMoe(divided, NEAR_MISSES[0])), "ACTIVATION_FORMAT")
    assert_refused(lowered(CodedMoe(NEAR_MISSES[0], divided)), "ACTIVATION_FORMAT")


def test_half_quantised_mixtures_are_refused():
    assert_refused(lowered(CodedMoe(divided, lambda rows: rows)), "ACTIVATION_FORMAT")
    assert_refused(lowered(CodedMoe(lambda rows: rows, divided)), "ACTIVATION_FORMAT")


def unchanged(rows):
    return rows


def test_gate_and_up_are_quantised_together_or_not_at_all():
    """If the graph quantises the rows for only one of gate and up, the pattern does not match: the
    op would quantise them for both or for neither, so its result would differ."""
    (site,) = matches_of(lowered(SeparateMoe(divided, bounded, divided)), "fused_moe")
    assert site.op == "fused_moe"
    for hidden in (divided, unchanged):
        assert_refused(lowered(SeparateMoe(divided, unchanged, hidden)), "ACTIVATION")
        assert_refused(lowered(SeparateMoe(unchanged, divided, hidden)), "ACTIVATION")


@pytest.mark.parametrize("dense", [False, True])
def test_tokens_that_alone_are_quantised_are_tokens(dense, fresh_dynamo):
    """If only the tokens are quantised, they become the op's x. Before the gather, they may be
    computed in any way."""
    module = CodedMoe(divided, unchanged, first=True, dense=dense)
    x = tokens()
    with torch.no_grad():
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        assert relative_error(compiled(x), module(x)) < 2**-6
    (found,) = reports()
    assert [site.op for site in matches_of(found, "fused_moe")] == ["fused_moe"], str(found)
    assert "activations" not in str(found)


def test_weights_that_are_no_codes_are_refused():
    assert_refused(lowered(CodedMoe(divided, divided, dense=True)), "ACTIVATION_FORMAT")


def test_a_graph_that_does_not_quantise_is_not_quantised():
    found = lowered(CodedMoe(lambda rows: rows, lambda rows: rows))
    (site,) = matches_of(found, "fused_moe")
    assert site.op == "fused_moe"
    assert "activations" not in str(found)


def test_a_library_s_kernel_is_told():
    """Reports a library's kernel. The two calls of the kernel give one miss. If the weights are not
    codes, there is no miss."""
    found = lowered(KernelMoe())
    assert_refused(found, "EXPERT_KERNEL")
    (miss,) = (m for m in misses_of(found, "fused_moe") if m.code == "EXPERT_KERNEL")
    assert "fp8_grouped_matmul" in miss.message
    assert "EXPERT_KERNEL" not in {
        m.code for m in misses_of(lowered(CodedMoe(divided, divided)), "fused_moe")
    }


def assert_refused(found, code):
    assert "fused_moe" not in {site.op for site in matches_of(found, "fused_moe")}, str(found)
    assert code in codes_of(found, "fused_moe"), str(found)
