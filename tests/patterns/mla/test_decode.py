"""Pattern `mla_decode`: absorbed attention in every spelling is fused, no worse than eager against
float64, and reads no key that nobody sees; what is nearly that is missed by name."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, cloned, upcast
from tests.found import codes_of, matches_of, misses_of, patterns_in
from tests.models import mla_idioms
from tests.models.mla_absorbed import SPELLINGS, Model, build
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WEIGHTS = ("joined", "apart", "fp8")


def in_float64(model, args):
    """What the same model gives with the same numbers in float64."""
    exact, _ = build_like(model, dtype=torch.float64)
    wide = dict(model.named_parameters())
    for name, parameter in exact.named_parameters():
        if parameter.dtype == torch.float64:
            parameter.data = wide[name].double()
    return exact(*(upcast(a) for a in args))


def build_like(model, **changes):
    axes = {**vars(model.axes), **changes}
    return build(model.attend.__name__, **axes)


def check_fused(model, args):
    """The site of a model that is fused, and no worse than eager."""
    expected, exact = model(*cloned(args)), in_float64(model, args)
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    actual = compiled(*cloned(args))
    assert_no_worse(actual, expected, exact, model.attend.__name__)
    return site_of(reports()[-1])


def site_of(report):
    assert misses_of(report, "mla", "attention") == []
    (site,) = matches_of(report, "mla", "attention")
    assert site.pattern == "mla_decode"
    return site


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_fused_and_no_worse_than_eager(spelling, weight):
    site = check_fused(*build(spelling, weight=weight))
    assert site.shapes["mask"] == "causal by position"
    assert site.shapes["weight"] == ("fp8" if weight == "fp8" else "dense")
