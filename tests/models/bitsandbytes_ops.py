"""Linears that call bitsandbytes' operators, and their results in float64.

If the library is not installed, stand-ins have its schemas and its default arithmetic.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.codegen.formats import TABLES
from tilewright.compiler.quantised import bitsandbytes

INSTALLED = importlib.util.find_spec("bitsandbytes") is not None
if INSTALLED:
    importlib.import_module("bitsandbytes")
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

    _EIGHT = torch.library.Library("bitsandbytes", "FRAGMENT")
    _EIGHT.define(
        "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)"
    )
    _EIGHT.define(
        "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, "
        "Tensor? bias=None, ScalarType? dtype=None) -> Tensor"
    )

    def int8_vectorwise_quant(A, threshold=0.0):
        largest = A.abs().amax(1).float()
        return torch.round(A * (127.0 / largest.unsqueeze(-1))).to(torch.int8), largest, None

    def int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
        y = (A.float() @ B.float().t()) * (row_stats[:, None] * col_stats) * 6.200124e-05
        return (y if bias is None else y + bias).to(dtype or torch.float16)

    for _does in (int8_vectorwise_quant, int8_scaled_mm):
        _EIGHT.impl(_does.__name__, _does, "CompositeExplicitAutograd")


def decoded(codes, absmax, shape, blocksize, quant_type, dtype=torch.float64):
    """Decodes a weight to [N, K], code by code."""
    at = torch.arange(shape[0] * shape[1])
    packed = codes.contiguous().view(torch.uint8).flatten().long()[at // 2]
    nibbles = torch.where(at % 2 == 0, packed >> 4, packed & 15)
    table = torch.tensor(TABLES[quant_type], dtype=torch.float32).to(dtype)
    return (table[nibbles] * absmax.to(dtype)[at // blocksize]).view(*shape)


class Linear(nn.Module):
    """Makes the call that the library's `Linear4bit` makes.

    storage: the dtype that holds the codes.
    nested: whether scales are codes, too.
    """

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
        """Computes the result in float64."""
        weight = decoded(self.codes, self.absmax, self.shape, self.blocksize, self.quant_type)
        bias = None if self.bias is None else self.bias.double()
        return F.linear(x.double(), weight, bias)


class ByteLinear(bitsandbytes.ByteLinear):
    """Computes the same as the module that `prepare` makes of a `Linear8bitLt`, with random
    codes."""

    def __init__(self, rows, columns, seed, bias=False):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
        scale = (torch.rand(rows, generator=generator) + 0.5) * 3 / columns**0.5
        own = torch.randn(rows, generator=generator).bfloat16() if bias else None
        super().__init__(columns, rows, {"codes": codes, "scale": scale, "bias": own})

    def exactly(self, x):
        """Computes the result in float64."""
        codes, largest, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(x.half())
        rows = codes.double() * largest.double()[:, None] / 127
        weight = self.codes.double() * self.scale.double()[:, None] / 127
        return F.linear(rows, weight, None if self.bias is None else self.bias.double())
