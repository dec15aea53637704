"""Tests products of codes by `torch._scaled_mm` and `F.scaled_mm`, with scales by blocks of 128 or
by rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.found import misses_of, patterns_in
from tests.scaled_products import ROW_SCALES
from tilewright.compiler import lower, reports

D = 32

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class BlockScaled(nn.Module):
    """Calls `_scaled_mm` with a scale for every 128 columns of a token, and one for every 128 x 128
    weights."""

    def __init__(self, hidden, width, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(width, hidden, generator=generator).to(torch.float8_e4m3fn)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.rand(width // 128, hidden // 128, generator=generator))

    def forward(self, x):
        blocks = x.float().unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn).flatten(-2)
        weight = self.codes.t()
        return torch._scaled_mm(
            codes, weight, scale.squeeze(-1), self.scale.t(), out_dtype=torch.bfloat16
        )


@pytest.mark.parametrize(("rows", "columns"), [(192, 256), (256, 192)])
def test_blocks_of_which_the_last_is_a_part_are_not_spread_evenly(rows, columns):
    class Gated(nn.Module):
        def forward(self, x, x_scale, *weights):
            gate, up = (
                torch._scaled_mm(x, w.t(), x_scale, s.t(), out_dtype=torch.bfloat16)
                for w, s in zip(weights[:2], weights[2:], strict=True)
            )
            return F.silu(gate) * up

    def matches(n, k):
        blocks = -(-n // 128), -(-k // 128)
        codes = [torch.zeros(n, k).to(torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.ones(blocks) for _ in range(2)]
        x = torch.zeros(4, k).to(torch.float8_e4m3fn), torch.ones(4, blocks[1])
        return patterns_in(lower(Gated(), (*x, *codes, *scales)), "mlp")

    assert matches(256, 256) == ["linear_activation"]
    assert matches(rows, columns) == []


def test_activations_scaled_by_block():
    """The product runs only on a GPU. The match can be tested everywhere."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(BlockScaled(256, 128, seed) for seed in range(3))

        def forward(self, x, slots, k_cache, v_cache):
            q, k, v = (part(x).view(-1, 4, D) for part in self.parts)
            k_cache.view(-1, 4, D)[slots] = k
            v_cache.view(-1, 4, D)[slots] = v
            return q * 2

    caches = [torch.zeros(4, 4, 4, D, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(5, 256).bfloat16()
    graph = lower(Blocks(), (x, torch.arange(5), *caches)).graphs[0].after.graph
    (fused,) = [n for n in graph.nodes if "fused_qkv_paged" in str(n.target)]
    assert fused.kwargs["scale_block"] == [128, 128]
    assert fused.kwargs["out_dtype"] == torch.bfloat16
    assert fused.kwargs["x_scale"].meta["example_value"].shape == (5, 2)
    assert fused.args[0].meta["example_value"].dtype == torch.float8_e4m3fn


class ScaledByRecipe(BlockScaled):
    """Calls `F.scaled_mm` with such scales in the orders that it accepts. The tensor of scales has
    blocks along K that are padded to a multiple of four. With `square`, the scales are for 128 rows
    of the weight."""

    def __init__(self, hidden, width, seed, square):
        super().__init__(hidden, width, seed)
        self.square = square
        blocks = -(-hidden // 512) * 4 if square else hidden // 128
        self.scale = torch.rand(width // 128 if square else width, blocks)

    def forward(self, x):
        recipe = torch.nn.functional.ScalingType
        blocks = x.float().unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn).flatten(-2)
        by_rows = scale.squeeze(-1).t().contiguous().t()
        own = self.scale.t() if self.square else self.scale.t().contiguous().t()
        recipes = recipe.BlockWise1x128, recipe.BlockWise128x128 if self.square else None
        return F.scaled_mm(
            codes, self.codes.t(), by_rows, recipes[0], own, recipes[1] or recipes[0],
            output_dtype=torch.bfloat16,
        )  # fmt: skip


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this PyTorch has none")
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize(("hidden", "is_read"), [(512, True), (640, False)])
def test_scales_by_recipes_of_blocks(hidden, is_read, square):
    """Products with padded scales are reported. The product itself runs only on a GPU."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (ScaledByRecipe(hidden, 256, s, square) for s in range(2))

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    lowered = lower(Gated(), (torch.randn(5, hidden).bfloat16(),))
    if is_read or not square:
        (fused,) = [n for n in lowered.graphs[0].after.graph.nodes if "activation" in str(n.target)]
        assert fused.kwargs["scale_block"] == [128 if square else 1, 128]
        return
    (miss,) = lowered.misses
    assert (miss.code, miss.pattern) == ("LINEAR_FORM", "linear_activation")
    assert "_scaled_mm_v2 computes the linear, with scales" in miss.message
    assert "a multiple of 512" in miss.hint


@ROW_SCALES
@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this PyTorch has none")
def test_sizes_of_a_second_compilation_are_told_where_they_are_symbols():
    """Sizes that are symbols in a second compilation are reported. Without a reset between two
    models, Dynamo makes symbols of the sizes that differ."""
    by_row = torch.nn.functional.ScalingType.RowWise

    def gated(x, x_scale, *weights):
        gate, up = (
            F.scaled_mm(
                x, codes.t(), x_scale, by_row, scale.t(), by_row, output_dtype=torch.bfloat16
            )
            for codes, scale in zip(weights[:2], weights[2:], strict=True)
        )
        return F.silu(gate) * up

    torch._dynamo.reset()
    options = {"inner": "eager"}
    compiled = torch.compile(gated, backend="tilewright", options=options)
    for rows, columns in ((256, 128), (384, 256)):
        codes = [torch.randn(rows, columns).to(torch.float8_e4m3fn) for _ in range(2)]
        scales = [torch.rand(rows, 1) for _ in range(2)]
        x = torch.randn(4, columns).to(torch.float8_e4m3fn)
        compiled(x, torch.rand(4, 1), *codes, *scales)
    first, second = reports()[-2:]
    assert patterns_in(first, "mlp") == ["linear_activation"]
    (miss,) = misses_of(second, "mlp")
    assert (miss.code, miss.pattern) == ("LINEAR_FORM", "linear_activation")
    assert "symbolic sizes" in miss.message
    assert "mark_static" in miss.hint
