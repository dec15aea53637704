"""Tests attention layers as public code bases write them: which are fused, what is reported
instead, and that outputs and caches are no less accurate than eager's against float64."""

from __future__ import annotations

import pytest
import torch

from tests.found import codes_of, matches_of, misses_of
from tests.wild.attention import STYLES, build
from tests.wild.checking import report_of
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

#: For each style, the rotation of the fused projection.
FUSED = {
    "complex_pairs": "half",
    "cast_after_half": "half",
    "cast_after_pairs": "interleaved",
    "tables_stacked": "interleaved",
    "tables_stacked_apart": "interleaved",
    "norm_in_place": "half",
    "norm_of_values": "half",
    "layer_norm_with_bias": "half(8)",
    "layer_norm_spelled_out": "half",
    "layer_norm_by_head": "half",
    "gate_beside_query": "half",
    "gate_in_packed": "half",
    "gate_behind_query": "half",
    "key_multiplier": "half",
    "value_multiplier": "half",
    "key_divided": "half",
    "query_multiplier": "half",
    "key_multiplied_after_norm": "half",
    "query_capped": "half",
    "int8_product_scaled": "interleaved",
    "int8_both_scaled": "half",
    "rows_unrolled": "half",
    "scattered_rows": "half",
    "sum_after": "none",
    "put_rows": "half",
    "put_rows_heads_first": "half",
    "beside_convolution": "none",
    "beside_recurrence": "none",
    "beside_recurrence_by_head": "none",
}

#: For each style, the code of the obstacle, and words of its message or hint.
MISSED = {
    "complex_pairs_turned_back": ("K_PATH", "aten.cat"),
    "key_multiplied_before_norm": ("K_PATH", "multiply the projection's weight by the factor once"),
    "query_multiplied_by_token": ("Q_PATH", "no part of it is rotated like K"),
    "norm_shifted_by_token": ("K_PATH", "aten.add"),
    "layer_norm_by_other_head": ("K_PATH", "aten.cat"),
    "norm_of_values_weighted": ("V_PATH", "the values are normalised with a weight"),
    "values_of_keys": ("V_PATH", "one projection computes both"),
    "query_by_old_cache": ("ORDER", "used by aten.maximum before"),
    "rows_crossed": ("SLOT_INDEX", "every token once and in order"),
    "scattered_heads": ("CACHE_LAYOUT", "element by element"),
    "rolled": ("MOVED_CACHE", "positions % window"),
    "replaced_whole": ("SLICE_WRITE", "it is not known which dimension has the slots"),
    "replaced_by_joined": ("SLICE_WRITE", "it is not known which dimension has the slots"),
    "query_in_float32": ("Q_PATH", "query = query.to(torch.bfloat16)"),
    "cross_once": ("Q_PATH", "as in cross-attention"),
    "gate_across_query": ("ESCAPES", "across its parts"),
    "norm_in_place_seen": ("ESCAPES", "also used by"),
    "cast_of_sums": ("ROPE_STYLE", "different tensors"),
}


def check(name):
    """Returns the report of a layer, after a check that its outputs and caches are no less accurate
    than eager's."""
    whole = name in ("rolled", "replaced_whole", "replaced_by_joined")
    return report_of(*build(name), name, caches=(1, 2), untouched=not whole)


@pytest.mark.parametrize("name", FUSED)
def test_a_style_is_fused(name):
    report = check(name)
    (site,) = matches_of(report, "qkv")
    assert (site.pattern, site.shapes["rope"]) == ("qkv_cache", FUSED[name])
    assert misses_of(report, "qkv") == []
    assert misses_of(report, "lora") == []


@pytest.mark.parametrize("name", MISSED)
def test_a_miss_says_what_stands_in_the_way(name):
    report = check(name)
    code, words = MISSED[name]
    assert codes_of(report, "qkv_cache") == {code}
    miss = misses_of(report, "qkv_cache")[0]
    assert words in f"{miss.message} {miss.hint}"


def test_a_factor_that_keeps_float16_in_range_stays_in_front():
    module, args = build("query_multiplier", torch.float16)
    (miss,) = misses_of(lower(module, tuple(args)), "qkv_cache")
    assert miss.code == "Q_PATH"
    assert "float16 may overflow" in miss.message


def test_every_style_is_asked_for():
    assert sorted([*FUSED, *MISSED]) == sorted(STYLES)
