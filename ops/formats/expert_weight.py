"""Weights [E, N, K] of the experts of a mixture, dense or quantised.

format   weight                              scale
dense    [E, N, K], the activation's dtype   none
fp8      [E, N, K] float8_e4m3fn             fp32 [E, ceil(N/bn), ceil(K/bk)], block (bn, bk)
int4     [E, N, K/2] uint8, even k low       float [E, ceil(N/bn), ceil(K/bk)]; value (code - 8) * s
nvfp4    [E, N, K/2] uint8                   e4m3 [E, N, K/16], signs count
mxfp4    [E, N, K/2] uint8                   e8m0 as uint8 [E, N, K/32]

Strides are free, so weights stored [E, K, N] arrive as transposed views. Quantised weights may have
one more factor per expert, fp32 [E] (NVFP4's second level).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS, WeightFormat, expert_formats
from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_operand,
    check_scale_block,
)
from tilewright.ops.formats import mxfp4
from tilewright.ops.formats.weight import code_numbers
from tilewright.ops.groups import ArgumentGroup
from tilewright.ops.runtime.dtypes import torch_types


@dataclass(frozen=True)
class ExpertWeight(ArgumentGroup):
    """The weight [E, N, K] of a mixture's experts, with all that belongs to it; see the module.

    data: numbers, or codes of a `weight_format` as they are stored. bias: [E, N].
    """

    data: torch.Tensor
    weight_format: str = "dense"
    scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    expert_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def format(self) -> WeightFormat | None:
        """What codes are stored; None where the weight has numbers."""
        return WEIGHT_FORMATS.get(self.weight_format)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; of weights without scales (1, 1)."""
        if self.scale is None:
            return 1, 1
        fixed = WEIGHT_FORMATS[self.weight_format].expert_block
        return fixed or (self.scale_block[0], self.scale_block[1])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), K counted in elements."""
        (experts, rows, stored), form = self.data.shape, self.format
        return experts, rows, stored if form is None else stored * form.per_byte

    def dequantize(self, experts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weights of some experts, [len(experts), N, K] in dtype."""
        data = _take_bytes(self.data, experts)
        if self.format is None:
            return data.to(dtype)
        values = expert_numbers(data, self.format, dtype)
        factor = self._factors(experts, dtype)[:, : values.shape[1], : values.shape[2]]
        return values * factor

    def _factors(self, experts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.scale is not None
        taken = _take_bytes(self.scale, experts)
        scale = taken.to(dtype) if taken.is_floating_point() else mxfp4.scale_numbers(taken, dtype)
        if self.expert_scale is not None:
            scale = scale * self.expert_scale[experts].to(dtype)[:, None, None]
        # A block may be larger than the weight.
        rows, columns = (min(b, n) for b, n in zip(self.block, self.shape[1:], strict=True))
        return scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)

    def check(self, op: str, dtype: torch.dtype) -> None:
        """Checks that storage, scales and blocks fit each other. dtype: the activations', which a
        dense weight must share. Metadata only; raises ArgumentError."""
        check_choice(op, "weight_format", self.weight_format, expert_formats())
        dtypes = (dtype,) if self.format is None else torch_types(self.format.stored)
        check_operand(op, self.named("data"), self.data, "[E, N, K]", (None, None, None), dtypes)
        if self.format is None:
            for field, tensor in (("scale", self.scale), ("expert_scale", self.expert_scale)):
                if tensor is not None:
                    expected = "none for dense weights"
                    raise ArgumentError(op, self.named(field), expected, "a tensor")
            return
        if self.scale is None:
            expected = f"the scales of {self.weight_format} weights"
            raise ArgumentError(op, self.named("scale"), expected, None)
        if self.format.expert_block is None:
            check_scale_block(op, self.scale_block)
        (experts, rows, columns), (bn, bk), device = self.shape, self.block, self.data.device
        sizes, dtypes = (experts, -(-rows // bn), -(-columns // bk)), self._scale_dtypes
        check_operand(op, self.named("scale"), self.scale, "[E, N/bn, K/bk]", sizes, dtypes, device)
        if self.expert_scale is not None:
            name, form = self.named("expert_scale"), ("[E]", (experts,), (torch.float32,), device)
            check_operand(op, name, self.expert_scale, *form)

    @property
    def _scale_dtypes(self) -> tuple[torch.dtype, ...]:
        return () if self.format is None else torch_types(self.format.expert_scales)


def expert_numbers(stored: torch.Tensor, form: WeightFormat, dtype: torch.dtype) -> torch.Tensor:
    """What stored codes of experts stand for, in dtype, before scales."""
    numbers = code_numbers(stored, form, dtype)
    return numbers - form.expert_zero if form.expert_zero else numbers


def _take_bytes(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor[index] along dim 0; one-byte floats cannot be indexed on every device."""
    if tensor.element_size() > 1:
        return tensor[index]
    return tensor.view(torch.uint8)[index].view(tensor.dtype)
