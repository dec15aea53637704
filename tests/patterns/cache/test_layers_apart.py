"""Tests that K and V of one layer are a pair, and that K and V of two layers never are, whatever
the layers share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compiler.steps import HKV, D, K, T, rotate, store
from tests.found import codes_of, matches_of
from tests.patterns.running import check_against_eager
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class TwoLayers(nn.Module):
    """Two layers that rotate their keys by the same angles, which are a product of frequencies and
    positions."""

    def __init__(self, value_dim: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        widths = [HKV * D, HKV * value_dim] * 2
        self.projections = nn.ParameterList(
            nn.Parameter(torch.randn(n, K, generator=generator) / 8, False) for n in widths
        )
        self.frequencies = nn.Buffer(0.1 ** (torch.arange(D // 2) / D))

    def forward(self, x, positions, slots, *caches):
        columns = self.frequencies[None, :, None].expand(1, -1, 1)
        angles = (columns @ positions[None, None, :].to(x.dtype)).transpose(1, 2)[0]
        angles = torch.cat((angles, angles), -1)[:, None]
        for layer in (0, 2):
            k, v = ((x @ w.T).view(T, HKV, -1) for w in self.projections[layer : layer + 2])
            store(caches[layer], slots, rotate(k, angles.cos(), angles.sin()))
            store(caches[layer + 1], slots, v)
            x = torch.tanh(x)
        return x


def arguments(value_dim: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    widths = [D, value_dim] * 2
    caches = [torch.randn(6, 8, HKV, width, generator=generator) for width in widths]
    slots = torch.tensor([3, 9, 40, 17, 0])
    return (torch.randn(T, K, generator=generator), torch.arange(T), slots, *caches)


def test_keys_of_two_layers_that_share_their_angles_are_no_pair():
    """Values have another width than keys, so the next write with the keys' shape belongs to the
    next layer."""
    check_against_eager("unlike", TwoLayers(D // 2), arguments(D // 2), ["cache_store"] * 4)
    report = reports()[-1]
    assert [site.shapes["writes"] for site in matches_of(report, "qkv")] == [1] * 4
    assert codes_of(report, "qkv") == {"LONE_WRITE"}


def test_keys_and_values_of_one_width_are_the_pairs_of_their_layers():
    check_against_eager("alike", TwoLayers(D), arguments(D), ["cache_store"] * 2)
    report = reports()[-1]
    assert [site.shapes["writes"] for site in matches_of(report, "qkv")] == [2, 2]
    assert codes_of(report, "qkv") == {"Q_PATH"}  # there are no queries
