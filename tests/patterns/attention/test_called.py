"""Tests that a call of `cache_attention` that the model itself makes is a match, and stays the same
call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.found import matches_of, misses_of
from tilewright.compiler import reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Calls(nn.Module):
    """Calls attention as an engine does, with keys and values in the rows of all layers."""

    def __init__(self, **sight):
        super().__init__()
        self.sight = sight

    def forward(self, q, rows, table, lengths):
        pages = rows.view(-1, 2, 2, 16, 1, 16)
        out = torch.ops.tilewright.cache_attention(
            q * 2, pages[:, 1, 0], pages[:, 1, 1], scale=0.25, num_sequences=q.shape[0],
            block_table=table, key_lengths=lengths, cache_lengths=lengths - 1, **self.sight,
        )  # fmt: skip
        return out.flatten(1) + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sight", [{}, {"mask": "sliding_window", "window": 4}])
def test_the_report_has_the_kernels_of_a_call_of_the_model_s_own(sight, dynamic):
    module = Calls(**sight)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 2, 16, generator=generator).bfloat16()
    rows = torch.randn(8 * 64, 1, 16, generator=generator).bfloat16()
    args = q, rows, torch.arange(8, dtype=torch.int32).view(4, 2), torch.tensor([3, 20, 32, 1])
    if dynamic:
        for tensor in (args[0], *args[2:]):
            torch._dynamo.mark_dynamic(tensor, 0)
    compiled = torch.compile(
        module, backend="tilewright", fullgraph=True, options={"inner": "eager"}
    )
    assert torch.equal(compiled(*args), module(*args))
    (report,) = reports()
    (site,) = matches_of(report, "cache_attention")
    assert (site.shapes["called"], site.shapes["page"]) == ("by the model", 16)
    assert site.shapes["mask"] == sight.get("mask", "causal")
    assert site.op == "cache_attention"
    if not dynamic:
        assert site.kernels[0].spec.kernel == "attention_decode"
    assert misses_of(report, "cache_attention", "census") == []
