"""Tests latent attention as public code writes it, with caches that have no axis for heads: which
is fused, what is reported instead, and that outputs and caches are no less accurate than eager's
against float64."""

from __future__ import annotations

import pytest

from tests.found import matches_of, misses_of, patterns_in
from tests.wild.checking import report_of
from tests.wild.latents import STYLES, build

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STORE, DECODE = "mla_latent_store", "mla_decode"

#: For each style, the norm and rotation of the fused write.
FUSED = {
    "slices_apart": ("rms", "interleaved"),
    "slices_joined": ("rms", "interleaved"),
    "slices_of_columns": ("rms", "interleaved"),
    "copied_by_position": ("rms", "interleaved"),
    "put_by_row": ("rms", "interleaved"),
    "normed_behind": ("rms", "none"),
    "norm_with_bias": ("none", "interleaved"),
}

#: For each style, what is fused all the same, the code of the obstacle, and words of its message.
MISSED = {
    "slices_shifted": ([DECODE], "SLOT_INDEX", "written at different slots"),
    "keys_up_projected": ([], "LONE_WRITE", "keys and values of one width"),
}


def check(name, tokens):
    """Returns the report of a layer, after a check that its outputs and caches are no less accurate
    than eager's."""
    module, args = build(name, tokens)
    return report_of(module, args, name, caches=range(2, len(args)))


@pytest.mark.parametrize(("name", "tokens"), [("slices_apart", 1), *((n, 2) for n in FUSED)])
def test_a_style_is_fused(name, tokens):
    report = check(name, tokens)
    assert patterns_in(report, "mla", "qkv") == [STORE, DECODE]
    assert misses_of(report, "mla", "qkv") == []
    store, _ = matches_of(report, "mla")
    assert (store.shapes["norm"], store.shapes["rope"]) == FUSED[name]


@pytest.mark.parametrize("name", MISSED)
def test_a_miss_says_what_stands_in_the_way(name):
    report = check(name, 2)
    fused, code, words = MISSED[name]
    assert patterns_in(report, "mla", "qkv") == [*fused, "cache_store", "cache_store"]
    found = misses_of(report, "mla", "qkv")
    assert {miss.code for miss in found} == {code}
    assert all(words in miss.message and miss.hint for miss in found)


def test_every_style_is_asked_for():
    assert sorted([*FUSED, *MISSED]) == sorted(STYLES)
