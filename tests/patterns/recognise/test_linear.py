"""Tests columns of linears: weight rows, bias and activation give the numbers of the view, as in
PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compiler.flow_check import selected
from tests.patterns.recognise.test_gemm import value
from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.language import Reject, Stage
from tilewright.patterns.recognise.linear import Path, match_columns, match_linear

B, S, K, N = 2, 3, 5, 24
WHOLE = effects.identity((B, S, N))
HEADS = effects.reshape(WHOLE, (B, S, 4, 6))
VIEWS = {
    "whole": WHOLE,
    "first half": effects.narrow(WHOLE, 2, 0, 12),
    "second half": effects.narrow(WHOLE, 2, 12, 12),
    "every other": effects.narrow(WHOLE, 2, 1, 12, 2),
    "rows": effects.reshape(WHOLE, (B * S, N)),
    "heads": HEADS,
    "odd heads": effects.narrow(HEADS, 2, 1, 2, 2),
    "one head": effects.select(HEADS, 2, 3),
    "columns across": effects.permute(HEADS, (0, 1, 3, 2)),
    "last tokens": effects.narrow(WHOLE, 1, 1, 2),
    "sequences first": effects.permute(WHOLE, (1, 0, 2)),
}
SPELLINGS = ("linear", "linear without a bias", "added bias", "matmul and added bias")


def linear(spelling):
    """Returns (the last value of a graph with a linear, the contents of the graph's inputs)."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, dtype=torch.double) for shape in ((B, S, K), (N, K), N))
    inputs = [value(op, t) for op, t in (("input", x), ("constant", weight), ("constant", bias))]
    given = dict(zip(inputs, (x, weight, bias), strict=True))
    xs, weights, biases = (v.whole for v in inputs)
    result = torch.nn.functional.linear(x, weight)
    if spelling.startswith("linear"):
        bare = spelling.endswith("without a bias")
        made = result if bare else result + bias
        return value("aten.linear", made, xs, weights, None if bare else biases), made, given
    if spelling == "added bias":
        product = value("aten.linear", result, xs, weights, None)
    else:
        turned = View(weights.value, effects.permute(weights.effect, (1, 0)))
        product = value("aten.matmul", result, xs, turned)
    return value("aten.add", result + bias, product.whole, biases), result + bias, given


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_columns_are_made_by_their_rows(spelling, name):
    of, result, given = linear(spelling)
    view = View(of, VIEWS[name])
    found = match_columns(view)
    x, weight = (selected(v.effect, given[v.value]) for v in (found.x, found.weight))
    made = torch.tensordot(x, weight, dims=([-1], [-1]))
    if found.bias is not None:
        made = made + selected(found.bias.effect, given[found.bias.value])
    torch.testing.assert_close(made, selected(view.effect, result))
    assert (found.bias is None) == (spelling == "linear without a bias")
    assert found.all_tokens == (name not in ("last tokens", "sequences first"))


@pytest.mark.parametrize(("dtype", "of", "is_read"), [
    (torch.int8, (N,), True), (torch.float32, (N,), False), (torch.int8, (S, 1), False),
])  # fmt: skip
def test_a_product_of_codes_may_be_scaled_by_feature(dtype, of, is_read):
    """Only the columns of a product of codes have scales, one for each column."""
    x, codes = torch.randn(B, S, K), torch.ones(N, K, dtype=dtype)
    stored, scale = value("constant", codes), value("constant", torch.ones(of))
    weight = (
        value("cast", codes.float(), stored.whole).whole if dtype == torch.int8 else stored.whole
    )
    made = torch.nn.functional.linear(x, codes.float())
    product = value("aten.linear", made, value("input", x).whole, weight, None)
    scaled = value("aten.mul", made, product.whole, scale.whole)
    part = View(scaled, effects.narrow(WHOLE, 2, 6, 12))
    found = match_columns(part)
    if is_read:
        assert found.scale == scale.whole.narrow(0, 6, 12)
    else:
        assert found is None or found.scale is None


def test_tokens_behind_columns_are_no_columns_of_a_linear():
    of, _, _ = linear("linear")
    assert match_columns(View(of, effects.permute(WHOLE, (0, 2, 1)))) is None
    assert match_columns(View(of, effects.reshape(WHOLE, (B, S * N)))) is None
    assert match_columns(View(of, WHOLE)) is not None


def test_misses_have_their_callers_codes():
    of, result, given = linear("linear")
    mask = value("input", torch.ones(1) > 0)
    path = Path("HEADS", Stage.ACTIVATION, "the gate", masked="WEIGHT_FORMAT")
    cases = (
        ("HEADS", next(iter(given))),
        ("HEADS", value("aten.tanh", result, of.whole)),
        ("WEIGHT_FORMAT", value("aten.index", result, of.whole, mask.whole)),
    )
    for code, above in cases:
        with pytest.raises(Reject) as rejection:
            match_linear(replace(above, node=torch.fx.Graph().placeholder("x")), path)
        assert (rejection.value.miss.code, rejection.value.miss.stage) == (code, Stage.ACTIVATION)
    assert match_linear(of, path).value is of


@pytest.mark.parametrize(("factors", "named"), [(1, True), (N, False)])
def test_a_miss_names_a_factor_that_is_one_number(factors, named):
    """The miss names a factor that is one number for all features. The user could multiply it into
    the weight when the model is loaded."""
    of, result, _ = linear("linear")
    factor = value("constant", torch.ones(factors))
    above = value("aten.mul", result, replace(of, projected=True).whole, factor.whole)
    with pytest.raises(Reject) as rejection:
        match_linear(
            replace(above, node=torch.fx.Graph().placeholder("x")),
            Path("HEADS", Stage.ACTIVATION, "the gate"),
        )
    assert ("a constant factor" in rejection.value.miss.message) == named
