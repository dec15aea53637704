"""Tests messages that users get without asking for them.

Each graph that lost a fusion gives one line, and a note says why an option, a variable or a mode
kept sites from being fused.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import tilewright
from tests.compiler.running import assert_close, build, compiled
from tests.found import codes_of, matches_of, misses_of
from tilewright.compiler import StrictError, backend, lower, reports
from tilewright.tools.pytest_plugin import Matches

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Growing(nn.Module):
    """A layer whose cache [B, H, S, D] grows by cat, with repeated key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 128).requires_grad_(False)

    def forward(self, x, keys, values):
        q, k, v = self.qkv(x).unflatten(-1, (8, 16)).transpose(1, 2).split((4, 2, 2), 1)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        attended = nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return attended.transpose(1, 2).flatten(2), keys, values


def growing(length: int = 3):
    return Growing(), (torch.randn(1, 1, 64), *torch.randn(2, 1, 2, length, 16))


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_what_a_graph_lost_is_one_line_beside_what_was_fused(caplog):
    """The line about lost fusions appears once. If the graph is compiled again for other sizes, the
    same line is not repeated until a reset."""
    model, args = growing()
    with caplog.at_level(logging.WARNING, "tilewright"):
        for length in (3, 5):
            compiled(model)(args[0], *torch.randn(2, 1, 2, length, 16))
    assert len(reports()) == 2
    assert {site.pattern for site in reports()[-1].matches} == {"cache_attention"}
    (line,) = warnings(caplog)
    assert line.startswith("1 site fused, 2 lost (GROWING_CACHE x2); the first: ")
    assert line.endswith("TILEWRIGHT_LOG=info or tilewright.reports() shows all")
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model)(*args)
    assert warnings(caplog) == [line, line]


def test_a_graph_that_lost_nothing_says_nothing(caplog):
    model, args = build("page_offset")
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model)(*args)
    assert matches_of(reports()[-1], "qkv")
    assert warnings(caplog) == []


@pytest.mark.parametrize("named", ["qkv_cache", "cache_store", "cache_absent"])
def test_a_cache_that_grows_is_a_miss_of_the_patterns_that_would_write_it(named):
    model, args = growing()
    with pytest.raises(StrictError, match="GROWING_CACHE"):
        lower(model, args, strict=[named])
    assert lower(model, args, strict=["moe"]).lost
    matches = Matches(Path("unused"), "unused", update=False)
    assert matches.assert_misses(model, args, **{named: "GROWING_CACHE"}).lost


def test_only_that_names_no_site_says_where_they_are(caplog):
    model, args = build("page_offset", num_layers=3)
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert_close(model, args, only=["layers.1"], patterns=["qkv_cache"])
    (line,) = warnings(caplog)
    assert line == (
        "options['only']: ['layers.1'] names none of the 3 sites, which are at layers.*.self_attn; "
        "did you mean '*layers.1*'?"
    )
    assert reports()[-1].notes == (line,)
    assert "nothing to fuse was found" not in reports()[-1].text
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert_close(model, args, only=["*layers.1*"], patterns=["qkv_cache"])
    assert [site.scope for site in reports()[-1].matches] == ["layers.1.self_attn"]
    assert len(warnings(caplog)) == 1


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8).requires_grad_(False), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.linear(x))


def test_a_model_in_train_mode_is_told_to_be_in_eval(caplog):
    model, x = Dropped(), torch.randn(2, 8)
    with caplog.at_level(logging.WARNING, "tilewright"):
        compiled(model)(x)
        compiled(model.eval())(x)
    (line,) = warnings(caplog)
    assert line.startswith("dropout is on in 1 place, as in train mode")
    assert "model.eval()" in line
    assert [report.notes for report in reports()] == [(line,), ()]


@pytest.mark.parametrize(
    ("given", "level"), [("inf", None), ("info", logging.INFO), ("10", 10), ("", None)]
)
def test_a_level_that_there_is_not_is_named_and_nothing_else(given, level, monkeypatch, caplog):
    """An unknown level is named in an error of its own. Before, `torch.compile`, which imports the
    backend, raised another error here."""
    before = logging.getLogger("tilewright").level
    try:
        backend._set_level(given)
        now = logging.getLogger("tilewright").level
    finally:
        logging.getLogger("tilewright").setLevel(before)
    assert now == (before if level is None else level)
    said = [] if level is not None else [f"got {given!r}"]
    assert [line.partition("critical, ")[2].partition(";")[0] for line in warnings(caplog)] == said
    assert all(
        line.startswith("TILEWRIGHT_LOG: expected one of debug") for line in warnings(caplog)
    )


def test_attention_in_float64_is_not_counted_as_fused():
    """No chip has a kernel for attention in float64. The same attention in bfloat16 is the
    control."""
    model, args = build("page_offset")
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        given = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
        found[dtype] = lower(model.to(dtype), given)
    assert "NO_KERNELS" in codes_of(found[torch.float64], "cache_attention")
    assert matches_of(found[torch.float64], "cache_attention") == []
    assert len(matches_of(found[torch.bfloat16], "cache_attention")) == 1
    (miss,) = misses_of(found[torch.float64], "cache_attention")
    assert "has no kernel for float64" in miss.message
    assert "bfloat16" in miss.hint


def test_a_number_of_a_tensor_is_not_answered_by_a_setting_of_dynamo():
    """Dynamo's own hint names `capture_scalar_outputs`. With this setting Dynamo fails at a slice
    of a cache, so the hint is replaced."""

    def write(cache, k, position):
        cache[:, position.item() : position.item() + 1] = k
        return cache.sum()

    lowered = tilewright.lower(write, (torch.zeros(2, 8, 4), torch.ones(2, 1, 4), torch.tensor(3)))
    (miss,) = misses_of(lowered, "capture")
    assert "cache.index_copy_(dim, positions, k)" in miss.hint
    assert "torch.arange(length) <= positions[:, None]" in miss.hint
    assert "capture_scalar_outputs" not in str(miss)
