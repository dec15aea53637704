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

from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_operand,
    check_scale_block,
)
from tilewright.ops.formats import fp4

INT4_ZERO = 8


@dataclass(frozen=True)
class ExpertFormat:
    """codes, scales: dtypes allowed; None: as the activations, none. per_byte: elements of one
    storage element. block: (bn, bk) where the format fixes it."""

    codes: tuple[torch.dtype, ...] | None
    scales: tuple[torch.dtype, ...] | None
    per_byte: int = 1
    block: tuple[int, int] | None = None


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = {
    "dense": ExpertFormat(None, None),
    "fp8": ExpertFormat((torch.float8_e4m3fn,), (torch.float32, torch.bfloat16)),
    "int4": ExpertFormat((torch.uint8,), _FLOATS, per_byte=2),
    "nvfp4": ExpertFormat((torch.uint8,), (torch.float8_e4m3fn,), per_byte=2, block=(1, 16)),
    "mxfp4": ExpertFormat((torch.uint8,), (torch.uint8,), per_byte=2, block=(1, 32)),
}


@dataclass(frozen=True)
class ExpertWeight:
    """One weight as an op got it: storage, format, scales (see the module)."""

    data: torch.Tensor
    format: str = "dense"
    scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    expert_scale: torch.Tensor | None = None

    @property
    def block(self) -> tuple[int, int]:
        fixed = FORMATS[self.format].block
        return fixed if fixed is not None else (self.scale_block[0], self.scale_block[1])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), K counted in elements."""
        experts, rows, stored = self.data.shape
        return experts, rows, stored * FORMATS[self.format].per_byte

    def dequantize(self, experts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weights of some experts, [len(experts), N, K] in dtype."""
        data = self.data[experts] if self.format != "fp8" else _take_bytes(self.data, experts)
        if self.format == "dense":
            return data.to(dtype)
        values = _decode(self.format, data, dtype)
        factor = self._factors(experts, dtype)[:, : values.shape[1], : values.shape[2]]
        return values * factor

    def _factors(self, experts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.scale is not None
        rows, columns = self.block
        taken = _take_bytes(self.scale, experts)
        if self.format == "mxfp4":
            exponent = taken.to(torch.int32) - 127
            scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).to(dtype)
            scale = torch.where(taken == 255, torch.nan, scale)
        else:
            scale = taken.to(dtype)
        if self.expert_scale is not None:
            scale = scale * self.expert_scale[experts].to(dtype)[:, None, None]
        # A block may be larger than the weight.
        rows, columns = (min(b, n) for b, n in zip((rows, columns), self.shape[1:], strict=True))
        return scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)


def _take_bytes(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """tensor[index] along dim 0; one-byte floats cannot be indexed on every device."""
    if tensor.element_size() > 1:
        return tensor[index]
    return tensor.view(torch.uint8)[index].view(tensor.dtype)


def _decode(name: str, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if name == "fp8":
        return data.to(dtype)
    codes = fp4.unpack(data)
    return codes.to(dtype) - INT4_ZERO if name == "int4" else fp4.decode(codes, dtype)


def check_expert_weight(
    op: str, name: str, w: ExpertWeight, dtype: torch.dtype, scales: str | None = None
) -> None:
    """Raises ArgumentError unless storage, scales and blocks fit each other.

    `name`: the weight's argument; `scales`: what the arguments `<scales>_scale` and
    `<scales>_expert_scale` start with, where that is not the weight's name. dtype: the
    activations', which a dense weight must share.
    """
    scales = name if scales is None else scales
    check_choice(op, "weight_format", w.format, tuple(FORMATS))
    kind = FORMATS[w.format]
    check_operand(op, name, w.data, "[E, N, K]", (None, None, None), kind.codes or (dtype,))
    if kind.scales is None:
        for what, given in (("scale", w.scale), ("expert_scale", w.expert_scale)):
            if given is not None:
                raise ArgumentError(op, f"{scales}_{what}", "none for dense weights", "a tensor")
        return
    if w.scale is None:
        raise ArgumentError(op, f"{scales}_scale", f"the scales of {w.format} weights", None)
    if kind.block is None:
        check_scale_block(op, w.scale_block)
    experts, rows, columns = w.shape
    sizes, device = (experts, -(-rows // w.block[0]), -(-columns // w.block[1])), w.data.device
    check_operand(op, f"{scales}_scale", w.scale, "[E, N/bn, K/bk]", sizes, kind.scales, device)
    if w.expert_scale is not None:
        name, dtypes = f"{scales}_expert_scale", (torch.float32,)
        check_operand(op, name, w.expert_scale, "[E]", (experts,), dtypes, device)
