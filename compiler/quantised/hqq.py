"""Reads 4-bit linears of HQQ, in which a byte holds codes of rows that are half the matrix apart.

The module copies the bytes once, so that a byte holds two neighbouring codes of a row. Kernels read
them in this order. The arithmetic is that of the library's `Quantizer.dequantize`, in its compute
dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewright.compiler.quantised.coded_linear import CodedLinear


class HqqLinear(CodedLinear):
    """A linear with packed [N, K / 2], and zero and scale [N * K / group, 1].

    The first of a byte's two codes is in the low nibble. The weight is (code - zero) * scale,
    rounded after each of the two operations.
    """

    packed: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor

    def extra_repr(self) -> str:
        groups = len(self.scale) // self.out_features
        return f"{super().extra_repr()}, group_size={self.in_features // groups}"

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).view(len(self.scale), -1)
        weight = (codes.to(self.scale.dtype) - self.zero) * self.scale
        return weight.view(self.out_features, self.in_features).to(dtype)


def replacement(module: nn.Module) -> nn.Module | str | None:
    """Returns a module that decodes in PyTorch, or the reason why there is none. Returns None for
    other libraries' modules."""
    if not type(module).__module__.startswith("hqq.") or type(module).__name__ != "HQQLinear":
        return None
    found: Any = module
    if not found.ready:
        return "its weight is not quantised yet"
    meta = found.meta
    if meta["nbits"] == 8 and meta["axis"] == 1:
        return None  # Dynamo traces it as it is
    if meta["packing"] != "4bit_u8":
        return (
            f"{meta['nbits']}-bit codes ({meta['packing']}) cannot be read; 4-bit codes in "
            "uint8 can"
        )
    if meta["axis"] != 1:
        return "its groups lie along the rows (axis 0)"
    if meta["view_as_float"] or meta.get("quant_zero") or meta.get("quant_scale"):
        return "its codes are stored as floats, or its scales as codes"
    if "zero_scale" in meta or not isinstance(meta.get("zero"), torch.Tensor):
        return "its zeros and scales are moved to its device in each call (offload_meta)"
    rows, columns = meta["shape"]
    if columns % 2 or columns % meta["group_size"]:
        return "its groups contain columns of several rows"
    tensors = {"packed": _packed(found.W_q, rows, columns), "bias": found.bias}
    tensors |= {name: meta[name] for name in ("zero", "scale")}
    return HqqLinear(columns, rows, tensors)


def _packed(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Returns bytes [N, K / 2]. Each byte holds two neighbouring codes of a row, with the first in
    the low nibble.

    `stored` are the library's bytes. Their high nibbles are the first half of the grouped matrix,
    and their low nibbles the second half.
    """
    codes = torch.cat([stored.detach() >> 4, stored.detach() & 15]).view(rows, columns)
    return codes[:, 0::2] | codes[:, 1::2] << 4
