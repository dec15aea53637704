"""Tests graphs in which a size is zero: no pattern fails, and the results equal eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.running import compiled
from tests.found import codes_of
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Attention(nn.Module):
    """Projects x [B, S, 64] to heads. Writes K and V to caches [B, H, 16, 32], and reads the
    caches."""

    def __init__(self, num_heads):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 32 * num_heads, bias=False) for _ in range(3))
        self.num_heads = num_heads

    def forward(self, x, k_cache, v_cache, positions):
        shape = (*x.shape[:2], self.num_heads, 32)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in self.parts)
        k_cache.index_copy_(2, positions, k)
        v_cache.index_copy_(2, positions, v)
        weights = torch.softmax(q @ k_cache.mT * 0.2, -1)
        return weights @ v_cache + F.scaled_dot_product_attention(q, k_cache, v_cache)


@pytest.mark.parametrize("sizes", [(2, 0, 2), (0, 3, 2), (2, 3, 0), (0, 0, 0), (2, 3, 2)])
def test_nothing_to_compute(sizes):
    batch, tokens, num_heads = sizes
    torch.manual_seed(0)
    model, x = Attention(num_heads), torch.randn(batch, tokens, 64)
    found = []
    for run in (model, compiled(model, everywhere=True)):
        caches = [torch.zeros(batch, num_heads, 16, 32) for _ in range(2)]
        found.append([run(x, *caches, torch.arange(tokens)), *caches])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    codes = codes_of(reports()[-1], "qkv", "attention", "tilewright", "view")
    assert "INTERNAL" not in codes, [*map(str, reports()[-1].misses)]
    assert ("EMPTY" in codes) == (0 in sizes)
