"""Tests mixtures of experts as public code bases write them: which are fused, what is reported
instead, and that results are no less accurate than eager's against float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.found import matches_of, misses_of
from tests.wild import expert_activations, expert_loops, mixtures
from tests.wild.checking import report_of
from tests.wild.mixtures import build
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STYLES = mixtures.STYLES | expert_activations.STYLES

#: For each style, the number of its mixtures that are fused.
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
    "added_to_shared": 1,
    "added_to_shared_of_all": 1,
    "columns_in_order": 1,
    "mapped_cells": 1,
    "mapped_cells_weighed_inside": 1,
    "biased_by_count": 1,
    "scaled_results": 1,
    "counted_for_statistics": 1,
    "limited_groups": 1,
    "limited_groups_filled": 1,
    "limited_groups_turned": 1,
}

#: For each style, the code of the obstacle, and words of its message or hint.
MISSED = {
    "scattered_back_twice": ("UNSUPPORTED", "scores of 2 experts multiply"),
    "top_two_before": ("EXPERT_ORDER", "score_before_experts=False"),
    "counted_by_other_mask": ("EXPERT_ENDS", "does not place the rows"),
    "counted_by_repeated_choice": ("EXPERT_ENDS", "does not place the rows"),
    "added_by_other_route": ("EXPERT_COMBINE", "aten.index_add"),
    "added_product_of_others": ("EXPERT_ACTIVATION", "aten.addcmul"),
    "added_half_product": ("EXPERT_ACTIVATION", "aten.addcmul"),
    "clamped_twice_unlike": ("EXPERT_ACTIVATION", "aten.mul"),
    "clamped_silu_unlike": ("EXPERT_ACTIVATION", "aten.clamp"),
    "added_to_wider": ("EXPERT_COMBINE", "which has another shape or dtype"),
    "added_beside_a_view": ("EXPERT_COMBINE", "add the experts' results to zeros"),
    "mapped_cells_in_any_order": ("EXPERT_ORDER", "not in the order of a sort"),
    "mapped_cells_of_others": ("EXPERT_ORDER", "not in the order of a sort"),
    "biased_by_other_count": ("EXPERT_ACTIVATION", "not a set of columns"),
    "scaled_channels": ("EXPERT_COMBINE", "aten.mul"),
}
#: In these styles, rows that are counted one too few times are never computed.
UNCOUNTED = ["counted_by_repeated_choice", "mapped_cells_of_others"]

#: For each style, the reason why its router is not fused, or None if it is fused.
ROUTERS = {
    "limited_groups": None,
    "limited_groups_filled": "a corrected score may be less",
    "limited_groups_turned": "excludes experts in an unknown way",
    "counted_by_mask": None,
}

#: Styles that Dynamo does not capture whole with its default settings.
BROKEN = ["mapped_rows"]
LOOPS = ["loop_over_hits", "moe_loop_over_modules", "moe_loop_over_counts"]

#: Loops that Dynamo captures with `capture_dynamic_output_shape_ops`.
CAPTURED = ["moe_loop_over_modules", "moe_added_modules"]


def check(name, styles=STYLES, tokens=mixtures.TOKENS):
    """Returns the report of a mixture, after a check that its result is no less accurate than
    eager's."""
    module, (x,) = build(name, styles=styles)
    return report_of(module, (x[:tokens],), name)


@cache
def checked(name):
    """Calls `check` once for each style."""
    return check(name)


def captured(name):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return check(name, expert_loops.STYLES)


@pytest.mark.parametrize("name", FUSED)
def test_a_style_is_fused(name):
    report = checked(name)
    assert len(matches_of(report, "fused_moe")) == FUSED[name]
    assert misses_of(report, "fused_moe") == []


@pytest.mark.parametrize("name", ["scattered_back", "added_to_shared_of_all"])
def test_one_token_is_fused(name):
    assert len(matches_of(check(name, tokens=1), "fused_moe")) == 1


@pytest.mark.parametrize("name", MISSED)
def test_a_miss_says_what_stands_in_the_way(name):
    if name in UNCOUNTED:
        module, args = build(name, styles=STYLES)
        report = lower(module, tuple(args))
    else:
        report = check(name)
    code, words = MISSED[name]
    (miss,) = misses_of(report, "fused_moe")
    assert miss.code == code
    assert words in f"{miss.message} {miss.hint}"


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_fused_or_says_why_not(name):
    report = checked(name)
    misses = misses_of(report, "moe_router")
    if ROUTERS[name] is None:
        assert len(matches_of(report, "moe_router")) == 1
        assert misses == []
    else:
        (miss,) = misses
        assert ROUTERS[name] in miss.message


@pytest.mark.parametrize("name", BROKEN)
def test_a_graph_that_is_cut_is_told(name):
    module, args = build(name, styles=STYLES)
    assert misses_of(lower(module, tuple(args)), "fused_moe", "capture")


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_told_with_what_to_write_instead(name):
    module, args = build(name, styles=expert_loops.STYLES)
    missed = misses_of(lower(module, tuple(args)), "fused_moe", "capture")
    assert missed
    assert all("_grouped_mm" in miss.hint for miss in missed), missed


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_loop_is_told_with_what_to_write_instead(name):
    report = captured(name)
    assert not matches_of(report, "fused_moe")
    (miss,) = misses_of(report, "fused_moe")
    assert miss.code == "EXPERT_LOOP"
    assert "one tensor [E, N, K]" in miss.hint


def test_a_loop_that_is_cut_while_captured_is_told_with_what_to_write_instead():
    """The loop is over the experts that were chosen, whose number is not known."""
    module, args = build("loop_over_hits", styles=expert_loops.STYLES)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        missed = misses_of(lower(module, tuple(args)), "fused_moe", "capture")
    assert any("_grouped_mm" in miss.hint for miss in missed if miss.code == "GRAPH_BREAK")


def test_every_style_is_asked_for():
    assert {*FUSED, *MISSED, *BROKEN} == set(STYLES)
    assert {*LOOPS, *CAPTURED} == set(expert_loops.STYLES)
