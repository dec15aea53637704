"""Tests which values two rewrites of one graph share: only values that are equal at both places."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.agreement import cloned
from tests.compiler.running import compiled, patterns_used
from tests.compiler.steps import Layer, make_args, store

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(model, args):
    """Returns eager's results and arguments after the call, and the backend's."""
    eager, ours = cloned(args), cloned(args)
    expected, actual = model(*eager), compiled(model)(*ours)
    for a, b in zip((*flat(actual), *ours), (*flat(expected), *eager), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def flat(result):
    return result if isinstance(result, tuple) else (result,)


def written_three_times(m, x, k_cache, v_cache, slots):
    """Writes K, V and K again into one cache at the same slots. The last write counts."""
    q, k, v = m.qkv(x)
    k, v = k.sin(), v.cos()
    store(k_cache, slots, k)
    store(k_cache, slots, v)
    store(k_cache, slots, k)
    return q * 2


def test_equal_writes_are_each_carried_out():
    run(Layer(written_three_times), make_args())
    assert patterns_used() == ["cache_store"] * 3


class TwoProducts(nn.Module):
    """Has two grouped products with one quantised weight. `change` is between the two products."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        generator = torch.Generator().manual_seed(0)
        codes = torch.randn(4, 64, 64, generator=generator).to(torch.float8_e4m3fn)
        self.register_buffer("codes", codes)
        self.register_buffer("factor", torch.rand(4, generator=generator).bfloat16())

    def product(self, x, ends):
        weight = self.codes.bfloat16() * self.factor[:, None, None]
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)

    def forward(self, x, ends):
        first = self.product(x, ends)
        self.change(self.factor)
        return first, self.product(x, ends)


def halved(factor):
    factor.mul_(0.5)


def first_replaced(factor):
    factor[:2] = 3.0


def written_through_a_view(factor):
    factor.view(2, 2).copy_(factor.view(2, 2).flip(0).clone())


def left_alone(factor):
    return None


@pytest.mark.parametrize("change", [left_alone, halved, first_replaced, written_through_a_view])
def test_a_scale_that_changes_between_two_products_is_read_twice(change):
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = torch.tensor([3, 5, 9, 12], dtype=torch.int32)
    model, other = TwoProducts(change), TwoProducts(change)
    expected, actual = model(x, ends), compiled(other)(x, ends)
    assert patterns_used("grouped") == ["grouped_gemm"] * 2
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=1e-1)
    assert torch.equal(model.factor, other.factor)
