"""Linears of gptqmodel that compute in PyTorch (`backend="torch"`), 4 bits.

The library's forward caches by `Tensor.is_inference()`, which Dynamo cannot trace, and shifts by a
buffer, whose contents no graph shows. The arithmetic is that of its `dequantize_weight`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilewright.compiler.quantised.coded_linear import CodedLinear

_TENSORS = ("qweight", "qzeros", "scales", "g_idx", "bias")


class GptqLinear(CodedLinear):
    """qweight [K / 8, N] words of eight rows' codes; qzeros [K / group, N / 8] words; scales
    [K / group, N]: weight[n, k] = scale * (code - zero)."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, module: Any) -> None:
        tensors = {name: getattr(module, name, None) for name in _TENSORS}
        super().__init__(module.in_features, module.out_features, tensors)
        self.group_size = module.group_size if module.group_size > 0 else module.in_features

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"

    def weight_of_codes(self, dtype: torch.dtype) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.qweight.device)
        codes = (self.qweight.unsqueeze(1) >> shifts.view(1, -1, 1)) & 15
        zeros = (self.qzeros.unsqueeze(2) >> shifts) & 15
        groups = codes.reshape(-1, self.group_size, self.out_features)
        zeros = zeros.reshape(-1, 1, self.out_features)
        weight = self.scales.unsqueeze(1) * (groups - zeros).to(self.scales.dtype)
        return weight.reshape(self.in_features, self.out_features).to(dtype).t()


def replacement(module: nn.Module) -> nn.Module | str | None:
    """The module that decodes in PyTorch, or why there is none; None for another library's."""
    if not type(module).__module__.startswith("gptqmodel.nn_modules.qlinear"):
        return None
    name = type(module).__name__
    if name == "AwqTorchLinear":
        return None  # it is traced as it is
    if name != "TorchLinear":
        return f'{name} has its codes in an order of its own; load with backend="torch"'
    found: Any = module
    if found.bits != 4 or found.pack_dtype != torch.int32 or getattr(found, "planar", False):
        return f"{found.bits}-bit codes in {found.pack_dtype} are not read; 4-bit in int32 are"
    if found.adapter is not None:
        return "it has an adapter"
    if found.qzero_format() != 2:
        return "its zeros are stored less one (GPTQ v1); gptqmodel makes them v2 in post_init"
    if any(getattr(found, name, False) for name in ("online_full_had", "online_partial_had")):
        return "its activations are rotated (Hadamard) before they are read"
    if found.g_idx.is_meta:
        return "its tensors are on the meta device, where the order of columns is not known"
    group = found.group_size if found.group_size > 0 else found.in_features
    if found.in_features % group or found.in_features % 8 or found.out_features % 8:
        return "its last group or word is filled up"
    expected = torch.arange(found.in_features, device=found.g_idx.device) // group
    if not torch.equal(found.g_idx.to(expected.dtype), expected):
        return "its groups follow another order of columns (desc_act=True)"
    return GptqLinear(found)
