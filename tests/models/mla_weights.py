"""The up-projection of latents, dense or quantised as DeepSeek's checkpoints are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 128


class Dense(nn.Linear):
    def __init__(self, axes) -> None:
        super().__init__(axes.kv_rank, axes.num_heads * (axes.nope + axes.v_dim), bias=False)


class Separate(nn.Module):
    """Has separate weights for keys and for values."""

    def __init__(self, axes) -> None:
        super().__init__()
        self.axes = axes
        self.k = nn.Linear(axes.kv_rank, axes.num_heads * axes.nope, bias=False)
        self.v = nn.Linear(axes.kv_rank, axes.num_heads * axes.v_dim, bias=False)

    def forward(self, latents):
        heads = self.axes.num_heads
        return torch.cat(
            [p(latents).unflatten(-1, (heads, -1)) for p in (self.k, self.v)], dim=-1
        ).flatten(-2)


class Einsum(nn.Module):
    """Has a weight [H, n + v, L]."""

    def __init__(self, axes) -> None:
        super().__init__()
        shape = (axes.num_heads, axes.nope + axes.v_dim, axes.kv_rank)
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, latents):
        return torch.einsum("tr,hdr->thd", latents, self.weight)


class Fp8Block(nn.Module):
    """Has codes with a scale for each block of 128 x 128, which the graph dequantises."""

    def __init__(self, axes) -> None:
        super().__init__()
        rows, columns = axes.num_heads * (axes.nope + axes.v_dim), axes.kv_rank
        generator = torch.Generator().manual_seed(1)
        codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        shape = (-(-rows // BLOCK), -(-columns // BLOCK))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", 0.1 + torch.rand(shape, generator=generator))
        self.out = axes.dtype

    @property
    def dequantised(self):
        rows, columns = self.weight.shape
        scale = self.scale.repeat_interleave(BLOCK, 0)[:rows]
        scale = scale.repeat_interleave(BLOCK, 1)[:, :columns]
        return (self.weight.to(self.scale.dtype) * scale).to(self.out)

    def forward(self, latents):
        return F.linear(latents, self.dequantised)


class Fp8Product(Fp8Block):
    """Quantises latents by token and the weight by row, and multiplies the codes."""

    def __init__(self, axes) -> None:
        super().__init__(axes)
        generator = torch.Generator().manual_seed(2)
        self.scale = 0.1 + torch.rand(self.weight.shape[0], 1, generator=generator)

    def forward(self, latents):
        rows = latents.to(torch.float32 if self.out != torch.float64 else self.out)
        scale = rows.abs().amax(dim=-1, keepdim=True) / 448
        codes = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        if self.out == torch.float64:  # codes cannot make such a sum
            return (codes.to(self.out) * scale) @ (self.weight.to(self.out) * self.scale).t()
        return torch._scaled_mm(
            codes, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=self.out
        )


class Int8Behind(nn.Module):
    """Has int8 codes. Each row's scale multiplies the sums, as in torchao."""

    def __init__(self, axes) -> None:
        super().__init__()
        rows = axes.num_heads * (axes.nope + axes.v_dim)
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(-128, 128, (rows, axes.kv_rank), generator=generator)
        self.register_buffer("codes", codes.to(torch.int8))
        scale = 0.001 + 0.01 * torch.rand(rows, generator=generator)
        self.register_buffer("scale", scale.to(axes.dtype))

    def forward(self, latents):
        return F.linear(latents, self.codes.to(latents.dtype)) * self.scale


FORMS = {"dense": Dense, "separate": Separate, "einsum": Einsum, "fp8_block": Fp8Block}
FORMS |= {"fp8_product": Fp8Product, "int8_behind": Int8Behind}
