"""Tests that caches that the graph allocates are reported, and that scratch memory does not count
as such a cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.found import codes_of, misses_of
from tilewright.compiler import lower

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Fresh(nn.Module):
    """Computes attention of 2 heads of 4 to keys and values that `put` writes into memory made
    here."""

    def __init__(self, put, returned, made=None):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.put, self.returned, self.made = put, returned, made or (lambda k: zeros(k))

    def forward(self, x):
        q, k, v = self.qkv(x).view(1, 3, 6, 4).split(2, 2)
        keys, values = (self.put(self.made(t), t) for t in (k, v))
        q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
        y = F.scaled_dot_product_attention(q, keys, values)
        return (y, keys, values) if self.returned else y


def zeros(k):
    return k.new_zeros(1, 9, 2, 4)


def by_index_put(cache, k):
    return cache.index_put_((torch.tensor([0]), torch.arange(3)), k[0])


def by_scatter(cache, k):
    return cache.scatter_(1, torch.arange(3).view(1, 3, 1, 1).expand(1, 3, 2, 4), k)


def by_slices(cache, k):
    cache[:1, 0:3] = k
    return cache


def by_copy(cache, k):
    cache[:, 2:5].copy_(k)
    return cache


def by_narrow(cache, k):
    cache.narrow(1, 0, 3).copy_(k)
    return cache


def by_token(cache, k):
    for i in range(3):
        cache[0, i] = k[0, i]
    return cache


def by_mask(cache, k):
    cache[:, torch.arange(9) < 3] = k
    return cache


def in_halves(cache, k):
    """Writes the halves of a rotated head into an empty tensor."""
    cache[..., :2] = k.repeat(1, 3, 1, 1)[..., 2:]
    cache[..., 2:] = k.repeat(1, 3, 1, 1)[..., :2]
    return cache


@pytest.mark.parametrize(
    ("put", "returned"),
    [
        *((put, True) for put in (by_index_put, by_scatter, by_slices, by_copy, by_mask)),
        *((put, False) for put in (by_index_put, by_slices, by_narrow, by_token)),
    ],
)
def test_a_cache_made_in_the_graph_is_told_however_it_is_written(put, returned):
    lowered = lower(Fresh(put, returned), (torch.randn(1, 3, 8),))
    (miss,) = (m for m in misses_of(lowered, "cache_absent"))
    assert miss.code == "FRESH_CACHE"
    slices = put in (by_slices, by_copy, by_narrow, by_token)
    assert miss.weight == ("advice" if slices and not returned else "lost")


def test_a_cache_that_is_cast_is_told():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Fresh(by_slices, True, self.made)
            self.register_buffer("cache", torch.zeros(1, 9, 2, 4, dtype=torch.float64))

        def made(self, k):
            return self.cache.to(k.dtype)

        def forward(self, x):
            return self.inner(x)

    assert "FRESH_CACHE" in codes_of(lower(Cast(), (torch.randn(1, 3, 8),)), "cache_absent")


class Rows(nn.Module):
    """Writes rows of a product into a tensor of zeros, as for padding, or for one expert after the
    other."""

    def forward(self, x, weight):
        rows = x.new_zeros(2, 9, 8)
        rows[:, :3] = F.linear(x, weight)
        rows[0, 3:4] = F.linear(x, weight)[:1]
        return F.linear(rows, weight) + rows


@pytest.mark.parametrize("returned", [True, False])
def test_scratch_memory_is_no_cache(returned):
    torch.manual_seed(0)
    rotated = lower(Fresh(in_halves, returned), (torch.randn(1, 3, 8),))
    padded = lower(Rows(), (torch.randn(3, 8), nn.Parameter(torch.randn(8, 8))))
    assert not codes_of(rotated, "cache_absent") | codes_of(padded, "cache_absent")
