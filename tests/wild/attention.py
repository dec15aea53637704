"""Attention over a cache in the manner of public code bases, one function per style.

    module, args = build("complex_pairs")        # one of STYLES

A style is `step(m, x, keys, values, positions) -> [B, S, Hq * D]`: it projects x [B, S, K] with m's
weights, rotates, writes the caches and attends. Caches are [B, Hkv, L, D] or [B, L, Hkv, D];
positions [S], or [B, S] where each sequence has its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.wild import attention_caches, attention_heads
from tests.wild.attention_pieces import (
    BATCH,
    BIASES,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTH,
    NORMS,
    SEQ,
    WIDTH,
    Style,
)

STYLES = {
    style.step.__name__: style for style in (*attention_heads.STYLES, *attention_caches.STYLES)
}


class Layer(nn.Module):
    """Has a projection, a style and a projection."""

    def __init__(self, style: Style, normal: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.step = style.step
        self.wq = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        if "gated" in style.names:
            self.wqg = nn.Linear(HIDDEN, 2 * HEADS * WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * WIDTH, bias=False) for _ in range(2))
        if "packed" in style.names:
            rows = 2 * (HEADS + KV_HEADS) * WIDTH
            self.packed = nn.Parameter(torch.empty(rows, HIDDEN))
            self.packed_bias = nn.Parameter(torch.empty(rows))
        if "steps" in style.names:
            self.down = nn.Parameter(torch.empty(KV_HEADS, 4, WIDTH))
            self.up = nn.Parameter(torch.empty(KV_HEADS, WIDTH, 4))
            self.step_bias = nn.Parameter(torch.empty(WIDTH, 1))
        self.wo = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        for weight in self.parameters():
            weight.data = normal(*weight.shape) * HIDDEN**-0.5
        for name in (*NORMS, *BIASES):
            if name in style.names:
                setattr(self, name, nn.Parameter(normal(WIDTH) * 0.3 + ("norm" in name)))
        if "norms" in style.names:
            for name, heads in (("q_norms", HEADS), ("k_norms", KV_HEADS)):
                own = [nn.Parameter(normal(WIDTH) * 0.3 + 1) for _ in range(heads)]
                setattr(self, name, nn.ParameterList(own))
        if "codes" in style.names:
            rows = (HEADS + 2 * KV_HEADS) * WIDTH
            codes = (normal(rows, HIDDEN).float() * 40).round().clamp(-127, 127)
            self.register_buffer("codes", codes.to(torch.int8))
            self.register_buffer("scales", normal(rows).abs() * 0.01)
        if "states" in style.names:
            self.register_buffer("states", normal(BATCH, LENGTH - 4, HIDDEN))
        if "inputs" in style.names:
            self.register_buffer("inputs", normal(BATCH, KV_HEADS * WIDTH, 4))
        if "state" in style.names:
            self.register_buffer("state", normal(BATCH, KV_HEADS, WIDTH, WIDTH).float())

    def forward(self, x, keys, values, positions):
        return self.wo(self.step(self, x, keys, values, positions))


def build(name, dtype=torch.bfloat16):
    """Returns (module, arguments). They are seeded, so that the same call gives the same
    numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    style = STYLES[name]
    layer = Layer(style, normal).requires_grad_(False)
    shape = (BATCH, LENGTH, KV_HEADS, WIDTH) if style.by_token else (BATCH, KV_HEADS, LENGTH, WIDTH)
    positions = torch.arange(4, 4 + SEQ)
    if style.by_row:
        positions = torch.stack((positions, positions - 3))
    return layer, [normal(BATCH, SEQ, HIDDEN), normal(*shape), normal(*shape), positions]
