"""Weights [E, N, K] of the experts of a mixture, dense or quantised.

format   weight                              scale
dense    [E, N, K], the activation's dtype   none
fp8      [E, N, K] float8_e4m3fn             fp32, bf16, or e8m0 as uint8 [E, ceil(N/bn),
                                             ceil(K/bk)], block (bn, bk)
int4     [E, N, K/2] uint8                   float [E, ceil(N/bn), ceil(K/bk)]; value (code - 8) * s
nvfp4    [E, N, K/2] uint8                   e4m3 [E, N, K/16], may be negative
mxfp4    [E, N, K/2] uint8                   e8m0 as uint8 [E, N, K/32]

A byte of two codes has the code of the even k in its low nibble.

Strides may have any values, so weights stored as [E, K, N] are passed as transposed views.
Quantised weights may have one more factor for each expert, fp32 [E] (the second level of NVFP4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.formats import WEIGHT_FORMATS, expert_formats
from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_operand,
    check_scale_block,
    holds,
    shape_text,
)
from tilewright.ops.formats.weight import StoredWeight, Weight, scale_numbers
from tilewright.ops.runtime.dtypes import torch_types


@dataclass(frozen=True)
class ExpertWeight(StoredWeight):
    """The weight [E, N, K] of a mixture's experts, with its scales and bias.

    Attributes:
        data: The numbers, or the codes as `weight_format` stores them.
        expert_scale: One more factor for each expert, fp32 [E].
        bias: The bias of each expert, [E, N].
    """

    expert_scale: torch.Tensor | None = None

    _of_codes = ("scale", "expert_scale")

    @property
    def block(self) -> tuple[int, int]:
        """How many rows and columns share a scale; (1, 1) if the weight has no scales."""
        if self.scale is None:
            return 1, 1
        fixed = WEIGHT_FORMATS[self.weight_format].expert_block
        return fixed or (self.scale_block[0], self.scale_block[1])

    def expert(self, index: int, dtype: torch.dtype) -> Weight:
        """Returns the weight [N, K] of one expert. All its factors are multiplied into one scale of
        `dtype`."""
        bias = None if self.bias is None else self.bias[index]
        if self.scale is None or self.format is None:
            return Weight(self.data[index], bias=bias)
        scale = scale_numbers(self.scale[index], dtype)
        if self.expert_scale is not None:
            scale = scale * self.expert_scale[index].to(dtype)
        zero, own = self.format.expert_zero, (self.weight_format, scale, self.block)
        return Weight(self.data[index], *own, bias=bias, zero_point=zero)

    def check(
        self, op: str, x: torch.Tensor, sizes: Sequence[Any], bias_dtypes: Sequence[torch.dtype]
    ) -> None:
        """Checks that storage, scales and blocks fit each other and x's device. A dense weight must
        have x's dtype. Reads only metadata. Raises ArgumentError.

        sizes: the expected E, N and K; None for any size.
        """
        check_choice(op, "weight_format", self.weight_format, expert_formats())
        name, device, dtypes = self.named("data"), x.device, self.dtypes or (x.dtype,)
        check_operand(op, name, self.data, "[E, N, K]", (None, None, None), dtypes, device)
        if not all(w is None or holds(n == w) for n, w in zip(self.shape, sizes, strict=True)):
            known = shape_text(["*" if size is None else size for size in sizes])
            expected = f"experts, rows and columns {known}"
            raise ArgumentError(op, name, expected, shape_text(self.shape))
        experts, rows, columns = self.shape
        if self.bias is not None:
            name, sizes = self.named("bias"), (experts, rows)
            check_operand(op, name, self.bias, "[E, N]", sizes, bias_dtypes, device)
        if not self.check_scale_given(op):
            return
        assert self.format is not None
        if self.format.expert_block is None:
            check_scale_block(op, self.scale_block)
        (bn, bk), dtypes = self.block, torch_types(self.format.expert_scales)
        name, sizes = self.named("scale"), (experts, cdiv(rows, bn), cdiv(columns, bk))
        check_operand(op, name, self.scale, "[E, N/bn, K/bk]", sizes, dtypes, device)
        if self.expert_scale is not None:
            name, dtypes = self.named("expert_scale"), (torch.float32,)
            check_operand(op, name, self.expert_scale, "[E]", (experts,), dtypes, device)
