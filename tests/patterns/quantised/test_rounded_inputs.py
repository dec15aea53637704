"""Tests linears of codes that each round the same activation themselves, as linears of libraries
do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse
from tests.found import codes_of, matches_of
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOKENS, LENGTH = 64, 4, 2, 16, 3, 24


class RoundingLinear(nn.Module):
    """Rounds x by token to float8_e4m3fn, and multiplies it by a weight of codes. A scale maps the
    largest number of a token to `most`."""

    def __init__(self, width, most=448.0):
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        self.most = most
        codes = torch.randn(width, HIDDEN, generator=generator).to(torch.float8_e4m3fn)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", 0.1 * torch.rand(width, 1, generator=generator).bfloat16())

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / self.most
        rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
        return F.linear(rounded, self.codes.to(x.dtype) * self.scale.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, most=448.0, packed=False):
        super().__init__()
        self.q = RoundingLinear(HEADS * HEAD_DIM, most)
        width = KV_HEADS * HEAD_DIM
        self.kv = nn.ModuleList(
            [RoundingLinear(w) for w in ([2 * width] if packed else [width] * 2)]
        )

    def forward(self, x, positions, k_cache, v_cache):
        k, v = torch.cat([linear(x) for linear in self.kv], -1).chunk(2, -1)
        if len(self.kv) == 2:
            k, v = (linear(x) for linear in self.kv)
        q, k, v = (y.view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2) for y in (self.q(x), k, v))
        k_cache.index_copy_(2, positions, k)
        v_cache.index_copy_(2, positions, v)
        return F.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=True)


def inputs(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, HIDDEN, generator=generator).to(dtype)
    caches = [torch.zeros(1, KV_HEADS, LENGTH, HEAD_DIM, dtype=dtype) for _ in "kv"]
    return x, torch.arange(TOKENS) + 2, *caches


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "k and v in one"])
def test_what_each_linear_rounds_is_one_activation(packed):
    model = Attention(packed=packed)
    with torch.no_grad():
        compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
        fused, eager = compiled(*inputs()), model(*inputs())
    (found,) = reports()
    (site,) = matches_of(found, "fused_qkv_paged")
    assert site.op == "fused_qkv_paged", str(found)
    # float64 would round x to other codes. The fused op may therefore have one more rounding than
    # eager.
    assert_no_worse(fused, eager, eager.double(), "rounded by each linear")


def test_a_query_that_is_rounded_otherwise_projects_another_activation():
    with torch.no_grad():
        found = lower(Attention(most=240.0), inputs())
    assert "Q_PATH" in codes_of(found, "qkv")
