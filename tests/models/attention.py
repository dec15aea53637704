"""Attention in plain PyTorch, whose arguments choose the kind of projection, bias, norm and rope.

It is written like serving code and Hugging Face models, but imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tests.models import ropes

#: Rotations by name.
ROPES = {
    "half": ropes.half,
    "half_chunk": ropes.half_chunk,
    "interleaved": ropes.interleaved,
    "complex": ropes.complex_numbers,
    "to_halves": ropes.to_halves,
    "partial": ropes.leading,
}


@dataclass(frozen=True)
class Axes:
    """The choices that make a variant of the model, all of which patterns must match, and the
    model's dims, which are tiny.

    projection: one of `projections.FORMS`.
    projected_kv_heads: the number of projected kv heads, if the cache has more.
    clip: the bound in forms that clamp.
    norm: one of the forms of `norms.head_norm`.
    rope: one of ROPES, or "none".
    rotary_dim: the width of the rotated part; it counts only for rope="partial".
    query_scale: a factor of the rotated query.
    parallel_mlp: whether the MLP reads the attention's input.
    """

    projection: str = "three_linears"
    bias: bool = False
    norm: str = "none"
    rope: str = "half"
    table: str = "computed"
    projected_kv_heads: int = 0
    clip: float = 0.5
    query_scale: float = 1.0
    parallel_mlp: bool = False
    num_layers: int = 1
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 16
    num_tokens: int = 10
    num_pages: int = 6
    page_size: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def rotated(self) -> int:
        return self.rotary_dim if self.rope == "partial" else self.head_dim


class Rope(nn.Module):
    """Rotates [..., H, D] by positions [...]. `heads_first` is for [B, H, S, D], the layout in
    Hugging Face models."""

    def __init__(self, axes: Axes, max_positions: int = 64, heads_first: bool = False) -> None:
        super().__init__()
        self.style, self.table = axes.rope, axes.table
        self.rotary_dim = axes.rotated
        self.head_axis = 1 if heads_first else -2
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        inv_freq = 10000.0**-exponents
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(axes.dtype)
        self.register_buffer("cos_sin_table", table, persistent=False)

    def cos_sin(self, positions, dtype):
        """Returns cos and sin, each [..., rotary_dim / 2]."""
        if self.table == "gathered":
            return self.cos_sin_table[positions].chunk(2, dim=-1)
        angles = positions[..., None].float() * self.inv_freq
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, q, k, positions):
        if self.style == "none":
            return q, k
        cos, sin = self.cos_sin(positions, q.dtype)
        cos, sin = cos.unsqueeze(self.head_axis), sin.unsqueeze(self.head_axis)
        rotate = ROPES[self.style]
        return rotate(q, cos, sin), rotate(k, cos, sin)


class GatedMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Decoder(nn.Module):
    """Has layers of norm, attention, norm and MLP. `attention(layer_index)` makes each
    attention."""

    def __init__(self, axes: Axes, attention) -> None:
        super().__init__()
        self.parallel_mlp = axes.parallel_mlp
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "input_norm": nn.RMSNorm(axes.hidden, eps=1e-6),
                    "self_attn": attention(layer),
                    "post_norm": nn.RMSNorm(axes.hidden, eps=1e-6),
                    "mlp": GatedMLP(axes.hidden),
                }
            )
            for layer in range(axes.num_layers)
        )

    def forward(self, x, *rest):
        for layer in self.layers:
            normed = layer["input_norm"](x)
            x = x + layer["self_attn"](normed, *rest)
            x = x + layer["mlp"](normed if self.parallel_mlp else layer["post_norm"](x))
        return x
