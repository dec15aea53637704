"""Tests adapters as public code bases write them: which are fused, what is reported instead, and
that results are no less accurate than eager's against float64."""

from __future__ import annotations

import pytest

from tests.found import matches_of, misses_of
from tests.wild.adapters import STYLES, build
from tests.wild.checking import report_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FUSED = ["rows_by_mask", "one_stack_in_turn", "one_stack_views"]

#: For each style, the code of the obstacle, and words of the hint.
MISSED = {
    "one_stack": ("LORA_FORM", "A[:, p][index]"),
    "one_stack_crossed": ("LORA_FORM", "A[:, p][index]"),
}


def check(name):
    """Returns the report of a layer, after a check that its result is no less accurate than
    eager's."""
    return report_of(*build(name), name)


@pytest.mark.parametrize("name", FUSED)
def test_a_style_is_fused(name):
    report = check(name)
    assert matches_of(report, "lora")
    assert misses_of(report, "lora") == []


@pytest.mark.parametrize("name", MISSED)
def test_a_miss_says_what_stands_in_the_way(name):
    report = check(name)
    code, words = MISSED[name]
    found = misses_of(report, "lora")
    assert not matches_of(report, "lora")
    assert {miss.code for miss in found} == {code}
    assert all(words in miss.hint for miss in found)


def test_rows_that_are_added_in_place_are_told():
    """The delta of one adapter may be fused by itself. The sum of all adapters into some rows is
    reported."""
    found = misses_of(check("rows_in_place"), "lora")
    assert {miss.code for miss in found} == {"LORA_IN_PLACE"}
    assert all("instead of adapter_names" in miss.hint for miss in found)


def test_what_is_no_adapter_is_no_miss():
    report = check("picked_by_mapping")
    assert not matches_of(report, "lora")
    assert misses_of(report, "lora") == []


def test_every_style_is_asked_for():
    assert sorted([*FUSED, *MISSED, "picked_by_mapping", "rows_in_place"]) == sorted(STYLES)
