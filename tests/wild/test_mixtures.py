"""Mixtures of experts as public code bases write them: what is fused, what is told instead, and
that results are no worse than eager against float64."""

from __future__ import annotations

import pytest
import torch

from tests.agreement import assert_no_worse, upcast
from tests.found import matches_of, misses_of
from tests.wild.mixtures import STYLES, build
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

#: Style -> how many mixtures of it are fused.
FUSED = {
    "gathered_weights": 1,
    "two_layers": 2,
    "scattered_back": 1,
    "counted_by_mask": 1,
    "sorted_scatter_back": 1,
    "sorted_scatter_into": 1,
    "top_one_sigmoid": 1,
    "top_one_after": 1,
    "added_by_route": 1,
    "added_by_route_top_one": 1,
    "sorted_and_added_by_route": 1,
    "added_product": 1,
    "clamped_silu": 1,
    "clamped_twice": 1,
}

#: Style -> the code of what stands in the way, and words of its message or hint.
MISSED = {
    "scattered_back_twice": ("UNSUPPORTED", "2 experts of a token weigh its input"),
    "top_two_before": ("EXPERT_ORDER", "score_before_experts=False"),
    "counted_by_other_mask": ("EXPERT_ENDS", "does not place the rows"),
    "counted_by_repeated_choice": ("EXPERT_ENDS", "does not place the rows"),
    "added_by_other_route": ("EXPERT_COMBINE", "aten.index_add"),
    "added_product_of_others": ("EXPERT_ACTIVATION", "aten.addcmul"),
    "added_half_product": ("EXPERT_ACTIVATION", "aten.addcmul"),
    "clamped_twice_unlike": ("EXPERT_ACTIVATION", "aten.mul"),
    "clamped_silu_unlike": ("EXPERT_ACTIVATION", "aten.clamp"),
    "added_to_shared": ("EXPERT_COMBINE", "add the experts' results to zeros"),
}

#: Styles that Dynamo does not capture whole.
BROKEN = ["mapped_rows", "loop_over_hits", "moe_loop_over_modules", "moe_loop_over_counts"]


def check(name):
    """The report of a mixture that was no worse than eager."""
    module, (x,) = build(name)
    with torch.no_grad():
        compiled = torch.compile(module, backend="tilewright", options={"inner": "eager"})
        out, expected = compiled(x), module(x)
        exact = upcast(module)(upcast(x))
    assert_no_worse(out, expected, exact, name)
    return reports()[-1]


@pytest.mark.parametrize("name", FUSED)
def test_a_style_is_fused(name):
    report = check(name)
    assert len(matches_of(report, "fused_moe")) == FUSED[name]
    assert misses_of(report, "fused_moe") == []


@pytest.mark.parametrize("name", MISSED)
def test_a_miss_says_what_stands_in_the_way(name):
    if name == "counted_by_repeated_choice":  # rows that it counts once too few are never computed
        module, args = build(name)
        report = lower(module, tuple(args))
    else:
        report = check(name)
    code, words = MISSED[name]
    (miss,) = misses_of(report, "fused_moe")
    assert miss.code == code
    assert words in f"{miss.message} {miss.hint}"


@pytest.mark.parametrize("name", BROKEN)
def test_a_loop_is_told_with_what_to_write_instead(name):
    module, args = build(name)
    missed = misses_of(lower(module, tuple(args)), "fused_moe", "capture")
    assert missed
    if name != "mapped_rows":
        assert all("_grouped_mm" in miss.hint for miss in missed), missed


def test_every_style_is_asked_for():
    assert sorted([*FUSED, *MISSED, *BROKEN]) == sorted(STYLES)
