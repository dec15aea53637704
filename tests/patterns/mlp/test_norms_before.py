"""Tests norms in front of linears for few tokens, in a form that no op supports. They are reported,
unless another op matches them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.found import matches_of, misses_of
from tests.patterns.mlp.test_linears import K, inputs, run

GROUPS = 2


def in_groups(x, norm):
    return norm(x.unflatten(-1, (GROUPS, K // GROUPS))).flatten(-2)


def root_mean_square(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def mamba(x, gate, weight):
    """Computes as Mamba-2 does: a gate in float32, then a norm of groups, with a weight for whole
    rows."""
    gated = x.float() * F.silu(gate.float())
    return weight * in_groups(gated, root_mean_square).to(x.dtype)


def gated_row(x, gate, weight):
    return weight * root_mean_square(x.float() * F.silu(gate.float())).to(x.dtype)


def of_groups(x, gate, weight):
    return weight * in_groups(x, lambda part: F.layer_norm(part, (K // GROUPS,)))


def of_rows(x, gate, weight):
    return F.rms_norm(x, (K,), weight, 1e-5)


def through_a_reshape(x, gate, weight):
    return F.rms_norm(x.flatten(0, 1), (K,), eps=1e-5).view_as(x) * weight


TOLD = {
    mamba: f"an RMS norm of a product that is gated, {K // GROUPS} columns at a time",
    gated_row: "an RMS norm of a product that is gated, in float32",
    of_groups: f"a layer norm, {K // GROUPS} columns at a time",
    of_rows: None,
    through_a_reshape: None,
}
READERS = {
    "linear_activation": lambda y, both, bias, residual: F.gelu(F.linear(y, both, bias)),
    "linear_residual": lambda y, both, bias, residual: residual + F.linear(y, both[:K]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("norm", TOLD, ids=lambda f: f.__name__)
def test_a_norm_that_no_op_takes_is_told(norm, reader):
    def program(x, both, down, bias, down_bias, weight, residual):
        return READERS[reader](norm(x, residual.tanh(), weight), both, bias, residual)

    report = run(program, inputs())
    assert [site.pattern for site in matches_of(report, *READERS)] == [reader]
    misses = misses_of(report, *READERS)
    fused = [site for site in report.matches if site.pattern not in READERS]
    if TOLD[norm] is None or fused:
        assert misses == []
        return
    (miss,) = misses
    assert (miss.code, miss.weight) == ("NORM_FORM", "advice")
    assert miss.message.endswith(TOLD[norm])


def test_a_norm_of_rows_that_are_reshaped_is_the_op_s():
    def program(x, both, down, bias, down_bias, weight, residual):
        return F.gelu(F.linear(through_a_reshape(x, None, weight), both, bias))

    (site,) = matches_of(run(program, inputs()), "linear_activation")
    assert site.shapes["norm"] == "rms"


def test_a_norm_of_groups_before_a_sum_is_told():
    def program(x, both, down, bias, down_bias, weight, residual):
        made = in_groups(F.linear(x, both[:K]), lambda part: F.rms_norm(part, (K // GROUPS,)))
        return residual + made

    report = run(program, inputs())
    assert matches_of(report, *READERS) == []
    (miss,) = misses_of(report, *READERS)
    assert miss.code == "SUM_PATH"
    assert f"{K // GROUPS} columns" in miss.message
