"""Reads linears of transformers' own NVFP4. What these linears compute depends on the number of
rows of x.

The arithmetic is that of nvfp4-gemm on the hub (`functional.py`, `nvfp4_utils.cuh`). One or two
rows are multiplied as they are. If there are more rows, they are first rounded to 4-bit floats, in
blocks of 16 columns. The scales of these blocks share a factor, which depends on the largest
element of all rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.compiler.quantised.coded_linear import DividedLinear, floats_of_bytes, nearest_e2m1
from tilewright.ops.formats import fp4
from tilewright.ops.formats.fp8_block import E4M3_MAX

BLOCK = 16
# The largest number of rows that are multiplied without rounding.
_ROWS_AS_THEY_ARE = 2
_LEAST_LARGEST = 1e-12


class Nvfp4Linear(DividedLinear):
    """A linear whose weight is stored in NVFP4. x and y are in bfloat16.

    weight: uint8 [N, K / 2], with two E2M1 codes in each byte.
    weight_sf_rowmajor: uint8 [N, K / 16], the bits of the e4m3 scales.
    weight_global_scale: [1], by which all scales are divided.
    """

    weight: torch.Tensor
    weight_sf_rowmajor: torch.Tensor

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        return decoded(self.weight, self.weight_sf_rowmajor, self.weight_factor).to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x in bfloat16. For more than two rows, returns the numbers that the codes of x
        stand for."""
        x = x.to(torch.bfloat16)
        if x.numel() <= _ROWS_AS_THEY_ARE * self.in_features:
            return x
        factor = E4M3_MAX * fp4.MAX / x.abs().amax().float().clamp(min=_LEAST_LARGEST)
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        scale = factor * (blocks.abs().amax(-1, keepdim=True) * (1.0 / fp4.MAX))
        scale = scale.to(torch.float8_e4m3fn).float()
        # The scales are multiplied by reciprocals, as in the library, because the codes of numbers
        # near a midpoint depend on this order of operations.
        scaled = blocks * torch.where(scale == 0, 0.0, 1.0 / (scale * (1.0 / factor)))
        codes = nearest_e2m1(scaled.clamp(-fp4.MAX, fp4.MAX))
        return (codes * (scale / factor)).flatten(-2).to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.rounded(x), self.weight_of_codes(torch.bfloat16))


def decoded(codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns the weight [N, K] in float32. `codes` is [N, K / 2], `scale` [N, K / 16] holds the
    bits of the scales, and all scales share the `factor` [1]."""
    numbers = floats_of_bytes(codes, torch.float32).unflatten(-1, (-1, BLOCK))
    by_block = factor * scale.view(torch.float8_e4m3fn).float()
    return (numbers * by_block.unsqueeze(-1)).flatten(-2)


def replacement(module: nn.Module) -> nn.Module | None:
    """Returns a module that decodes in PyTorch. Returns None for modules of other libraries."""
    own = type(module)
    if own.__name__ != "NVFP4Linear" or not own.__module__.startswith("transformers."):
        return None
    names = ("weight", "weight_sf_rowmajor", "weight_global_scale")
    tensors = {name: getattr(module, name) for name in names} | {"bias": None}
    return Nvfp4Linear(module.in_features, module.out_features, tensors)  # type: ignore[arg-type]
