"""bitsandbytes' `gemm_4bit`: the library's where it is installed, else a stand-in with its schema
and its default arithmetic; and what its codes stand for in float64."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.codegen.formats import TABLES

if importlib.util.find_spec("bitsandbytes") is not None:
    import bitsandbytes  # noqa: F401
else:

    @torch.library.custom_op("bitsandbytes::gemm_4bit", mutates_args=())
    def gemm_4bit(
        A: torch.Tensor,
        B: torch.Tensor,
        shapeB: list[int],
        absmax: torch.Tensor,
        blocksize: int,
        quant_type: str,
        bias: torch.Tensor | None = None,
        absmax_8bit: torch.Tensor | None = None,
        absmax_code: torch.Tensor | None = None,
        absmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if absmax_8bit is not None:
            absmax = absmax_code[absmax_8bit.long()] * absmax.repeat_interleave(256)
            absmax = absmax[: len(absmax_8bit)] + absmax_offset
        weight = decoded(B, absmax, shapeB, blocksize, quant_type, torch.float32)
        return F.linear(A, weight.to(A.dtype), bias)

    gemm_4bit.register_fake(lambda A, B, shapeB, *_: A.new_empty((*A.shape[:-1], shapeB[0])))


def decoded(codes, absmax, shape, blocksize, quant_type, dtype=torch.float64):
    """A weight [N, K], code by code."""
    at = torch.arange(shape[0] * shape[1])
    packed = codes.contiguous().view(torch.uint8).flatten().long()[at // 2]
    nibbles = torch.where(at % 2 == 0, packed >> 4, packed & 15)
    table = torch.tensor(TABLES[quant_type], dtype=torch.float32).to(dtype)
    return (table[nibbles] * absmax.to(dtype)[at // blocksize]).view(*shape)


class Linear(nn.Module):
    """The call that the library's `Linear4bit` makes. storage: the dtype that codes lie in; nested:
    scales are codes too."""

    def __init__(
        self, rows, columns, seed, blocksize=64, quant_type="nf4", bias=False, nested=False,
        storage=torch.uint8,
    ):  # fmt: skip
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.blocksize, self.quant_type = (rows, columns), blocksize, quant_type
        codes = torch.randint(0, 256, (rows * columns // 2,), generator=generator)
        codes = codes.to(torch.uint8).view(storage).unsqueeze(1)
        self.codes = nn.Parameter(codes, requires_grad=False)
        blocks = -(-rows * columns // blocksize)
        self.absmax = torch.rand(blocks, generator=generator) / columns**0.5
        self.bias = torch.randn(rows, generator=generator).bfloat16() if bias else None
        self.second = None
        if nested:
            own = torch.rand(-(-blocks // 256), generator=generator) / 16
            codes = torch.randint(0, 256, (blocks,), generator=generator).to(torch.uint8)
            self.second = (own, codes, torch.linspace(-1, 1, 256), torch.tensor(0.1))

    def forward(self, x):
        absmax, *rest = (self.absmax,) if self.second is None else self.second
        return torch.ops.bitsandbytes.gemm_4bit.default(
            x, self.codes, self.shape, absmax, self.blocksize, self.quant_type, self.bias, *rest
        )

    def exactly(self, x):
        """What it computes, in float64."""
        weight = decoded(self.codes, self.absmax, self.shape, self.blocksize, self.quant_type)
        bias = None if self.bias is None else self.bias.double()
        return F.linear(x.double(), weight, bias)
