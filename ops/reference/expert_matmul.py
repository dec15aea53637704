"""Multiplies rows by the weight of each row's expert, for the references of the ops."""

from __future__ import annotations

import torch

from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.reference.linear import apply_linear


def multiply_by_expert(x: torch.Tensor, expert: torch.Tensor, weight: ExpertWeight) -> torch.Tensor:
    """Returns x [M, K] times the weight of each row's expert, plus its bias, as [M, N] in x's
    precision. Rows of expert -1 are zeros."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for index in range(weight.shape[0]):
        rows = (expert == index).nonzero().flatten()
        if rows.numel():
            own = weight.expert(index, x.dtype)
            out[rows] = apply_linear(x[rows], own.dequantize(x.dtype), own.bias)
    return out
