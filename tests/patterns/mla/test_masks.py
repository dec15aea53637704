"""Tests attention to expanded latents with a mask tensor that is an input of the graph, as in
`generate()`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.found import matches_of
from tilewright.compiler import lower, reports

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, NOPE, ROPE, V, RANK, KEYS = 2, 16, 8, 16, 32, 200


class Attention(torch.nn.Module):
    """Attends with queries [B, S, H * (N + R)] of x to the latents of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(RANK, HEADS * (NOPE + ROPE), bias=False)
        self.kv_b = torch.nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.out = torch.nn.Linear(HEADS * V, RANK, bias=False)

    def forward(self, x, latents, rope_keys, mask):
        batch, count, _ = x.shape
        q = self.q(x).view(batch, count, HEADS, -1).transpose(1, 2)
        kv = self.kv_b(latents).view(batch, KEYS, HEADS, NOPE + V).transpose(1, 2)
        nope, v = kv.split([NOPE, V], dim=-1)
        rope = rope_keys.view(batch, 1, KEYS, ROPE).expand(-1, HEADS, -1, -1)
        k = torch.cat((nope, rope), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2)
        return self.out(out.transpose(1, 2).reshape(batch, count, -1))


class Model(torch.nn.Module):
    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention() for _ in range(3))
        self.sliced = sliced

    def forward(self, x, latents, rope_keys, mask):
        for layer in self.layers:
            own = mask[:, :, :, :KEYS] if self.sliced else mask
            x = x + layer(x, latents, rope_keys, own)
        return x


def arguments(queries, keys=KEYS):
    """Returns x, latents, rope keys and the mask of a padded batch, in a cache that is not full."""
    torch.manual_seed(0)
    positions = 90 + torch.arange(queries)
    mask = (torch.arange(keys) <= positions[:, None]).repeat(2, 1, 1, 1)
    mask[1, ..., :70] = False
    latents, rope_keys = torch.randn(2, KEYS, RANK), torch.randn(2, KEYS, ROPE)
    return torch.randn(2, queries, RANK), latents, rope_keys, mask


@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_layers_of_one_mask_share_its_list_of_blocks(sliced):
    model, args = Model(sliced), arguments(5, KEYS + 56 * sliced)
    (graph,) = lower(model, args).graphs
    calls = [node for node in graph.after.graph.nodes if "mla_prefill" in str(node.target)]
    lists = {node.kwargs["mask_blocks"] for node in calls}
    assert (len(calls), len(lists)) == (3, 1)
    (blocks,) = lists
    assert "mask_blocks" in str(blocks.target)
    assert {node.kwargs["attn_mask"] for node in calls} == {blocks.args[0]}


@pytest.mark.parametrize(
    ("form", "queries"),
    [
        *(("bool", queries) for queries in (1, 5, 130)),
        *(("numbers", 130), ("lowest", 5), ("expanded", 1), ("expanded", 130)),
    ],
)
def test_what_is_fused_gives_what_eager_gives(queries, form):
    model, (x, latents, rope_keys, mask) = Model(False), arguments(queries)
    if form in ("numbers", "lowest"):
        hidden = -torch.inf if form == "numbers" else torch.finfo(torch.float32).min
        mask = torch.zeros(mask.shape).masked_fill(~mask, hidden)
    if form == "expanded":
        mask = mask[:, :, -1:].expand(-1, HEADS, queries, -1)
    compiled = torch.compile(model, backend="tilewright", options={"inner": "eager"})
    with torch.no_grad():
        expected = model(x, latents, rope_keys, mask)
        actual = compiled(x, latents, rope_keys, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    found = matches_of(reports()[-1], "mla_prefill")
    assert {match.shapes["mask"] for match in found} == {"tensor"}
