"""Tests that formulas match in any order, through casts and changes of layout, and match nothing
with another meaning."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from tests.compiler.flow_check import returned, selected
from tilewright.patterns.arithmetic.formula import (
    ABSENT,
    aside,
    call,
    number,
    reduction,
    tensor,
)
from tilewright.patterns.dataflow import once, remembering
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.norm import match_norm

T, N, G = 3, 24, 4
D = N // G
X, Y = tensor("x"), tensor("y")
MEAN = reduction("mean", X, "width")


def given(seed=0, shape=(T, N)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def match(formula, function, *args):
    return formula.match(returned(function, *(args or (given(), given(1)))))


def held(view, **inputs):
    """Returns what a view selects from an argument of the program."""
    return selected(view.effect, inputs[view.value.node.name.removeprefix("l_").strip("_")])


# --- order ----------------------------------------------------------------------------------------

SWISH = X * call("sigmoid", X) * Y
ORDERS = {
    "as written": lambda x, y: x * torch.sigmoid(x) * y,
    "factors swapped": lambda x, y: y * (torch.sigmoid(x) * x),
    "computed twice": lambda x, y: (x + 1 - 1) * torch.sigmoid(x + 1 - 1) * y,
    "methods": lambda x, y: x.sigmoid().mul(x).mul(y),
}


@pytest.mark.parametrize("name", ORDERS)
def test_factors_in_any_order(name):
    assert match(SWISH, ORDERS[name]) is not None


def test_a_name_is_one_value():
    assert match(SWISH, lambda x, y: x * torch.sigmoid(y) * y) is None
    assert match(X + X, lambda x, y: x + y) is None
    assert match(X + X, lambda x, y: y + y).bound["x"].shape == (T, N)


def test_a_difference_has_one_order():
    assert match(X - X * Y, lambda x, y: x - y * x) is not None
    assert match(X - X * Y, lambda x, y: y * x - x) is None


def test_an_alternative_that_the_reader_refuses_is_left_for_the_next():
    formula = (X * Y).giving(kind="product")
    taken = []

    def second(found):
        taken.append(found.bound["x"].value.node.name)
        return found if len(taken) == 2 else None

    assert formula.match(returned(lambda x, y: x * y, given(), given(1)), second) is not None
    assert taken == ["l_x_", "l_y_"]
    assert formula.match(returned(lambda x, y: x * y, given(), given(1)), lambda f: None) is None


# --- numbers and options --------------------------------------------------------------------------


def test_numbers():
    half = X * 0.5
    assert match(half, lambda x: 0.5 * x, given()) is not None
    assert match(half, lambda x: 0.50001 * x, given()) is None
    assert match(half, lambda x, y: x * y) is None
    rounded = X * number(0.5, within=1e-3)
    assert match(rounded, lambda x: 0.50001 * x, given()) is not None
    same = X * number("n") + number("n")
    assert match(same, lambda x: x * 3 + 3, given()).bound["n"] == 3
    assert match(same, lambda x: x * 3 + 2, given()) is None


OPTIONS = {
    "alpha of a sum": (X + Y, lambda x, y: torch.add(x, y, alpha=2)),
    "alpha of a difference": (X - Y, lambda x, y: torch.sub(x, y, alpha=2)),
    "a quotient that is rounded": (X / Y, lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "value of addcmul": (
        call("addcmul", X, X, Y),
        lambda x, y: torch.addcmul(x, x, y, value=2),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_make_another_operation(name):
    formula, function = OPTIONS[name]
    assert match(formula, function) is None
    plain = {
        "alpha of a sum": lambda x, y: torch.add(x, y, alpha=1),
        "alpha of a difference": lambda x, y: torch.sub(x, y, alpha=1),
        "a quotient that is rounded": lambda x, y: torch.div(x, y, rounding_mode=None),
        "value of addcmul": lambda x, y: torch.addcmul(x, x, y, value=1),
    }
    assert match(formula, plain[name]) is not None


def test_an_argument_that_may_be_absent():
    clamp = call("clamp", X, number("low") | ABSENT, read=lambda view: view.value.args[:2])
    assert match(clamp, lambda x: x.clamp(None, 3), given()).bound.keys() == {"x"}
    assert match(clamp, lambda x: x.clamp(1, 3), given()).bound["low"] == 1
    assert match(clamp, lambda x, y: x.clamp(y, None)) is None


# --- casts and layout ----------------------------------------------------------------------------


def test_casts_between_floating_types_alone_are_seen_through():
    def through(dtype):
        return match(SWISH, lambda x, y: x * torch.sigmoid(x.to(dtype).float()) * y)

    assert through(torch.float64) is not None
    assert through(torch.bfloat16) is not None
    assert through(torch.int32) is None
    assert through(torch.float8_e4m3fn) is None


LAYOUTS = {
    "whole": lambda x, y: x * torch.sigmoid(x) * y,
    "reshaped": lambda x, y: (x * torch.sigmoid(x)).view(-1) * y.view(-1),
    "reshaped on the way": lambda x, y: x * torch.sigmoid(x.view(T, G, D)).view(T, N) * y,
    "turned": lambda x, y: (x.t() * torch.sigmoid(x.t())).t() * y,
    "a slice": lambda x, y: (x * torch.sigmoid(x))[:, 3:9] * y[:, 3:9],
    "cast and reshaped": lambda x, y: (
        (x.half() * torch.sigmoid(x.half())).view(-1).float() * y.view(-1)
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_found_has_the_dimensions_of_what_is_matched(name):
    x, y = given(), given(1)
    found = match(SWISH, LAYOUTS[name], x, y).bound
    expected = LAYOUTS[name](x, y)
    a, b = held(found["x"], x=x, y=y), held(found["y"], x=x, y=y)
    torch.testing.assert_close(a * torch.sigmoid(a) * b, expected, rtol=2e-3, atol=2e-3)


OTHER_LAYOUTS = {
    "rolled": lambda x, y: x * torch.sigmoid(x.roll(1, 1)) * y,
    "another slice": lambda x, y: x[:, 3:9] * torch.sigmoid(x[:, 4:10]) * y[:, 3:9],
    "turned on one side": lambda x, y: x[:, :T] * torch.sigmoid(x[:, :T].t()) * y[:, :T],
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_other_elements_are_others(name):
    assert match(SWISH, OTHER_LAYOUTS[name]) is None


def test_what_stays_aside_is_not_absorbed():
    formula = X * aside((number("n") + Y).named("factor"))
    view = returned(lambda x, y: x * (y + 2), given(), given(1))
    found = formula.match(view)
    assert [value.op for value in found.absorbed] == ["aten.mul"]
    assert found.bound["factor"].value.op == "aten.add"
    assert found.bound["n"] == 2


# --- reductions -----------------------------------------------------------------------------------


def by_groups(x):
    return x.view(T, G, D)


CENTRED = {
    "rows": (lambda x: x - x.mean(-1, keepdim=True), N),
    "unsqueezed": (lambda x: x - x.mean(-1).unsqueeze(-1), N),
    "groups": (
        lambda x: (by_groups(x) - by_groups(x).mean(-1, keepdim=True)).view(T, N),
        D,
    ),
    "repeated": (
        lambda x: x - by_groups(x).mean(-1, keepdim=True).expand(T, G, D).reshape(T, N),
        D,
    ),
    "interleaved": (
        lambda x: x - by_groups(x).mean(-1).repeat_interleave(D, -1),
        D,
    ),
    "turned": (lambda x: (x.t() - x.t().mean(0)).t(), None),
    "over another dimension": (lambda x: x - x.mean(0, keepdim=True), None),
    "over all": (lambda x: x - x.mean(), None),
    "another group": (
        lambda x: x - by_groups(x).mean(-1, keepdim=True).expand(T, G, D).flip(1).reshape(T, N),
        None,
    ),
    "groups of columns apart": (
        lambda x: x - x.view(T, D, G).mean(-1, keepdim=True).expand(T, D, G).mT.reshape(T, N),
        None,
    ),
    "rounded": (lambda x: x - x.mean(-1, keepdim=True).to(torch.int32), None),
    "rows of a square by columns": (lambda x: x[:, :T] - x[:, :T].mean(-1), None),
}


@pytest.mark.parametrize("name", CENTRED)
def test_every_element_sees_its_own_run(name):
    function, width = CENTRED[name]
    x = (8 * given()).round()  # sums are exact in any order
    found = match(X - MEAN, function, x)
    assert (found and found.bound["width"]) == width
    if found is not None:
        runs = held(found.bound["x"], x=x).view(T, -1, width)
        expected = (runs - runs.mean(-1, keepdim=True)).view(T, N)
        torch.testing.assert_close(expected, function(x))


def test_runs_of_two_lengths_are_no_one_width():
    both = X - MEAN - MEAN
    assert match(both, lambda x: x - x.mean(-1, True) - x.mean(-1, True), given()) is not None

    def two(x):
        means = by_groups(x).mean(-1, keepdim=True).expand(T, G, D).reshape(T, N)
        return x - x.mean(-1, keepdim=True) - means

    assert match(both, two, given()) is None


# --- activations and norms through layout ---------------------------------------------------------


def mamba(x, gate, weight):
    """Computes as Mamba-2 does: a gate, then an RMS norm of groups, with a weight for whole
    rows."""
    gated = x.float() * F.silu(gate.float())
    groups = by_groups(gated)
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * normed.view(T, N).to(x.dtype)


def test_mamba_2_s_gated_norm():
    x, gate, weight = given().bfloat16(), given(1).bfloat16(), given(2, (N,)).bfloat16()
    norm = match_norm(returned(mamba, x, gate, weight))
    assert norm is not None
    assert (norm.kind, norm.width, norm.eps, norm.x.shape) == ("rms", D, 1e-5, (T, N))
    assert norm.weight.shape == (1, N)
    gated = match_activation(norm.x)
    assert (gated.name, gated.gate.value.node.name, gated.up.value.node.name) == (
        "silu",
        "l_gate_",
        "l_x_",
    )


NORMS = {
    "of groups": lambda x, w: F.rms_norm(by_groups(x), (D,), None, 1e-5).view(T, N) * w,
    "of groups, layer": lambda x, w: w * F.layer_norm(by_groups(x), (D,)).view(T, N),
    "of one long row": lambda x, w: F.rms_norm(x.view(1, T, N), (N,), w, 1e-5).view(T, N),
    "of heads side by side": lambda x, w: F.layer_norm(x.view(-1, D), (D,), w[:D]).view(T, N),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_is_reshaped_has_the_meaning_of_its_record(name):
    x, w = given(), given(2, (N,))
    norm = match_norm(returned(NORMS[name], x, w))
    runs = held(norm.x, x=x, w=w).view(T, -1, norm.width)
    if norm.kind == "layer":
        runs = runs - runs.mean(-1, keepdim=True)
    normed = runs * torch.rsqrt(runs.square().mean(-1, keepdim=True) + norm.eps)
    made = normed.view(T, N) * held(norm.weight, x=x, w=w)
    torch.testing.assert_close(made, NORMS[name](x, w))


def test_a_norm_whose_rows_lie_crosswise_is_none_of_the_last_dimension():
    assert match_norm(returned(lambda x: F.rms_norm(x, (N,)).t(), given())) is None
    assert match_norm(returned(lambda x: F.rms_norm(x, (N,)).t().t(), given())) is not None
    assert match_norm(returned(lambda x: F.rms_norm(x, (N,))[:, :D], given())) is None


# --- what is kept ---------------------------------------------------------------------------------


def test_answers_are_kept_while_they_are_wanted_and_no_longer():
    asked = []

    @once
    def number_of_operands(value):
        asked.append(value)
        return len(value.operands)

    value = returned(lambda x, y: x * y, given(), given(1)).value
    with remembering():
        assert [number_of_operands(value) for _ in range(2)] == [2, 2]
    assert len(asked) == 1
    assert [number_of_operands(value) for _ in range(2)] == [2, 2]
    assert len(asked) == 3
    held = weakref.ref(value)
    with remembering():
        assert match_norm(value.whole) is None
    del value
    asked.clear()
    gc.collect()
    assert held() is None
