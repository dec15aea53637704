"""Tests that every miss has a hint, either its own or that of its code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.found import misses_of
from tilewright.compiler import lower
from tilewright.patterns.codes import HINTS
from tilewright.patterns.hints import hint_for
from tilewright.patterns.language import Miss, Stage
from tilewright.tools.report.miss_guide import miss_guide

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_every_code_of_the_guide_has_a_hint():
    assert set(miss_guide({})) == set(HINTS)
    assert all(hint_for(code, ()) for code in HINTS)


def test_a_hint_of_its_own_comes_first():
    assert Miss("p", "CLAIMED", Stage.GUARDS, "why", hint="own").hint == "own"
    assert Miss("p", "LAYOUT", Stage.GUARDS, "why").hint == hint_for("LAYOUT", ())
    assert Miss("p", "A_CODE_OF_THEIRS", Stage.GUARDS, "why").hint == ""


class Cached(nn.Module):
    def __init__(self, autocast):
        super().__init__()
        self.autocast = autocast
        for name in "qkv":
            setattr(self, name, nn.Linear(32, 32, bias=False))

    def forward(self, x, positions, k_cache, v_cache):
        if not self.autocast:
            return self.step(x, positions, k_cache, v_cache)
        with torch.autocast("cpu", torch.bfloat16):
            return self.step(x, positions, k_cache, v_cache)

    def step(self, x, positions, k_cache, v_cache):
        q, k, v = (getattr(self, n)(x).view(2, 4, 2, 16).transpose(1, 2) for n in "qkv")
        k_cache.index_copy_(2, positions, k.to(k_cache.dtype))
        v_cache.index_copy_(2, positions, v.to(v_cache.dtype))
        return F.scaled_dot_product_attention(q.to(k_cache.dtype), k_cache, v_cache)


@pytest.mark.parametrize("where", ["inside", "around", None])
def test_autocast_is_named_where_it_makes_the_dtypes_differ(where):
    model = Cached(where == "inside").requires_grad_(False)
    caches = [torch.zeros(2, 2, 8, 16, dtype=torch.bfloat16) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
        lowered = lower(model, (torch.randn(2, 4, 32), torch.arange(4), *caches))
    hints = [miss.hint for miss in misses_of(lowered, "qkv")]
    assert hints
    assert any("autocast computes in torch.bfloat16" in hint for hint in hints) == bool(where)


def test_autocast_is_not_named_for_integers_or_for_sources_that_are_no_tensors():
    """Autocast casts only floating-point tensors."""
    graph = torch.fx.Graph()
    codes, unread = graph.placeholder("codes"), graph.placeholder("unread")
    codes.meta["example_value"] = torch.ones(2, 2, dtype=torch.int8)
    product = graph.call_function(torch.matmul, (codes, unread))
    product.meta["example_value"] = torch.ones(2, 2, dtype=torch.int32)
    assert hint_for("DTYPE", [product]) == HINTS["DTYPE"]


def test_a_class_of_a_library_is_named_to_its_own_users_alone():
    project = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def grows(x, past):
        past = torch.cat([past, project(x).view(1, 1, -1, 8)], 2)
        return past.mean(2), past

    (miss,) = misses_of(lower(grows, (torch.ones(1, 8), torch.ones(1, 1, 5, 8))), "qkv")
    assert miss.code == "GROWING_CACHE"
    assert "index_copy_" in miss.hint
    assert "StaticCache" not in miss.hint
